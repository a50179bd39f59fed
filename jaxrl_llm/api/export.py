"""A trained policy or reward model as a directory that transformers and vLLM load: config.json, safetensors, tokenizer."""

import pathlib
from typing import Any, NamedTuple

from jaxrl_llm import schema
from jaxrl_llm.api import loaded_run
from jaxrl_llm.hub import hf_config, pretrained
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.records.run_dir import RunDir
from jaxrl_llm.reward_models import reward_model


class Trained(NamedTuple):
    """What a run made.

    Attributes:
      params, config, tokenizer: the model.
      source: the checkpoint that it began with, or None.
      stop_ids: ids that end a response, or a dialogue.
      pad_id: filler.
      name: in words.
    """

    params: Any
    config: ModelConfig
    tokenizer: Any
    source: pathlib.Path | None
    stop_ids: tuple[int, ...]
    pad_id: int | None
    name: str


def export(
    run_dir: str, output: str, rollout: int | None = None, dtype: str = "bfloat16", max_shard_size: str = "5GB"
) -> str:
    """Exports a checkpoint of a run.

    Returns:
      What was written, in words.

    Raises:
      ValueError: the run, its checkpoint or its source cannot be read, or the output directory is not free.
    """
    folder = RunDir(pathlib.Path(run_dir))
    judges = reward_model.is_run(folder.read_config())
    model = _reward_model(folder, rollout) if judges else _policy(run_dir, rollout)
    write(model, pathlib.Path(output), dtype, max_shard_size, scores=judges)
    return model.name


def write(
    model: Trained,
    directory: pathlib.Path,
    dtype: str = "bfloat16",
    max_shard_size: str = "5GB",
    *,
    scores: bool = False,
) -> None:
    """Writes a model with its configuration and tokenizer.

    Args:
      model: what to write.
      directory: must not hold anything yet.
      dtype: of the tensors.
      max_shard_size: of one file.
      scores: it is a reward model.

    Raises:
      ValueError: the directory is not free.
    """
    if model.source is None:
        theirs = hf_config.to_transformers(model.config)
        theirs.bos_token_id = getattr(model.tokenizer, "bos_token_id", None)
        theirs.eos_token_id, theirs.pad_token_id = model.stop_ids[0], model.pad_id
    else:
        theirs = pretrained.transformers_config(model.source)
    if scores and theirs.pad_token_id in model.stop_ids:
        theirs.pad_token_id = None  # the score stands at the end token, which transformers must not take for padding
    tokenizer = model.tokenizer
    if not hasattr(tokenizer, "save_pretrained"):
        tokenizer = tokenizer.to_transformers()
    pretrained.save(directory, model.params, model.config, theirs, tokenizer, dtype, max_shard_size)
    if model.source is not None:
        pretrained.copy_generation_config(model.source, directory)


def _policy(run_dir: str, rollout: int | None) -> Trained:
    run = loaded_run.load(run_dir, rollout, best=True)
    p = run.policy
    name = f"the policy after rollout {run.rollout}"
    return Trained(p.params, p.config, p.tokenizer, p.source, p.stop_ids, p.pad_id, name)


def _reward_model(folder: RunDir, rollout: int | None) -> Trained:
    schema.require(rollout is None, "--rollout", rollout, "left out: a reward model's run keeps its last parameters")
    run = reward_model.read_run(folder)
    tokenizer, name = run.scorer.tokenizer, f"the reward model after step {run.step}"
    ends, pad_id = (tokenizer.eos_token_id,), tokenizer.pad_token_id
    return Trained(run.scorer.params, run.config, tokenizer, run.source, ends, pad_id, name)
