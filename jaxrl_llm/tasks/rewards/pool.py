"""Grades in processes that can be killed, so that no answer can hold up a run or take it down.

SymPy may compute for hours on a ten-character answer, in C code that no exception interrupts, and the alarms that
math-verify sets work in main threads only. Each worker here is a process of its own, started afresh (never forked: JAX
runs threads), with a deadline per answer; after a deadline, a crash or enough answers another takes its place.

Written here because process pools that can kill a worker build on `multiprocessing`, whose fresh processes import the
main script first, JAX included, and because a deadline missed over the truth must not count against the answer.

Use one pool for a whole run. It may be called from any thread, and by several at once.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from typing import Any

from jaxrl_llm import schema
from jaxrl_llm.tasks.rewards import graders
from jaxrl_llm.tasks.rewards import worker as workers

_PACKAGES = str(pathlib.Path(__file__).parents[3])  # where jaxrl_llm is found, installed or not
# -P: a json.py in the current directory is none of the worker's business.
_PYTHON = (sys.executable, "-P", "-c")


@dataclasses.dataclass(frozen=True)
class PoolConfig:
    """How graders run.

    Attributes:
      workers: processes; 0 for one per core, at most 8.
      deadline: seconds an answer may take; beyond, it scores 0.
      recycle: answers after which a worker is replaced, because SymPy's caches grow.
      memory: MiB that a worker may use beyond its libraries.
      startup: seconds a worker may take to import its libraries.
    """

    workers: int = 0
    deadline: float = 3.0
    recycle: int = 5000
    memory: int = 1024
    startup: float = 120.0

    def __post_init__(self):
        schema.require(self.workers >= 0, "pool.workers", self.workers, "0 (one per core) or more")
        for name in ("deadline", "recycle", "memory", "startup"):
            schema.require(getattr(self, name) > 0, f"pool.{name}", getattr(self, name), "positive")


class GraderPool:
    """Workers for one grader (see `graders.find`); they start when first needed and end with the pool.

    Attributes:
      counts: how many answers were "graded" (timeouts included), ran into the deadline or the memory limit
        ("timeouts"), or got no grade because the grader failed ("errors"); and how many workers were "started".
      last_error: what the grader said when it last failed.
    """

    def __init__(self, grader: str = "math", config: PoolConfig | None = None):
        if ":" not in grader:
            schema.choose(graders.GRADERS, grader, "grader")
        self.config = config or PoolConfig()
        self.grader = grader
        self.size = self.config.workers or min(8, os.cpu_count() or 1)
        self.counts: collections.Counter[str] = collections.Counter()
        self.last_error = ""
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._idle: queue.Queue[_Worker] = queue.Queue()
        self._finalizer = weakref.finalize(self, _stop, self._workers)

    def __enter__(self) -> "GraderPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers, also those at work."""
        self._finalizer()

    def grade(self, requests: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """A score for each request (see `graders`), in order; None where the grader itself failed.

        Raises:
          RuntimeError: a worker cannot be started (a library is missing, for example), or the pool is closed.
        """
        if not requests:
            return []
        self._start(min(self.size, len(requests)))
        # Started here and ended here, so that no thread outlives the call.
        with concurrent.futures.ThreadPoolExecutor(min(self.size, len(requests))) as threads:
            return list(threads.map(self._grade_one, requests))

    def _start(self, wanted: int) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("the grader pool is closed")
        with self._lock:
            for _ in range(wanted - len(self._workers)):
                worker = _Worker(self.grader, self.config)
                self._workers.append(worker)
                self._idle.put(worker)

    def _grade_one(self, request: Mapping[str, Any]) -> float | None:
        worker = self._idle.get()
        try:
            outcome, value = worker.ask(request)
            if outcome == "died":  # something outside may have killed it: that says nothing about the answer
                outcome, value = worker.ask(request)
        except RuntimeError as error:
            # Where nothing was ever graded, a library is missing; later, one lost grade is better than a lost run.
            if not self.counts["graded"] or not self._finalizer.alive:
                raise
            outcome, value = "error", str(error)
        finally:
            self._idle.put(worker)
        with self._lock:
            self.counts["started"] = sum(w.started for w in self._workers)
            if outcome in ("score", "timeout"):
                self.counts["graded"] += 1
                self.counts["timeouts"] += outcome == "timeout"
                return value
            self.counts["errors"] += 1
            self.last_error = value if outcome == "error" else "the grader's process died twice on one answer"
            return None


class _Worker:
    """A process, replaced whenever it has ended or served enough. One thread at a time uses it."""

    def __init__(self, grader: str, config: PoolConfig):
        self.grader, self.config = grader, config
        self.process: subprocess.Popen | None = None
        self.started = self.served = 0
        self.ready = self.closed = False
        self._launch()  # all workers import at the same time

    def ask(self, request: Mapping[str, Any]) -> tuple[str, Any]:
        """("score", s), ("timeout", 0.0), ("error", why) or ("died", None)."""
        if self.served >= self.config.recycle or self.process.poll() is not None:
            self._launch()
        if not self.ready:
            self._await_start()
        try:
            line = json.dumps(request) + "\n"
        except (TypeError, ValueError) as error:
            return "error", str(error)
        self.served += 1
        limit = time.monotonic() + self.config.deadline + workers.GRACE
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except OSError:
            self._launch()
            return "died", None
        understood = False
        while True:
            message = self._read(limit)
            if message == workers.UNDERSTOOD:
                understood = True
            elif message is None:
                late = time.monotonic() >= limit or self.process.wait(workers.GRACE) == -signal.SIGALRM
                self._launch()
                if not late:
                    return "died", None
                return ("timeout", 0.0) if understood else ("error", "the deadline passed while the truth was read")
            elif "error" in message:
                return "error", message["error"]
            else:
                return ("timeout" if message.get("heavy") else "score"), message["score"]

    def end(self) -> None:
        """Kills the process for good."""
        self.closed = True
        self._kill()

    def _launch(self) -> None:
        self._kill()
        if self.closed:
            raise RuntimeError("the grader pool is closed")
        code = f"from {workers.__name__} import main; main"
        arguments = (self.grader, self.config.deadline, self.config.memory)
        paths = filter(None, (_PACKAGES, os.environ.get("PYTHONPATH")))
        self.process = subprocess.Popen(
            [*_PYTHON, f"{code}{arguments!r}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            start_new_session=True,  # Ctrl-C is for the run, which may want to finish its rollout
        )
        self.buffer = b""
        self.ready, self.served = False, 0
        self.started += 1

    def _await_start(self) -> None:
        message = self._read(time.monotonic() + self.config.startup)
        if message == workers.READY:
            self.ready = True
            return
        self._kill()
        why = message["error"] if message else f"it ended, or took longer than {self.config.startup:g} s"
        raise RuntimeError(f"the {self.grader} grader's process did not start: {why}")

    def _read(self, until: float) -> dict[str, Any] | None:
        """The next message, or None once the time is up or the process has ended."""
        descriptor = self.process.stdout.fileno()
        while b"\n" not in self.buffer:
            readable = connection.wait([descriptor], max(0.0, until - time.monotonic()))
            if not readable or not (data := os.read(descriptor, 65536)):
                return None
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def _kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                with contextlib.suppress(OSError):  # a request that it did not take any more
                    stream.close()


def _stop(pool_workers: list[_Worker]) -> None:
    for worker in pool_workers:
        worker.end()
