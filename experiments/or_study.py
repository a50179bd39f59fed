"""The four arms of the "OR Else" paper in a tiny setting: PPO-clip, PPO-OR, GRPO, GRPO-OR, over seeds and margins.

    python experiments/train_reward_model.py --config=configs/reward_models/tiny.py
    python experiments/or_study.py --out=runs/or_study

Each run is configs/tiny_rlhf.py with another objective, seed or margin and nothing else changed; one process runs them
all, so that they share what they compile. Runs that are complete are kept: an interrupted study goes on where it
stopped. It leaves table.md and traces.png in --out. docs/or_study.md tells what came out.
"""

import contextlib
import dataclasses
import io
import pathlib
import shutil
import sys

import jax
import numpy as np
from absl import flags
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from jaxrl_llm.api import command_line
from jaxrl_llm.config import RunConfig
from jaxrl_llm.config import files as config_files
from jaxrl_llm.records import progress
from jaxrl_llm.records.metrics import read_rows
from jaxrl_llm.records.plots import COLORS
from jaxrl_llm.training import loop

ROOT = pathlib.Path(__file__).parents[1]

_OUT = flags.DEFINE_string("out", "runs/or_study", "Where runs, table and picture go.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of each arm.", lower_bound=2)
_ALPHAS = flags.DEFINE_list("alphas", ["0.2", "0.1", "0.5"], "Margins; the first one is that of the main table.")
_ROLLOUTS = flags.DEFINE_integer("rollouts", 0, "Rollouts of each run; 0 for the configuration's.", lower_bound=0)
_REWARD_MODEL = flags.DEFINE_string("reward_model", "runs/tiny_reward_model", "Directory of the frozen judge.")


@dataclasses.dataclass(frozen=True)
class Arm:
    """One line of the table: an objective with its margin (None for the clipped ones)."""

    objective: str
    alpha: float | None = None

    @property
    def title(self) -> str:
        names = {"ppo_clip": "PPO-clip", "ppo_or": "PPO-OR", "grpo": "GRPO", "grpo_or": "GRPO-OR"}
        return names[self.objective] + ("" if self.alpha is None else f", alpha {self.alpha:g}")


# Final reward (mean, standard deviation across seeds) and drift, as the paper reports them.
PAPER = {
    "ppo_clip": ("+0.195 ± 0.110", "0.3 to 0.5"),
    "ppo_or": ("+0.500 ± 0.158", "0.3 to 0.5"),
    "grpo": ("+0.488 ± 0.080", "5 to 13"),
    "grpo_or": ("+0.457 ± 0.027", "5 to 13"),
}
TRACES = {
    "reward/mean": "reward (standardised)",
    "after/drift": "drift: mean |log ratio|",
    "after/residual": "residual to the margin",
    "after/overshoot": "overshoot share",
    "loss": "loss",
    "response/length_mean": "response length",
}


def arms(alphas: list[float]) -> list[Arm]:
    """The four arms at the first margin, then the margins' sweep."""
    main = [Arm("ppo_clip"), Arm("ppo_or", alphas[0]), Arm("grpo"), Arm("grpo_or", alphas[0])]
    return main + [Arm(name, alpha) for alpha in alphas[1:] for name in ("ppo_or", "grpo_or")]


def configure(arm: Arm, seed: int, path: pathlib.Path, reward_model: str, rollouts: int, margin: float) -> RunConfig:
    """The tiny configuration with this arm's objective."""
    config = config_files.load(ROOT / "configs" / "tiny_rlhf.py").get_config(arm.objective)
    config.run_dir, config.seed, config.reward_model.source = str(path), seed, reward_model
    # Residual and overshoot of all arms are measured against one margin, so that they can be compared.
    config.diagnostics.margin = margin
    if arm.alpha is not None:
        config.objective[arm.objective].alpha = arm.alpha
    if rollouts:
        config.training.rollouts = config.checkpoint.every = rollouts
    return RunConfig.read(config)


def final(rows: list[dict], metric: str) -> float:
    """Mean of a metric over the last tenth of the rollouts, at least three."""
    values = [row[metric] for row in rows if row.get(metric) is not None]
    return float(np.mean(values[-max(3, len(values) // 10) :]))


def table(results: dict[Arm, list[list[dict]]], margin: float) -> str:
    """Markdown: one line an arm, means over seeds with their standard deviation (ddof 1) where it says ±."""
    lines = [
        f"| arm | final reward | true score | drift | residual ({margin:g}) | overshoot | length | paper: reward | drift |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, seeds in results.items():
        ends = {name: np.array([final(rows, name) for rows in seeds]) for name in TRACES}
        truth = [next(v for k, v in rows[-1].items() if k.endswith("/accuracy")) for rows in seeds]
        reward = ends["reward/mean"]
        paper = PAPER[arm.objective]
        cells = [
            arm.title,
            f"{reward.mean():+.3f} ± {reward.std(ddof=1):.3f}",
            f"{np.mean(truth):.3f} ± {np.std(truth, ddof=1):.3f}",
            f"{ends['after/drift'].mean():.3f}",
            f"{ends['after/residual'].mean():.3f}",
            f"{100 * ends['after/overshoot'].mean():.1f} %",
            f"{ends['response/length_mean'].mean():.2f}",
            *paper,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def picture(results: dict[Arm, list[list[dict]]], path: pathlib.Path) -> None:
    """One panel a trace: thin lines are seeds, thick ones their mean."""
    fig = Figure(figsize=(12, 6.2), layout="constrained")
    axes = fig.subplots(2, 3).ravel()
    for axis, (metric, title) in zip(axes, TRACES.items(), strict=True):
        for color, (arm, seeds) in zip(COLORS, results.items(), strict=False):
            values = np.array([[row[metric] for row in rows if metric in row] for rows in seeds], float)
            axis.plot(1 + np.arange(values.shape[1]), values.T, color=color, linewidth=0.6, alpha=0.4)
            axis.plot(1 + np.arange(values.shape[1]), values.mean(axis=0), color=color, linewidth=2, label=arm.title)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("rollout", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    FigureCanvasAgg(fig)
    fig.savefig(path, dpi=130)


def main():
    out, alphas = pathlib.Path(_OUT.value), list(map(float, _ALPHAS.value))
    console = Console()
    jax.config.update("jax_compilation_cache_dir", str((out / "compiled").absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    # Seed by seed, so that a study that is cut short has every arm of its first seeds.
    plan = [(arm, seed) for seed in range(_SEEDS.value) for arm in arms(alphas)]
    rows: dict[tuple[Arm, int], list[dict]] = {}
    with progress.bar(console, "study", len(plan)) as bar:
        for done, (arm, seed) in enumerate(plan):
            path = out / f"{arm.objective}_{arm.alpha or 'clip'}_{seed}"
            run = configure(arm, seed, path, _REWARD_MODEL.value, _ROLLOUTS.value, alphas[0])
            found = read_rows(path / "metrics.jsonl")
            if not found or found[-1]["rollout"] != run.training.rollouts:
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.redirect_stdout(io.StringIO()):
                    if loop.train(run, console=Console(file=io.StringIO())) is None:
                        sys.exit("stopped; start again to go on")
            rows[arm, seed] = read_rows(path / "metrics.jsonl")
            bar.update(done + 1, {arm.title + " reward": final(rows[arm, seed], "reward/mean")})
    results = {arm: [rows[arm, seed] for seed in range(_SEEDS.value)] for arm in arms(alphas)}
    text = table(results, alphas[0])
    (out / "table.md").write_text(text)
    picture(dict(list(results.items())[:4]), out / "traces.png")
    console.print(text, markup=False, soft_wrap=True)
    console.print(f"{out / 'table.md'}, {out / 'traces.png'}", markup=False)


if __name__ == "__main__":
    command_line.run(main)
