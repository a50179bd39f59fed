"""Whatever an answer does to a grader, the pool goes on, and says what happened."""

import concurrent.futures
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jaxrl_llm.tasks.rewards.pool import GraderPool, PoolConfig

ROOT = pathlib.Path(__file__).parents[3]
JUDGES = "tests.tasks.rewards.judges"


@pytest.fixture(scope="module", autouse=True)
def importable_judges():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


@pytest.fixture(scope="module")
def math_pool():
    with GraderPool("math", PoolConfig(workers=2, deadline=2.0)) as pool:
        yield pool


@pytest.fixture(scope="module")
def careless_pool():
    with GraderPool(f"{JUDGES}:careless", PoolConfig(workers=1, deadline=0.5, recycle=50)) as pool:
        yield pool


def math(*pairs):
    return [{"completion": completion, "truth": truth} for completion, truth in pairs]


def test_pathological_answers_cost_their_deadline_and_score_nothing(math_pool):
    answers = [
        r"\boxed{9^9^9^9}",
        r"\boxed{9^{9^{9^9}}}",
        r"\boxed{(10^{10})!}",
        r"\boxed{" + "1+" * 50_000 + "1}",
        "x" * 100_000,
        r"\boxed" * 20_000,
        r"\boxed{" + "{" * 50_000,
    ]
    right = (r"\boxed{7}", "7")
    start = time.monotonic()
    grades = math_pool.grade(math(right, *((answer, "7") for answer in answers), right))
    seconds = time.monotonic() - start
    assert grades == [1.0, *[0.0] * len(answers), 1.0]
    # No bound on speed: one on what is promised, that each answer costs at most its deadline (with starts of workers).
    assert seconds < (2.0 + 20.0) * len(answers)
    assert math_pool.counts["timeouts"] >= 1
    assert math_pool.counts["errors"] == 0


def test_it_works_from_any_thread_and_keeps_the_order(math_pool):
    def grade(shift):
        return math_pool.grade(math(*((rf"\boxed{{{i % 3}}}", str(shift)) for i in range(12))))

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        results = list(threads.map(grade, (0, 1, 2, 3)))
    assert results == [[float(i % 3 == shift) for i in range(12)] for shift in (0, 1, 2, 3)]


def test_late_answers_score_zero_but_a_truth_that_takes_too_long_is_an_error(careless_pool):
    before = careless_pool.counts.copy()
    assert careless_pool.grade([{"after": 30}, {}, {"before": 30}, {}]) == [0.0, 1.0, None, 1.0]
    change = careless_pool.counts - before
    assert (change["graded"], change["timeouts"], change["errors"]) == (3, 1, 1)
    assert "while the truth was read" in careless_pool.last_error


def test_a_grader_that_fails_gives_no_grade_and_is_counted(careless_pool):
    before = careless_pool.counts.copy()
    assert careless_pool.grade([{"crash": True}, {"raise": True}, {"score": 0.25}]) == [None, None, 0.25]
    assert (careless_pool.counts - before)["errors"] == 2
    assert "cannot judge this" in careless_pool.last_error
    assert careless_pool.grade([{"unjson": {1, 2}}, {}]) == [None, 1.0]
    assert "set is not JSON serializable" in careless_pool.last_error


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited on Linux only")
def test_an_answer_that_fills_the_memory_scores_zero(careless_pool):
    before = careless_pool.counts.copy()
    assert careless_pool.grade([{"fill": True}, {}]) == [0.0, 1.0]
    assert (careless_pool.counts - before)["timeouts"] == 1


def test_workers_are_replaced_when_they_served_enough_or_were_killed_from_outside():
    with GraderPool(f"{JUDGES}:careless", PoolConfig(workers=1, recycle=2)) as pool:
        assert pool.grade([{}] * 5) == [1.0] * 5
        assert pool.counts["started"] == 3
        victim = pool._workers[0].process
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
        assert pool.grade([{}]) == [1.0]
        last = pool._workers[0].process
    assert last.poll() is not None
    with pytest.raises(RuntimeError, match="the grader pool is closed"):
        pool.grade([{}])


def test_workers_load_no_jax():
    code = "import sys; import jaxrl_llm.tasks.rewards.worker; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_library_that_is_missing_is_named():
    with (
        GraderPool(f"{JUDGES}:unavailable", PoolConfig(workers=1)) as pool,
        pytest.raises(RuntimeError, match="did not start: ModuleNotFoundError: No module named 'no_such_library'"),
    ):
        pool.grade([{}])
    with pytest.raises(ValueError, match="unknown grader 'maths'; choose from: math"):
        GraderPool("maths")


def test_workers_end_with_a_parent_that_was_killed():
    script = (
        "import os; from jaxrl_llm.tasks.rewards.pool import GraderPool, PoolConfig\n"
        f"pool = GraderPool('{JUDGES}:careless', PoolConfig(workers=1)); pool.grade([{{}}])\n"
        "print(pool._workers[0].process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    worker = int(done.stdout)
    limit = time.monotonic() + 20
    while _alive(worker) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not _alive(worker)


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = pathlib.Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workers": -1}, "pool.workers is -1"),
        ({"deadline": 0.0}, "pool.deadline is 0.0; it must be positive"),
        ({"recycle": 0}, "pool.recycle is 0"),
    ],
)
def test_bad_settings_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        PoolConfig(**fields)
