r"""From a data set's row to an `Example`: one pure function per schema. A row that does not fit raises `RowError`.

| schema | fields |
|---|---|
| dapo | prompt (messages), reward_model.ground_truth, extra_info.index; the prompt asks for "Answer:" itself |
| problem | problem or question, answer or true_answer: AIME, MATH-500 |
| gsm8k | question, answer ending in "#### n" |
| hh_rlhf | chosen, rejected: dialogues of "\n\nHuman:" and "\n\nAssistant:" turns |
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.tasks.base import Example
from jaxrl_llm.tasks.rewards import extract
from jaxrl_llm.tasks.sources import RowError, Skip

Row = Mapping[str, Any]
Messages = tuple[Mapping[str, str], ...]
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_LAST = "\n\nAssistant:"


def dapo(row: Row, id: str) -> Example:
    """DAPO-Math-17k, and AIME in the same form."""
    turns = _field(row, "prompt", list)
    messages = []
    for i, turn in enumerate(turns):
        messages.append({key: _field(turn, key, str, f"prompt[{i}].") for key in ("role", "content")})
    if not messages:
        raise RowError("prompt", "no messages")
    truth = _field(_field(row, "reward_model", Mapping), "ground_truth", str, "reward_model.")
    extra = row.get("extra_info")
    index = extra.get("index") if isinstance(extra, Mapping) else None
    return Example(id, tuple(messages), truth, metadata={"index": index, "instructed": True})


def problem(row: Row, id: str) -> Example:
    """A problem and its answer, under any of the usual names."""
    question = _field(row, _first(row, "problem", "question", "Problem", "Question"), str)
    name = _first(row, "answer", "true_answer", "Answer", "expected_answer")
    answer = row[name]
    # AIME's answers are integers, and some copies store them as such.
    if isinstance(answer, int) and not isinstance(answer, bool):
        answer = str(answer)
    elif isinstance(answer, float) and answer.is_integer():
        answer = str(int(answer))
    if not isinstance(answer, str) or not answer.strip():
        raise RowError(name, f"an answer as text or integer is needed, this is {answer!r}")
    kept = {key: row[key] for key in ("subject", "level", "year") if key in row}
    return Example(id, user(question), answer.strip(), metadata=kept)


def gsm8k(row: Row, id: str) -> Example:
    """GSM8K: the answer's last line is "#### n"; what stands before it is a worked solution."""
    question, answer = _field(row, "question", str), _field(row, "answer", str)
    truth = extract.gsm8k_answer(answer)
    if truth is None:
        raise RowError("answer", 'no number after "####"')
    # "<<48/2=24>>" are notes for a calculator.
    return Example(id, user(question), truth.replace(",", ""), solution=re.sub(r"<<[^<>]*>>", "", answer))


def hh_rlhf(row: Row, id: str) -> Example:
    """Anthropic's helpful-harmless pairs: the prompt is all but the last assistant turn, chosen and rejected that turn.

    Raises:
      Skip: an empty final turn, or two dialogues that part before it (such a pair compares more than two answers).
    """
    chosen, rejected = (_dialogue(_field(row, name, str), name) for name in ("chosen", "rejected"))
    if not chosen[1] or not rejected[1]:
        raise Skip("empty final turn")
    if chosen[0] != rejected[0]:
        raise Skip("dialogues part before the final turn")
    replies = {"chosen": chosen[1], "rejected": rejected[1]}
    return Example(id, chosen[0], answer="", solution=chosen[1], metadata=replies)


def user(text: str) -> Messages:
    """One message of the user's."""
    return ({"role": "user", "content": text.strip()},)


SCHEMAS: dict[str, Callable[[Row, str], Example]] = {
    "dapo": dapo,
    "problem": problem,
    "gsm8k": gsm8k,
    "hh_rlhf": hh_rlhf,
}


def _dialogue(text: str, name: str) -> tuple[Messages, str]:
    """Turns before the last "\n\nAssistant:", and what follows it."""
    if not text.startswith("\n\nHuman:"):
        raise RowError(name, r'it must begin with "\n\nHuman:"')
    if _LAST not in text:
        raise RowError(name, r'there is no "\n\nAssistant:"')
    before, reply = text.rsplit(_LAST, 1)
    parts = _TURN.split(before)[1:]
    messages: list[dict[str, str]] = []
    for speaker, content in zip(parts[::2], parts[1::2], strict=True):
        role, content = _ROLES[speaker], content.strip()
        # Chat templates want turns that alternate.
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] = f"{messages[-1]['content']}\n\n{content}".strip()
        else:
            messages.append({"role": role, "content": content})
    return tuple(messages), reply.strip()


def _first(row: Row, *names: str) -> str:
    for name in names:
        if row.get(name) is not None:
            return name
    raise RowError(names[0], f"missing (nor is there {' or '.join(names[1:])})")


def _field(row: Any, name: str, kind: type, path: str = "") -> Any:
    value = row.get(name) if isinstance(row, Mapping) else None
    if value is None:
        raise RowError(path + name, "missing")
    if not isinstance(value, kind):
        raise RowError(path + name, f"{kind.__name__} is needed, this is {value!r:.80}")
    if isinstance(value, str) and not value.strip():
        raise RowError(path + name, "empty")
    return value
