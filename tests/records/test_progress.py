"""What a person sees: the right numbers, on a terminal of any width and in a log."""

import io
import re

import pytest
from rich.console import Console

from jaxrl_llm.records import progress


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def log_console():
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def terminal(width):
    return Console(file=io.StringIO(), force_terminal=True, width=width, _environ={})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.41234, "0.412"),
        (0.0, "0"),
        (3.0, "3"),
        (12.0, "12"),
        (123.0, "123"),
        (12.34, "12.3"),
        (1234.5, "1.23k"),
        (999_600.0, "1000k"),
        (2_500_000.0, "2.5M"),
        (-1234.0, "-1.23k"),
        (1e-5, "1e-05"),
        (float("nan"), "–"),
        (float("inf"), "–"),
        (None, "–"),
    ],
)
def test_numbers(value, text):
    assert progress.number(value) == text


@pytest.mark.parametrize(("rate", "text"), [(12.34, "12.3/s"), (1.0, "1/s"), (0.5, "2 s each"), (1 / 90, "90 s each")])
def test_pace_of_slow_work_is_told_in_seconds(rate, text):
    assert progress.pace(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (75, "1:15"), (3600, "1:00:00"), (36061, "10:01:01")]
)
def test_clock_time(seconds, text):
    assert progress.clock_time(seconds) == text


def test_pace_forgets_the_compilation_and_what_was_done_before():
    pace = progress.Pace(done=50, now=0.0)
    assert pace.rate is None
    pace.update(51, 100.0)  # compiles
    assert pace.rate == pytest.approx(1 / 100)
    pace.update(52, 102.0)
    assert pace.rate == pytest.approx(1 / 2)
    for i in range(1, 100):
        pace.update(52 + i, 102.0 + 2 * i)
    assert pace.rate == pytest.approx(1 / 2)
    # Slower from now on: after a window of updates that is all it knows.
    for i in range(1, progress.WINDOW + 1):
        pace.update(151 + i, 300.0 + 10 * i)
    assert pace.rate == pytest.approx(1 / 10)


def test_a_log_gets_a_line_now_and_then():
    console, clock = log_console(), Clock()
    bar = progress.Bar(console, "RL", 40, 0, clock)
    for done in range(1, 41):
        clock.now += 3.0
        bar.update(done, {"reward": done / 100, "accuracy": float("nan")})
    bar.stop()
    lines = console.file.getvalue().splitlines()
    # The first, the last, and every fourth between: 12 seconds are the first multiple of 3 past 10.
    assert [line.split(" | ")[0] for line in lines] == [f"RL {n}/40" for n in (1, *range(5, 38, 4), 40)]
    assert lines[0] == "RL 1/40 | 3 s each  0:03 elapsed  1:57 left | reward 0.01 | accuracy –"
    assert lines[-1] == "RL 40/40 | 3 s each  2:00 elapsed  0:00 left | reward 0.4 | accuracy –"


def test_a_log_line_is_not_broken():
    console = log_console()
    bar = progress.Bar(console, "RL", 2)
    bar.update(2, {f"a rather long name {i}": 0.123 for i in range(20)})
    assert len(console.file.getvalue().splitlines()) == 1


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n")


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_a_terminal_shows_two_lines_that_fit(width):
    console, clock = terminal(width), Clock()
    bar = progress.Bar(console, "RL", 1200, 100, clock)
    for done in range(101, 111):
        clock.now += 900.0
        bar.update(done, {"reward": 0.5, "accuracy": 0.25, "tok/s": 1234.0})
    bar.stop()
    lines = [line for line in plain(console.file.getvalue()).splitlines() if line.strip()]
    assert max(map(len, lines)) <= width
    assert "110/1200" in lines[-2] and lines[-1] == "   reward 0.5   accuracy 0.25   tok/s 1.23k"
    if width >= 80:
        assert lines[-2].rstrip().endswith("900 s each  2:30:00 elapsed  272:30:00 left")


def test_time_goes_on_between_updates():
    clock = Clock()
    bar = progress.Bar(log_console(), "RL", 10, 0, clock)
    for done in (1, 2):
        clock.now += 60.0
        bar.update(done, {})
    assert bar._times() == "60 s each  2:00 elapsed  8:00 left"
    clock.now += 45.0
    assert bar._times() == "60 s each  2:45 elapsed  7:15 left"
    clock.now += 4500.0
    assert bar._times().endswith("0:00 left")


def test_the_bar_is_taken_down_after_an_error():
    console = terminal(80)
    with pytest.raises(KeyError), progress.bar(console, "RL", 3):
        raise KeyError
    assert console.file.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_markup_is_text():
    for console in (log_console(), terminal(100)):
        with progress.bar(console, "[red]RL", 3) as bar:
            bar.update(3, {"[bold]x": 1.0})
        progress.summary(console, "[a] title", {"[b]": "[/c]"})
        text = plain(console.file.getvalue())
        assert all(piece in text for piece in ("[red]RL", "[bold]x 1", "[a] title", "[b]", "[/c]"))


def test_summary_keeps_paths_whole():
    console, path = log_console(), "/somewhere/" + "deep/" * 30 + "metrics.jsonl"
    progress.summary(
        console, "grpo, seed 0", {"accuracy": "81.2 % [78.0, 84.1]", "metrics": path, "a longer name": "x"}
    )
    assert console.file.getvalue().splitlines() == [
        "",
        "grpo, seed 0",
        "  accuracy        81.2 % [78.0, 84.1]",
        f"  metrics         {path}",
        "  a longer name   x",
    ]
