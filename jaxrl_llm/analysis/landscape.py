"""Gradient-weight landscapes: what every objective does to a token, over (mu, pi) and for both signs of the advantage.

The colour is w in the gradient -A r w grad log pi: 1 leaves the policy gradient alone, 0 stops it, below 0 pulls back.
Views of the whole distribution are reduced to the two points {sampled token, the rest}, as in the papers' figures.
"""

import pathlib
from collections.abc import Sequence

import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from jaxrl_llm import objectives

# Title -> (objective, hyperparameters), at the papers' thresholds.
SHOWN = {
    "PPO / GRPO clip, eps 0.2": ("ppo_clip", {}),
    "CISPO, cap 3": ("cispo", {}),
    "SPO, eps 0.2": ("spo", {}),
    "DPPO binary TV, delta 0.15": ("dppo", {"divergence": "binary_tv", "delta_low": 0.15, "delta_high": 0.15}),
    "DPPO binary KL, delta 0.05": ("dppo", {"divergence": "binary_kl"}),
    "PDM binary KL, delta 0.05": ("pdm", {"view": "binary", "delta_low": 0.05, "delta_high": 0.05}),
    "DRPO, delta 0.15": ("drpo", {}),
    "DRPO, delta 12.5": ("drpo", {"delta": 12.5}),
    "mask-DRPO, delta 0.15": ("mask_drpo", {}),
    "DRPO, KL penalty": ("drpo_kl", {}),
    "DRPO, TV penalty": ("drpo_tv", {}),
    "Output reset, alpha 0.2": ("grpo_or", {}),
}


def weights(name: str, hyper: dict, advantage: float, grid: Sequence[float]) -> np.ndarray:
    """Effective weight [pi, mu] of an objective for one advantage, over probabilities `grid` of the sampled token."""
    mu, pi = np.meshgrid(grid, grid)
    loss = objectives.build({"name": name, name: hyper})
    log_mu, log_pi = jnp.log(jnp.asarray(mu, jnp.float32)), jnp.log(jnp.asarray(pi, jnp.float32))
    return np.asarray(objectives.effective_weight(loss, log_pi, log_mu, jnp.full(mu.shape, advantage, jnp.float32)))


def draw(out: pathlib.Path | str, points: int = 160) -> pathlib.Path:
    """Draws all of `SHOWN` into the PNG `out`; returns its path."""
    grid = np.linspace(0.003, 0.997, points)
    columns = 4
    rows = -(-len(SHOWN) // columns)
    figure, axes = plt.subplots(
        rows, 2 * columns, figsize=(4.2 * columns, 2.7 * rows + 0.8), layout="constrained", sharex=True, sharey=True
    )
    for pair, (title, (name, hyper)) in zip(axes.reshape(-1, 2), SHOWN.items(), strict=False):
        for axis, advantage in zip(pair, (1.0, -1.0), strict=True):
            image = axis.imshow(
                weights(name, hyper, advantage, grid),
                origin="lower",
                extent=(0, 1, 0, 1),
                cmap="RdBu",
                vmin=-2,
                vmax=2,
                interpolation="nearest",
            )
            axis.plot([0, 1], [0, 1], color="#1a202c", linewidth=0.6, linestyle=":")
            axis.set_title(f"A {'>' if advantage > 0 else '<'} 0", fontsize=8, color="#4a5568", loc="right")
            axis.set_xticks([0, 0.5, 1], ["0", ".5", "1"], fontsize=7)
            axis.set_yticks([0, 0.5, 1], ["0", ".5", "1"], fontsize=7)
        pair[0].set_title(title, fontsize=9, fontweight="bold", loc="left", y=1.08)
        pair[0].set_title("A > 0", fontsize=8, color="#4a5568", loc="right")
    for axis in axes[-1]:
        axis.set_xlabel("mu", fontsize=8)
    for axis in axes[:, 0]:
        axis.set_ylabel("pi", fontsize=8)
    bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.4, aspect=40, extend="both")
    bar.set_label("weight w of the policy gradient: blue follows, white stops, red pulls back", fontsize=9)
    out = pathlib.Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=100)
    plt.close(figure)
    return out
