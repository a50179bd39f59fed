"""Hugging Face checkpoints: read straight into sharded parameters, written so that transformers loads them.

A source is a directory of safetensors (one file, or shards with their index), a hub id of one, or a .gguf file (through
transformers, with torch: for small models). Every tensor is accounted for before the first is read: a missing, extra or
misshapen one is an error that names it. Tensors are then read one by one into their place in the stacked parameters, so the
host holds about one of them beside the parameters.
"""

import functools
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
import transformers
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from rich.progress import track

from jaxrl_llm import processes
from jaxrl_llm.hub import hf_config, names
from jaxrl_llm.models.abstract import abstract
from jaxrl_llm.models.config import RUNTIME, ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.heads import ScalarModel

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# What a checkpoint may hold beside the policy's parameters; any other tensor left over is an error.
OTHER_PARTS = ("mtp.", "model.visual.")  # Qwen3.5's head that predicts several tokens at once, and its vision tower
BUFFERS = ("rotary_emb.inv_freq",)  # of old versions

Shapes = dict[str, tuple[int, ...]]
Reader = Callable[[str], np.ndarray]
Shardings = Callable[[Any], Any]


def find(source: str) -> pathlib.Path:
    """The local directory or .gguf file of a checkpoint; a hub id is downloaded into the hub's cache.

    Raises:
      ValueError: there is no such file or directory, it holds no checkpoint, or the hub does not have it.
    """
    path = pathlib.Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"checkpoint file {source!r} does not exist")
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"checkpoint directory {source!r} has no config.json")
        if not (path / SINGLE).is_file() and not (path / INDEX).is_file():
            raise ValueError(f"checkpoint directory {source!r} has neither {SINGLE} nor {INDEX}")
        return path
    if path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1:
        raise ValueError(f"checkpoint {source!r} is no directory, no .gguf file and no hub id (owner/name)")
    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])
        )
    except Exception as error:  # the hub client raises many kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"checkpoint {source!r} is no directory, and the hub does not give it: {reason}") from error


def transformers_config(path: pathlib.Path) -> transformers.PretrainedConfig:
    """The checkpoint's configuration as transformers reads it; a multimodal model's text part.

    Raises:
      ValueError: it cannot be read; names the file.
    """
    try:
        if path.suffix != ".gguf":
            kind = json.loads((path / "config.json").read_text()).get("model_type")
            if kind not in transformers.CONFIG_MAPPING:
                raise ValueError(f"unknown model_type {kind!r}; choose from: {', '.join(sorted(hf_config.FAMILIES))}")
        whole = transformers.AutoConfig.from_pretrained(**_located(path))
    except Exception as error:  # a file that is torn, not JSON, or whose fields transformers refuses
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"the configuration of {path} cannot be read: {reason}") from error
    text = whole.get_text_config()
    # What a multimodal model says as a whole holds for its text part too.
    text.tie_word_embeddings = text.tie_word_embeddings or whole.tie_word_embeddings
    if getattr(whole, "quantization_config", None) is not None:
        text.quantization_config = whole.quantization_config
    return text


def read_config(path: pathlib.Path, **fields: Any) -> ModelConfig:
    """The checkpoint's architecture; see `hf_config.from_transformers`."""
    return hf_config.from_transformers(transformers_config(path), str(path), **fields)


def tokenizer(path: pathlib.Path) -> Any:
    """The checkpoint's tokenizer (transformers).

    Raises:
      ValueError: it has none that can be read.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(**_located(path))
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"the tokenizer of {path} cannot be read: {reason}") from error


def stop_ids(path: pathlib.Path, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a response: the tokenizer's end token first, then the generation configuration's and the model's.

    Raises:
      ValueError: there is none at all.
    """
    ids = [tokenizer.eos_token_id, transformers_config(path).eos_token_id]
    if (path / "generation_config.json").is_file():
        ids.append(json.loads((path / "generation_config.json").read_text()).get("eos_token_id"))
    flat = [i for some in ids for i in (some if isinstance(some, list | tuple) else [some]) if i is not None]
    if not flat:
        raise ValueError(
            f"checkpoint {path} names no end token (eos_token_id) in tokenizer, config or generation_config"
        )
    return tuple(dict.fromkeys(flat))


def load(path: pathlib.Path, config: ModelConfig, shardings: Shardings | None = None) -> nnx.State:
    """Parameters of a `Decoder` from a checkpoint, in `config.param_dtype`.

    Args:
      path: from `find`.
      config: from `read_config`.
      shardings: tree of shapes -> tree of `NamedSharding`; the first device by default.

    Raises:
      ValueError: a missing, extra or misshapen tensor, or a file that is missing or damaged; names it.
    """
    return _load(path, config, abstract(Decoder, config)[1], shardings)


def load_scalar(
    path: pathlib.Path, config: ModelConfig, shardings: Shardings | None = None, *, new_head: bool = False
) -> nnx.State:
    """Parameters of a `ScalarModel` from a `*ForSequenceClassification` checkpoint with one label.

    Args:
      path, config, shardings: as of `load`.
      new_head: take a language model as well: its unembedding is left out, and the score head begins at 0.

    Raises:
      ValueError: as `load`; without a score head the missing tensor is score.weight.
    """
    like = abstract(ScalarModel, config)[1]
    return _load(path, config, like, shardings, optional=(names.SCORE,) if new_head else ())


def _load(
    path: pathlib.Path,
    config: ModelConfig,
    like: nnx.State,
    shardings: Shardings | None,
    optional: tuple[str, ...] = (),
) -> nnx.State:
    """Fills a tree of shapes. A tensor in `optional` may be missing: then 0 stands for it, and an unembedding is left out."""
    shapes, read = _open_gguf(path) if path.suffix == ".gguf" else _open_safetensors(path)
    layout = names.Layout.of(shapes)
    wanted = names.tensors(config, flatten(like), layout)
    absent = [name for name in optional if name not in shapes]
    for name in absent:
        del wanted[name]
    _account(path, wanted, shapes, {names.HEAD} if absent or config.tie_word_embeddings else set())
    tied = config.tie_word_embeddings and names.HEAD in shapes
    if tied and not np.array_equal(read(names.HEAD), read(layout.embedding)):
        raise ValueError(
            f"tensor {names.HEAD} of checkpoint {path} differs from {layout.embedding}, and yet its configuration says"
            " tie_word_embeddings; set that to false there, or remove the tensor if it is the embedding that counts"
        )
    if shardings is None:
        one = jax.sharding.Mesh(jax.devices()[:1], "x")
        places = jax.tree.map(lambda _: NamedSharding(one, PartitionSpec()), like)
    else:
        places = shardings(like)
    zeros = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, config.param_dtype), like), out_shardings=places)
    params, placed = zeros(), dict(zip(flatten(like), jax.tree.leaves(places), strict=True))
    arrays = flatten(params)
    in_order_of_files = [name for name in shapes if name in wanted]
    for name in track(in_order_of_files, f"reading {path.name}", transient=True):
        tensor = wanted[name]
        for target, part in zip(tensor.paths, tensor.rule.split(config, read(name)), strict=True):
            part = np.asarray(part, jnp.dtype(config.param_dtype))
            sharding = placed[target]
            spec = PartitionSpec(*sharding.spec[len(tensor.index) :])
            part = _put(part, NamedSharding(sharding.mesh, spec))
            arrays[target] = _setter(sharding)(arrays[target], part, np.array(tensor.index, np.int32))
    return jax.tree.unflatten(jax.tree.structure(params), arrays.values())


def save(
    directory: pathlib.Path,
    params: nnx.State,
    config: ModelConfig,
    theirs: transformers.PretrainedConfig,
    tokenizer: Any,
    dtype: str = "bfloat16",
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes a directory that transformers (and vLLM) loads: config.json, safetensors shards, tokenizer.

    A `ScalarModel` becomes a `*ForSequenceClassification` with one label.

    Args:
      directory: made; it must not hold anything yet.
      params: of a `Decoder` or a `ScalarModel`.
      config: its architecture.
      theirs: the configuration to write, of the source or from `hf_config.to_transformers`.
      tokenizer: transformers', saved beside.
      dtype: of the tensors.
      max_shard_size: bytes of a file, or such as "5GB".

    Raises:
      ValueError: the directory holds something, or `theirs` describes another architecture.
    """
    runtime = {name: getattr(config, name) for name in RUNTIME}
    if hf_config.from_transformers(theirs, "the configuration to write", **runtime) != config:
        raise ValueError(f"the configuration to write describes another architecture than the parameters': {config}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not empty; choose another directory")
    flat = flatten(params)
    wanted = names.tensors(config, flat)
    size = jnp.dtype(dtype).itemsize
    split = huggingface_hub.split_state_dict_into_shards_factory(
        wanted,
        get_storage_size=lambda tensor: size * int(np.prod(tensor.shape)),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    directory.mkdir(parents=True, exist_ok=True)
    for file, inside in track(split.filename_to_tensors.items(), f"writing {directory.name}", transient=True):
        shard = {name: _gather(config, wanted[name], flat, dtype) for name in inside}
        safetensors.numpy.save_file(shard, directory / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    kinds = transformers.models.auto.modeling_auto
    if names.SCORE in wanted:
        theirs.architectures = [kinds.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[theirs.model_type]]
        theirs.num_labels = 1
    else:
        theirs.architectures = [kinds.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[theirs.model_type]]
    theirs.dtype = dtype
    theirs.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def copy_generation_config(path: pathlib.Path, directory: pathlib.Path) -> None:
    """The source's sampling defaults and end tokens, which an export keeps."""
    if (path / "generation_config.json").is_file():
        shutil.copy(path / "generation_config.json", directory)


def _located(path: pathlib.Path) -> dict[str, Any]:
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    return {"pretrained_model_name_or_path": path}


def flatten(tree: nnx.State) -> dict[names.Path, Any]:
    """Path -> leaf, in the order of `jax.tree.leaves`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {tuple(str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey)): leaf for path, leaf in leaves}


def _open_safetensors(path: pathlib.Path) -> tuple[Shapes, Reader]:
    """Shape of every tensor, from the files' headers alone, in the order of the files; and what reads one by its name."""
    files = [path / SINGLE]
    if (path / INDEX).is_file():
        try:
            listed = json.loads((path / INDEX).read_text())["weight_map"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path / INDEX} is not an index of safetensors") from error
        files = [path / file for file in sorted(set(listed.values()))]
    shapes, lies_in = {}, {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"checkpoint file {file} is missing")
        try:
            with safetensors.safe_open(file, "numpy") as tensors:
                inside = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except safetensors.SafetensorError as error:
            raise ValueError(f"checkpoint file {file} cannot be read: {error}") from error
        shapes |= inside
        lies_in |= dict.fromkeys(inside, file)

    @functools.lru_cache(maxsize=1)
    def opened(file):
        return safetensors.safe_open(file, "numpy")

    return shapes, lambda name: opened(lies_in[name]).get_tensor(name)


def _open_gguf(path: pathlib.Path) -> tuple[Shapes, Reader]:
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(**_located(path), dtype="float32")
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"checkpoint file {path} cannot be read: {reason}") from error
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return {name: tensor.shape for name, tensor in tensors.items()}, tensors.__getitem__


def _account(path: pathlib.Path, wanted: dict[str, names.Tensor], shapes: Shapes, unread: set[str]) -> None:
    for name, tensor in wanted.items():
        if name not in shapes:
            raise ValueError(f"checkpoint {path} lacks tensor {name} {tensor.shape}")
        if tuple(shapes[name]) != tensor.shape:
            raise ValueError(f"tensor {name} of checkpoint {path} has shape {shapes[name]}; it must be {tensor.shape}")
    left = (name for name in shapes if name not in wanted and name not in unread)
    extra = [name for name in left if not name.startswith(OTHER_PARTS) and not name.endswith(BUFFERS)]
    if extra:
        raise ValueError(f"checkpoint {path} holds a tensor that the model has no place for: {extra[0]}")


def _put(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    # Every process reads the files and keeps its part.
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


@functools.cache
def _setter(sharding: NamedSharding):
    """(array, part, index) -> the array with `part` at `index` of its leading axes; updated in place."""

    def write(array, part, index):
        start = (*index, *[0] * part.ndim)
        return jax.lax.dynamic_update_slice(array, part[(None,) * len(index)], start)

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


@jax.jit
def _take(array: jax.Array, index: np.ndarray) -> jax.Array:
    # The index is data: one program per shape, not one per layer.
    return jax.lax.dynamic_slice(
        array, (*index, *[0] * (array.ndim - len(index))), (*[1] * len(index), *array.shape[len(index) :])
    ).reshape(array.shape[len(index) :])


def _gather(config: ModelConfig, tensor: names.Tensor, flat: dict, dtype: str) -> np.ndarray:
    parts = [processes.fetch(_take(flat[path], np.array(tensor.index, np.int32))) for path in tensor.paths]
    joined = np.asarray(tensor.rule.join(config, *parts)).astype(jnp.dtype(dtype))
    return np.ascontiguousarray(joined)
