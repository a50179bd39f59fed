"""The programs of a run compiled ahead of time for devices that need not exist: nothing is allocated, nothing runs."""

import dataclasses
import functools
import math
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import config as configs
from jaxrl_llm import schema
from jaxrl_llm.axes import round_up
from jaxrl_llm.config import RunConfig
from jaxrl_llm.hub import presets
from jaxrl_llm.learning import trainer as trainers
from jaxrl_llm.learning.trainer import Trainer
from jaxrl_llm.models.abstract import abstract
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder, is_matrix
from jaxrl_llm.models.flops import forward_flops
from jaxrl_llm.parallel import sharding
from jaxrl_llm.plan import hlo
from jaxrl_llm.rollout import placement
from jaxrl_llm.rollout import slots as sampling
from jaxrl_llm.rollout.choice import Choice
from jaxrl_llm.rollout.slots import SamplingConfig, Slots
from jaxrl_llm.types import Batch, TopKView


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program, per device.

    Attributes:
      name: what it does.
      resident: part -> bytes of its arguments.
      temporary: bytes of activations and other temporaries at their peak.
      flops: matrix FLOPs of one run.
      ideal_flops: the model's own FLOPs of one run, divided by the devices; what flops exceeds is recomputed or
        replicated work.
      collective_bytes: kind -> bytes sent.
      uncounted_loops: loops whose length could not be read from the program; their bodies count once.
    """

    name: str
    resident: dict[str, float]
    temporary: float
    flops: float
    ideal_flops: float
    collective_bytes: dict[str, float]
    uncounted_loops: int

    @property
    def peak(self) -> float:
        """Bytes needed at once."""
        return sum(self.resident.values()) + self.temporary


def model_config(run: RunConfig) -> ModelConfig:
    """The architecture that `run` names, without loading anything."""
    fields = presets.architecture(run.model.source) if run.model.source else dict(run.model.architecture)
    fields |= run.model.runtime
    return schema.read(ModelConfig, fields, "config.model.architecture")


def training_program(run: RunConfig, mesh: Mesh) -> Program:
    """The optimizer step on one mini-batch, with the widths that the configuration allows at most.

    Raises:
      ValueError: a batch that does not divide over the mesh; names the field.
    """
    configs.check_devices(run, sharding.data_shards(mesh))
    model = model_config(run)
    graphdef, params = _abstract_model(model, mesh)
    trainer = trainers.create(run, model, graphdef, mesh)
    state = trainer.describe(params, mesh)
    rows = run.sequences // run.training.updates_per_rollout
    batch = _abstract_batch(run, model, rows, trainer, mesh)
    with jax.set_mesh(mesh):
        lowered = trainers.compile_step(trainer.step, state).lower(state, batch)
    length = run.rollout.max_prompt_length + run.rollout.max_response_length
    # Backward costs twice the forward.
    ideal = 3 * forward_flops(model, rows, length, rows * run.rollout.max_response_length)
    parts = {"parameters": state.params, "optimizer": state.opt_state, "batch": batch}
    if trainer.compared:
        parts["reference"] = state.reference_params
    if trainer.critic is not None:
        parts["critic"] = state.critic
        if run.critic.trunk == "own":
            ideal += 3 * forward_flops(model, rows, length, 0)
    resident = {name: _bytes_per_device(part) for name, part in parts.items()}
    return _program("training step", lowered, resident, ideal / mesh.size)


def decoding_program(run: RunConfig, mesh: Mesh) -> Program:
    """One decoding step of the sampler for every sequence of a rollout (or every slot), at the longest cache.

    Beside the training parameters there is the sampler's copy of them, gathered over fsdp where the configuration says so.
    """
    model, r = model_config(run), run.rollout
    graphdef, params = _abstract_model(model, mesh)
    rows = round_up(min(r.slots or run.sequences, run.sequences), placement.shards(mesh))
    config = SamplingConfig(
        max_response_length=r.max_response_length,
        stop_ids=(0,),
        choice=Choice(r.temperature, r.top_k, r.top_p, r.min_p, r.fp8.logits, r.truncation_ratio),
        capture_top_k=r.capture_top_k,
        capture_routing=r.routing_replay,
        fp8=r.fp8.sites,
    )
    length = r.max_prompt_length + r.max_response_length
    slots = jax.eval_shape(
        functools.partial(sampling.empty, model, rows, length, r.max_prompt_length, r.routing_replay)
    )
    places = placement.places(slots, mesh)
    slots = sharding.placed(slots, places)
    loaded = jax.eval_shape(functools.partial(sampling.load, fp8=r.fp8.sites, dtype=model.dtype), params)
    loaded = loaded.replace(layers=_placed_layers(loaded.layers, mesh), params=sharding.describe(loaded.params, mesh))
    if r.gather_params:
        loaded = sharding.placed(loaded, placement.gathered_places(loaded))
    # The stacked layers, and what neither moves nor changes its dtype, are the training parameters themselves.
    copied = [loaded.layers]
    copied += [part for name, part in loaded.params.items() if jax.tree.leaves(part) != jax.tree.leaves(params[name])]

    def one(loaded, slots: Slots, steps, finished):
        return sampling.decode(graphdef, config, loaded, slots, steps, finished, 1)

    # Arguments, so that the loop over steps has no length and its body counts once.
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding.replicated(mesh))
    with jax.set_mesh(mesh):
        lowered = jax.jit(one, donate_argnums=1, out_shardings=(places, None)).lower(loaded, slots, count, count)
    resident = {
        "parameters": _bytes_per_device(params),
        "sampler's copy": _bytes_per_device(copied),
        "KV cache": _bytes_per_device(slots.cache),
    }
    return _program("decoding step", lowered, resident, decoding_flops(model, rows, length) / mesh.size)


def _placed_layers(layers: Any, mesh: Mesh) -> Any:
    """The sampler's layers divided as the parameters that they come from, of which its matrices are transposes."""

    def turn(path, x):
        return jax.ShapeDtypeStruct(x.shape[::-1], x.dtype) if is_matrix(path, x) else x

    def turn_back(path, x, place):
        spec = (*place.spec, *(None,) * (x.ndim - len(place.spec)))
        return NamedSharding(mesh, PartitionSpec(*spec[::-1])) if is_matrix(path, x) else place

    places = sharding.shardings(jax.tree_util.tree_map_with_path(turn, layers), mesh)
    return sharding.placed(layers, jax.tree_util.tree_map_with_path(turn_back, layers, places))


def decoding_flops(model: ModelConfig, rows: int, length: int) -> float:
    """Matrix FLOPs of one token for each of `rows` sequences against a cache of `length`."""
    return rows * (forward_flops(model, 1, length, 1) - forward_flops(model, 1, length - 1, 0))


def _abstract_model(model: ModelConfig, mesh: Mesh) -> tuple[nnx.GraphDef, Any]:
    graphdef, params = abstract(Decoder, model)
    return graphdef, sharding.describe(params, mesh)


def _abstract_batch(run: RunConfig, model: ModelConfig, rows: int, trainer: Trainer, mesh: Mesh) -> Batch:
    place = sharding.batch_sharding(mesh)
    length, k = run.rollout.max_response_length, run.rollout.capture_top_k

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=place)

    width = run.rollout.max_prompt_length + length
    whole, experts = array(jnp.int32, width), (model.num_moe_layers, model.moe.experts_per_token)
    present = {
        "old_logprobs": "old_logprobs" in trainer.loss.needs or run.kl.reward > 0,
        "reference_logprobs": trainer.compared,
        "old_values": trainer.critic is not None,
        "returns": trainer.critic is not None,
    }
    optional = {name: array(jnp.float32, length) for name, there in present.items() if there}
    if run.kl.target:
        optional["kl_scale"] = array(jnp.float32)
    return Batch(
        tokens=whole,
        positions=whole,
        segment_ids=whole,
        response_mask=array(jnp.bool_, length),
        behavior_logprobs=array(jnp.float32, length),
        advantages=array(jnp.float32, length),
        topk=TopKView(array(jnp.int32, length, k), array(jnp.float32, length, k)) if k else None,
        log_kept_mass=array(jnp.float32, length),
        routed_experts=array(jnp.int32, width, *experts) if run.rollout.routing_replay else None,
        **optional,
    )


def _bytes_per_device(tree: Any) -> float:
    def one(x):
        shape = x.sharding.shard_shape(x.shape)
        return math.prod(shape) * (x.dtype.itemsize if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else 8)

    return sum(map(one, jax.tree.leaves(tree)))


def _program(name: str, lowered: Any, resident: dict[str, float], ideal_flops: float) -> Program:
    with tempfile.TemporaryDirectory() as folder:
        # libtpu's executables do not give their text back, but the compiler writes it on the way.
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        (text,) = pathlib.Path(folder).glob("*after_optimizations.txt")
        costs = hlo.costs(text.read_text())
    memory = compiled.memory_analysis()
    # Results that do not take over an argument's buffer need their own.
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Program(
        name=name,
        resident=resident,
        temporary=memory.temp_size_in_bytes + fresh + memory.generated_code_size_in_bytes,
        flops=costs.flops,
        ideal_flops=ideal_flops,
        collective_bytes=dict(costs.collective_bytes),
        uncounted_loops=sum(count is None for count in costs.loops.values()),
    )
