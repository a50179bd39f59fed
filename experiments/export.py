"""Writes a trained policy as a directory that transformers and vLLM load: config.json, safetensors, tokenizer.

    python experiments/export.py --run_dir=runs/smollm2_arith --output=exported
    python experiments/export.py --run_dir=runs/smollm2_arith --output=exported --rollout=30 --dtype=float32

Reads the run directory's best checkpoint by evaluation, the newest where none was evaluated, or the one named by --rollout.
"""

import pathlib

from absl import flags

from jaxrl_llm.models import hf, hf_config
from jaxrl_llm.training import command_line, saved

_RUN_DIR = flags.DEFINE_string("run_dir", None, "The run.")
_OUTPUT = flags.DEFINE_string("output", None, "The directory to write; it must not hold anything yet.")
_ROLLOUT = flags.DEFINE_integer("rollout", None, "The checkpoint; the best by default.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the tensors.")
_SHARD = flags.DEFINE_string("max_shard_size", "5GB", "Size of one file at most.")


def export(
    run_dir: str, output: str, rollout: int | None = None, dtype: str = "bfloat16", max_shard_size: str = "5GB"
) -> int:
    """Exports a checkpoint of a run.

    Returns:
      The number of the rollout whose parameters were written.

    Raises:
      ValueError: the run, its checkpoint or its source cannot be read, or the output directory is not free.
    """
    run = saved.load(run_dir, rollout, best=True)
    policy = run.policy
    if policy.source is None:
        theirs = hf_config.to_transformers(policy.config)
        theirs.bos_token_id = getattr(policy.tokenizer, "bos_token_id", None)
        theirs.eos_token_id, theirs.pad_token_id = policy.stop_ids[0], policy.pad_id
    else:
        theirs = hf.transformers_config(policy.source)
    tokenizer = policy.tokenizer
    if not hasattr(tokenizer, "save_pretrained"):
        tokenizer = tokenizer.to_transformers()
    hf.save(pathlib.Path(output), policy.params, policy.config, theirs, tokenizer, dtype, max_shard_size)
    if policy.source is not None:
        hf.copy_generation_config(policy.source, pathlib.Path(output))
    return run.rollout


def main():
    rollout = export(_RUN_DIR.value, _OUTPUT.value, _ROLLOUT.value, _DTYPE.value, _SHARD.value)
    print(f"{_OUTPUT.value}: the policy after rollout {rollout}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["run_dir", "output"])
    command_line.run(main)
