"""SIGTERM and SIGINT as a flag that the loop asks for, so that a run ends on a checkpoint and not in the middle of one.

A cluster sends SIGTERM some time before it takes the machine away; a person presses Ctrl-C. The first signal asks the
loop to stop where it may; a second Ctrl-C stops at once.

    with StopSignals() as stop:
        for rollout in ...:
            ...
            if stop.agreed():
                save, and break

Several processes must stop at the same place, although only one of them may have got the signal: they ask each other.
"""

import signal
import threading
from types import FrameType
from typing import Any

import numpy as np

from jaxrl_llm import processes

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Catches the signals while it is entered, and puts the former handlers back afterwards.

    Off the main thread, where Python allows no handlers, it catches nothing.
    """

    def __init__(self):
        self._received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._received is not None

    def agreed(self) -> bool:
        """Whether a signal had come to any process of the run when the last of them asked; all must ask."""
        number = int(processes.gather(np.int32(self._received or 0)).max())
        if number and not self.requested:
            self._received = signal.Signals(number)
        return number > 0

    @property
    def name(self) -> str | None:
        """Name of the first signal that came ("SIGTERM"), or None."""
        return None if self._received is None else self._received.name

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: Any) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            # None stands for a handler that was not set from Python, which cannot be put back either.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.requested:
            self._received = signal.Signals(number)
