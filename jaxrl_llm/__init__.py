"""Trust regions for reinforcement learning of large language models, in JAX.

    import jaxrl_llm as jrl

    run = jrl.train(config)                                # what experiments/train.py does; config from jrl.default_config()
    run = jrl.read_run("runs/quickstart")                  # run.metrics, run.samples(), run.plot(), run.config
    policy = jrl.load("runs/quickstart")                   # or a Hugging Face folder, a hub id, a .gguf file
    policy.sample(["3+4-2="], n=4)                         # completions with tokens, log-probs, top-K view
    policy.score(["3+4-2="], [">7,5"])                     # log-probs and entropies of given tokens
    policy.save("folder")                                  # for transformers and vLLM
    jrl.objectives.build({"name": "pdm"}), jrl.divergence  # the pure functions

Nothing is imported before it is asked for, and jax starts no device until something is computed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_llm import objectives
    from jaxrl_llm.api.policy import load
    from jaxrl_llm.api.runs import read_run
    from jaxrl_llm.api.train import train
    from jaxrl_llm.config import RunConfig, default_config
    from jaxrl_llm.objectives import divergence

__version__ = "0.1.0"

# Name -> where it lives; a name that is the module's own last name stands for the module.
_PUBLIC = {
    "RunConfig": "jaxrl_llm.config",
    "default_config": "jaxrl_llm.config",
    "divergence": "jaxrl_llm.objectives.divergence",
    "load": "jaxrl_llm.api.policy",
    "objectives": "jaxrl_llm.objectives",
    "read_run": "jaxrl_llm.api.runs",
    "train": "jaxrl_llm.api.train",
}

__all__ = ["RunConfig", "default_config", "divergence", "load", "objectives", "read_run", "train"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"jaxrl_llm has no {name!r}; it offers {', '.join(__all__)}")
    module = importlib.import_module(_PUBLIC[name])
    value = module if name in ("divergence", "objectives") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
