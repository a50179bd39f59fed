"""The direction autopsy of a whole run: rates of its updates pooled, beside the paper's (arXiv 2607.10848)."""

import dataclasses
from collections.abc import Mapping, Sequence

# Unsafe-keep and contraction-keep rates that the paper reports for (ratio, predictive).
PAPER = {"unsafe_keep": (0.369, 0.342), "contraction_keep": (0.629, 0.651)}


@dataclasses.dataclass(frozen=True)
class Rates:
    """Pooled over the disputed tokens: outside the trust region, and the two criteria disagree.

    Attributes:
      outside: tokens outside the region.
      disputed: share of them on which the criteria disagree.
      unsafe_keep: of the updates that a criterion keeps, the share whose divergence grew; (ratio, predictive).
      contraction_keep: of the updates that really contracted, the share that a criterion keeps; (ratio, predictive).
      A rate over no tokens is NaN.
    """

    outside: float
    disputed: float
    unsafe_keep: tuple[float, float]
    contraction_keep: tuple[float, float]


def pool(rows: Sequence[Mapping[str, float]]) -> Rates:
    """Rates of all the updates of a run.

    Args:
      rows: metrics of its rollouts (`training.metrics.read_rows`); rows without an autopsy are passed over.

    Raises:
      ValueError: no row has an autopsy.
    """
    rows = [row for row in rows if "autopsy/outside_tokens" in row]
    if not rows:
        raise ValueError("no row has autopsy/* metrics; run with config.training.autopsy_delta above 0")

    def pooled(rate, count):
        total = sum(row[count] for row in rows)
        # A row without such tokens has no rate; it weighs nothing.
        return sum(row[rate] * row[count] for row in rows if row[count] > 0) / total if total else float("nan")

    def both(rate, count):
        ratio, predictive = (pooled(f"autopsy/{c}/{rate}", count.format(c)) for c in ("ratio", "predictive"))
        return ratio, predictive

    return Rates(
        outside=sum(row["autopsy/outside_tokens"] for row in rows),
        disputed=pooled("autopsy/disagree", "autopsy/outside_tokens"),
        unsafe_keep=both("unsafe_keep", "autopsy/{}/kept_tokens"),
        contraction_keep=both("contraction_keep", "autopsy/shrank_tokens"),
    )
