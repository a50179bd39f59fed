r"""Finds the final answer in a completion: the last \boxed{}, the last "Answer:" line, or GSM8K's "####".

Everything is linear in the text's length, so that a degenerate completion of any size costs little.
"""

import collections
import re

_BOX = re.compile(r"\\f?box(?:ed)?\s*")
_ANSWER = re.compile(r"(?i)(?:\banswer\*{0,2}\s*:|\banswer\s+is\s*:?|\banswer\s*=)[ \t]*\*{0,2}")
_GSM8K = re.compile(r"####[ \t]*([^\n]*)")
# What may stand between two boxes of one answer, as in "\boxed{1} or \boxed{2}".
_BETWEEN = re.compile(r"[\s$]*(?:,|;|\band\b|\bor\b|\\text\s*\{\s*(?:and|or)\s*\}|,\s*(?:and|or)\b)[\s$]*")
_THOUGHT_END = "</think>"
_BARE_LIMIT = 200  # characters; a longer text without any marker has no final answer
_ANSWER_LIMIT = 1000


def final_answer(completion: str) -> str | None:
    r"""The text that a completion gives as its answer, or None.

    Thoughts (up to the last "</think>") do not count, nor does a text that opens "<think>" and never closes it. Of
    several boxes the last counts; boxes joined by nothing but a comma, "and" or "or" are one answer, a list. A box or
    an answer line further down wins over one further up. A short single line without any marker is taken whole.
    """
    text = _after_thoughts(completion)
    answer, found = _marked_answer(text)
    if found or "\n" in text or len(text) > _BARE_LIMIT:
        return answer
    return text or None


def marked(completion: str) -> bool:
    """Whether the answer is marked by a box or an answer line, not merely a short text."""
    return _marked_answer(_after_thoughts(completion))[0] is not None


def gsm8k_answer(text: str) -> str | None:
    """What follows the last "####" on its line, or None."""
    found = _GSM8K.findall(text)
    return (found[-1].strip() or None) if found else None


def tagged_answer(completion: str) -> str | None:
    """What stands between the last <answer> and </answer>, line breaks included, or else the final answer."""
    before, end, _ = completion.rpartition("</answer>")
    _, start, inside = before.rpartition("<answer>")
    return inside.strip() or None if start and end else final_answer(completion)


def _after_thoughts(completion: str) -> str:
    if _THOUGHT_END in completion:
        completion = completion.rsplit(_THOUGHT_END, 1)[1]
    elif completion.lstrip().startswith("<think>"):
        return ""
    return completion.strip()


def _marked_answer(text: str) -> tuple[str | None, bool]:
    """The content of the last box or answer line, None where it is empty or cut; and whether there is one at all."""
    box, box_end = _last_boxes(text)
    line, line_end = _last_answer_line(text)
    if line is not None and (box_end is None or line_end > box_end):
        return line, True
    return box, box_end is not None or line_end >= 0


def _last_boxes(text: str) -> tuple[str | None, int | None]:
    """Content of the last box, or of the last group of joined ones, and where it ends.

    An empty or unclosed last box (a response that was cut) gives (None, its place): it is no answer, and no earlier box
    stands in for it.
    """
    starts = [m.span() for m in _BOX.finditer(text)]
    if not starts:
        return None, None
    contents: list[str] = []
    following = None  # where the box after this one starts
    for start, after in reversed(starts):
        content, end = _box_content(text, after)
        if following is not None and (end is None or not _BETWEEN.fullmatch(text[end:following][:100])):
            break
        if content is None:
            return None, len(text)
        if following is None:
            last_end = end
        contents.insert(0, content)
        following = start
    return ", ".join(contents), last_end


def _box_content(text: str, start: int) -> tuple[str | None, int | None]:
    r"""The balanced {...} at `start` (a single character or number without braces, as in "\boxed 5"), and its end."""
    if not text.startswith("{", start):
        bare = re.compile(r"-?[\d.,]*\d|[A-Za-z]\b").match(text, start)
        return (bare.group(), bare.end()) if bare else (None, None)
    depth, i = 0, start
    limit = min(len(text), start + _ANSWER_LIMIT)
    while i < limit:
        if text[i] == "\\":
            i += 2
            continue
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + 1 : i].strip() or None, i + 1
        i += 1
    return None, None


def _last_answer_line(text: str) -> tuple[str | None, int]:
    """What follows the last "answer:" or "answer is" on its line (or on the next, if nothing does), and where it ends."""
    found = collections.deque(_ANSWER.finditer(text), maxlen=1)
    if not found:
        return None, -1
    last = found[0]
    rest = text[last.end() : last.end() + _ANSWER_LIMIT].lstrip("\n \t")
    rest = "\n".join(rest.split("\n\n")[0].splitlines()) if rest.startswith(("$$", "\\[")) else rest.split("\n")[0]
    boxed, _ = _last_boxes(rest)
    if _BOX.search(rest):
        return boxed, last.end() + len(rest)
    # "The answer is 4. That is all." ends with its sentence, "The answer is 4.5" does not.
    rest = re.split(r"(?<=[\w)\]}$%])\.(?:\s|$)", rest)[0].strip().rstrip("*").strip()
    return rest or None, last.end() + len(rest)
