"""The processes of a run: how they find each other, and how they end together.

Every process runs the same script on the devices of its host and sees the devices of all. `session` connects them before
the first device is touched. When one of them fails, the others would wait for it in their next collective: its message is
left with the coordinator, where each looks once a second, and all end with it.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax

# The coordinator's key-value store, which jax and orbax use themselves, has no public door.
from jax._src import distributed as internals

from jaxrl_llm import schema

FAILURE = "jaxrl_llm/failure"
LOOK_SECONDS = 1.0
END_SECONDS = 3600  # process 0 may have plots to draw when the others are done


@contextlib.contextmanager
def session(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    detect: bool = False,
    expected: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Connects this process with the others while it is entered; does nothing where no argument asks for it.

    Args:
      coordinator: host:port on which process 0 listens, the same in all processes.
      num_processes: how many there are.
      process_id: which one this is.
      detect: let jax ask the cluster (Cloud TPU, Slurm, Open MPI, Kubernetes) for all that is not given.
      expected: errors that are told in one line; others with their traceback.

    Raises:
      ValueError: some of the three are given and some are not, without `detect`; or the processes do not find each other.
    """
    _connect(coordinator, num_processes, process_id, detect)
    if jax.process_count() == 1:
        yield
        return
    client, ended = internals.global_state.client, threading.Event()
    threading.Thread(target=_watch, args=(client, ended), daemon=True).start()
    try:
        yield
    except BaseException as error:
        if isinstance(error, expected):
            text = f"error: process {jax.process_index()}: {error}"
        else:
            text = f"error: process {jax.process_index()}:\n{''.join(traceback.format_exception(error)).rstrip()}"
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.key_value_set(FAILURE, text)
        # The first message counts: a collective that another's end cut short is no reason.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            text = client.key_value_try_get(FAILURE)
        _end(text)
    client.wait_at_barrier(FAILURE, 1000 * END_SECONDS)
    ended.set()
    jax.distributed.shutdown()


def _connect(coordinator: str | None, num_processes: int | None, process_id: int | None, detect: bool) -> None:
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    if not detect and all(value is None for value in given.values()):
        return
    for name, value in given.items():
        schema.require(detect or value is not None, name, value, "given where one of " + ", ".join(given) + " is")
    # SIGTERM is for `StopSignals`, not for jax's own preemption notice.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id)
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"the processes of the run could not be connected: {reason}") from error


def _watch(client: Any, ended: threading.Event) -> None:
    """Ends this process when another has left its message. The main thread may wait in a collective that never comes."""
    while not ended.wait(LOOK_SECONDS):
        # Not there yet, or no longer reachable: then jax itself ends the process.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _end(client.key_value_try_get(FAILURE))


def _end(text: str) -> None:
    """Prints and ends at once: an orderly end would wait for the processes that cannot come any more."""
    print(text, file=sys.stderr, flush=True)
    time.sleep(3 * LOOK_SECONDS)  # until everybody has read it: the store ends with process 0, collectives with any
    os._exit(1)
