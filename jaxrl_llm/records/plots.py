"""Pictures of runs, from their metrics.jsonl: one run alone, or several over each other.

    python -m jaxrl_llm.records.plots runs/a                          (writes runs/a/plots/training.png)
    python -m jaxrl_llm.records.plots runs/a runs/b --out=comparison.png --labels=dppo,pdm

Thin lines are the rollouts' own values, thick ones running means. A panel that no run has numbers for is left out.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import app, flags
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from jaxrl_llm.records.metrics import read_rows

# Told apart by readers with any colour vision (Okabe and Ito 2008).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK, QUIET, RULE, AXIS = "#1f2933", "#66727f", "#e4e8ec", "#c3cad1"
COLUMNS = 3
SMOOTHING = 40  # a running mean reaches 1 / SMOOTHING of the run to either side
# The page, in inches: a panel, the room left, right and above it for its numbers and titles, and the margins.
PANEL, LEFT, RIGHT, ABOVE, BELOW = (3.0, 1.55), 0.75, 0.85, 0.62, 0.32
HEAD, FOOT = 0.5, 0.2

Rows = Sequence[Mapping[str, Any]]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}".replace("e-0", "e-")


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot of the grid.

    Attributes:
      title: what is shown.
      note: unit, and what else a reader needs.
      lines: metric -> its name in the panel ("" for the only one). The first is drawn solid, a second one dashed.
      band: metrics of the lower and upper end of an interval, or None.
      log: logarithmic axis.
      markers: the values are few and far between; they are marked and not smoothed.
      show: how a value is written.
    """

    title: str
    note: str
    lines: tuple[tuple[str, str], ...]
    band: tuple[str, str] | None = None
    log: bool = False
    markers: bool = False
    show: Callable[[float], str] = _number


PANELS = (
    Panel("Reward", "mean of the rollout", (("reward/mean", ""),)),
    Panel("Divergence", "D(behaviour, policy), mean over tokens", (("divergence/mean", ""),)),
    Panel(
        "Masked or clipped, outside the region",
        "shares of tokens",
        (("mask/share", "masked"), ("divergence/outside", "outside")),
        show=_percent,
    ),
    Panel(
        "Sampler against trainer",
        "|log ratio| before any update",
        (("mismatch/mean_abs_log_ratio", "mean"), ("mismatch/max_abs_log_ratio", "max")),
        log=True,
    ),
    Panel(
        "Reach of the updates",
        "|log ratio| within a rollout",
        (("ratio/abs_log", "mean"), ("ratio/max_abs_log", "max")),
        log=True,
    ),
    Panel("Response length", "tokens", (("response/length_mean", "mean"), ("response/length_max", "longest"))),
    Panel("Truncated responses", "share that reached the length limit", (("response/truncated", ""),), show=_percent),
    Panel("Entropy", "nats per token", (("entropy", ""),)),
    Panel("Gradient norm", "before clipping", (("optimizer/grad_norm", ""),), log=True),
    Panel("Groups without a signal", "share with equal rewards", (("advantage/zero_groups", ""),), show=_percent),
    Panel("Speed", "response tokens per second, updates included", (("time/tokens_per_s", ""),)),
)


def draw(
    run_dirs: Sequence[pathlib.Path | str], out: pathlib.Path | str, labels: Sequence[str] | None = None
) -> pathlib.Path:
    """Draws every panel that a run has numbers for into the PNG `out`; returns its path.

    Args:
      run_dirs: directories with a metrics.jsonl.
      out: the picture; its directory is made where missing.
      labels: names of the runs; those of their directories by default.

    Raises:
      ValueError: no runs, another number of labels, or a directory without metrics; names it.
    """
    if not run_dirs:
        raise ValueError("no run directory to plot")
    labels = [pathlib.Path(folder).absolute().name for folder in run_dirs] if labels is None else list(labels)
    if len(labels) != len(run_dirs):
        raise ValueError(f"{len(labels)} labels for {len(run_dirs)} run directories; give one for each")
    runs = []
    for folder in map(pathlib.Path, run_dirs):
        rows = read_rows(folder / "metrics.jsonl")
        if not rows:
            raise ValueError(f"{folder} has no metrics to plot (metrics.jsonl is missing or empty)")
        runs.append(rows)
    out = pathlib.Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure(runs, labels).savefig(out, dpi=120, facecolor="white")
    return out


def figure(runs: Sequence[Rows], labels: Sequence[str]) -> Figure:
    """The picture of `runs` (rows of metrics.jsonl each), named by `labels`."""
    panels = [panel for panel in (*_evaluations(runs), *PANELS) if _has_numbers(panel, runs)]
    rollouts = [row["rollout"] for rows in runs for row in rows]
    cell = LEFT + PANEL[0] + RIGHT, ABOVE + PANEL[1] + BELOW
    columns = max(1, min(COLUMNS, len(panels)))
    width, height = columns * cell[0], HEAD + math.ceil(len(panels) / columns) * cell[1] + FOOT
    fig = Figure(figsize=(width, height))
    FigureCanvasAgg(fig)
    _header(fig, labels, width, height)
    for i, panel in enumerate(panels):
        x = (i % columns) * cell[0] + LEFT
        y = height - HEAD - (i // columns) * cell[1] - ABOVE - PANEL[1]
        axis = fig.add_axes((x / width, y / height, PANEL[0] / width, PANEL[1] / height))
        # The same rollouts in every panel, so that the eye can go from one to another.
        axis.set_xlim(min(rollouts), max(max(rollouts), min(rollouts) + 1))
        _draw_panel(axis, panel, runs, last=i + columns >= len(panels))
    return fig


def _evaluations(runs: Sequence[Rows]) -> list[Panel]:
    names = {key.split("/")[1]: None for rows in runs for row in rows for key in row if key.startswith("eval/")}
    return [
        Panel(
            f"Accuracy, {name.replace('_', ' ')}",
            "evaluation; band: 95 % interval",
            ((f"eval/{name}/accuracy", ""),),
            band=(f"eval/{name}/low", f"eval/{name}/high"),
            markers=True,
            show=_percent,
        )
        for name in names
    ]


def _has_numbers(panel: Panel, runs: Sequence[Rows]) -> bool:
    # On a logarithmic axis zeros are no points.
    series = [_series(rows, metric)[1] for rows in runs for metric, _ in panel.lines]
    return any((y > 0).any() if panel.log else len(y) for y in series)


def _header(fig: Figure, labels: Sequence[str], width: float, height: float) -> None:
    """The runs' names, each in its colour: a key without a box."""
    x = LEFT / width
    for i, label in enumerate(labels):
        color = INK if len(labels) == 1 else _color(i)
        text = fig.text(x, 1 - 0.32 / height, label, color=color, fontsize=14, fontweight="bold", va="center")
        box = text.get_window_extent(fig.canvas.get_renderer()).transformed(fig.transFigure.inverted())
        x = box.x1 + 0.3 / width


def _draw_panel(axis: Axes, panel: Panel, runs: Sequence[Rows], last: bool) -> None:
    ends, alone = [], len(runs) == 1
    for i, rows in enumerate(runs):
        for j, (metric, name) in enumerate(panel.lines):
            x, y = _series(rows, metric)
            if panel.log:
                x, y = x[y > 0], y[y > 0]
            if not len(x):
                continue
            smooth = y if panel.markers else running_mean(y, len(y) // SMOOTHING)
            if panel.markers:
                style = {
                    "marker": "o",
                    "markersize": 4.5,
                    "markeredgecolor": "white",
                    "linewidth": 1.8,
                    "clip_on": False,
                }
            elif j == 0:
                style = {"linewidth": 1.8, "solid_capstyle": "round"}
                if alone and len(y) >= SMOOTHING:
                    axis.plot(x, y, linewidth=0.7, alpha=0.3, color=_color(i))
            else:
                style = {"linewidth": 1.1, "linestyle": (0, (4, 2)), "alpha": 0.8}
            axis.plot(x, smooth, color=_color(i), **style)
            if alone or j == 0:  # of several runs' dashed lines the values would be too many
                text = f"{panel.show(smooth[-1])}\n{name}" if alone and name else panel.show(smooth[-1])
                ends.append((smooth[-1], text, _color(i), j == 0))
        if panel.band:
            _, low = _series(rows, panel.band[0])
            x, high = _series(rows, panel.band[1])
            if len(low) == len(high) > 0:
                axis.fill_between(x, low, high, color=_color(i), alpha=0.14, linewidth=0)
    _dress(axis, panel, alone, last)
    _label_ends(axis, ends)


def _dress(axis: Axes, panel: Panel, alone: bool, last: bool) -> None:
    note = panel.note
    if not alone and len(panel.lines) == 2:
        note += f"; solid {panel.lines[0][1]}, dashed {panel.lines[1][1]}"
    above = {"transform": axis.transAxes, "va": "bottom"}
    axis.text(0, 1.155, panel.title, fontsize=10.5, color=INK, fontweight="bold", **above)
    axis.text(0, 1.045, note, fontsize=8.2, color=QUIET, **above)
    if panel.log:
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 30 else (1,), numticks=5))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(_power))
    else:
        axis.yaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 2.5, 5, 10)))
        if panel.show is _percent:
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
        if axis.dataLim.y0 >= 0:
            axis.set_ylim(bottom=max(0.0, axis.get_ylim()[0]))
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=(1, 2, 5, 10)))
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(AXIS)
    axis.grid(axis="y", color=RULE, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(which="both", length=0, labelsize=8, colors=QUIET)
    if last:
        axis.set_xlabel("rollout", fontsize=8.5, color=QUIET)


def _label_ends(axis: Axes, ends: Sequence[tuple[float, str, str, bool]]) -> None:
    """Each line's last value beside its end, moved apart where they would touch."""
    to_axes = axis.transData + axis.transAxes.inverted()
    heights = [float(to_axes.transform((axis.get_xlim()[1], value))[1]) for value, *_ in ends]
    rows = max((text.count("\n") + 1 for _, text, *_ in ends), default=1)
    for height, (_, text, color, solid) in zip(spread(heights, 0.095 * rows), ends, strict=True):
        weight = "bold" if solid else "normal"
        style = {"color": color, "fontsize": 8.2, "fontweight": weight, "va": "center", "linespacing": 1.05}
        axis.text(1.015, height, text, transform=axis.transAxes, **style)


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Positions in [0, 1] moved as little as it takes to lie at least `gap` apart, their order kept.

    The least squares solution: those that touch are centred on their mean (pool adjacent violators).
    """
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    # Without the gaps the task is to make a sequence rise.
    pools: list[list[float]] = []
    for rank, i in enumerate(order):
        pools.append([positions[i] - rank * gap])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    flat = np.clip([np.mean(pool) for pool in pools for _ in pool], 0, max(0.0, 1 - (len(positions) - 1) * gap))
    result = [0.0] * len(positions)
    for rank, i in enumerate(order):
        result[i] = float(flat[rank]) + rank * gap
    return result


def running_mean(y: np.ndarray, reach: int) -> np.ndarray:
    """Mean over each value and the `reach` values on either side of it, as far as there are any."""
    sums = np.concatenate([[0.0], np.cumsum(y, dtype=np.float64)])
    i = np.arange(len(y))
    first, end = np.maximum(i - reach, 0), np.minimum(i + reach + 1, len(y))
    return (sums[end] - sums[first]) / (end - first)


def _series(rows: Rows, metric: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(row["rollout"], row[metric]) for row in rows if row.get(metric) is not None]
    return np.array([x for x, _ in points]), np.array([y for _, y in points], np.float64)


def _power(value: float, _: Any) -> str:
    if 1e-3 <= value < 1e4:
        return f"{value:g}"
    exponent = math.floor(math.log10(value) + 1e-9)
    factor = round(value / 10**exponent)
    return f"$10^{{{exponent}}}$" if factor == 1 else f"${factor}\\times10^{{{exponent}}}$"


def _color(run: int) -> str:
    return COLORS[run % len(COLORS)]


def main(argv: Sequence[str]) -> None:
    run_dirs = argv[1:]
    out = _OUT.value or (pathlib.Path(run_dirs[0]) / "plots" / "training.png" if len(run_dirs) == 1 else None)
    try:
        if run_dirs and out is None:
            raise ValueError("several runs need --out, the picture to write")
        print(draw(run_dirs, out or "", _LABELS.value or None))
    except (ValueError, OSError) as error:
        raise app.UsageError(str(error)) from None


if __name__ == "__main__":
    _OUT = flags.DEFINE_string("out", "", "The picture; of one run, its plots/training.png by default.")
    _LABELS = flags.DEFINE_list("labels", [], "Names of the runs, in their order.")
    app.run(main)
