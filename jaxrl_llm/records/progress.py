"""What a person sees while a run works: a bar with pace, time left and the numbers that matter, and a summary.

On a terminal the bar stands still at the bottom; elsewhere (a log file) a line is written every few seconds. Texts are
shown as they are: brackets in a path or an interval are no markup.
"""

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

LOG_SECONDS = 10.0  # between lines where there is no terminal to draw a bar on
WINDOW = 20  # updates over which the pace is taken: recent, so that a compilation at the start is soon forgotten


class Pace:
    """How fast the work goes, from the times of the last updates."""

    def __init__(self, done: int, now: float):
        """
        Args:
          done: units that were finished before (a resumed run).
          now: seconds on any clock.
        """
        self._updates = collections.deque([(now, done)], maxlen=WINDOW + 1)

    def update(self, done: int, now: float) -> None:
        """`done` units are finished at `now`."""
        self._updates.append((now, done))
        if len(self._updates) == 3:
            self._updates.popleft()  # from the second update on, the first is left out: it compiled

    @property
    def rate(self) -> float | None:
        """Units per second, or None before anything can be said."""
        (start, before), (end, after) = self._updates[0], self._updates[-1]
        return (after - before) / (end - start) if end > start and after > before else None


class Bar:
    """A bar on a terminal, a line every few seconds elsewhere. Made by `bar`, which also takes it down."""

    def __init__(
        self, console: Console, title: str, total: int, done: int = 0, clock: Callable[[], float] = time.monotonic
    ):
        """
        Args:
          console: where to draw.
          title: what is under way, in a word or two.
          total: units of work.
          done: how many of them are finished already.
          clock: seconds.
        """
        self._console, self._title, self._total, self._done, self._clock = console, title, total, done, clock
        self._start = self._logged = self._updated = clock()
        self._first = True
        self._pace = Pace(done, self._start)
        self._progress = _TwoLines(console, title, total, done, self._times) if console.is_terminal else None
        if self._progress is not None:
            self._progress.start()

    def update(self, done: int, live: Mapping[str, float | None]) -> None:
        """`done` of the total is finished; `live` are the numbers shown beside the bar."""
        now = self._clock()
        self._done, self._updated = done, now
        self._pace.update(done, now)
        numbers = [f"{name} {number(value)}" for name, value in live.items()]
        if self._progress is not None:
            self._progress.show(done, "   ".join(numbers))
        elif self._first or done == self._total or now - self._logged >= LOG_SECONDS:
            self._first, self._logged = False, now
            _print(self._console, Text(" | ".join([f"{self._title} {done}/{self._total}", self._times(), *numbers])))

    def stop(self) -> None:
        """Leaves the bar as it stands."""
        if self._progress is not None:
            self._progress.stop()

    def _times(self) -> str:
        now, rate = self._clock(), self._pace.rate
        elapsed = f"{clock_time(now - self._start)} elapsed"
        if rate is None:
            return elapsed
        left = max(0.0, (self._total - self._done) / rate - (now - self._updated))
        return f"{pace(rate)}  {elapsed}  {clock_time(left)} left"


class SamplingPace:
    """Shows a sampler's progress: what it reports after every chunk, as tokens per second."""

    def __init__(self, bar: Bar, clock: Callable[[], float] = time.monotonic):
        """
        Args:
          bar: of responses.
          clock: seconds.
        """
        self._bar, self._clock, self._start, self._usage = bar, clock, clock(), None

    def __call__(self, finished: int, usage: Any) -> None:
        """For `Sampler(..., report=)`."""
        self._usage = usage
        self._bar.update(finished, {"tok/s": self._rate()})

    def summary(self) -> dict[str, str]:
        """What the sampling took, for `summary`."""
        used = self._usage
        if used is None:
            return {"tokens": "0"}
        return {
            "tokens": f"{used.tokens} ({number(self._rate())} per second, compilation included)",
            "row steps": f"{used.row_steps} in {used.chunks} chunks; {used.tokens / used.row_steps:.0%} gave a token",
            "decoding programs": f"{len(used.programs)} compiled",
        }

    def _rate(self) -> float:
        return self._usage.tokens / max(self._clock() - self._start, 1e-9)


@contextlib.contextmanager
def bar(console: Console, title: str, total: int, done: int = 0) -> Iterator[Bar]:
    """A `Bar` that is stopped whatever happens."""
    shown = Bar(console, title, total, done)
    try:
        yield shown
    finally:
        shown.stop()


def summary(console: Console, title: str, rows: Mapping[str, str]) -> None:
    """What came out, and where it lies: a closing table whose paths are never broken over two lines."""
    width = max(map(len, rows), default=0)
    _print(console, Text(f"\n{title}", style="bold"))
    for name, value in rows.items():
        _print(console, Text.assemble(("  " + name.ljust(width + 3), "dim"), value))


def number(value: float | None) -> str:
    """Three digits, thousands as k and M, and a dash where there is no number."""
    if value is None or not math.isfinite(value):
        return "–"
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}" if abs(value) < 999 * size else f"{value / size:.0f}{unit}"
    return f"{value:.0f}" if float(value).is_integer() and abs(value) >= 10 else f"{value:.3g}"


def pace(rate: float) -> str:
    """Units per second, or seconds for each where they are slow."""
    return f"{number(rate)}/s" if rate >= 1 else f"{number(1 / rate)} s each"


def clock_time(seconds: float) -> str:
    """m:ss, or h:mm:ss from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Live(ProgressColumn):
    """A text that is asked for anew at every redrawing, so that the clock goes on between updates."""

    def __init__(self, text: Callable[[], str]):
        super().__init__()
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(self._text(), style="dim", no_wrap=True)


class _TwoLines(Progress):
    """The bar with its times, and below it the live numbers."""

    def __init__(self, console: Console, title: str, total: int, done: int, times: Callable[[], str]):
        self._indent, self._numbers = len(title) + 1, ""  # before super, which draws once
        room = console.width - len(title) - 2 * len(str(total)) - 48  # 48: what the times may take, and the gaps
        super().__init__(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=max(6, min(40, room)), complete_style="cyan", finished_style="green"),
            MofNCompleteColumn(),
            _Live(times),
            console=console,
        )
        self._task = self.add_task(title, total=total, completed=done)

    def show(self, done: int, numbers: str) -> None:
        self._numbers = numbers
        self.update(self._task, completed=done, refresh=True)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self._numbers:
            yield Text(" " * self._indent + self._numbers, style="cyan", no_wrap=True, overflow="ellipsis")


def _print(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True, highlight=False)
