"""A plan in words: what each program needs of a chip, whether it fits, and what would help."""

import dataclasses
from collections.abc import Sequence

from jaxrl_llm.plan.chips import Chip
from jaxrl_llm.plan.programs import Program

GIB = 2**30
# libtpu keeps some memory to itself; a plan that fills the chip to the last byte does not run.
USABLE = 0.95


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one run at the chip's published ceilings: no program is faster, real ones are slower.

    Attributes:
      compute: matrix products at the peak rate.
      memory: every resident byte read once.
      links: collectives over the chip's own links.
    """

    compute: float
    memory: float
    links: float

    @property
    def total(self) -> float:
        """The slowest of the three, as if they overlapped perfectly."""
        return max(self.compute, self.memory, self.links)


def estimate(program: Program, chip: Chip) -> Estimate:
    """Of one device, which has its share of the chip."""
    return Estimate(
        compute=program.flops / (chip.flops / chip.cores),
        memory=sum(program.resident.values()) / (chip.hbm_bandwidth / chip.cores),
        links=sum(program.collective_bytes.values()) / (chip.link_bandwidth / chip.cores),
    )


def fits(program: Program, chip: Chip) -> bool:
    """Whether the program's peak leaves the runtime its share of the memory."""
    return program.peak <= USABLE * chip.hbm / chip.cores


def advice(program: Program, chip: Chip) -> str:
    """The verdict on one program, and for one that does not fit the knob that would help most."""
    if fits(program, chip):
        return "FITS"
    largest = max({**program.resident, "temporaries": program.temporary}.items(), key=lambda part: part[1])[0]
    knob = {
        "temporaries": "config.model.remat = 'full', more config.training.micro_batches or"
        " config.mesh.sequence, or fewer config.rollout.slots",
        "KV cache": "fewer config.rollout.slots, or more config.mesh.tensor",
        "batch": "more config.training.updates_per_rollout",
    }.get(largest, "more devices in config.mesh.fsdp, or config.model.param_dtype = 'bfloat16'")
    return f"DOES NOT FIT: {largest} take the most; try {knob}"


def table(programs: Sequence[Program], chip: Chip) -> list[tuple[str, ...]]:
    """Rows of (quantity, value for each program), the first one the header."""

    def row(name, value):
        return (name, *(value(program) for program in programs))

    def gib(size):
        return f"{size / GIB:.2f} GiB"

    parts = list(dict.fromkeys(part for program in programs for part in program.resident))
    kinds = sorted({kind for program in programs for kind in program.collective_bytes})
    return [
        row("per device", lambda p: p.name),
        *(row(part, lambda p, part=part: gib(p.resident[part]) if part in p.resident else "") for part in parts),
        row("activations and temporaries", lambda p: gib(p.temporary)),
        row("peak", lambda p: f"{gib(p.peak)} of {gib(chip.hbm / chip.cores)}"),
        row("matrix FLOPs", lambda p: f"{p.flops:.3g}"),
        row("times the model's own / devices", lambda p: f"{p.flops / p.ideal_flops:.2f}"),
        *(row(f"sent by {kind}", lambda p, kind=kind: gib(p.collective_bytes.get(kind, 0.0))) for kind in kinds),
        row("least time: compute", lambda p: f"{1e3 * estimate(p, chip).compute:.1f} ms"),
        row("least time: memory", lambda p: f"{1e3 * estimate(p, chip).memory:.1f} ms"),
        row("least time: links", lambda p: f"{1e3 * estimate(p, chip).links:.1f} ms"),
        row("verdict", lambda p: "FITS" if fits(p, chip) else "DOES NOT FIT"),
    ]
