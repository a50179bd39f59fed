"""Pooling of the autopsy's rates, by hand."""

import pytest

from jaxrl_llm.analysis import autopsy


def row(outside, disagree, kept, unsafe, shrank, contraction):
    values = {"autopsy/outside_tokens": outside, "autopsy/disagree": disagree, "autopsy/shrank_tokens": shrank}
    for i, name in enumerate(("ratio", "predictive")):
        values[f"autopsy/{name}/kept_tokens"] = kept[i]
        values[f"autopsy/{name}/unsafe_keep"] = unsafe[i]
        values[f"autopsy/{name}/contraction_keep"] = contraction[i]
    return values


def test_rates_are_weighed_by_the_tokens_behind_them():
    rows = [
        {"reward/mean": 1.0},  # an evaluation's row
        row(10, 0.4, (3, 1), (1 / 3, 0.0), 2, (0.5, 0.5)),
        row(30, 0.2, (1, 5), (1.0, 0.2), 4, (0.25, 0.75)),
    ]
    rates = autopsy.pool(rows)
    assert rates.outside == 40
    assert rates.disputed == pytest.approx((4 + 6) / 40)
    assert rates.unsafe_keep == pytest.approx(((1 + 1) / 4, (0 + 1) / 6))
    assert rates.contraction_keep == pytest.approx(((1 + 1) / 6, (1 + 3) / 6))


def test_a_row_whose_criteria_agree_everywhere_weighs_nothing():
    quiet = {"autopsy/outside_tokens": 0.0, "autopsy/shrank_tokens": 0.0}
    quiet |= {"autopsy/ratio/kept_tokens": 0.0, "autopsy/predictive/kept_tokens": 0.0}
    busy = row(10, 0.4, (3, 1), (1 / 3, 0.0), 2, (0.5, 0.5))
    assert autopsy.pool([quiet, busy]) == autopsy.pool([busy])


def test_a_run_without_autopsy_says_how_to_get_one():
    with pytest.raises(ValueError, match="autopsy_delta"):
        autopsy.pool([{"reward/mean": 1.0}])
