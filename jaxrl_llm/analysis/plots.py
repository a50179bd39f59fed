"""Pictures of runs, from their metrics.jsonl.

    python -m jaxrl_llm.analysis.plots runs/a runs/b --out=comparison.png
"""

import dataclasses
import pathlib
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from absl import app, flags

from jaxrl_llm.training.metrics import read_rows

COLORS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#4a5568")


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot of the grid.

    Attributes:
      title: what is shown, with its unit.
      lines: metric -> line style; the first that a run has gives the panel its numbers, the rest are drawn with it.
      band: names of the lower and upper end of an interval, or None.
      log: logarithmic axis.
    """

    title: str
    lines: tuple[tuple[str, str], ...]
    band: tuple[str, str] | None = None
    log: bool = False


PANELS = (
    Panel("reward (mean of rollout)", (("reward/mean", "-"),)),
    Panel(
        "held-out accuracy, 95 % interval", (("eval/held_out/accuracy", "o-"),), ("eval/held_out/low", "eval/held_out/high")
    ),
    Panel("divergence (mean D; dashed: share outside)", (("divergence/mean", "-"), ("divergence/outside", "--"))),
    Panel("masked or clipped share of tokens", (("mask/share", "-"),)),
    Panel(
        "mismatch |log pi_old - log mu| (mean; dashed: max)",
        (("mismatch/mean_abs_log_ratio", "-"), ("mismatch/max_abs_log_ratio", "--")),
        log=True,
    ),
    Panel("response length (tokens; dashed: longest)", (("response/length_mean", "-"), ("response/length_max", "--"))),
    Panel("entropy (nats per token)", (("entropy", "-"),)),
    Panel("|log r| during updates (mean)", (("ratio/abs_log", "-"),)),
    Panel("gradient norm", (("optimizer/grad_norm", "-"),), log=True),
)


def draw(run_dirs: Sequence[pathlib.Path | str], out: pathlib.Path | str, labels: Sequence[str] | None = None) -> pathlib.Path:
    """Draws all panels for one or several runs into the PNG `out`; returns its path.

    Raises:
      ValueError: a directory without metrics; names it.
    """
    runs = []
    for folder in map(pathlib.Path, run_dirs):
        rows = read_rows(folder / "metrics.jsonl")
        if not rows:
            raise ValueError(f"{folder} has no metrics to plot (metrics.jsonl is missing or empty)")
        runs.append(rows)
    labels = labels or [pathlib.Path(folder).name for folder in run_dirs]

    figure, axes = plt.subplots(3, 3, figsize=(13, 9), layout="constrained")
    for axis, panel in zip(axes.flat, PANELS, strict=True):
        for rows, label, color in zip(runs, labels, COLORS * len(runs), strict=False):
            _draw_panel(axis, panel, rows, label, color)
        axis.set_title(panel.title, fontsize=10, loc="left", color="#1a202c")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e2e8f0", linewidth=0.8)
        axis.tick_params(labelsize=8, colors="#4a5568")
        if panel.log and axis.lines:
            axis.set_yscale("log")
        if not axis.lines:
            axis.text(0.5, 0.5, "not part of this objective", ha="center", va="center", color="#a0aec0", transform=axis.transAxes)
            axis.set_yticks([])
    for axis in axes[-1]:
        axis.set_xlabel("rollout", fontsize=9, color="#4a5568")
    if len(runs) > 1:
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(runs), frameon=False)
    else:
        figure.suptitle(labels[0], x=0.01, ha="left", fontsize=12, color="#1a202c")
    out = pathlib.Path(out)
    figure.savefig(out, dpi=110)
    plt.close(figure)
    return out


def _draw_panel(axis, panel: Panel, rows, label: str, color: str) -> None:
    for name, style in panel.lines:
        x, y = _series(rows, name)
        if x:
            first = name == panel.lines[0][0]
            axis.plot(x, y, style, color=color, label=label if first else None, linewidth=1.6, markersize=4)
    if panel.band:
        x, low = _series(rows, panel.band[0])
        _, high = _series(rows, panel.band[1])
        if x:
            axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def _series(rows, name: str) -> tuple[list[int], list[float]]:
    points = [(row["rollout"], row[name]) for row in rows if row.get(name) is not None]
    return [x for x, _ in points], [y for _, y in points]


def main(argv):
    draw(argv[1:], _OUT.value)
    print(_OUT.value)


if __name__ == "__main__":
    _OUT = flags.DEFINE_string("out", "comparison.png", "The picture.")
    app.run(main)
