"""What a compiled program costs each device, read from its optimised HLO text: matrix FLOPs and collective bytes.

XLA's own `cost_analysis()` counts the body of a loop once, and a training step is loops within loops (layers, micro-batches,
blocks of tokens). Here every instruction counts as often as its loops run. Written here because no library reads trip
counts; the text is that of `compiled.as_text()`, after partitioning, so all sizes are one device's.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Mapping

import numpy as np

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4} | {
    "s64": 8,
    "u64": 8,
    "f64": 8,
    "c64": 8,
    "s4": 0.5,
    "u4": 0.5,
}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|branch_computations|called_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?")


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of one run of the program on one device.

    Attributes:
      flops: multiplications and additions of matrix products.
      collective_bytes: kind -> bytes that the device sends over its links (ring algorithms).
      loops: body of each loop -> how often it runs; those whose count could not be read count once and are None.
    """

    flops: float
    collective_bytes: Mapping[str, float]
    loops: Mapping[str, int | None]


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    op: str
    rest: str  # operands and attributes


def costs(text: str) -> Costs:
    """Costs of the module in `text`.

    Raises:
      ValueError: no entry computation, that is, not the text of a compiled program.
    """
    computations, entry = _parse(text)
    if entry is None:
        raise ValueError("the text has no ENTRY computation: it is not that of a compiled program")
    flops, collectives, loops = 0.0, collections.Counter(), {}

    def visit(name: str, times: float) -> None:
        nonlocal flops
        shapes = {i.name: i.shape for i in computations[name]}
        for instruction in computations[name]:
            flops += times * _flops(instruction, shapes)
            kind = instruction.op.removesuffix("-start")
            if kind in COLLECTIVES:
                collectives[kind] += times * _sent(instruction, kind, shapes)
            inner = times
            if instruction.op == "while":
                body = _attribute(instruction.rest, "body")
                loops[body] = _trips(instruction, computations)
                inner = times * (loops[body] or 1)
            elif kind in ("all-reduce", "reduce-scatter"):
                continue  # they call an addition
            for called in _called(instruction.rest):
                if called in computations:
                    visit(called, inner)

    visit(entry, 1.0)
    return Costs(flops, dict(collectives), loops)


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str | None]:
    computations, entry, current = {}, None, None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(_Instruction(*match.groups()))
    return computations, entry


def _called(rest: str) -> list[str]:
    return [name.strip().lstrip("%") for match in _CALLED.findall(rest) for name in match.split(", ")]


def _attribute(rest: str, key: str) -> str:
    return re.search(rf"\b{key}=%?([\w.\-]+)", rest)[1]


def _dims(shape: str) -> list[int]:
    return [int(d) for d in _SHAPE.search(shape)[2].split(",") if d]


def _size(shape: str) -> float:
    """Bytes of an array or of a tuple's arrays together."""
    return sum(
        BYTES.get(kind, 1) * math.prod(int(d) for d in dims.split(",") if d) for kind, dims in _SHAPE.findall(shape)
    )


def _operands(rest: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", rest[: rest.index(")")])


def _flops(instruction: _Instruction, shapes: Mapping[str, str]) -> float:
    if instruction.op not in ("dot", "convolution"):
        return 0.0
    left, right = (_dims(shapes[name]) for name in _operands(instruction.rest)[:2])
    out = math.prod(_dims(instruction.shape))
    if instruction.op == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)[1]
        return 2.0 * out * math.prod(left[int(d)] for d in contracted.split(",") if d)
    # TPUs write matrix products as convolutions. Batch dimensions hide in windows that reach over dilation or padding,
    # where there is nothing to multiply.
    lhs, kernel, result = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest).groups()
    window = re.search(r"window=\{([^}]*)\}", instruction.rest)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}
    sizes = [int(size) for size in fields["size"].split("x")] if fields else []
    strides, dilations, kernel_dilations = (
        [int(n) for n in fields[name].split("x")] if name in fields else [1] * len(sizes)
        for name in ("stride", "lhs_dilate", "rhs_dilate")
    )
    pads = [int(pad.split("_")[0]) for pad in fields["pad"].split("x")] if "pad" in fields else [0] * len(sizes)
    flops, outs = 2.0 * out * right[kernel.index("i")], _dims(instruction.shape)
    for d, geometry in enumerate(zip(sizes, strides, pads, dilations, kernel_dilations, strict=True)):
        steps = outs[result.index(str(d))]
        flops *= _products(left[lhs.index(str(d))], steps, *geometry) / steps
    return flops


@functools.cache
def _products(length: int, steps: int, size: int, stride: int, pad: int, dilation: int, kernel_dilation: int) -> int:
    """How often a window of `size`, moved `steps` times along `length` values, meets a value, and not padding or dilation."""
    at = np.arange(steps)[:, None] * stride + np.arange(size) * kernel_dilation - pad
    return int(np.sum((at >= 0) & (at <= (length - 1) * dilation) & (at % dilation == 0)))


def _sent(instruction: _Instruction, kind: str, shapes: Mapping[str, str]) -> float:
    operands = sum(_size(shapes[name]) for name in _operands(instruction.rest) if name in shapes)
    n = _group_size(instruction.rest)
    share = (n - 1) / n
    return {
        "all-gather": operands * (n - 1),
        "all-reduce": 2 * operands * share,
        "reduce-scatter": operands * share,
        "all-to-all": operands * share,
        "ragged-all-to-all": operands * share,
        "collective-permute": operands,
    }[kind]


def _group_size(rest: str) -> int:
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest):
        return int(match[2])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        sizes = dict(part.split("=") for part in match[1].split(","))
        return math.prod(int(sizes[axis]) for axis in match[2].split(","))
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return match[1].count(",") + 1
    return 2  # a permutation names pairs


def _trips(instruction: _Instruction, computations: Mapping[str, list[_Instruction]]) -> int | None:
    if match := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', instruction.rest):
        return int(match[1])
    # A counted loop compares its counter with a constant: the largest one that the condition holds.
    pending, found = [_attribute(instruction.rest, "condition")], []
    while pending:
        for inner in computations.get(pending.pop(), ()):
            if inner.op == "constant" and inner.shape.startswith(("s32[]", "u32[]")):
                found.append(int(re.match(r"-?\d+", inner.rest)[0]))
            pending += _called(inner.rest)
    return max(found, default=None)
