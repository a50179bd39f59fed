r"""Compares two formulas with math-verify (SymPy behind it), outside the cases that the rest of the package settles.

`math_verify.verify` is told not to set alarms: they work in main threads only, and the pool has the deadline.
"""

import functools
import logging
import re
from fractions import Fraction

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import verify

from jaxrl_llm.tasks.rewards import literal

logging.getLogger("math_verify").setLevel(logging.ERROR)

_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
)
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|\([^()]*\))\s*\^\\circ\s*")
_REPEATING = re.compile(r"\d*\.\d*\\overline\{\d+\}")
_DECIMAL = re.compile(r"(?<![\d.])(?:\d+\.\d+|\.\d+)(?![\d.])")
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)
_I = (sympy.Symbol("i", real=True), sympy.Symbol("i", real=False), sympy.Symbol("i"))


def same(a: str, b: str) -> bool:
    """Whether two formulas in LaTeX (see `surface.normalize`) are equal; one that cannot be read equals nothing."""
    x, y = read(a), read(b)
    if x is None or y is None:
        return False
    for decimal, other in ((a, y), (b, x)):
        number = literal.read(decimal)
        if number is not None and (verdict := _same_as_literal(number, other)) is not None:
            return verdict
    if isinstance(x, sympy.Eq) and isinstance(y, sympy.Eq) and _proportional(x, y):
        return True
    if isinstance(x, sympy.Rational) and isinstance(y, sympy.Rational):
        return x == y
    if _differ_somewhere(x, y):
        return False
    return bool(verify(y, x, float_rounding=12, allow_set_relation_comp=True, timeout_seconds=None))


@functools.lru_cache(maxsize=256)
def read(text: str) -> sympy.Basic | sympy.MatrixBase | None:
    """The SymPy object of a formula, with "i" as the imaginary unit, or None where it cannot be read."""
    text = _DEGREES.sub(r"(\1 \\cdot \\frac{\\pi}{180})", text)
    text = _REPEATING.sub(_exactly, text)
    text = _DECIMAL.sub(_exactly, text)
    try:
        parsed = latex2sympy(
            normalize_latex(text, _NORMALIZATION), is_real=True, convert_degrees=False, normalization_config=None
        )
    except Exception:  # the parser raises what it likes; a text it cannot read is no formula
        return None
    try:
        return parsed.subs(dict.fromkeys(_I, sympy.I))
    except Exception:
        return parsed


def _exactly(match: re.Match) -> str:
    # As a float, 0.5 would not be 1/2.
    value = literal.read(match.group()).value
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _differ_somewhere(x: sympy.Basic, y: sympy.Basic) -> bool:
    """Whether two expressions take different values at some point: a hundred times faster than failing to simplify."""
    if not isinstance(x, sympy.Expr) or not isinstance(y, sympy.Expr) or x.has(sympy.zoo, sympy.oo, sympy.nan):
        return False
    symbols = sorted(x.free_symbols | y.free_symbols, key=str)
    if len(symbols) > 8:
        return False
    for shift in (0, 1):
        point = {s: sympy.Rational(_PRIMES[(i + shift) % len(_PRIMES)], 7 + shift) for i, s in enumerate(symbols)}
        try:
            left, right = (sympy.N(e.subs(point), 40) for e in (x, y))
        except Exception:  # what SymPy cannot evaluate is left to the full comparison
            return False
        if not (left.is_number and right.is_number and left.is_finite and right.is_finite):
            return False
        # Relatively, because 1/20! is not 1/21!; what is as small as this is the rounding of a zero.
        if abs(left - right) > max(1e-20 * max(abs(left), abs(right)), 1e-90):
            return True
        if not symbols:
            break
    return False


def _proportional(x: sympy.Eq, y: sympy.Eq) -> bool:
    """Whether one equation is a non-zero multiple of the other."""
    try:
        ratio = sympy.simplify((x.lhs - x.rhs) / (y.lhs - y.rhs))
    except (TypeError, AttributeError):  # sides that are sets or matrices
        return False
    return ratio.is_number and bool(ratio.is_finite) and not ratio.is_zero


def _same_as_literal(number: literal.Literal, other: sympy.Basic) -> bool | None:
    """Whether a number without free variables is the literal: exactly, or rounded correctly to its six or more digits."""
    if not isinstance(other, sympy.Expr) or other.free_symbols:
        return None
    other = other.doit()
    value = sympy.Rational(number.value.numerator, number.value.denominator)
    difference = other - value
    if not number.decimals or number.digits < literal.ENOUGH_DIGITS:
        return None
    if difference.equals(0):
        return True
    if other.is_Rational and literal.is_finite_decimal(Fraction(int(other.p), int(other.q))):
        return False
    return bool(abs(sympy.N(difference, 30)) * 2 * 10**number.decimals <= 1)
