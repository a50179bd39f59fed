"""What the policy is asked, and how its answers are judged. Tasks know neither models nor training."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm import schema
from jaxrl_llm.tasks import arithmetic, mathematics, preferences, procedural_preferences, puzzles, word_problems
from jaxrl_llm.tasks.base import Example, Task

# name -> function of the task's own fields.
TASKS: dict[str, Callable[[Mapping[str, Any]], Task]] = {
    "arithmetic": arithmetic.create,
    "mathematics": mathematics.create,
    "preferences": preferences.create,
    "puzzles": puzzles.create,
    "procedural_preferences": procedural_preferences.create,
    "word_problems": word_problems.create,
}

__all__ = ["TASKS", "Example", "Task", "create", "default_config"]


def create(config: Mapping[str, Any]) -> Task:
    """The task `config["name"]`, made from the block of that name; other tasks' blocks are ignored.

    Raises:
      ValueError: unknown task or field; names it and the choices.
    """
    known = {"name", *TASKS}
    for key in config:
        if key not in known:
            raise ValueError(f"unknown field config.task.{key}; choose from: {', '.join(sorted(known))}")
    name = config.get("name", "arithmetic")
    return schema.choose(TASKS, name, "task config.task.name")(config.get(name, {}))


def default_config() -> dict[str, Any]:
    """Every task's fields with their defaults."""
    return {
        "name": "arithmetic",
        "arithmetic": schema.defaults(arithmetic.Arithmetic()),
        "mathematics": schema.defaults(mathematics.Mathematics()),
        "preferences": schema.defaults(preferences.Preferences()),
        "puzzles": schema.defaults(puzzles.Puzzles()),
        "procedural_preferences": schema.defaults(procedural_preferences.ProceduralPreferences()),
        "word_problems": schema.defaults(word_problems.WordProblems()),
    }
