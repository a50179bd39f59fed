"""A policy in one's hands: sample from it, score with it, save it."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import jax
import numpy as np

from jaxrl_llm import processes, schema
from jaxrl_llm.api import export, loaded_run
from jaxrl_llm.axes import round_up
from jaxrl_llm.config import Mesh, RunConfig
from jaxrl_llm.experience import batches, generation
from jaxrl_llm.experience import policy as policies
from jaxrl_llm.experience.generation import Completion
from jaxrl_llm.experience.policy import Policy
from jaxrl_llm.experience.prompts import tokenize
from jaxrl_llm.learning.step import Forward
from jaxrl_llm.parallel import sharding
from jaxrl_llm.rollout import placement
from jaxrl_llm.rollout.choice import Choice
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.rollout.slots import SamplingConfig

Prompt = str | Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Score:
    """What a policy thinks of given tokens.

    Attributes:
      tokens: their ids.
      logprobs: float32 [tokens], nats.
      entropy: float32 [tokens], of the distribution that each could have been drawn from, nats.
    """

    tokens: list[int]
    logprobs: np.ndarray
    entropy: np.ndarray


@dataclasses.dataclass(frozen=True)
class LoadedPolicy:
    """A policy with its parameters on this machine's devices.

    Attributes:
      model: architecture, parameters, tokenizer.
      name: where it comes from, in words.
      max_tokens: longest completion unless another is asked for.
    """

    model: Policy
    name: str
    max_tokens: int = 256

    def __repr__(self) -> str:
        size = sum(x.size for x in jax.tree.leaves(self.model.params))
        return f"LoadedPolicy({self.name}, {size:,} parameters, vocabulary {self.model.config.vocab_size:,})"

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        max_tokens: int | None = None,
        capture_top_k: int = 0,
        slots: int = 64,
        seed: int = 0,
        report: Callable[[int, Any], None] | None = None,
    ) -> list[Completion]:
        """`n` completions of every prompt, those of one prompt side by side.

        Args:
          prompts: texts, or chats as lists of {"role", "content"}.
          n: completions of each.
          temperature: 0 is greedy.
          top_k, top_p, min_p: truncation; 0, 1 and 0 keep everything.
          max_tokens: of a completion; the run's limit, or 256, by default.
          capture_top_k: K of the top-K view of the distribution that each token was drawn from; 0 for none.
          slots: sequences decoded at once.
          seed: of the draws; the same one gives the same completions.
          report: see `Sampler`.

        Raises:
          ValueError: no prompt, an empty one, or a chat for a tokenizer without template.
        """
        schema.require(not isinstance(prompts, str), "prompts", prompts, "a list of prompts")
        m = self.model
        examples = generation.as_examples(prompts)
        config = SamplingConfig(
            max_tokens or self.max_tokens,
            m.stop_ids,
            m.pad_id,
            Choice(temperature, top_k, top_p, min_p),
            capture_top_k=capture_top_k,
            slots=slots,
        )
        ids = tokenize(examples, m.tokenizer, limit=2**30).tokens
        sampler = Sampler(m.graphdef, m.config, config)
        rollout = sampler(m.params, ids, jax.random.key(seed), group_size=n, report=report)
        return generation.completions(rollout, examples, m.tokenizer)

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str | Sequence[int] | Completion],
        *,
        temperature: float = 1.0,
    ) -> list[Score]:
        """Log-probs and entropies of given completions, one for each prompt, as the trainer computes them.

        Args:
          prompts: as `sample` takes them.
          completions: what `sample` returned or lists of token ids, scored exactly as they are; or texts, which are encoded
            without an end token.
          temperature: logits are divided by it.

        Raises:
          ValueError: another number of completions than prompts, or an empty one.
        """
        schema.require(
            len(prompts) == len(completions), "completions", len(completions), f"one a prompt, {len(prompts)}"
        )
        schema.require(temperature > 0, "temperature", temperature, "above 0")
        m = self.model
        ids = tokenize(generation.as_examples(prompts), m.tokenizer, limit=2**30).tokens
        responses = [self._ids(completion) for completion in completions]
        for i, response in enumerate(responses):
            schema.require(len(response) > 0, f"completions[{i}]", completions[i], "at least one token")
        mesh = placement.mesh_of(m.params)
        # Widths and rows in steps, so that few programs are compiled; filler rows repeat the first.
        rows = round_up(len(ids), 8 if mesh is None else sharding.data_shards(mesh) * 8)
        ids, filled = ([*x, *[x[0]] * (rows - len(x))] for x in (ids, responses))
        widths = (round_up(max(map(len, x)), 16) for x in (ids, filled))
        batch = batches.from_pairs(ids, filled, *widths, m.pad_id)
        layout = None if mesh is None else sharding.token_layout(mesh)
        forward = Forward(m.graphdef, m.config.vocab_size, temperature, entropy=True, layout=layout)
        with placement.use(mesh):
            stats = _forward(forward, m.params, batch if mesh is None else sharding.spread(batch, mesh))
        logprobs, entropy = processes.fetch((stats.logprobs, stats.entropy))
        return [Score(r, logprobs[i, : len(r)], entropy[i, : len(r)]) for i, r in enumerate(responses)]

    def save(self, folder: str | os.PathLike, dtype: str = "bfloat16", max_shard_size: str = "5GB") -> pathlib.Path:
        """Writes a directory that transformers and vLLM load; it must not hold anything yet.

        Raises:
          ValueError: the directory is not free.
        """
        m, folder = self.model, pathlib.Path(folder)
        trained = export.Trained(m.params, m.config, m.tokenizer, m.source, m.stop_ids, m.pad_id, self.name)
        export.write(trained, folder, dtype, max_shard_size)
        return folder

    def _ids(self, completion: str | Sequence[int] | Completion) -> list[int]:
        if isinstance(completion, Completion):
            return list(completion.tokens)
        if isinstance(completion, str):
            return list(self.model.tokenizer.encode(completion, add_special_tokens=False))
        return [int(token) for token in completion]


def load(
    source: str | os.PathLike,
    checkpoint: int | None = None,
    *,
    best: bool = False,
    dtype: str = "float32",
    report: Callable[[str], None] = print,
) -> LoadedPolicy:
    """A policy from a run directory, a Hugging Face checkpoint (folder or hub id) or a .gguf file.

    Args:
      source: where it lies.
      checkpoint: of a run, the rollout after which it was saved; the newest by default.
      best: of a run, the checkpoint that was evaluated best.
      dtype: of the computation, for what is not a run; a run's own is in its configuration.
      report: takes one line about what a person should know.

    Raises:
      ValueError: there is no such thing, or it cannot be read; names it.
    """
    folder = pathlib.Path(source)
    if (folder / "metrics.jsonl").exists() or (folder / "checkpoints").is_dir():
        found = loaded_run.load(str(folder), checkpoint, report, best=best)
        name = f"checkpoint {found.rollout} of {folder}"
        return LoadedPolicy(found.policy, name, found.run.rollout.max_response_length)
    for option, value in {"checkpoint": checkpoint, "best": best or None}.items():
        schema.require(value is None, option, value, f"left out: {source} is no run directory")
    run = RunConfig.read({"model": {"source": str(source), "dtype": dtype}})
    return LoadedPolicy(policies.create(run, policies.NO_TASK, sharding.create_mesh(Mesh())), str(source))


@functools.partial(jax.jit, static_argnums=0)
def _forward(forward: Forward, params: Any, batch: chex.ArrayTree) -> Any:
    return forward(params, batch)
