"""What the user mistyped ends in one line that names it."""

import pathlib
import sys

import pytest
from absl import app, flags
from ml_collections import config_flags

from jaxrl_llm.api import command_line

CONFIG = """
from ml_collections import ConfigDict

def get_config():
    return ConfigDict({"objective": {"name": "grpo"}, "steps": 3})
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    """`run(main, *arguments)` with a `--config` flag of its own: absl's registry and sys.argv are global."""

    path = tmp_path / "config.py"
    path.write_text(CONFIG)

    def run(main, *arguments):
        argv = ["script", f"--config={path}", *arguments]
        monkeypatch.setattr(sys, "argv", argv)  # where ml_collections looks for the fields to override
        values = flags.FlagValues()
        config_flags.DEFINE_config_file("config", lock_config=True, flag_values=values)
        monkeypatch.setattr(app, "parse_flags_with_usage", values)
        monkeypatch.setattr(app, "run", lambda main, flags_parser: main(flags_parser(argv)))
        command_line.run(lambda: main(values["config"].value))

    return run


def test_a_known_field_reaches_the_script(run):
    seen = []
    run(lambda c: seen.append(c.objective.name), "--config.objective.name=drpo")
    assert seen == ["drpo"]


@pytest.mark.parametrize(
    ("argument", "meant"),
    [("--config.objective.nam=drpo", "config.objective.name"), ("--config.stepz=3", "config.steps")],
)
def test_a_misspelt_field_is_named_and_the_one_that_was_meant(run, argument, meant):
    with pytest.raises(SystemExit) as stop:
        run(lambda c: pytest.fail("must not start"), argument)
    field = argument.lstrip("-").partition("=")[0]
    assert stop.value.code.startswith(f"error: unknown field {field}; did you mean {meant}?")
    assert "\n" not in stop.value.code


def test_a_refused_value_is_one_line(run):
    def main(c):
        raise ValueError("config.steps is 3; it must be even")

    with pytest.raises(SystemExit, match="error: config.steps is 3; it must be even"):
        run(main)


def test_a_full_disk_is_one_line_and_other_accidents_keep_their_traceback(run):
    def main(c):
        with open("/dev/full", "w") as file:
            file.write("x")

    with pytest.raises(SystemExit, match="error: .*No space left on device"):
        run(main)
    with pytest.raises(FileNotFoundError):
        run(lambda c: pathlib.Path("/nowhere/to/be/found").read_text())


def test_a_bug_keeps_its_traceback(run):
    with pytest.raises(ZeroDivisionError):
        run(lambda c: 1 / 0)
