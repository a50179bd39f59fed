"""Pictures of runs: what is drawn is what the rows say."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.records import plots


def write_run(path, rows):
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(values, **more):
    return [{"rollout": i, "reward/mean": v, **more} for i, v in enumerate(values)]


EVALUATED = [
    {"rollout": i, "eval/held_out/accuracy": 0.1 * i, "eval/held_out/low": 0.05 * i, "eval/held_out/high": 0.2 * i}
    for i in range(1, 4)
]


def titles(figure):
    return [axis.texts[0].get_text() for axis in figure.axes]


def ends(axis):
    """What is written beside the lines' ends, below title and note."""
    return [text.get_text() for text in axis.texts[2:]]


def pixels(path):
    """Width and height from the PNG's header."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_panels_without_numbers_are_left_out():
    figure = plots.figure([EVALUATED, rows_of([1.0, 2.0], entropy=0.5)], ["a", "b"])
    assert titles(figure) == ["Accuracy, held out", "Reward", "Entropy"]


def test_lines_band_and_end_are_the_rows():
    (axis,) = plots.figure([EVALUATED], ["a"]).axes
    (line,) = axis.lines
    np.testing.assert_array_equal(line.get_xydata(), [[1, 0.1], [2, 0.2], [3, 0.1 * 3]])
    (band,) = axis.collections
    corners = {(x, round(y, 6)) for x, y in band.get_paths()[0].vertices}
    assert {(1, 0.05), (2, 0.1), (3, 0.15), (1, 0.2), (2, 0.4), (3, 0.6)} == corners
    assert ends(axis) == ["30.0 %"]


def test_null_rows_are_gaps():
    (axis,) = plots.figure([rows_of([1.0, None, 3.0])], ["a"]).axes
    np.testing.assert_array_equal(axis.lines[0].get_xydata(), [[0, 1.0], [2, 3.0]])


def test_zeros_do_not_reach_a_logarithmic_axis():
    rows = [{"rollout": i, "optimizer/grad_norm": v, "ratio/abs_log": 0.0} for i, v in enumerate([0.0, 0.5, 2.0])]
    figure = plots.figure([rows], ["a"])
    assert titles(figure) == ["Gradient norm"]
    assert figure.axes[0].get_yscale() == "log"
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_xdata(), [1, 2])


def test_two_lines_of_one_run_are_named_and_of_several_runs_explained():
    rows = [{"rollout": i, "response/length_mean": 5.0, "response/length_max": 1200.0} for i in range(3)]
    (axis,) = plots.figure([rows], ["a"]).axes
    assert ends(axis) == ["5\nmean", "1,200\nlongest"]
    (axis,) = plots.figure([rows, rows], ["a", "b"]).axes
    assert axis.texts[1].get_text() == "tokens; solid mean, dashed longest"
    assert ends(axis) == ["5", "5"]


def test_runs_are_told_apart_by_colour_as_their_names_are():
    figure = plots.figure([rows_of([1.0, 2.0]), rows_of([2.0, 3.0])], ["first", "second"])
    names = {text.get_text(): text.get_color() for text in figure.texts}
    (axis,) = figure.axes
    assert names == {"first": axis.lines[0].get_color(), "second": axis.lines[1].get_color()}
    assert axis.lines[0].get_color() != axis.lines[1].get_color()


def test_names_do_not_overlap():
    figure = plots.figure([rows_of([1.0, 2.0])] * 2, ["a rather long name of a run", "another"])
    first, second = (text.get_window_extent() for text in figure.texts)
    assert first.x1 < second.x0


def test_all_panels_span_the_same_rollouts():
    figure = plots.figure([EVALUATED, rows_of([1.0] * 9), rows_of([1.0], entropy=1.0)], ["a", "b", "c"])
    assert [axis.get_xlim() for axis in figure.axes] == [(0, 8)] * 3


def test_a_full_page_keeps_texts_apart():
    """No text of one panel reaches into another panel or over another text."""
    metrics = {name: 0.37 for panel in plots.PANELS for name, _ in panel.lines}
    rows = [{"rollout": i, **metrics, "time/tokens_per_s": 123456.0} for i in range(50)] + EVALUATED
    figure = plots.figure([rows], ["run"])
    assert len(figure.axes) == 1 + len(plots.PANELS)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for axis in figure.axes for text in axis.texts]
    overlapping = [(i, j) for i in range(len(boxes)) for j in range(i) if boxes[i].overlaps(boxes[j])]
    assert not overlapping
    assert all(box.x1 < figure.bbox.x1 and box.y1 < figure.bbox.y1 for box in boxes)


def test_draw_writes_a_png_where_asked(tmp_path):
    run = write_run(tmp_path / "run", rows_of([0.1, 0.2]))
    out = plots.draw([run], tmp_path / "new" / "picture.png")
    narrow = pixels(out)
    rows = rows_of([0.1, 0.2], entropy=1.0)
    wide = pixels(plots.draw([write_run(tmp_path / "other", rows)], tmp_path / "wide.png"))
    assert wide[0] == 2 * narrow[0] and wide[1] == narrow[1]


def test_a_run_with_one_row(tmp_path):
    pixels(plots.draw([write_run(tmp_path / "run", EVALUATED[:1])], tmp_path / "one.png"))


def test_refusals_name_what_is_wrong(tmp_path):
    run = write_run(tmp_path / "run", rows_of([0.1]))
    with pytest.raises(ValueError, match=r"missing has no metrics to plot"):
        plots.draw([run, tmp_path / "missing"], tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"empty has no metrics to plot"):
        plots.draw([write_run(tmp_path / "empty", [])], tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"2 labels for 1 run directories"):
        plots.draw([run], tmp_path / "x.png", labels=["a", "b"])
    with pytest.raises(ValueError, match=r"no run directory"):
        plots.draw([], tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=40), st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_running_mean(values, reach):
    expected = [np.mean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]
    np.testing.assert_allclose(plots.running_mean(np.array(values), reach), expected, atol=1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_spread_keeps_order_distance_and_bounds(positions):
    gap = 0.1
    result = plots.spread(positions, gap)
    order = np.argsort(positions, kind="stable")
    placed = np.array(result)[order]
    assert (np.diff(placed) >= gap - 1e-9).all()
    assert placed[0] >= -1e-9 and placed[-1] <= 1 + 1e-9
    if (np.diff(np.array(positions)[order]) >= gap).all():
        np.testing.assert_allclose(result, positions, atol=1e-12)


def test_spread_by_hand():
    # Two that coincide part evenly; the third is far enough.
    np.testing.assert_allclose(plots.spread([0.5, 0.9, 0.5], 0.1), [0.45, 0.9, 0.55])
    # At the edge there is one way to go only.
    np.testing.assert_allclose(plots.spread([0.0, 0.02], 0.1), [0.0, 0.1])


def test_command_line(tmp_path):
    run = write_run(tmp_path / "run", rows_of([0.1, 0.2]))
    command = [sys.executable, "-m", "jaxrl_llm.records.plots"]
    done = subprocess.run([*command, str(run)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == str(run / "plots" / "training.png"), done.stderr
    pixels(run / "plots" / "training.png")
    refused = subprocess.run([*command, str(run), str(run)], capture_output=True, text=True, timeout=120)
    assert refused.returncode != 0 and "several runs need --out" in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stdout + refused.stderr
