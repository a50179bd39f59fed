r"""Rewards that need nothing but the text: exact match, GSM8K's answer, and the format of a completion."""

from jaxrl_llm.tasks.rewards import extract, literal, surface

OPEN, CLOSE = "<think>", "</think>"


def exact_match(completion: str, answer: str) -> float:
    """1 where the completion is the answer, spaces around it aside."""
    return float(completion.strip() == answer.strip())


def gsm8k(completion: str, answer: str) -> float:
    """1 where the number after the last "####" is the answer; "$1,080.00" is 1080. Without "####" it is 0."""
    given, right = extract.gsm8k_answer(completion), literal.read(surface.normalize(answer))
    number = None if given is None else literal.read(surface.normalize(given))
    return float(number is not None and right is not None and number.value == right.value)


def answer_format(completion: str) -> float:
    r"""1 where the final answer is marked, by \boxed{} or an "Answer:" line."""
    return float(extract.marked(completion))


def think_format(completion: str) -> float:
    """1 for one block of thoughts, closed, with an answer after it.

    The opening tag may be missing, because chat templates of reasoning models end the prompt with it; where it is there,
    it comes first.
    """
    text = completion.strip()
    if text.count(CLOSE) != 1 or text.count(OPEN) > 1 or (OPEN in text and not text.startswith(OPEN)):
        return 0.0
    return float(bool(text.split(CLOSE)[1].strip()))
