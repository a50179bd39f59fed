"""What `import jaxrl_llm as jrl` offers, from a notebook's point of view."""

import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

import jaxrl_llm as jrl
from jaxrl_llm.hub import hf_config, pretrained
from jaxrl_llm.tasks.tokenizer import CharTokenizer
from tests import tiny, tiny_runs

ALPHABET = "0123456789+-=>,"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "it"
    config, _, params = tiny.decoder(vocab_size=len(CharTokenizer(ALPHABET).to_transformers()))
    theirs = hf_config.to_transformers(config)
    tokenizer = CharTokenizer(ALPHABET).to_transformers()
    theirs.eos_token_id = tokenizer.eos_token_id
    pretrained.save(path, params, config, theirs, tokenizer, "float32")
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four rollouts that a callback ended after the second, and the rows that it saw."""
    folder, rows = tmp_path_factory.mktemp("run") / "it", []

    def until_two(row):
        rows.append(row)
        return row["rollout"] == 2

    config = tiny_runs.config(folder, **tiny_runs.PLAIN | {"training__rollouts": 4})
    run = jrl.train(config, callbacks=[until_two, lambda row: 1], console=Console(quiet=True))
    return run, rows


def test_importing_loads_no_jax():
    code = "import sys, jaxrl_llm; assert not {'jax', 'flax', 'numpy'} & set(sys.modules); print(dir(jaxrl_llm))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "'read_run'" in done.stdout, done.stderr


def test_every_name_is_there_and_an_unknown_one_is_told():
    assert all(getattr(jrl, name) is not None for name in jrl.__all__)
    assert jrl.divergence is jrl.objectives.divergence
    with pytest.raises(AttributeError, match="no 'lod'.*load"):
        _ = jrl.lod


def test_a_callback_sees_every_row_and_ends_the_run(finished):
    run, rows = finished
    assert [row["rollout"] for row in rows] == [0, 1, 2] == run.metrics.index.tolist()
    assert run.metrics.loc[2, "reward/mean"] == rows[-1]["reward/mean"]
    assert sorted(p.name for p in run.directory.checkpoints.iterdir() if p.name.isdigit())[-1] == "2"


def test_a_run_is_read_again(finished, tmp_path):
    run = jrl.read_run(finished[0].path)
    assert run.config.training.rollouts == 4 and run.config.objective.name == "pdm"
    assert {"prompt", "completion", "reward"} <= set(run.samples("before").columns)
    with pytest.raises(ValueError, match="before"):
        run.samples("nowhere")
    assert run.plot().axes
    assert run.policy().name.startswith("checkpoint 2 of")
    with pytest.raises(ValueError, match=r"config\.json"):
        jrl.read_run(tmp_path)


def test_scores_are_those_of_transformers(checkpoint):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    policy = jrl.load(checkpoint)
    prompts, completions = ["1+2=", "31-4=", "7="], [">3", [5, 3, 4], "27,1"]
    found = policy.score(prompts, completions, temperature=0.7)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for prompt, score in zip(prompts, found, strict=True):
        start = policy.model.tokenizer.encode(prompt)
        with torch.no_grad():
            logits = theirs(torch.tensor([start + score.tokens])).logits[0, len(start) - 1 : -1].double() / 0.7
        logp = torch.log_softmax(logits, -1).numpy()
        np.testing.assert_allclose(score.logprobs, logp[np.arange(len(score.tokens)), score.tokens], atol=1e-4)
        np.testing.assert_allclose(score.entropy, -(np.exp(logp) * logp).sum(-1), atol=1e-4)
    assert found[1].tokens == [5, 3, 4]


def test_samples_score_as_they_were_drawn_and_come_back_with_their_seed(checkpoint):
    policy = jrl.load(checkpoint)
    drawn = policy.sample(["1+2=", "7="], n=3, temperature=0.8, max_tokens=5, capture_top_k=4, seed=3)
    assert [c.prompt for c in drawn] == ["1+2="] * 3 + ["7="] * 3 and [c.sample for c in drawn] == [0, 1, 2] * 2
    again = policy.sample(["1+2=", "7="], n=3, temperature=0.8, max_tokens=5, seed=3)
    assert [c.tokens for c in again] == [c.tokens for c in drawn] and again[0].topk is None
    scores = policy.score([c.prompt for c in drawn], drawn, temperature=0.8)
    for completion, score in zip(drawn, scores, strict=True):
        assert score.tokens == completion.tokens and completion.topk.ids.shape == (len(score.tokens), 4)
        np.testing.assert_allclose(score.logprobs, completion.logprobs, atol=1e-4)


def test_what_is_saved_is_loaded_again(checkpoint, tmp_path):
    policy = jrl.load(checkpoint)
    again = jrl.load(policy.save(tmp_path / "out", dtype="float32"))
    one, other = (p.score(["1="], [[4, 5]])[0].logprobs for p in (policy, again))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda policy: policy.sample("1+2="), "prompts.*a list of prompts"),
        (lambda policy: policy.sample([]), "at least one prompt"),
        (lambda policy: policy.sample(["1", ""]), r"prompts\[1\]"),
        (lambda policy: policy.score(["1"], []), "completions.*one a prompt, 1"),
        (lambda policy: policy.score(["1"], [[]]), r"completions\[0\]"),
        (lambda policy: policy.score(["1"], [[2]], temperature=0.0), "temperature"),
        (lambda policy: jrl.load("/nowhere"), "/nowhere"),
        (lambda policy: jrl.load(policy.name, 3), "checkpoint.*no run directory"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(checkpoint, call, message):
    with pytest.raises(ValueError, match=message):
        call(jrl.load(checkpoint))
