"""How experiment scripts start: absl's, but what the user mistyped is one line, not a traceback."""

import contextlib
import errno
import pathlib
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging

from jaxrl_llm.config import files, suggest
from jaxrl_llm.parallel import distributed
from jaxrl_llm.records.checkpoints import SaveError

EXPECTED = (ValueError, SaveError)  # what the user must mend


def run(main: Callable[[], None]) -> None:
    """Parses the flags and runs `main`; an unknown config field or a refused value ends the program with "error: ...".

    Args:
      main: the script; takes nothing, reads its flags, raises ValueError or SaveError for what the user must mend. A
        full disk is told in one line wherever it is noticed.
    """

    def parse(arguments: Sequence[str]) -> Sequence[str]:
        try:
            return app.parse_flags_with_usage(arguments)
        except (AttributeError, KeyError, TypeError) as error:  # what a locked ConfigDict raises
            while error.args and isinstance(error.args[0], Exception):
                error = error.args[0]
            message = error.args[0] if error.args else error
            text = _unknown(arguments) or f"unknown or unfit config field: {message}"
            sys.exit(f"error: {text}".replace("\n", ". "))

    def guarded(arguments: Sequence[str]) -> None:
        if len(arguments) > 1:
            raise app.UsageError(f"unexpected arguments: {arguments[1:]}")
        logging.set_verbosity(logging.WARNING)  # orbax tells every step of every save
        try:
            main()
        except EXPECTED as error:
            sys.exit(f"error: {error}")
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            sys.exit(f"error: {error}")

    app.run(guarded, flags_parser=parse)


def _unknown(arguments: Sequence[str]) -> str | None:
    """One line about the first argument that sets a field which the configuration does not have, or None."""
    given = dict(argument.lstrip("-").partition("=")[::2] for argument in arguments if argument.startswith("-"))
    # The flag has no value yet: the file is read once more, for its fields.
    file, _, argument = given.get("config", "").partition(":")
    if not file:
        return None
    config = files.load(pathlib.Path(file)).get_config(*([argument] if argument else []))
    known = set(suggest.paths(config))
    wrong = [name for name in given if name.startswith("config.") and name not in known]
    return suggest.unknown_field(wrong[0], config) if wrong else None


def process_flags() -> Callable[[], contextlib.AbstractContextManager]:
    """Defines the flags of a script that may run in several processes; returns the session that they ask for."""
    coordinator = flags.DEFINE_string("coordinator", None, "Of a run in several processes: host:port of process 0.")
    count = flags.DEFINE_integer("num_processes", None, "Their number.", lower_bound=1)
    index = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.", lower_bound=0)
    detect = flags.DEFINE_bool(
        "distributed", False, "Ask the cluster (TPU pod, Slurm, Open MPI) for what is not given."
    )
    return lambda: distributed.session(coordinator.value, count.value, index.value, detect.value, EXPECTED)
