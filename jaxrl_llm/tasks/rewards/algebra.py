r"""Decides exactly whether two elementary formulas are equal, without SymPy, which takes milliseconds to read one.

Most answers are made of numbers, letters, \pi, i, \frac, \sqrt, powers and the four operations. Such a formula is a
quotient of polynomials in letters and in roots of primes. Products of different roots of primes are linearly independent
over the rationals (Besicovitch 1940), and letters stand for anything: two polynomials are equal exactly if all their
terms are. A formula that holds anything else, or whose notation has more than one reading ("1/2x", "3\frac{1}{2}",
"f(2)"), is left to `formula`.
"""

import functools
import itertools
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from jaxrl_llm.tasks.rewards import literal

# Generators and their exponents, sorted. "7" to a power between 0 and 1 is a root of 7, "i" has no power but 1, and any
# other name (letters, pi, e) has an integer power other than 0.
Term = tuple[tuple[str, Fraction], ...]
Polynomial = dict[Term, Fraction]
ONE: Polynomial = {(): Fraction(1)}

MAX_LENGTH = 300  # characters
_MAX_PRODUCTS = 400  # terms by terms in one multiplication
_MAX_POWER = 64  # of what has several terms
_MAX_BITS = 2048  # of a numerator or denominator
_MAX_RADICAND = 10**10  # factored by trial division

_TOKEN = re.compile(r"\s*(\\[a-zA-Z]+|\d+(?:\.\d+)?|\.\d+|.)", re.DOTALL)
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_SYMBOL = re.compile(r"[a-zA-HJ-Z]|\\(?:pi|alpha|beta|theta|lambda|mu|omega|phi|rho|tau)")
# Words and functions, differentials, "f(2)" and "2(3)".
_AMBIGUOUS = re.compile(
    r"(?<![\\a-zA-Z])(?:[a-zA-Z]{3,}|ln|lg|tg|d\s*[a-zA-Z])"
    r"|[\da-zA-Z](?<!\\cdot)(?<!\\times)(?<!\\div)\s*\(\s*(?:[a-zA-Z]|\d+(?:\s*/\s*\d+)?)\s*\)"
)


class _Undecided(Exception):
    """The formula is none of those that this module decides."""


class Quotient(NamedTuple):
    """A formula. `bottom` is `ONE` unless it has several terms."""

    top: Polynomial
    bottom: Polynomial = ONE


def same(a: str, b: str) -> bool | None:
    """Whether two formulas (see `surface.normalize` for their form) are equal; None where that is not decided here."""
    x, y = read(a), read(b)
    if x is None or y is None:
        return None
    try:
        equal = _multiply(x.top, y.bottom) == _multiply(y.top, x.bottom)
    except _Undecided:
        return None
    # A number of many digits may be a rounded value of the other formula.
    return None if not equal and (_has_long_number(a) or _has_long_number(b)) else equal


@functools.lru_cache(maxsize=1024)
def read(text: str) -> Quotient | None:
    """The formula, or None where it is none of this module's."""
    if len(text) > MAX_LENGTH or _AMBIGUOUS.search(text):
        return None
    reader = _Reader(text)
    try:
        value = reader.sum()
    except (_Undecided, ValueError, ZeroDivisionError, RecursionError):
        return None  # ValueError: digits of other scripts
    return None if reader.token else value


def _has_long_number(text: str) -> bool:
    return any(len(n.replace(".", "").lstrip("0")) >= literal.ENOUGH_DIGITS for n in _NUMBER.findall(text))


# ---- Reading ----------------------------------------------------------------------------------------------------------


class _Reader:
    """Reads by recursive descent; `token` is the next one, "" at the end."""

    def __init__(self, text: str):
        self._tokens = iter(_TOKEN.findall(text.strip()))
        self.token = ""
        self._advance()

    def _advance(self) -> str:
        token, self.token = self.token, next(self._tokens, "")
        return token

    def _take(self, *wanted: str) -> str:
        return self._advance() if self.token in wanted else ""

    def _closed(self, closing: str) -> Quotient:
        value = self.sum()
        if not self._take(closing):
            raise _Undecided
        return value

    def _group(self) -> Quotient:
        if not self._take("{"):
            raise _Undecided
        return self._closed("}")

    def sum(self) -> Quotient:
        total, sign = Quotient({}), self._take("+", "-")
        while True:
            total = _plus(total, self._product(), -1 if sign == "-" else 1)
            if not (sign := self._take("+", "-")):
                return total

    def _product(self) -> Quotient:
        after_number, divided = _NUMBER.fullmatch(self.token), False
        value = self._power()
        while True:
            if self._take(r"\cdot", r"\times"):
                after_number = _NUMBER.fullmatch(self.token)
                value = _times(value, self._power())
                continue
            if self._take("/", r"\div"):
                value, divided = _over(value, self._power()), True
            elif self.token in ("(", r"\frac", r"\sqrt") or _SYMBOL.fullmatch(self.token):
                # In "1/2x" the x may stand below, and "3\frac{1}{2}" may be a sum.
                if divided or (after_number and self.token == r"\frac"):
                    raise _Undecided
                value = _times(value, self._power())
            else:
                return value
            after_number = False

    def _power(self) -> Quotient:
        base = self._atom()
        if not self._take("^"):
            return base
        if self._take("{"):
            exponent = _rational(self._closed("}"))
        elif self.token.isdigit():
            exponent = Fraction(self._advance())
        else:
            raise _Undecided
        if self.token == "^":
            raise _Undecided
        return _to_power(base, exponent)

    def _atom(self) -> Quotient:
        token = self._advance()
        if _NUMBER.fullmatch(token):
            return Quotient(_constant(Fraction(token)))
        if _SYMBOL.fullmatch(token):
            return Quotient({((token, Fraction(1)),): Fraction(1)})
        if token == "(":
            return self._closed(")")
        if token == r"\frac":
            top = self._group()
            return _over(top, self._group())
        if token == r"\sqrt":
            degree = _rational(self._closed("]")) if self._take("[") else Fraction(2)
            return _to_power(self._group(), 1 / degree)
        raise _Undecided


# ---- Arithmetic -------------------------------------------------------------------------------------------------------


def _constant(value: Fraction) -> Polynomial:
    return {(): value} if value else {}


def _rational(value: Quotient) -> Fraction:
    if value.bottom != ONE or not value.top.keys() <= {()}:
        raise _Undecided
    return value.top.get((), Fraction(0))


def _term(factors: Iterable[tuple[str, Fraction]]) -> tuple[Term, Fraction]:
    """The product of powers of generators, as a term and its coefficient."""
    exponents: dict[str, Fraction] = {}
    for name, exponent in factors:
        exponents[name] = exponents.get(name, 0) + exponent
    coefficient = Fraction(1)
    for name, exponent in exponents.items():
        if name.isdigit():
            coefficient *= Fraction(int(name)) ** (exponent // 1)
            exponents[name] = exponent % 1
        elif name == "i":
            coefficient *= -1 if exponent % 4 >= 2 else 1
            exponents[name] = exponent % 2
    return tuple(sorted((name, exponent) for name, exponent in exponents.items() if exponent)), coefficient


def _collected(terms: Iterable[tuple[Term, Fraction]]) -> Polynomial:
    total: Polynomial = {}
    for term, coefficient in terms:
        total[term] = total.get(term, 0) + coefficient
    if any(max(c.numerator.bit_length(), c.denominator.bit_length()) > _MAX_BITS for c in total.values()):
        raise _Undecided
    return {term: coefficient for term, coefficient in total.items() if coefficient}


def _multiply(a: Polynomial, b: Polynomial) -> Polynomial:
    if len(a) * len(b) > _MAX_PRODUCTS:
        raise _Undecided
    products = []
    for (s, c), (t, d) in itertools.product(a.items(), b.items()):
        term, factor = _term(s + t) if s and t else (s or t, 1)
        products.append((term, c * d * factor))
    return _collected(products)


def _plus(a: Quotient, b: Quotient, sign: int) -> Quotient:
    left, right = (a.top, b.top) if a.bottom == b.bottom else (_multiply(a.top, b.bottom), _multiply(b.top, a.bottom))
    top = _collected([*left.items(), *((term, sign * c) for term, c in right.items())])
    return _reduced(top, a.bottom if a.bottom == b.bottom else _multiply(a.bottom, b.bottom))


def _times(a: Quotient, b: Quotient) -> Quotient:
    return _reduced(_multiply(a.top, b.top), _multiply(a.bottom, b.bottom))


def _over(a: Quotient, b: Quotient) -> Quotient:
    if not b.top:
        raise ZeroDivisionError
    return _reduced(_multiply(a.top, b.bottom), _multiply(a.bottom, b.top))


def _reduced(top: Polynomial, bottom: Polynomial) -> Quotient:
    """top / bottom, where a bottom of one term has gone into the top."""
    if not bottom:
        raise ZeroDivisionError
    if bottom == ONE or len(bottom) > 1:
        return Quotient(top, bottom)
    [(term, coefficient)] = bottom.items()
    inverse, factor = _term((name, -exponent) for name, exponent in term)
    return Quotient(_multiply(top, {inverse: factor / coefficient}))


def _to_power(base: Quotient, exponent: Fraction) -> Quotient:
    if not base.top:
        if exponent <= 0:
            raise _Undecided
        return base
    if exponent.denominator != 1:
        return Quotient(_root(_rational(base), exponent))
    if exponent < 0:
        base = _over(Quotient(ONE), base)
    times = abs(exponent.numerator)
    if len(base.top) == 1 and base.bottom == ONE:
        # One term, however high the power.
        [(term, coefficient)] = base.top.items()
        size = max(coefficient.numerator.bit_length(), coefficient.denominator.bit_length())
        if times * size > _MAX_BITS:
            raise _Undecided
        term, factor = _term((name, times * power) for name, power in term)
        return Quotient(_collected([(term, factor * coefficient**times)]))
    if times > _MAX_POWER:
        raise _Undecided
    return functools.reduce(_times, [base] * times, Quotient(ONE))


def _root(value: Fraction, exponent: Fraction) -> Polynomial:
    """value**exponent as a term: the positive root, or i times a positive square root."""
    if max(abs(value.numerator), value.denominator) > _MAX_RADICAND or abs(exponent) > _MAX_POWER:
        raise _Undecided
    factors = [(str(prime), exponent) for prime in _primes(abs(value.numerator))]
    factors += [(str(prime), -exponent) for prime in _primes(value.denominator)]
    if value < 0:
        if exponent != Fraction(1, 2):
            raise _Undecided
        factors.append(("i", Fraction(1)))
    term, coefficient = _term(factors)
    return _collected([(term, coefficient)])


def _primes(number: int) -> list[int]:
    """The prime factors of a positive number, repeated ones repeatedly."""
    found, prime = [], 2
    while prime * prime <= number:
        while number % prime == 0:
            found.append(prime)
            number //= prime
        prime += 1
    return found + [number] * (number > 1)
