r"""Brings the many ways of writing the same answer closer together, character by character.

It changes how an answer is written, never what it means: Unicode symbols become LaTeX, wrappers that only typeset
(\left, \dfrac, \mathrm, $, **) go, "1{,}000" becomes "1,000", "sqrt(2)" becomes "\sqrt{2}".
"""

import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_CHARACTERS = {
    **dict.fromkeys("−–—‐‑‒﹣－", "-"),
    **dict.fromkeys("×✕⨯", r"\times "),
    **dict.fromkeys("·⋅∙", r"\cdot "),
    **dict.fromkeys("÷", "/"),
    **dict.fromkeys("∕⁄", "/"),
    **dict.fromkeys("π𝜋", r"\pi "),
    **dict.fromkeys("∞", r"\infty "),
    **dict.fromkeys("≤⩽", r"\le "),
    **dict.fromkeys("≥⩾", r"\ge "),
    **dict.fromkeys("≠", r"\ne "),
    **dict.fromkeys("≈", r"\approx "),
    **dict.fromkeys("±", r"\pm "),
    **dict.fromkeys("∓", r"\mp "),
    **dict.fromkeys("∪", r"\cup "),
    **dict.fromkeys("∩", r"\cap "),
    **dict.fromkeys("∈", r"\in "),
    **dict.fromkeys("∅⌀", r"\emptyset "),
    **dict.fromkeys("ℝ", r"\mathbb{R}"),
    **dict.fromkeys("ℤ", r"\mathbb{Z}"),
    **dict.fromkeys("°º˚", r"^\circ "),
    **dict.fromkeys("θ", r"\theta "),
    **dict.fromkeys("α", r"\alpha "),
    **dict.fromkeys("β", r"\beta "),
    **dict.fromkeys("“”„", '"'),
    **dict.fromkeys("‘’", "'"),
    **dict.fromkeys("，", ","),
}
_TRANSLATION = str.maketrans(_CHARACTERS)

_COMMA_SPACE = re.compile(r"(?<=\d),\s*\\!\s*(?=\d{3})")
_NEGATIVE_SPACE = re.compile(r"(?<!\\)\\!")
# Thousands may be set apart by one space of any width that keeps a number together, not by \quad or the like.
_THIN_THOUSANDS = re.compile(
    r"(?<![\d.,])\d{1,3}(?:(?:\\[,;: ]|\\thinspace\s?|~| |\u202f|\u2009|\u00a0)\d{3})+(?![\d])"
)
_FUNCTIONS = (
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "arcsin",
    "arccos",
    "arctan",
    "ln",
    "log",
    "exp",
    "gcd",
    "lcm",
    "max",
    "min",
    "floor",
    "ceil",
)
_SPACES = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad\b|\\(?:thin|med|thick|neg)space\b|(?<!\\)~|&nbsp;|\s+")
_DELIMITERS = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?|middle)(?![a-zA-Z])\s*\.?")
_DOUBLE_BRACES = re.compile(r"\{\{([^{}]*)\}\}")
_STYLE = re.compile(r"\\(?:displaystyle|textstyle|scriptstyle|limits|strut|hfill)(?![a-zA-Z])\s*")
_RENAMED = [
    (re.compile(pattern), new)
    for pattern, new in [
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (
            r"\\(?:text(?:bf|it|rm|sf|tt|normal|md|up)|mbox|hbox|operatorname\*?|math(?:rm|bf|it|sf|tt))(?=\s*\{)",
            r"\\text",
        ),
        (r"\\(?:boldsymbol|bm|pmb|vec|hat|mathcal)\s*\{([^{}]*)\}", r"\1"),
        (r"\\(?:leq(?:slant)?)(?![a-zA-Z])", r"\\le"),
        (r"\\(?:geq(?:slant)?)(?![a-zA-Z])", r"\\ge"),
        (r"\\(?:neq)(?![a-zA-Z])", r"\\ne"),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\(?:lvert|rvert|vert)(?![a-zA-Z])", r"|"),
        (r"\\langle(?![a-zA-Z])", r"("),
        (r"\\rangle(?![a-zA-Z])", r")"),
        (r"\\lbrack(?![a-zA-Z])", r"["),
        (r"\\rbrack(?![a-zA-Z])", r"]"),
        (r"\\degrees?(?![a-zA-Z])", r"^\\circ"),
        (r"\^\s*\{?\s*\\circ(?![a-zA-Z])\s*\}?", r"^\\circ "),
        (r"\\(?:R|reals)(?![a-zA-Z])", r"\\mathbb{R}"),
        (r"\{\\rm\s+([^{}]*)\}", r"\\text{\1}"),
        (r"\{\s*,\s*\}", r","),
        (r"(?<![a-zA-Z\\])(?:infinity|infty|inf)(?![a-zA-Z])", r"\\infty "),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![a-zA-Z\\])(?=(?:sqrt|arcsin|arccos|arctan|sin|cos|tan|ln|log)\s*[\d(\\])", r"\\"),
        (r"\*\*(?=\s*[\d(a-z{-])", r"^"),
        (r"(?<=[\w)}])\s*\*\s*(?=[\w(\\])", r"\\cdot "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=", r"\\ne "),
        # "2^10" is written for 2^{10}, whatever TeX would make of it.
        (r"\^\s*(-?\d{2,}|-\d)(?!\d)", r"^{\1}"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\\sqrt\s*(\d+|[a-zA-Z](?![a-zA-Z]))", r"\\sqrt{\1}"),
    ]
]
_FRACTION_TAIL = re.compile(r"(\\frac\{[^{}]*\})\s*(\d)")
_MARKDOWN = re.compile(r"^(\*\*|__|`+)(.*)\1$")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_UNIT_LETTERS = set("mshgLlJNWVKCF")
_MATH = re.compile(r"^(?:\$\$(.*)\$\$|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\])$", re.DOTALL)


def normalize(text: str) -> str:
    """The answer written plainly, with single spaces; see the module docstring."""
    text = _unicode(text)
    text = _NEGATIVE_SPACE.sub("", _COMMA_SPACE.sub(",", text.replace(r"\\%", r"\%")))
    text = _THIN_THOUSANDS.sub(lambda m: re.sub(r"\D+", ",", m.group()), text)
    text = _SPACES.sub(" ", text)
    text = _unwrap(_DOUBLE_BRACES.sub(r"{\1}", text).strip())
    text = _DELIMITERS.sub("", text)
    text = _STYLE.sub("", text)
    for pattern, new in _RENAMED:
        text = pattern.sub(new, text)
    text = _TEXT.sub(_plain_if_mathematics, text)
    text = _FRACTION_TAIL.sub(r"\1{\2}", text)
    text = _braced_roots(text)
    if (match := _TEXT.fullmatch(text)) and not re.search("[A-Za-z]{2,}", match.group(1)):
        text = match.group(1)
    text = text.replace(r"\$", "").replace("$", "").replace("€", "").replace("£", "").replace(r"\%", "%")
    return re.sub(r" +", " ", text).strip()


def compact(text: str) -> str:
    """`text` without braces that hold a single character and without spaces, but those that part two digits."""
    text = re.sub(r"(?<!\d) +| +(?!\d)", "", re.sub(r" +", " ", text))
    return re.sub(r"(?<![a-zA-Z])\{(\w)\}", r"\1", text)


def _plain_if_mathematics(match: re.Match) -> str:
    r"""What a text command holds, where that is mathematics: how it is typeset does not make a word of it.

    Nothing, a symbol, a function's name and whatever holds a digit or an operator is mathematics. Letters that may be a
    unit stay text after a number; `units` decides there.
    """
    content = match.group(1)
    name = content.strip()
    if name in _FUNCTIONS:
        return rf"\{name} "
    if len(name) == 1 and name.isalpha():
        return (
            match.group() if name in _UNIT_LETTERS and re.search(r"[\d})]\s*$", match.string[: match.start()]) else name
        )
    if not re.search(r"[A-Za-z]", content) or re.search(r"[\d=<>+*/^|!]", content):
        return content
    return match.group()


def _unicode(text: str) -> str:
    text = re.sub("√\\s*\\(?(\\w+)\\)?", r"\\sqrt{\1}", text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + m.group().translate(_SUBSCRIPTS) + "}", text)
    # "2½" is two and a half: the compatibility form of "½" is "1⁄2".
    text = re.sub("(\\d?)([¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])", _vulgar_fraction, text)
    return unicodedata.normalize("NFKC", text.translate(_TRANSLATION)).translate(_TRANSLATION)


def _vulgar_fraction(match: re.Match) -> str:
    top, bottom = unicodedata.normalize("NFKC", match.group(2)).split("⁄")
    return match.group(1) + rf"\frac{{{top}}}{{{bottom}}}"


def _unwrap(text: str) -> str:
    """Takes off what surrounds the whole answer: bold, code, dollar signs, a closing full stop."""
    for _ in range(4):
        before = text
        text = text.strip().rstrip(",;:").strip()
        if text.endswith(".") and not text.endswith("..") and text != ".":
            text = text[:-1].strip()
        if match := _MARKDOWN.match(text):
            text = match.group(2)
        match = _MATH.match(text)
        # "$1$ and $2$" is not one formula.
        if match and "$" not in (inner := next(g for g in match.groups() if g is not None)).replace(r"\$", ""):
            text = inner
        if text == before:
            break
    return text


def _braced_roots(text: str) -> str:
    r"""Turns "\sqrt(a(b+c))" into "\sqrt{a(b+c)}"."""
    start = 0
    while (start := text.find("\\sqrt", start)) >= 0:
        opening = start + 5
        while opening < len(text) and text[opening] == " ":
            opening += 1
        start += 5
        if opening >= len(text) or text[opening] != "(":
            continue
        depth = 0
        for i in range(opening, len(text)):
            depth += (text[i] == "(") - (text[i] == ")")
            if depth == 0:
                text = text[:opening] + "{" + text[opening + 1 : i] + "}" + text[i + 1 :]
                break
    return text
