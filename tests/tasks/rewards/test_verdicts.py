"""The graders against a table of verdicts written by hand (`verdicts`)."""

import collections

import pytest

from jaxrl_llm.tasks.rewards.pool import GraderPool, PoolConfig
from tests.tasks.rewards.verdicts import CASES


@pytest.fixture(scope="module")
def grades():
    # The machines that tests run on are busy: no verdict here may depend on the deadline.
    with GraderPool("math", PoolConfig(workers=2, deadline=60.0)) as pool:
        return pool.grade([{"completion": completion, "truth": truth} for _, completion, truth, _ in CASES])


@pytest.mark.parametrize("kind", sorted({kind for kind, *_ in CASES}))
def test_every_verdict_of_a_kind(kind, grades):
    wrong = [
        (completion, truth, grade)
        for (its_kind, completion, truth, verdict), grade in zip(CASES, grades, strict=True)
        if its_kind == kind and grade != float(verdict)
    ]
    assert not wrong


def test_the_table_has_no_case_twice_and_verdicts_of_both_sorts():
    assert len({(completion, truth) for _, completion, truth, _ in CASES}) == len(CASES) >= 150
    verdicts = collections.Counter(verdict for *_, verdict in CASES)
    assert min(verdicts.values()) >= 50
