"""The run directory: never over an existing run, never half made, and clear about why not."""

import json
import multiprocessing

import pytest

from jaxrl_llm.records.run_dir import RunDir, open_run_dir

CONFIG = {"run_dir": "x", "seed": 1, "nested": {"values": (1, 2)}}


def create(path, config=CONFIG, *, resume=False, overwrite=False) -> RunDir:
    return open_run_dir(str(path), config, resume=resume, overwrite=overwrite)


def names(path):
    return sorted(p.name for p in path.iterdir())


def test_new_run(tmp_path):
    run = create(tmp_path / "deep" / "run")
    assert run.path == tmp_path / "deep" / "run"
    assert names(run.path) == ["checkpoints", "config.json", "plots", "samples", "tensorboard"]
    assert run.read_config() == json.loads(json.dumps(CONFIG)) == {**CONFIG, "nested": {"values": [1, 2]}}


def test_a_relative_path_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert create("runs/a").path == tmp_path / "runs" / "a"


def test_an_existing_run_is_kept(tmp_path):
    run = create(tmp_path / "run")
    run.metrics.write_text("precious")
    with pytest.raises(ValueError, match=r"already holds a run; use --resume to go on, --overwrite to replace it"):
        create(tmp_path / "run", {**CONFIG, "seed": 2})
    assert run.metrics.read_text() == "precious"
    assert run.read_config()["seed"] == 1


def test_overwrite_replaces_what_a_run_writes_and_nothing_else(tmp_path):
    run = create(tmp_path / "run")
    run.metrics.write_text("old")
    (run.samples / "before.md").write_text("old")
    (run.checkpoints / "1").mkdir()
    (run.path / "notes.txt").write_text("mine")
    run = create(tmp_path / "run", {**CONFIG, "seed": 2}, overwrite=True)
    assert names(run.path) == ["checkpoints", "config.json", "notes.txt", "plots", "samples", "tensorboard"]
    assert not names(run.samples) and not names(run.checkpoints)
    assert run.read_config()["seed"] == 2


@pytest.mark.parametrize("options", [{"overwrite": True}, {"resume": True}])
def test_a_directory_of_something_else_is_refused(tmp_path, options):
    # A model's checkpoint has a config.json too.
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "a.md").write_text("mine")
    with pytest.raises(ValueError, match=r"config.json is not a run's configuration: it has no field run_dir"):
        create(tmp_path, **options)
    assert (tmp_path / "samples" / "a.md").read_text() == "mine"
    assert names(tmp_path) == ["config.json", "samples"]


def test_files_under_our_names_without_a_run_are_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("mine")
    (tmp_path / "plots").mkdir()
    with pytest.raises(ValueError, match=r"holds metrics.jsonl but no run \(no config.json\)"):
        create(tmp_path, overwrite=True)
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"


def test_a_start_that_was_killed_can_be_repeated(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "samples").mkdir()
    assert create(tmp_path).read_config()["seed"] == 1


def test_resume(tmp_path):
    with pytest.raises(ValueError, match=r"holds no run to resume \(no config.json\)"):
        create(tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()
    created = create(tmp_path / "run")
    before = created.config.read_bytes()
    created.plots.rmdir()
    run = create(tmp_path / "run", {**CONFIG, "seed": 2}, resume=True)
    # A refusal that follows must not have changed the record of what the run was.
    assert run.config.read_bytes() == before
    assert run.plots.is_dir()
    run.write_config({**CONFIG, "seed": 2})
    assert run.read_config()["seed"] == 2
    assert names(run.path) == ["checkpoints", "config.json", "plots", "samples", "tensorboard"]


def test_a_torn_configuration_is_named(tmp_path):
    run = create(tmp_path)
    run.config.write_text('{"run_dir": ')
    with pytest.raises(ValueError, match=r"config.json cannot be read: Expecting value"):
        create(tmp_path, resume=True)


def test_not_a_run_directory(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run directory: it has no config.json"):
        RunDir(tmp_path).read_config()


def test_unwritable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"config.run_dir '.*/file/run' cannot be written: Not a directory"):
        create(tmp_path / "file" / "run")


def _race(path, barrier, results):
    barrier.wait()
    try:
        create(path)
        results.put("made")
    except ValueError as error:
        results.put(str(error))


def test_of_two_starts_at_once_one_wins(tmp_path):
    # `fork` would inherit jax's threads.
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_race, args=(tmp_path / "run", barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    assert answers.count("made") == 1
    assert names(tmp_path / "run") == ["checkpoints", "config.json", "plots", "samples", "tensorboard"]
