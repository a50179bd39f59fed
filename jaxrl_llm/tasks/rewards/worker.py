"""The process that grades: reads one JSON request a line, answers each with lines of JSON. Started by `pool`.

The kernel ends it at the deadline (SIGALRM with its default action), whatever code it is in and even if its parent is
gone. Before the answer is looked at, a line says that the truth was understood: a deadline missed earlier is not the
answer's fault.
"""

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

READY, UNDERSTOOD = {"ready": True}, {"understood": True}
_MEMORY = "/proc/self/statm"  # Linux
GRACE = 1.0  # seconds that the parent waits beyond the deadline before it kills the process itself


def math(request: Mapping[str, str], understood: Callable[[], None]) -> float:
    """1 where the final answer of `completion` is equivalent to `truth`, else 0."""
    from jaxrl_llm.tasks.rewards import equivalence, extract

    equivalence.understand(request["truth"])
    understood()
    answer = extract.final_answer(request["completion"])
    return float(answer is not None and equivalence.equivalent(answer, request["truth"]))


def reasoning_gym(request: Mapping[str, Any], understood: Callable[[], None]) -> float:
    """The score that reasoning-gym's own judge of a data set gives to the answer of `completion`."""
    from reasoning_gym import get_score_answer_fn

    from jaxrl_llm.tasks.rewards import extract

    judge = get_score_answer_fn(request["dataset"])
    understood()
    return float(judge(answer=extract.tagged_answer(request["completion"]), entry=request["entry"]))


def sleep(request: Mapping[str, Any], understood: Callable[[], None]) -> float:
    """Waits `seconds`, before or after it understands; for checks of the pool."""
    import time

    if request.get("crash"):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(request.get("before", 0))
    understood()
    time.sleep(request.get("after", 0))
    return 1.0


def _prepare_math() -> None:
    from jaxrl_llm.tasks.rewards import equivalence

    equivalence.equivalent(r"\sqrt{12}", r"2\sqrt{3}")  # imports SymPy and fills the parser's tables


# Grader -> (judge, what to import before the first deadline).
GRADERS: dict[str, tuple[Callable, Callable[[], object]]] = {
    "math": (math, _prepare_math),
    "reasoning_gym": (reasoning_gym, lambda: importlib.import_module("reasoning_gym")),
    "sleep": (sleep, lambda: None),
}


def main(grader: str, deadline: float, memory: int) -> None:
    """Serves requests until standard input ends.

    Args:
      grader: one of `GRADERS`.
      deadline: seconds a request may take.
      memory: MiB that the process may use above what its imports took; limited on Linux only.
    """
    # Libraries print what they like; the answers have a descriptor of their own.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message: Mapping[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")

    judge, prepare = GRADERS[grader]
    try:
        prepare()
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


def _answer(judge: Callable, line: str, say: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
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
