r"""Whether two answers are mathematically the same.

Structure is compared here: tuples and intervals in order and by their brackets, sets and lists in any order, equations
by their right sides. Number literals are compared exactly (`literal`), quantities with their units (`units`),
elementary formulas exactly (`algebra`), and every other formula by math-verify (`formula`).

Conventions: a unit, a percent or degree sign that one side leaves out is forgiven, a wrong one is not. A bare list
"1, 2" may stand for a set or, in the same order, for a tuple. A variable in front of "=" may be left out.

This module has no deadline of its own: what SymPy is asked to simplify may take for ever, so run it in a `pool`.
"""

import dataclasses
import functools
import re
from fractions import Fraction

from jaxrl_llm.tasks.rewards import algebra, literal, surface, units

MAX_LENGTH = 2000  # characters; a longer answer is compared as text only

_OPENING, _CLOSING = "([{", ")]}"
_NAME = r"(?:[a-zA-Z]|\\[a-zA-Z]+)(?:_(?:\{[^{}]*\}|\w))?'?"
_LEFT_SIDE = re.compile(
    rf"^((?:\\text\s*\{{[^{{}}]*\}}|[A-Za-z][a-z]+(?: [a-z]+)*|{_NAME}\s*\([^()=]*\)|\(\s*{_NAME}(?:\s*,\s*{_NAME})*\s*\)|{_NAME}))"
    r"\s*(=|\\approx|:=|\\equiv|\\in(?![a-z]))\s*(?!=)(.+)$",
    re.DOTALL,
)
_RELATION = re.compile(
    r"<|>|\\le(?![a-z])|\\ge(?![a-z])|\\ne(?![a-z])|\\in(?![a-z])|\\setminus|\\mathbb|\\cup|\\cap|\\infty"
)
_COMPARISON = re.compile(r"<|>|\\le(?![a-z])|\\ge(?![a-z])")
_DESCRIBED = re.compile(r"^\\?\{\s*[a-z]\s*(?:\\in\s*\\mathbb\{R\})?\s*(?:\\mid|\||:)(.+?)\\?\}$", re.DOTALL)
_CONJUNCTION = re.compile(
    r",?\s*(?:(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|\\text\s*\{\s*,?\s*(?:and|or)\s*\}),?|;|\\lor|\\vee"
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_WORD = re.compile(
    r"\\text\s*\{[^{}]*\}|(?<![a-zA-Z\\])(?:[a-zA-Z]*[a-z][a-zA-Z]{3,}|[a-zA-Z]{3,}[a-z]|[a-z]{2,} [a-z]{2,})[a-zA-Z]*"
)
_WORD_OR_LETTERS = re.compile(r"\\text\s*\{[^{}]*\}|(?<![a-zA-Z\\])[a-zA-Z]{2,}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}(?:\{[clr|]*\})?")
_SYSTEM = re.compile(r"^\\begin\{cases\}([^&]*)\\end\{cases\}$", re.DOTALL)
_SYMBOL = re.compile(r"\\[a-zA-Z]+|[a-zA-Z]")
_BASED_NUMBER = re.compile(r"^-?[\dA-Fa-f.]*\d[\dA-Fa-f]*\s*_\s*\{?\s*(?:\d+|\\text\s*\{[^{}]*\})\s*\}?$")
_EQUATION = re.compile(r"(?<![<>!:])=|\\equiv(?![a-z])")
_APART = re.compile(r"(?<![_^\d])\d+ \d")
_CONSTANTS = ("e", "i", r"\pi", r"\infty")
_ELLIPSIS = re.compile(r"\\(?:l|c|v|d)?dots(?![a-zA-Z])|\.\.\.")
_SYNONYMS = {
    r"\emptyset": (
        "emptyset",
        "no solution",
        "no solutions",
        "empty set",
        "none",
        "no real solution",
        "no real solutions",
    ),
    r"\mathbb{R}": ("all real numbers", "all reals", "real numbers", "the real numbers", "all real x"),
}


# A group's completions often end in the same answer.
@functools.lru_cache(maxsize=4096)
def equivalent(answer: str, truth: str) -> bool:
    """Whether `answer` is the same mathematical object as `truth` (both as text, LaTeX or plain)."""
    if answer.strip() == truth.strip():
        return bool(truth.strip())
    if len(answer) > MAX_LENGTH or len(truth) > MAX_LENGTH:
        return False
    given, right = _normalized(answer), _normalized(truth)
    if not given or not right:
        return False
    return surface.compact(given) == surface.compact(right) or same(parse(given), parse(right))


def understand(truth: str) -> None:
    """Reads every formula of `truth` as `equivalent` may have to; what is read is remembered."""
    if len(truth) <= MAX_LENGTH:
        _read_formulas(parse(_normalized(truth)))


_normalized = functools.lru_cache(maxsize=1024)(surface.normalize)


def _read_formulas(node: "Node") -> None:
    for item in node.items:
        _read_formulas(item)
    if node.kind == "value":
        core, _ = units.split(node.text)
        if literal.read(core) is None and not _has_words(core) and algebra.read(core) is None:
            _formulas().read(core)


# ---- Structure --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Node:
    """A part of an answer.

    Attributes:
      kind: "value", "list", "set", "union", "assign" (of `left`), or the pair of brackets of a tuple or interval.
      text: as written.
      items: its parts; for "assign" the right side alone.
      left: left side of "assign".
    """

    kind: str
    text: str
    items: tuple["Node", ...] = ()
    left: str = ""


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Node:
    """The structure of a normalized answer."""
    text = text.strip()
    text = _SYNONYM_OF.get(_words(text), text)
    text = re.sub(r"^\\approx\s*", "", text)
    if system := _SYSTEM.match(text):
        return Node(
            "list", text, _flat([row.strip().rstrip(",;") for row in system.group(1).split(r"\\") if row.strip()])
        )
    if condition := _DESCRIBED.match(text):
        return parse(condition.group(1))
    items = split(_CONJUNCTION.sub(",", text) if _enclosed(text) is None else text)
    if len(items) > 1 and _THOUSANDS.fullmatch(text.strip("-+% ")) is None:
        if all(map(_COMPARISON.search, items)) and re.search(r"\bor\b|\\lor|\\vee", text):
            return Node("union", text, tuple(map(parse, items)))
        return Node("list", text, _flat(items))
    parts = _split(text, r"\cup")
    if len(parts) > 1:
        return Node("union", text, tuple(map(parse, parts)))
    if (match := _LEFT_SIDE.match(text)) and not _is_formula(match.group(1)) and match.group(1) not in _CONSTANTS:
        left, sign, right = match.groups()
        # Constants have a value of their own, and "x = 2 + 3 = 5" says 5 in the end.
        if sign != r"\in" or _enclosed(right) or "\\" in right:
            return Node("assign", text, (parse(_split(right, "=")[-1]),), left=_left_name(left))
    if text == r"\emptyset":
        return Node("set", text)
    if (inner := _set_content(text)) is not None:
        return Node("set", text, _flat(_split_inside(inner)) if inner.strip() else ())
    if r"\pm" in text or r"\mp" in text:
        upper = text.replace(r"\pm", "+").replace(r"\mp", "-")
        lower = text.replace(r"\pm", "-").replace(r"\mp", "+")
        return Node("list", text, (parse(upper), parse(lower)))
    if enclosed := _enclosed(text):
        brackets, inner = enclosed
        items = _split_inside(inner)
        if len(items) > 1:
            return Node(brackets, text, tuple(map(parse, items)))
        if brackets == "()":
            return parse(inner)
    return Node("value", text)


def split(text: str) -> list[str]:
    """Parts between the commas outside brackets; "1,000" outside brackets is one part."""
    protected = _THOUSANDS.sub(lambda m: m.group().replace(",", ""), text) if not _enclosed(text) else text
    return _split(protected, ",")


def _split_inside(text: str) -> list[str]:
    """Parts of what brackets hold: in "(1,234)" the comma separates, in "(1,000, 2)" only the second one does."""
    return _split(text, ",") if _THOUSANDS.fullmatch(text.strip()) else split(text)


def _split(text: str, separator: str) -> list[str]:
    """Parts of `text` between separators that stand outside every bracket; empty parts are left out."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        # An interval's brackets need not match: "[0,1)" opens and closes once.
        depth += (text[i] in _OPENING) - (text[i] in _CLOSING)
        if depth <= 0 and text.startswith(separator, i) and not (separator == "=" and _part_of_relation(text, i)):
            parts.append(text[start:i])
            start = i + len(separator)
            i = start
            continue
        i += 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def _part_of_relation(text: str, i: int) -> bool:
    return text[i - 1 : i] in ("<", ">", "!", ":") or text[i + 1 : i + 2] == "="


def _enclosed(text: str) -> tuple[str, str] | None:
    """Brackets and content, where one pair of round or square brackets holds the whole text."""
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return None
    depth = 0
    for i, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0 and i < len(text) - 1:
            return None
    return (text[0] + text[-1], text[1:-1]) if depth == 0 else None


def _set_content(text: str) -> str | None:
    r"""What "\{...\}" (or "{...}", with commas) holds, unless it is a description with a condition."""
    if text.startswith("\\{") and text.endswith("\\}") and text.count("\\{") == 1:
        inner = text[2:-2]
    elif text.startswith("{") and text.endswith("}") and text.count("{") == 1:
        inner = text[1:-1]
    else:
        return None
    return None if re.search(r"\\mid|\||:", inner) else inner


def _flat(items: list[str]) -> tuple[Node, ...]:
    nodes = []
    for node in map(parse, items):
        nodes.extend(node.items if node.kind == "list" else [node])
    return tuple(nodes)


def _left_name(left: str) -> str:
    return re.sub(r"\\text\s*|[{}\s]", "", left)


def _is_formula(left: str) -> bool:
    r"""Whether a left side such as "\frac" is a command that needs arguments, not a name."""
    return left.startswith("\\") and left.split("_")[0] in (r"\frac", r"\sqrt", r"\log", r"\sin", r"\cos", r"\tan")


# ---- Comparison -------------------------------------------------------------------------------------------------------


def same(a: Node, b: Node) -> bool:
    """Whether two structures are the same object."""
    if "assign" in (a.kind, b.kind):
        return _same_assigned(a, b)
    kinds = {a.kind, b.kind}
    if kinds == {"value"}:
        return _same_value(a.text, b.text)
    if kinds <= {"list", "set"} or kinds == {"union"}:
        if _same_in_any_order(a, b):
            return True
        return kinds == {"union"} and _same_formula(a.text, b.text)
    if a.kind == b.kind:
        return _same_in_order(a, b)
    if len(a.items) == len(b.items) and len(a.items) > 1:
        if "list" in kinds and not kinds & {"set", "union"}:
            return kinds & {"()"} != set() and _same_in_order(a, b)
        if kinds == {"()", "[]"}:  # of three and more, they are vectors
            return len(a.items) > 2 and _same_in_order(a, b)
    for one, other in ((a, b), (b, a)):
        if one.kind == "set" and len(one.items) == 1 and other.kind == "value":
            return same(one.items[0], other)
    # "0 <= x < 1" is "[0, 1)": let the sets be compared as such.
    if not kinds & {"list"} and (_RELATION.search(a.text) or _RELATION.search(b.text)):
        return _same_formula(a.text, b.text)
    return False


def _same_assigned(a: Node, b: Node) -> bool:
    if a.kind == b.kind:
        if a.left == b.left:
            return same(a.items[0], b.items[0])
        return _same_formula(a.text, b.text)
    assigned, other = (a, b) if a.kind == "assign" else (b, a)
    if other.kind == "value" and re.search(r"(?<![<>!])=", other.text):
        return _same_formula(a.text, b.text)
    return same(assigned.items[0], other) if assigned is a else same(other, assigned.items[0])


def _same_in_any_order(a: Node, b: Node) -> bool:
    """Whether every item of one has a partner of its own in the other; being the same is an equivalence, so any will do."""
    left = list(b.items)
    for x in a.items:
        partner = next((i for i, y in enumerate(left) if same(x, y)), None)
        if partner is None:
            return False
        del left[partner]
    return not left


def _same_in_order(a: Node, b: Node) -> bool:
    if {a.kind, b.kind} == {"list", "()"}:
        # "y = 1, x = 2" is the point (2, 1).
        a, b = map(_by_name, (a, b))
    return len(a.items) == len(b.items) and all(same(x, y) for x, y in zip(a.items, b.items, strict=True))


def _by_name(node: Node) -> Node:
    if not all(item.kind == "assign" for item in node.items):
        return node
    return dataclasses.replace(node, items=tuple(sorted(node.items, key=lambda item: item.left)))


def _same_value(a: str, b: str) -> bool:
    if surface.compact(a) == surface.compact(b):
        return True
    if _BASED_NUMBER.match(a) or _BASED_NUMBER.match(b):
        return False  # the base is part of the number, and the digits were just compared
    if (a_scaled := _scaled(a)) != a or _scaled(b) != b:
        return _same_value(a_scaled, _scaled(b))
    (a_core, a_unit), (b_core, b_unit) = units.split(a), units.split(b)
    if a_unit is None and b_unit is None:
        return _same_number_or_words(a, b)
    if a_unit is not None and b_unit is not None:
        if a_unit == b_unit:
            return _same_number_or_words(a_core, b_core)
        if a_unit.dimension != b_unit.dimension:
            return False
        return _same_number_or_words(_times(a_core, a_unit.size), _times(b_core, b_unit.size))
    (core, unit), plain = ((a_core, a_unit), b) if a_unit else ((b_core, b_unit), a)
    if _same_number_or_words(core, plain):
        return True
    return unit.is_ratio and _same_number_or_words(rf"({core}) \cdot {unit.factor}", plain)


def _scaled(text: str) -> str:
    core, scale = units.scale(text)
    return text if scale == 1 else _times(core, Fraction(scale))


def _times(core: str, size) -> str:
    number = literal.read(core)
    if number is not None:
        return str(number.value * size)
    return rf"({core}) \cdot \frac{{{size.numerator}}}{{{size.denominator}}}"


def _same_number_or_words(a: str, b: str) -> bool:
    if surface.compact(a) == surface.compact(b):
        return True
    number_a, number_b = literal.read(a), literal.read(b)
    if number_a is not None and number_b is not None:
        return literal.same(number_a, number_b)
    if re.fullmatch(r"[a-zA-Z ]{3,}", a) and _same_text(a, b):
        return True
    if _has_words(a) or _has_words(b):
        return _same_text(a, b)
    return not _other_case(a, b) and _same_formula(a, b)


def _same_text(a: str, b: str) -> bool:
    """Whether two texts have the same words, in the same places, and the same mathematics between them."""
    a_words, b_words = ([_words(w) for w in _WORD_OR_LETTERS.findall(t)] for t in (a, b))
    if not a_words or a_words != b_words:
        return False
    pieces = zip(*(map(_between_words, _WORD_OR_LETTERS.split(t)) for t in (a, b)), strict=True)
    return all(x == y or (x and y and _same_number_or_words(x, y)) for x, y in pieces)


def _between_words(text: str) -> str:
    return surface.compact(text.strip(" .,;:!?\"'"))


def _has_words(text: str) -> bool:
    return _WORD.search(_ENVIRONMENT.sub(" ", text)) is not None


def _other_case(a: str, b: str) -> bool:
    r"""Whether a symbol of one formula stands in the other with another case only: x is not X, \delta not \Delta."""
    a_symbols, b_symbols = (set(_SYMBOL.findall(_ENVIRONMENT.sub(" ", text))) for text in (a, b))
    return any(_SYMBOL.sub(_swap_initial, s) in b_symbols - a_symbols for s in a_symbols - b_symbols)


def _swap_initial(symbol: re.Match) -> str:
    return re.sub(r"[a-zA-Z]", lambda m: m.group().swapcase(), symbol.group(), count=1)


def _words(text: str) -> str:
    """Letters and digits of a text answer, in lower case; "\\text{(C)}" and "c)" come to "c"."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    return " ".join(re.findall(r"[^\W_]+", text.casefold()))


_SYNONYM_OF = {_words(words): symbol for symbol, several in _SYNONYMS.items() for words in several}


def _same_formula(a: str, b: str) -> bool:
    # An ellipsis hides what a formula says.
    if _ELLIPSIS.search(a) or _ELLIPSIS.search(b):
        return False
    # An equation is no value, whatever stands on its right; and two numbers side by side are not one.
    if bool(_EQUATION.search(a)) != bool(_EQUATION.search(b)) or _APART.search(a) or _APART.search(b):
        return False
    verdict = algebra.same(a, b)
    return _formulas().same(a, b) if verdict is None else verdict


def _formulas():
    from jaxrl_llm.tasks.rewards import formula  # SymPy takes a second to import, and most answers do not need it

    return formula
