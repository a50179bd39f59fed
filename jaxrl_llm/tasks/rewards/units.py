r"""Parts a quantity into what is counted and its unit: "5\text{ cm}^2" is 5 and cm^2, "12 apples" is 12 and apple.

A factor makes units of one dimension comparable (500 cm and 5 m). Percent and degree are units as well, of dimension 1.
"""

import dataclasses
import re
from fractions import Fraction

from jaxrl_llm.tasks.rewards import literal

_DEGREE, _PERCENT = "deg", "%"

# dimension -> unit -> size
_SIZES: dict[str, dict[str, Fraction]] = {
    "length": {
        "mm": Fraction(1, 1000),
        "cm": Fraction(1, 100),
        "m": Fraction(1),
        "km": Fraction(1000),
        "inch": Fraction(254, 10_000),
        "ft": Fraction(3048, 10_000),
        "yd": Fraction(9144, 10_000),
        "mile": Fraction(1_609_344, 1000),
    },
    "time": {
        "s": Fraction(1),
        "minute": Fraction(60),
        "h": Fraction(3600),
        "day": Fraction(86_400),
        "week": Fraction(604_800),
    },
    "mass": {
        "mg": Fraction(1, 1_000_000),
        "g": Fraction(1, 1000),
        "kg": Fraction(1),
        "lb": Fraction(45_359_237, 10**8),
    },
    "volume": {"ml": Fraction(1, 1000), "l": Fraction(1)},
    "money": {"cent": Fraction(1, 100), "dollar": Fraction(1)},
}
_NAMES = {
    "millimeter": "mm",
    "millimetre": "mm",
    "centimeter": "cm",
    "centimetre": "cm",
    "meter": "m",
    "metre": "m",
    "kilometer": "km",
    "kilometre": "km",
    "inche": "inch",
    "in": "inch",
    "foot": "ft",
    "feet": "ft",
    "yard": "yd",
    "mi": "mile",
    "second": "s",
    "sec": "s",
    "min": "minute",
    "hour": "h",
    "hr": "h",
    "milligram": "mg",
    "gram": "g",
    "kilogram": "kg",
    "pound": "lb",
    "milliliter": "ml",
    "millilitre": "ml",
    "liter": "l",
    "litre": "l",
    "percent": _PERCENT,
    "percentage": _PERCENT,
    "degree": _DEGREE,
    "people": "person",
    "men": "man",
    "women": "woman",
    "children": "child",
}
_KNOWN = {name: (dimension, size) for dimension, sizes in _SIZES.items() for name, size in sizes.items()}
_LETTERS = set("mshgLlJNWVKCF")
# What answers count. A word that is none of these is no unit: forgiven, "5 thirds" would be 5.
_COUNTED = frozenset(
    """unit square-unit cubic-unit person student man woman child boy girl people way apple orange egg book pencil pen card
    coin marble ball box bag bottle cup page point mark game side edge face vertex vertices vertice triangle square circle
    solution root value digit number integer letter word day week month year time step stair ticket chair table car bus
    house tree flower cat dog cow animal fish bird slice piece cookie candy candie candies cake pizza sandwich toy shirt
    item object element outcome subset pair set group team player row column tile block cube packet pack penny pennies
    nickel dime quarter euro joule newton watt volt kelvin mol mole radian rad mph kph""".split()  # noqa: SIM905
)
_SCALES = {
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_NOT_UNITS = re.compile(r"(?i)^(?:and|or|to|pi|sqrt|sin|cos|tan|log|ln|exp|is|mod|if|for|where|when|only|x|y|z)\b")

_WRAPPED = re.compile(
    r"^(.*[\d)}\]%.|a-zA-Z])\s*\\text\s*\{\s*([^{}\\]*?)\s*\}\s*(?:\^\s*\{?(\d)\}?)?\s*\.?$", re.DOTALL
)
_SPELLED = re.compile(r"^(.*[\d)}])(\s*)([A-Za-z][A-Za-z./ -]*?)\s*(?:\^\s*\{?(\d)\}?)?$", re.DOTALL)
_DEGREES = re.compile(r"^(.*[\d)}a-zA-Z])\s*\^\\circ\s*(?:\\text\s*\{\s*)?([CF])?\s*\}?$", re.DOTALL)

_SCALED = re.compile(rf"(?i)^([\d.,]*\d)\s*(?:\\text\s*\{{\s*)?({'|'.join(_SCALES)})s?\s*\}}?$")
_FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)")  # "sin 30 degrees" is no angle


@dataclasses.dataclass(frozen=True)
class Unit:
    """A unit as far as comparison needs it.

    Attributes:
      dimension: what may be compared, such as "length^2"; unknown units are their own dimension.
      size: in the dimension's base unit, as a fraction; for degrees that of a half-turn, 1/180 (of pi).
    """

    dimension: str
    size: Fraction = Fraction(1)

    @property
    def is_ratio(self) -> bool:
        """Whether the unit is a plain number: percent (1/100) or degree (pi/180)."""
        return self.dimension in (_PERCENT, _DEGREE)

    @property
    def factor(self) -> str:
        """The number that a ratio unit stands for, in LaTeX."""
        return r"\frac{1}{100}" if self.dimension == _PERCENT else r"\frac{\pi}{180}"


PERCENT = Unit(_PERCENT, Fraction(1, 100))
DEGREE = Unit(_DEGREE, Fraction(1, 180))


def split(text: str) -> tuple[str, Unit | None]:
    """The number or formula of a quantity (see `surface.normalize` for its form) and its unit, or None without one."""
    if text.endswith("%") and len(text) > 1:
        return text[:-1].strip(), PERCENT
    if (match := _DEGREES.match(text)) and not _FUNCTION.search(text):
        core, scale = match.groups()
        return core.strip(), Unit(f"degree {scale}") if scale else DEGREE
    if match := _WRAPPED.match(text):
        core, name, power = match.groups()
        return (core.strip(), _unit(name, power)) if _is_unit(name) and _may_count(core, name) else (text, None)
    if match := _SPELLED.match(text):
        core, space, name, power = match.groups()
        apart = space or (_canonical(name) in _KNOWN and len(name) > 1)
        if apart and _is_unit(name) and _may_count(core, name):
            return core.strip(), _unit(name, power)
    return text, None


def scale(text: str) -> tuple[str, int]:
    """What a number word at the end of `text` multiplies, and by how much: "5 million" is 5 and 1,000,000."""
    match = _SCALED.match(text)
    return (match.group(1), _SCALES[match.group(2).lower()]) if match else (text, 1)


def _is_unit(name: str) -> bool:
    """Whether a word, or several such as "square cm" and "miles per hour", is a unit or something that is counted."""
    words = [
        w
        for w in re.split(r"[\s/.]+|-(?=unit)", name)
        if w and w.lower() not in ("per", "square", "sq", "cubic", "cu", "a")
    ]
    if not words:
        return False
    return all(w in _LETTERS or _canonical(w) in _KNOWN or _canonical(w) in (_PERCENT, _DEGREE) or _canonical(w) in _COUNTED
               or _canonical(w) in _NAMES.values() for w in words) and not _NOT_UNITS.match(name)  # fmt: skip


def _may_count(core: str, name: str) -> bool:
    """Whether `name` may be a unit after `core`: a single letter is one after a number alone, in a formula it is a factor."""
    return len(name) > 1 or literal.read(core) is not None


def _unit(name: str, power: str | None) -> Unit:
    name = name.strip().strip(".")
    words = name.split()
    if words and words[0].lower() in ("square", "sq", "sq.", "cubic", "cu"):
        power = "3" if words[0].lower().startswith("cu") else "2"
        name = " ".join(words[1:])
    canonical = _canonical(name)
    if canonical in (_PERCENT, _DEGREE):
        return PERCENT if canonical == _PERCENT else DEGREE
    dimension, size = _KNOWN.get(canonical, (canonical, Fraction(1)))
    exponent = int(power or 1)
    return Unit(dimension if exponent == 1 else f"{dimension}^{exponent}", size**exponent)


def _canonical(name: str) -> str:
    name = name.strip().rstrip(".").lower()
    for candidate in (name, name.removesuffix("s"), name.removesuffix("es")):
        if candidate in _KNOWN or candidate in _NAMES:
            return _NAMES.get(candidate, candidate)
    return name.removesuffix("s")
