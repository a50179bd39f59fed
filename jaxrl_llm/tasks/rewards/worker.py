"""The process that grades: reads one JSON request a line, answers each with lines of JSON. Started by `pool`.

The kernel ends it at the deadline (SIGALRM with its default action), whatever code it is in and even if its parent is
gone. Before the answer is looked at, a line says that the truth was understood: a deadline missed earlier is not the
answer's fault.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.tasks.rewards import graders

READY, UNDERSTOOD = {"ready": True}, {"understood": True}
_MEMORY = "/proc/self/statm"  # Linux
GRACE = 1.0  # seconds that the parent waits beyond the deadline before it kills the process itself


def main(grader: str, deadline: float, memory: int) -> None:
    """Serves requests until standard input ends.

    Args:
      grader: see `graders.find`.
      deadline: seconds a request may take.
      memory: MiB that the process may use above what its imports took; limited on Linux only.
    """
    # Libraries print what they like; the answers have a descriptor of their own.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message: Mapping[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")

    try:
        judge = graders.find(grader)()
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.path.exists(_MEMORY):
        limit = _virtual_memory() + memory * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    say(READY)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, deadline)
        message = _answer(judge, line, say)
        signal.setitimer(signal.ITIMER_REAL, 0)
        say(message)


def _answer(judge: graders.Judge, line: str, say: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    reached = []

    def understood() -> None:
        reached.append(True)
        say(UNDERSTOOD)

    try:
        return {"score": judge(json.loads(line), understood)}
    except (MemoryError, RecursionError) as error:
        # Once the truth has been understood it is the answer that is too big, not the grader that is broken.
        return {"score": 0.0, "heavy": True} if reached else {"error": repr(error)}
    except Exception as error:
        return {"error": repr(error)[:500]}


def _virtual_memory() -> int:
    with open(_MEMORY) as f:
        return int(f.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
