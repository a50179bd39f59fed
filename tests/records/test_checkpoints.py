"""Checkpoints: what comes back, on which mesh, after which accidents."""

import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.records.checkpoints import Checkpoints, OtherModel, SaveError, config_difference
from jaxrl_llm.types import TrainState


def make_state(value: float = 0.0, width: int = 16, dtype=jnp.float32) -> TrainState:
    params = {
        "embedding": jnp.arange(8 * width, dtype=dtype).reshape(8, width) + value,
        "layers": {"kernel": jnp.full((3, width, 4), value, dtype)},
    }
    opt_state = optax.adam(1e-3).init(params)
    return TrainState(step=jnp.int32(7), params=params, opt_state=opt_state, skipped=jnp.int32(1))


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def save_all(path, values, **options):
    """Saves states 1, 2, ... of the given values and closes."""
    with Checkpoints(path, **options) as checkpoints:
        for number, value in enumerate(values, 1):
            checkpoints.save(number, make_state(value), {"position": 10 * number})


def test_round_trip_in_a_new_manager(tmp_path):
    save_all(tmp_path, [1.5])
    with Checkpoints(tmp_path) as checkpoints:
        rollout, state, record = checkpoints.restore(jax.eval_shape(make_state))
    assert (rollout, record) == (1, {"position": 10})
    assert_same(state, make_state(1.5))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8", "bool", "uint32"])
def test_every_dtype(tmp_path, dtype):
    tree = {"x": jnp.asarray(np.arange(-6, 6).reshape(3, 4) % 5, dtype)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree, {})
        assert_same(checkpoints.restore(tree).state, tree)


def test_nothing_saved_is_none(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(make_state()) is None
        assert checkpoints.latest() is None
        assert checkpoints.best() is None


def test_donation_and_later_changes_do_not_reach_the_checkpoint(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    x = jax.device_put(jax.random.normal(jax.random.key(0), (1024, 1024)), NamedSharding(mesh, P("fsdp")))
    before = np.array(x)
    step = jax.jit(lambda v: v + 1.0, donate_argnums=0)
    record = {"position": 1, "nested": {"n": 1}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": x}, record)
        record["position"], record["nested"]["n"] = 2, 2
        for _ in range(5):
            x = step(x)
        jax.block_until_ready(x)
        restored = checkpoints.restore({"x": x})
    np.testing.assert_array_equal(np.asarray(restored.state["x"]), before)
    assert restored.record == {"position": 1, "nested": {"n": 1}}


def test_another_mesh_shape(tmp_path):
    devices = np.array(jax.devices())
    old = Mesh(devices.reshape(4, 2), ("fsdp", "tensor"))
    new = Mesh(devices[:6].reshape(2, 3)[:, :2], ("fsdp", "tensor"))
    state = make_state(3.0)
    saved = jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(old, P("fsdp") if x.shape[:1] == (8,) else P())), state
    )
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved, {})

    def place(x):
        spec = P("tensor", "fsdp") if x.shape[:1] == (8,) else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(new, spec))

    like = jax.tree.map(place, state)
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(like).state
    assert_same(restored, state)
    for array, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert array.sharding.is_equivalent_to(wanted.sharding, array.ndim)


def test_part_of_a_state(tmp_path):
    save_all(tmp_path, [2.0])
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        like = make_state().replace(opt_state=None)
        restored = checkpoints.restore(like, partial=True).state
        assert_same(restored, make_state(2.0).replace(opt_state=None))
        with pytest.raises(OtherModel, match="opt_state"):
            checkpoints.restore(like)


def test_keeps_recent_and_best(tmp_path):
    accuracies = {1: 0.2, 2: 0.9, 3: None, 4: 0.3, 5: float("nan"), 6: None}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for number, accuracy in accuracies.items():
            checkpoints.save(number, make_state(number), {}, accuracy)
            checkpoints.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "5", "6"]
    # The best is known to a new manager too, and loses its place to a better one.
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.best() == 2
        checkpoints.save(7, make_state(7), {}, 0.95)
        checkpoints.save(8, make_state(8), {}, 0.1)
        checkpoints.save(9, make_state(9), {}, None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["7", "8", "9"]


def test_saving_again_replaces_the_course_that_was_left(tmp_path):
    save_all(tmp_path, [1.0, 2.0, 3.0], keep=5)
    with Checkpoints(tmp_path, keep=5) as checkpoints:
        assert checkpoints.restore(make_state(), 1).rollout == 1
        checkpoints.save(2, make_state(20.0), {"position": 200})
        checkpoints.save(2, make_state(21.0), {"position": 210})
        assert checkpoints.rollouts() == [1, 2]
        restored = checkpoints.restore(make_state())
    assert restored.record == {"position": 210}
    assert_same(restored.state, make_state(21.0))


def test_absent_number_lists_the_choices(tmp_path):
    save_all(tmp_path, [1.0, 2.0])
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=r"no checkpoint 5 .* choose from: 1, 2"):
        checkpoints.restore(make_state(), 5)


def test_read_only_names_what_is_wrong_with_a_path(tmp_path):
    with pytest.raises(ValueError, match=r"missing does not exist"):
        Checkpoints(tmp_path / "missing", read_only=True)
    assert not (tmp_path / "missing").exists()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a directory of checkpoints.*config\.json"):
        Checkpoints(tmp_path, read_only=True)


def test_unwritable_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/checkpoints cannot be written: Not a directory"):
        Checkpoints(tmp_path / "file" / "checkpoints")


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (lambda: make_state(width=8), r"params/embedding has shape \(8, 16\) there, \(8, 8\) here"),
        (lambda: make_state(dtype=jnp.bfloat16), r"params/embedding is float32 there, bfloat16 here"),
        (
            lambda: make_state().replace(params={**make_state().params, "head": jnp.zeros(3)}),
            r"params/head is missing from the checkpoint",
        ),
        (
            lambda: make_state().replace(params={"embedding": make_state().params["embedding"]}),
            r"params/layers/kernel is only in the checkpoint",
        ),
    ],
)
def test_other_model_names_the_first_difference(tmp_path, like, message):
    save_all(tmp_path, [1.0, 2.0])
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(OtherModel, match=f"2 is a checkpoint of another model: {message}"):
            checkpoints.restore(jax.eval_shape(like))
        assert checkpoints.rollouts() == [1, 2]


def damage(path: pathlib.Path, kind: str):
    content = bytearray(path.read_bytes())
    if kind == "gone":
        path.unlink()
        return
    if kind == "torn":
        content = content[: len(content) // 2]
    elif kind == "flipped":
        content[len(content) // 2] ^= 0x10
    elif kind == "zeros":
        content = bytearray(len(content))
    path.write_bytes(content)


# The storage library drops a coroutine when it meets a torn file.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["torn", "flipped", "zeros", "gone"])
def test_damage_to_any_file_falls_back_or_does_no_harm(tmp_path, kind):
    # Random numbers do not compress, so that a flipped bit reaches the data itself.
    def state(number):
        return {"x": jax.random.normal(jax.random.key(number), (64, 64)), "n": jnp.int32(number)}

    with Checkpoints(tmp_path, keep=5) as checkpoints:
        for number in (1, 2):
            checkpoints.save(number, state(number), {"position": number})
    newest = tmp_path / "2"
    fell_back = 0
    for path in sorted(p for p in newest.rglob("*") if p.is_file() and p.stat().st_size):
        whole = {p: p.read_bytes() for p in newest.rglob("*") if p.is_file()}
        damage(path, kind)
        lines = []
        with Checkpoints(tmp_path, keep=5, report=lines.append) as checkpoints:
            rollout, restored, record = checkpoints.restore(state(0))
        # Either way the numbers are those of the checkpoint that it says it is.
        assert record == {"position": rollout}
        assert_same(restored, state(rollout))
        if rollout == 1:
            fell_back += 1
            assert str(newest) in lines[0] and lines[-1] == "going on from checkpoint 1 instead"
            assert (tmp_path / "damaged-2").is_dir() and not newest.exists()
            os.rename(tmp_path / "damaged-2", newest)
        else:
            assert not lines
        for p, content in whole.items():
            p.write_bytes(content)
    assert fell_back >= 4


def test_a_damaged_number_can_be_saved_again(tmp_path):
    save_all(tmp_path, [1.0, 2.0])
    damage(tmp_path / "2" / "record" / "metadata", "torn")
    with Checkpoints(tmp_path, report=lambda line: None) as checkpoints:
        assert checkpoints.restore(make_state()).rollout == 1
        checkpoints.save(2, make_state(2.5), {"position": 25})
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(make_state())
    assert restored.record == {"position": 25}
    assert_same(restored.state, make_state(2.5))


def test_all_damaged_names_each_and_moves_none(tmp_path):
    save_all(tmp_path, [1.0, 2.0])
    for number in (1, 2):
        damage(tmp_path / str(number) / "record" / "metadata", "flipped")
    message = r"(?s)no checkpoint in .* can be read:\n  2: .*\n  1: "
    with Checkpoints(tmp_path, report=lambda line: None) as checkpoints, pytest.raises(ValueError, match=message):
        checkpoints.restore(make_state())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def test_reading_only_leaves_a_damaged_checkpoint_alone(tmp_path):
    save_all(tmp_path, [1.0, 2.0])
    damage(tmp_path / "2" / "record" / "metadata", "torn")
    with Checkpoints(tmp_path, read_only=True, report=lambda line: None) as checkpoints:
        assert checkpoints.restore(make_state()).rollout == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


@pytest.fixture
def full_disk():
    """A limit on the size of files stands in for a full disk: the same write fails, with another number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_full_disk_is_said_and_survived(tmp_path, full_disk):
    state = {"x": jax.random.normal(jax.random.key(0), (512, 512))}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {"position": 1})
    checkpoints.wait()
    full_disk(100_000)
    with pytest.raises(SaveError, match=r"could not be written to .*: File too large; whole ones there: 1$"):
        checkpoints.save(2, state, {"position": 2})
        checkpoints.wait()
    full_disk(resource.RLIM_INFINITY)
    assert checkpoints.restore(state).record == {"position": 1}
    checkpoints.save(2, state, {"position": 2})
    checkpoints.close()
    with Checkpoints(tmp_path) as again:
        assert again.restore(state).record == {"position": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_save_does_not_hide_the_error_under_way(tmp_path, full_disk):
    state, lines = {"x": jax.random.normal(jax.random.key(0), (512, 512))}, []
    with pytest.raises(KeyError, match="the first error"), Checkpoints(tmp_path, report=lines.append) as checkpoints:
        full_disk(100_000)
        checkpoints.save(1, state, {})
        raise KeyError("the first error")
    assert "could not be written" in lines[0]


def test_leftovers_of_a_killed_save_are_ignored_and_swept(tmp_path):
    save_all(tmp_path, [1.0])
    partial = tmp_path / "2.orbax-checkpoint-tmp" / "state"
    partial.mkdir(parents=True)
    (partial / "manifest.ocdbt").write_bytes(b"\x0c\xdb")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(make_state()).rollout == 1
    assert not partial.exists()


KILLED = textwrap.dedent("""
    import sys
    import jax, jax.numpy as jnp
    from jaxrl_llm.records.checkpoints import Checkpoints
    x = jax.random.normal(jax.random.key(0), (1500, 1500))
    with Checkpoints(sys.argv[1], keep=3) as checkpoints:
        for number in range(1, 10_000):
            checkpoints.save(number, {"x": x + number, "n": jnp.int32(number)}, {"position": number})
            print(number, flush=True)
""")


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.03, 0.07, 0.15])
def test_sigkill_during_a_save_leaves_whole_checkpoints(tmp_path, delay):
    path = tmp_path / "checkpoints"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if int(line) == 4:  # the fourth save has begun
            break
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()

    like = {"x": jnp.zeros((1500, 1500)), "n": jnp.int32(0)}
    x = np.asarray(jax.random.normal(jax.random.key(0), (1500, 1500)))
    lines = []
    with Checkpoints(path, keep=3, report=lines.append) as checkpoints:
        found = checkpoints.rollouts()
        assert found and found[-1] >= 3
        for number in found:
            restored = checkpoints.restore(like, number)
            assert restored.record == {"position": number} and int(restored.state["n"]) == number
            np.testing.assert_array_equal(np.asarray(restored.state["x"]), x + np.float32(number))
        checkpoints.save(found[-1] + 1, like, {"position": -1})
        checkpoints.wait()
        assert checkpoints.latest() == found[-1] + 1
    assert not lines


def test_config_difference_is_readable():
    old = {"seed": 0, "optimizer": {"lr": 1e-3, "b": (1, 2)}, "gone": 1, "run_dir": "a", "checkpoint": {"keep": 2}}
    new = {"seed": 0, "optimizer": {"lr": 1e-4, "b": (1, 2)}, "added": [1], "run_dir": "b", "checkpoint": {"keep": 3}}
    stored = json.loads(json.dumps(old))
    assert config_difference(stored, old) == []
    assert config_difference(stored, new) == [
        "config.added: '(absent)' -> [1]",
        "config.gone: 1 -> '(absent)'",
        "config.optimizer.lr: 0.001 -> 0.0001",
    ]
