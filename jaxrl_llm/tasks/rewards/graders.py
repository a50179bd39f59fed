"""The judges that run in the pool's processes.

A grader is a function without arguments that imports what it needs, warms it up, and returns its judge. A judge takes a
request (any JSON object) and a callback, and returns the score. It calls back once it has read the truth: what goes
wrong before is not the answer's fault, and gives no grade instead of a bad one.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

Judge = Callable[[Mapping[str, Any], Callable[[], None]], float]


def math() -> Judge:
    """1 where the final answer of `completion` is equivalent to `truth`, else 0."""
    from jaxrl_llm.tasks.rewards import equivalence, extract, formula

    formula.same(r"\sqrt{12}", r"2\sqrt{3}")  # fills the tables of the parser and of SymPy

    def judge(request: Mapping[str, Any], understood: Callable[[], None]) -> float:
        equivalence.understand(request["truth"])
        understood()
        answer = extract.final_answer(request["completion"])
        try:
            return float(answer is not None and equivalence.equivalent(answer, request["truth"]))
        except (MemoryError, RecursionError):
            raise  # the worker tells these apart
        except Exception:  # the libraries raise what they like; the truth was understood, so the answer is wrong
            return 0.0

    return judge


def reasoning_gym() -> Judge:
    """The score that reasoning-gym's own judge of `dataset` gives to the answer of `completion` to `entry`."""
    from reasoning_gym import get_score_answer_fn

    from jaxrl_llm.tasks.rewards import extract

    def judge(request: Mapping[str, Any], understood: Callable[[], None]) -> float:
        score = get_score_answer_fn(request["dataset"])
        understood()
        return float(score(answer=extract.tagged_answer(request["completion"]), entry=request["entry"]))

    return judge


GRADERS: dict[str, Callable[[], Judge]] = {"math": math, "reasoning_gym": reasoning_gym}


def find(name: str) -> Callable[[], Judge]:
    """One of `GRADERS`, or what "package.module:function" names."""
    module, colon, function = name.partition(":")
    return getattr(importlib.import_module(module), function) if colon else GRADERS[name]
