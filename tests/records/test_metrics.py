"""Metrics files: strict JSON, whole rows, no row twice, and TensorBoard's events beside them."""

import json
import pathlib
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboardX.proto import event_pb2

from jaxrl_llm.objectives import Metric
from jaxrl_llm.records.metrics import MetricsWriter, read_rows, reduce_updates


def metric(numerator, denominator=1.0):
    return Metric(jnp.float32(numerator), jnp.float32(denominator))


def strict(text: str):
    """JSON as its standard has it: no NaN, no Infinity."""

    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def events(folder: pathlib.Path):
    """Scalars (tag, step, value) of the one event file, read as its records are laid out: length, crc, event, crc."""
    (path,) = folder.iterdir()
    data, scalars = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        scalars += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
    return scalars


@pytest.fixture
def paths(tmp_path):
    return tmp_path / "metrics.jsonl", tmp_path / "tensorboard"


def test_reduce_divides_once():
    # Two updates of 10 and 2 tokens with mean losses 1 and 3: 16 / 12, where a mean of means would say 2.
    updates = [{"loss": metric(10.0, 10.0)}, {"loss": metric(6.0, 2.0)}]
    assert reduce_updates(updates) == {"loss": pytest.approx(4 / 3)}


def test_reduce_takes_the_largest_of_maxima():
    updates = [{"ratio/max_abs_log": metric(v), "maximum": metric(v)} for v in (0.25, 2.0, 1.0)]
    assert reduce_updates(updates) == {"ratio/max_abs_log": 2.0, "maximum": pytest.approx(3.25 / 3)}
    updates[1]["ratio/max_abs_log"] = metric(float("nan"))
    assert np.isnan(reduce_updates(updates)["ratio/max_abs_log"])


def test_reduce_leaves_out_what_nothing_counted_towards():
    updates = [{"a": metric(0.0, 0.0), "b": metric(0.0, 0.0), "max_c": metric(0.0, 0.0)}, {**dict.fromkeys("ab")}]
    updates[1] = {"a": metric(0.0, 0.0), "b": metric(1.0, 4.0), "max_c": metric(0.0, 0.0)}
    assert reduce_updates(updates) == {"b": 0.25}
    assert reduce_updates([]) == {}


def test_rows_and_events(paths):
    with MetricsWriter(*paths) as writer:
        writer.write(0, {"eval/accuracy": 0.5})
        writer.write(1, {"loss": float("nan"), "reward": 1.0, "big": float("-inf"), "n": 3})
        # On disk before the writer is closed.
        assert strict(paths[0].read_text()) == [
            {"rollout": 0, "eval/accuracy": 0.5},
            {"rollout": 1, "loss": None, "reward": 1.0, "big": None, "n": 3},
        ]
    assert events(paths[1]) == [("eval/accuracy", 0, 0.5), ("reward", 1, 1.0), ("n", 1, 3.0)]
    assert read_rows(paths[0]) == strict(paths[0].read_text())


@pytest.mark.parametrize(
    "value",
    [np.float32(0.5), np.float64(0.5), jnp.float32(0.5), jnp.bfloat16(0.5), np.array([0.5]), jnp.full((1, 1), 0.5)],
)
def test_every_scalar_is_a_number(paths, value):
    with MetricsWriter(*paths) as writer:
        writer.write(1, {"x": value})
    assert strict(paths[0].read_text()) == [{"rollout": 1, "x": 0.5}]


@pytest.mark.parametrize("value", ["0.5", None, np.zeros(2), [1.0, 2.0]])
def test_what_is_no_number_is_refused_before_anything_is_written(paths, value):
    with MetricsWriter(*paths) as writer:
        with pytest.raises(ValueError, match=r"metric 'x' is .*; it must be one number"):
            writer.write(1, {"x": value})
        writer.write(1, {"x": 1})
    assert strict(paths[0].read_text()) == [{"rollout": 1, "x": 1}]


@pytest.mark.parametrize("again", [0, 2])
def test_no_rollout_twice(paths, again):
    with MetricsWriter(*paths) as writer:
        writer.write(2, {"x": 1.0})
        with pytest.raises(ValueError, match=f"row for rollout 2 already; {again} does not follow"):
            writer.write(again, {"x": 1.0})
    with MetricsWriter(*paths, resume_at=2) as writer, pytest.raises(ValueError, match="rollout 2 already"):
        writer.write(2, {"x": 1.0})


@pytest.mark.parametrize(
    "tail", [b"", b'{"rollout": 6', b'{"rollout": 6, "x": 0.', b"\0\0\0\0", b'{"rollout": 6, "x": 6.0}']
)
def test_resume_drops_what_is_run_again(paths, tail):
    with MetricsWriter(*paths) as writer:
        for rollout in range(6):
            writer.write(rollout, {"x": float(rollout)})
    for path in paths[1].iterdir():
        path.write_bytes(path.read_bytes()[:70])  # a killed run has not written its last events
    with paths[0].open("ab") as file:
        file.write(tail)
    with MetricsWriter(*paths, resume_at=3) as writer:
        writer.write(4, {"x": 40.0})
    assert strict(paths[0].read_text()) == [{"rollout": i, "x": float(i)} for i in range(4)] + [
        {"rollout": 4, "x": 40.0}
    ]
    assert events(paths[1]) == [("x", i, float(i)) for i in range(4)] + [("x", 4, 40.0)]


def test_without_resuming_the_file_starts_empty(paths):
    paths[0].write_text('{"rollout": 1}\n')
    with MetricsWriter(*paths):
        pass
    assert paths[0].read_text() == ""


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 200), resume_at=st.integers(0, 5))
def test_a_file_cut_anywhere_reads_as_its_whole_rows(tmp_path_factory, cut, resume_at):
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    rows = [{"rollout": i, "x": i / 7, "y": None} for i in range(6)]
    lines = [json.dumps(row) + "\n" for row in rows]
    text = "".join(lines)[:cut]
    path.write_text(text)
    # The last row is whole with or without its line's end.
    whole = [row for i, row in enumerate(rows) if len("".join(lines[: i + 1])) - 1 <= cut]
    assert read_rows(path) == whole
    with MetricsWriter(path, path.parent / "tensorboard", resume_at=resume_at):
        pass
    assert strict(path.read_text()) == [row for row in whole if row["rollout"] <= resume_at]


@pytest.mark.parametrize("line", ["{", "[1]", '{"x": 1}', '{"rollout": "1"}', '{"rollout": true}', "\0"])
def test_a_broken_row_in_the_middle_is_named(paths, line):
    paths[0].write_text(f'{{"rollout": 1}}\n{line}\n{{"rollout": 3}}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: not a row of metrics"):
        read_rows(paths[0])
    with pytest.raises(ValueError, match="line 2"):
        MetricsWriter(*paths, resume_at=1)
    assert paths[0].read_text().count("\n") == 3


def test_a_full_disk_is_named_once(paths, monkeypatch):
    message = r"No space left on device: a row could not be written: '.*metrics.jsonl'"
    with (
        pathlib.Path("/dev/full").open("w") as full,
        pytest.raises(OSError, match=message),
        MetricsWriter(*paths) as writer,
    ):
        monkeypatch.setattr(writer, "_file", full)
        writer.write(1, {"loss": 1.0})


def test_no_file_no_rows(tmp_path):
    assert read_rows(tmp_path / "metrics.jsonl") == []
