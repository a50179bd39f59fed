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
from jax.sharding import Mesh

from jaxrl_llm import objectives, schema
from jaxrl_llm.models import presets
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.plan import hlo
from jaxrl_llm.rollout import slots as sampling
from jaxrl_llm.rollout.choice import Choice
from jaxrl_llm.rollout.slots import SamplingConfig, Slots
from jaxrl_llm.training import config as configs
from jaxrl_llm.training import optimizer as optimizers
from jaxrl_llm.training import sharding
from jaxrl_llm.training.config import RunConfig
from jaxrl_llm.training.step import Forward, TrainStep
from jaxrl_llm.types import Batch, TopKView, TrainState


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
    model, loss = model_config(run), objectives.build(run.objective)
    graphdef, params = _abstract_model(model, mesh)
    optimizer = optimizers.create(run.optimizer, run.optimizer_steps)
    forward = Forward(
        graphdef,
        model.vocab_size,
        run.rollout.temperature,
        entropy=True,
        topk="topk_logprobs" in loss.needs,
        layout=sharding.token_layout(mesh),
    )
    step = TrainStep(forward, loss, optimizer, run.training.micro_batches)

    moments = jax.eval_shape(lambda p: optimizers.init(optimizer, p), params)
    moments = _placed(moments, sharding.shardings(moments, mesh))
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding.replicated(mesh))
    state = TrainState(step=count, params=params, opt_state=moments, skipped=count)
    rows = run.sequences // run.training.updates_per_rollout
    batch = _abstract_batch(run, model, rows, loss.needs, mesh)
    places = jax.tree.map(lambda x: x.sharding, state)
    with jax.set_mesh(mesh):
        lowered = jax.jit(step, donate_argnums=0, out_shardings=(places, None)).lower(state, batch)
    length = run.rollout.max_prompt_length + run.rollout.max_response_length
    # Backward costs twice the forward.
    ideal = 3 * forward_flops(model, rows, length, rows * run.rollout.max_response_length)
    resident = {
        "parameters": _bytes_per_device(params),
        "optimizer": _bytes_per_device(moments),
        "batch": _bytes_per_device(batch),
    }
    return _program("training step", lowered, resident, ideal / mesh.size)


def decoding_program(run: RunConfig, mesh: Mesh) -> Program:
    """One decoding step of the sampler for every sequence of a rollout (or every slot), at the longest cache.

    Parameters lie as in training; rows are divided over data and fsdp, keys and values over tensor too where it divides them.
    """
    model, r = model_config(run), run.rollout
    graphdef, params = _abstract_model(model, mesh)
    rows = min(r.slots or run.sequences, run.sequences)
    config = SamplingConfig(
        max_response_length=r.max_response_length,
        stop_ids=(0,),
        choice=Choice(r.temperature, r.top_k, r.top_p, r.min_p, r.fp8.logits),
        capture_top_k=r.capture_top_k,
        capture_routing=r.routing_replay,
        fp8=r.fp8.sites,
    )
    length = r.max_prompt_length + r.max_response_length
    slots = jax.eval_shape(
        functools.partial(sampling.empty, model, rows, length, r.max_prompt_length, r.routing_replay)
    )
    slots = _placed(slots, jax.tree.map(functools.partial(_slot_sharding, mesh=mesh), slots))

    def one(params, slots: Slots, steps, finished):
        loaded = sampling.load(params, config.fp8)
        return sampling.decode(graphdef, config, loaded, slots, steps, finished, 1)

    # Arguments, so that the loop over steps has no length and its body counts once.
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding.replicated(mesh))
    places = jax.tree.map(lambda x: x.sharding, slots)
    with jax.set_mesh(mesh):
        lowered = jax.jit(one, donate_argnums=1, out_shardings=(places, None)).lower(params, slots, count, count)
    resident = {"parameters": _bytes_per_device(params), "KV cache": _bytes_per_device(slots.cache)}
    return _program("decoding step", lowered, resident, decoding_flops(model, rows, length) / mesh.size)


def decoding_flops(model: ModelConfig, rows: int, length: int) -> float:
    """Matrix FLOPs of one token for each of `rows` sequences against a cache of `length`."""
    return rows * (forward_flops(model, 1, length, 1) - forward_flops(model, 1, length - 1, 0))


def _slot_sharding(x: Any, mesh: Mesh) -> jax.sharding.NamedSharding:
    rows = ("data", "fsdp")
    spec: list[Any] = [None] * len(x.shape)
    if x.shape and x.shape[0] % sharding.data_shards(mesh) == 0:
        spec[0] = rows
    if len(x.shape) == 4 and x.shape[1] % mesh.shape["tensor"] == 0:
        spec[1] = "tensor"  # heads of keys and values
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


def forward_flops(model: ModelConfig, rows: int, length: int, unembedded: int) -> float:
    """Matrix FLOPs of the model's forward over `rows` sequences of `length` tokens, attention causal.

    Args:
      model: the architecture.
      rows, length: sequences and their length.
      unembedded: tokens whose logits are computed.
    """
    c, tokens = model, rows * length
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    scores = 2 * c.num_heads * c.head_dim * (length + 1) / 2  # products with earlier keys and their values
    dense = 3 * c.hidden_size * c.intermediate_size
    routed = c.hidden_size * (c.moe.num_experts + 3 * c.moe.experts_per_token * c.moe.intermediate_size)
    layers = sum(attention + scores + (routed if k.feed_forward == "moe" else dense) for k in c.layer_kinds)
    return 2.0 * (tokens * layers + unembedded * c.hidden_size * c.vocab_size)


def _abstract_model(model: ModelConfig, mesh: Mesh) -> tuple[nnx.GraphDef, Any]:
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0))), nnx.Param)
    return graphdef, _placed(params, sharding.shardings(params, mesh))


def _placed(tree: Any, places: Any) -> Any:
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)


def _abstract_batch(run: RunConfig, model: ModelConfig, rows: int, needs: frozenset[str], mesh: Mesh) -> Batch:
    place = sharding.batch_sharding(mesh)
    length, k = run.rollout.max_response_length, run.rollout.capture_top_k

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=place)

    width = run.rollout.max_prompt_length + length
    whole, experts = array(jnp.int32, width), (model.num_moe_layers, model.moe.experts_per_token)
    optional = {name: array(jnp.float32, length) for name in ("old_logprobs", "reference_logprobs") if name in needs}
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
