"""The optimizer named by the configuration, from optax."""

import functools

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.config import Optimizer
from jaxrl_llm.parallel import sharding


def schedule(config: Optimizer, steps: int) -> optax.Schedule:
    """Learning rate by optimizer step: linear warm-up, then constant, linear or cosine decay to 0 at `steps`."""
    decay_steps = max(steps - config.warmup_steps, 1)
    shape = {
        "constant": optax.constant_schedule(config.learning_rate),
        "linear": optax.linear_schedule(config.learning_rate, 0.0, decay_steps),
        "cosine": optax.cosine_decay_schedule(config.learning_rate, decay_steps),
    }[config.schedule]
    if config.warmup_steps == 0:
        return shape
    # The first step already moves: a rate of exactly 0 would waste it.
    warmup = optax.linear_schedule(
        config.learning_rate / config.warmup_steps, config.learning_rate, config.warmup_steps - 1
    )
    return optax.join_schedules([warmup, shape], [config.warmup_steps])


def create(config: Optimizer, steps: int) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW on the schedule."""
    adamw = optax.adamw(
        schedule(config, steps), b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay
    )
    if config.max_grad_norm == 0:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw)


def init(optimizer: optax.GradientTransformation, params) -> optax.OptState:
    """Optimizer state with float32 moments whatever the parameters' dtype."""
    return optimizer.init(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))


def init_on(mesh: jax.sharding.Mesh, optimizer: optax.GradientTransformation, params) -> optax.OptState:
    """`init` with moments that lie on the mesh as their parameters do."""
    return sharding.create(functools.partial(init, optimizer), mesh, params)
