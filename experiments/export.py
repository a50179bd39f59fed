"""Writes a trained policy or reward model as a directory that transformers and vLLM load: config.json, safetensors, tokenizer.

    python experiments/export.py --run_dir=runs/smollm2_arith --output=exported
    python experiments/export.py --run_dir=runs/smollm2_arith --output=exported --rollout=30 --dtype=float32

Of a policy's run it reads the best checkpoint by evaluation, the newest where none was evaluated, or the one named by --rollout.
A reward model becomes a `*ForSequenceClassification` with one label.
"""

from absl import flags

from jaxrl_llm.api import command_line, export

_RUN_DIR = flags.DEFINE_string("run_dir", None, "The run.")
_OUTPUT = flags.DEFINE_string("output", None, "The directory to write; it must not hold anything yet.")
_ROLLOUT = flags.DEFINE_integer("rollout", None, "The checkpoint; the best by default.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the tensors.")
_SHARD = flags.DEFINE_string("max_shard_size", "5GB", "Size of one file at most.")


def main():
    what = export.export(_RUN_DIR.value, _OUTPUT.value, _ROLLOUT.value, _DTYPE.value, _SHARD.value)
    print(f"{_OUTPUT.value}: {what}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["run_dir", "output"])
    command_line.run(main)
