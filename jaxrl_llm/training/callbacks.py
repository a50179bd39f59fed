"""Functions of one's own that see every row of a run's metrics and may end it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm import processes

Callback = Callable[[Mapping[str, Any]], Any]


def asked_to_stop(callbacks: Sequence[Callback], rollout: int, row: Mapping[str, Any]) -> bool:
    """Shows the row to every callback; True where one of them, in any process of the run, answered True.

    Any other answer (None, a number) lets the run go on, so that `rows.append` is a callback.
    """
    if not callbacks:
        return False
    answers = [callback({"rollout": rollout, **row}) for callback in callbacks]
    return bool(processes.gather(np.bool_(any(answer is True for answer in answers))).any())
