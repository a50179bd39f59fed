"""What a person sees while a run works: one bar with rate, remaining time and the numbers that matter, and a summary."""

import contextlib
import time
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

LOG_SECONDS = 10.0  # between lines where there is no terminal to draw a bar on


class Bar:
    """A bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, console: Console, title: str, total: int, done: int = 0):
        self._console, self._title, self._total = console, title, total
        self._done, self._first, self._start, self._last = done, done, time.monotonic(), 0.0
        self._progress = None
        if console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=28),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[live]}", style="cyan"),
                console=console,
            )
            self._task = self._progress.add_task(title, total=total, completed=done, live="", rate="")
            self._progress.start()

    def update(self, done: int, live: Mapping[str, float]) -> None:
        """`done` of the total is finished; `live` are the numbers shown beside the bar."""
        self._done = done
        text = "  ".join(f"{name} {value:.3g}" for name, value in live.items())
        elapsed = time.monotonic() - self._start
        rate = (done - self._first) / elapsed if elapsed > 0 else 0.0
        if self._progress is not None:
            self._progress.update(self._task, completed=done, live=text, rate=f"{rate:.2f}/s")
        elif elapsed - self._last > LOG_SECONDS or done == self._total:
            self._last = elapsed
            left = (self._total - done) / rate if rate > 0 else float("nan")
            self._console.print(
                f"{self._title} {done}/{self._total}  {rate:.2f}/s  {elapsed:.0f} s, {left:.0f} s left  {text}"
            )

    def stop(self) -> None:
        """Leaves the bar as it stands."""
        if self._progress is not None:
            self._progress.stop()


@contextlib.contextmanager
def bar(console: Console, title: str, total: int, done: int = 0) -> Iterator[Bar]:
    """A `Bar` that is stopped whatever happens."""
    shown = Bar(console, title, total, done)
    try:
        yield shown
    finally:
        shown.stop()


def summary(console: Console, title: str, rows: Mapping[str, str]) -> None:
    """A closing table of what came out and where it lies."""
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
