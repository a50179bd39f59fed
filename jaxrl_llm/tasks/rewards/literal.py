r"""Reads number literals exactly: "-1{,}000.50", "3/4", "1\frac{1}{2}", "2.5\times10^{-3}", "0.1\overline{6}", "1e3".

Exactness matters: a grader that rounds to six decimals takes 0.0000001 for 0.
"""

import dataclasses
import re
from fractions import Fraction

_MAX_EXPONENT = 400
# Digits from which on a rounded decimal may stand for a number that has no finite decimal.
ENOUGH_DIGITS = 6

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_PLAIN = re.compile(rf"({_DECIMAL})(?:[eE]([+-]?\d{{1,4}}))?")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")
_TIMES_POWER = re.compile(
    rf"(?:({_DECIMAL})\s*(?:\\times|\\cdot|\*|x)\s*)?10\s*\^\s*(?:\{{\s*([+-]?\d{{1,4}})\s*\}}|(\d))"
)
_RATIO = re.compile(rf"({_DECIMAL})\s*/\s*({_DECIMAL})")
_FRAC = re.compile(rf"\\frac\s*\{{\s*([+-]?\s*{_DECIMAL})\s*\}}\s*\{{\s*([+-]?\s*{_DECIMAL})\s*\}}")
_MIXED = re.compile(r"(\d+)\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d+)\s+(\d+)\s*/\s*(\d+)")


@dataclasses.dataclass(frozen=True)
class Literal:
    """A number as written.

    Attributes:
      value: exactly.
      decimals: digits after the point, or None where it is not a plain decimal.
      digits: significant digits of a plain decimal, 0 otherwise.
    """

    value: Fraction
    decimals: int | None = None
    digits: int = 0


def read(text: str) -> Literal | None:
    """The number that `text` (see `surface.normalize`) writes, or None if it is not a literal."""
    if len(text) > 500:
        return None
    text, sign = _signed(text.strip())
    literal = _unsigned(text)
    return literal and dataclasses.replace(literal, value=sign * literal.value)


def same(a: Literal, b: Literal) -> bool:
    """Whether two literals are the same number.

    Equal values are, and an integer is exact. So is a decimal of six or more significant digits that is the correct
    rounding of a number without a finite decimal of its own (0.333333 and 1/3, not 0.333 and 1/3).
    """
    return a.value == b.value or _rounds_to(a, b) or _rounds_to(b, a)


def _rounds_to(decimal: Literal, exact: Literal) -> bool:
    if not decimal.decimals or decimal.digits < ENOUGH_DIGITS or is_finite_decimal(exact.value):
        return False
    return abs(decimal.value - exact.value) * 2 * 10**decimal.decimals <= 1


def is_finite_decimal(value: Fraction) -> bool:
    """Whether the denominator has no prime factors but 2 and 5."""
    denominator = value.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def _signed(text: str) -> tuple[str, int]:
    sign = 1
    while text:
        if text[0] in "+-":
            sign *= -1 if text[0] == "-" else 1
            text = text[1:].lstrip()
        elif text[0] == "(" and text[-1] == ")" and text.count("(") == 1:
            text = text[1:-1].strip()
        else:
            break
    return text, sign


def _unsigned(text: str) -> Literal | None:
    if match := _PLAIN.fullmatch(text):
        mantissa, exponent = match.groups()
        digits = mantissa.replace(",", "").replace(" ", "")
        if exponent is not None:
            return _scaled(_number(mantissa), int(exponent))
        decimals = len(digits.partition(".")[2])
        return Literal(_number(mantissa), decimals, len(digits.replace(".", "").lstrip("0")))
    if match := _TIMES_POWER.fullmatch(text):
        mantissa, braced, bare = match.groups()
        return _scaled(_number(mantissa or "1"), int(braced or bare))
    if match := _RATIO.fullmatch(text) or _FRAC.fullmatch(text):
        top, bottom = (_number(g.replace(" ", "")) for g in match.groups())
        return Literal(top / bottom) if bottom else None
    if match := _MIXED.fullmatch(text):
        whole, top, bottom = (int(g) for g in match.groups() if g is not None)
        return Literal(whole + Fraction(top, bottom)) if bottom else None
    if match := _REPEATING.fullmatch(text):
        whole, fixed, period = match.groups()
        scale = 10 ** len(fixed)
        value = Fraction(int((whole or "0") + fixed), scale)
        return Literal(value + Fraction(int(period), (10 ** len(period) - 1) * scale))
    return None


def _scaled(mantissa: Fraction, exponent: int) -> Literal | None:
    return Literal(mantissa * Fraction(10) ** exponent) if abs(exponent) <= _MAX_EXPONENT else None


def _number(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").rstrip("."))
