"""Reward models: the step against the equation, buckets, the last valid token, and transformers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from jaxrl_llm import config as configs
from jaxrl_llm import tasks
from jaxrl_llm.api import export
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import last_valid
from jaxrl_llm.parallel import sharding
from jaxrl_llm.reward_models import reward_model, scoring
from jaxrl_llm.reward_models.scoring import Scorer
from tests import tiny

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}


ONE_DEVICE = jax.devices()[:1]


@pytest.fixture(scope="module")
def mesh():
    return sharding.create_mesh(configs.Mesh(), ONE_DEVICE)


@pytest.fixture(scope="module")
def model(mesh):
    graphdef, params = reward_model.create(ModelConfig(vocab_size=12, **TINY), 0, mesh)
    params["score"]["kernel"] = jax.tree.map(lambda x: x + 1.0, params["score"]["kernel"])
    return graphdef, params


def test_one_step_moves_along_the_gradient_of_the_pairs_likelihood(model):
    graphdef, params = model
    rng = np.random.default_rng(0)
    dialogues = [rng.integers(3, 12, n).tolist() for n in (5, 3, 8, 4, 6, 2)]
    chosen, rejected = (scoring.pad(side, 4, 8) for side in (dialogues[:3], dialogues[3:]))
    counted = np.array([True, True, True, False])

    def likelihood(params):
        tokens, mask = map(jnp.asarray, scoring.pad(dialogues, 6, 16))
        one = scoring.scores(graphdef, params, tokens, mask)
        return jnp.mean(jnp.logaddexp(0.0, one[3:] - one[:3]))

    value, gradient = jax.jit(jax.value_and_grad(likelihood))(params)
    optimizer = optax.sgd(0.1)
    step = jax.jit(lambda *a: reward_model.update(graphdef, optimizer, *a))
    new, _, metrics = step(params, optimizer.init(params), chosen, rejected, counted)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    jax.tree.map(
        lambda a, p, g: np.testing.assert_allclose(a, p - 0.1 * g, rtol=1e-4, atol=1e-6), new, params, gradient
    )


def test_scores_do_not_depend_on_batch_bucket_or_padding(model):
    rng = np.random.default_rng(1)
    dialogues = [rng.integers(3, 12, n).tolist() for n in (3, 20, 8, 9, 1, 16, 5)]
    one_by_one = [Scorer(*model, None, 64, rows=8).raw([d])[0] for d in dialogues]
    together = Scorer(*model, None, 64, rows=16).raw(dialogues)
    np.testing.assert_allclose(together, one_by_one, rtol=1e-5, atol=1e-6)
    assert len(set(np.round(one_by_one, 4))) == len(dialogues)


def test_buckets_hold_every_sequence_once_within_their_width():
    lengths = [3, 17, 8, 9, 64, 1]
    batches = scoring.length_buckets(lengths, 2)
    assert sorted(i for members, _ in batches for i in members) == list(range(6))
    assert [width for _, width in batches] == [8, 16, 64]
    assert scoring.length_buckets([], 2) == []


def test_the_score_is_that_of_the_last_valid_token_wherever_the_padding_stands():
    scores = jnp.arange(12.0).reshape(3, 4)
    mask = np.array([[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0]], bool)
    np.testing.assert_array_equal(last_valid(scores, mask), [1, 7, 8])


def test_standardising_and_clipping(model):
    task = tasks.create({"name": "procedural_preferences"})
    examples, replies = task.train[:3], ["abc", "h", "aaaa"]
    scorer = Scorer(*model, dataclasses.replace(task.tokenizer, alphabet="abcdefgh?"), 64, shift=2.0, scale=4.0)
    raw = dataclasses.replace(scorer, shift=0.0, scale=1.0).judge(examples, replies)
    np.testing.assert_allclose(scorer.judge(examples, replies), (np.array(raw) - 2) / 4, rtol=1e-6)
    clipped = dataclasses.replace(scorer, clip=0.1).judge(examples, replies)
    np.testing.assert_allclose(clipped, np.clip((np.array(raw) - 2) / 4, -0.1, 0.1), rtol=1e-6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(directory, transformers model) of a Llama with a score head, whose end token serves as padding."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("classifier")
    tokenizer = tasks.create({"name": "procedural_preferences"}).tokenizer
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8,
        num_attention_heads=2, num_key_value_heads=2, num_labels=1, pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.3 * torch.randn_like(parameter)
    model.save_pretrained(path)
    tokenizer.to_transformers().save_pretrained(path)
    return path, model


def test_a_sequence_classifier_judges_with_its_own_pooling_standardised_on_held_out_pairs(checkpoint):
    import torch

    path, model = checkpoint
    task = tasks.create({"name": "procedural_preferences"})
    config = configs.RewardModel(source=str(path), held_out_pairs=5, batch_size=3, max_length=32)
    mesh = sharding.create_mesh(configs.Mesh(data=2, fsdp=2, tensor=2))
    judged = reward_model.attach(task, config, mesh)

    def theirs(examples, replies):
        texts = [example.prompt + reply for example, reply in zip(examples, replies, strict=True)]
        with torch.no_grad():
            rows = [[*task.tokenizer.encode(text), task.tokenizer.eos_token_id] for text in texts]
            return np.array([model(torch.tensor([row])).logits[0, 0].item() for row in rows])

    pairs = task.evaluation["held_out"][:5]
    measured = theirs(pairs * 2, [e.metadata[side] for side in ("chosen", "rejected") for e in pairs])
    replies = ["abc", "", "hhhhhh", "a", "bb"]
    expected = (theirs(pairs, replies) - measured.mean()) / measured.std()
    np.testing.assert_allclose(judged.score(pairs, replies), expected, rtol=1e-3, atol=1e-4)
    plain = reward_model.load(dataclasses.replace(config, standardize=False, clip=0.1, dtype="bfloat16"), mesh)
    query = plain.params["trunk"]["layers"]["attention"]["query"]["kernel"][...]
    assert (query.dtype, query.addressable_shards[0].data.shape) == (jnp.bfloat16, (1, 8, 8))
    np.testing.assert_allclose(plain.judge(pairs, replies), np.clip(theirs(pairs, replies), -0.1, 0.1), atol=0.02)


def test_a_checkpoint_is_standardised_on_pairs_or_not_at_all(checkpoint, mesh):
    with pytest.raises(ValueError, match="config.reward_model.standardize is True; it must be False: the task has no"):
        reward_model.load(configs.RewardModel(source=str(checkpoint[0])), mesh)


def test_a_conversation_is_written_by_the_chat_template_with_the_reply_as_its_last_turn():
    tokenizer = tasks.create({"name": "procedural_preferences"}).tokenizer.to_transformers()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[:1] }}{{ m.content }}?{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    turns = ({"role": "abc", "content": "de"},)
    example = tasks.Example("1", turns, "")
    (ids,) = scoring.encode([example], ["gh"], tokenizer)
    assert tokenizer.decode(ids).replace(" ", "") == "<bos>ade?agh?"
    text = tasks.Example("2", "de?", "")
    (ids,) = scoring.encode([text], ["gh"], tokenizer)
    assert ids == [*tokenizer.encode("de?gh"), tokenizer.eos_token_id]


def test_training_on_dialogues_from_a_checkpoint_and_back_as_a_judge(mesh, tmp_path):
    """A chat model's decoder, hh-rlhf rows; what the run leaves is read without the checkpoint's tensors."""
    pytest.importorskip("torch")
    template = "{% for m in messages %}{{ m.role[:1] }}?{% endfor %}{{ messages[-1].content[:2] }}"
    path = tiny.chat(tmp_path / "language_model", "abcdefgh?", template, qk_norm=False)
    rows = [("ab", "cd"), ("ef", "ga"), ("ha", "bc")]
    text = "\n\nHuman: a\n\nAssistant: "
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"chosen": text + a, "rejected": text + b}) + "\n" for a, b in rows))
    source = {"path": str(file), "schema": "hh_rlhf"}
    run = reward_model.RewardModelConfig(
        run_dir=str(tmp_path / "run"),
        model=configs.Model(source=str(path)),
        task=tasks.default_config() | {"name": "preferences", "preferences": {"train": source, "evaluation": source}},
        max_length=8,
        steps=2,
        batch_size=8,
    )
    accuracy, _ = reward_model.train(run, console=Console(quiet=True))
    assert accuracy.pairs == 3
    (path / "model.safetensors").write_bytes(b"torn")
    task = tasks.create(run.task)
    judged = reward_model.attach(task, configs.RewardModel(source=run.run_dir), mesh)
    chosen, rejected = ([e.metadata[side] for e in task.train] for side in ("chosen", "rejected"))
    scores = np.array([judged.score(task.train, side) for side in (chosen, rejected)])
    np.testing.assert_allclose([scores.mean(), scores.std()], [0, 1], atol=1e-4)
    assert np.mean(scores[0] > scores[1]) == accuracy.value

    # The same judge by way of transformers.
    assert export.export(run.run_dir, str(tmp_path / "out"), dtype="float32") == "the reward model after step 2"
    config = configs.RewardModel(source=str(tmp_path / "out"), max_length=8)
    again = reward_model.attach(task, config, mesh)
    np.testing.assert_allclose([again.score(task.train, side) for side in (chosen, rejected)], scores, atol=1e-4)


def test_what_cannot_work_is_named(mesh, tmp_path):
    arithmetic = tasks.create({"name": "arithmetic"})
    assert reward_model.attach(arithmetic, configs.RewardModel(), mesh) is arithmetic
    with pytest.raises(ValueError, match="task 'arithmetic' has its own rewards"):
        reward_model.attach(arithmetic, configs.RewardModel(source="x"), mesh)
    with pytest.raises(ValueError, match="reward_model.source .* is no reward model: .* has no config.json"):
        reward_model.load(configs.RewardModel(source=str(tmp_path)), mesh)
    with pytest.raises(ValueError, match="example 'train-0' has no chosen and rejected reply"):
        reward_model.comparisons(arithmetic.train[:1], arithmetic.tokenizer, 64)
    task = tasks.create({"name": "procedural_preferences"})
    kept, (chosen, rejected) = reward_model.comparisons(task.train[:50], task.tokenizer, 9)
    assert 0 < len(kept) < 50
    assert max(map(len, chosen + rejected)) <= 9
