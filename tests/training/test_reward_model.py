"""Reward models: the step against the equation, buckets, the last valid token, and transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxrl_llm import tasks
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import ScalarModel, last_valid
from jaxrl_llm.training import config as configs
from jaxrl_llm.training import reward_model, sharding
from jaxrl_llm.training.reward_model import Scorer

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
    chosen, rejected = (reward_model.pad(side, 4, 8) for side in (dialogues[:3], dialogues[3:]))
    counted = np.array([True, True, True, False])

    def likelihood(params):
        tokens, mask = map(jnp.asarray, reward_model.pad(dialogues, 6, 16))
        one = reward_model.scores(graphdef, params, tokens, mask)
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
    batches = reward_model.length_buckets(lengths, 2)
    assert sorted(i for members, _ in batches for i in members) == list(range(6))
    assert [width for _, width in batches] == [8, 16, 64]
    assert reward_model.length_buckets([], 2) == []


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


def test_the_scalar_model_is_transformers_sequence_classification():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tests.models.test_decoder import CASES, COMMON, load, pair

    _, config, _, _ = pair("llama3_scaling")
    _, fields, scaling = CASES["llama3_scaling"]
    torch.manual_seed(3)
    reference = transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(
            **COMMON, **fields, num_labels=1, pad_token_id=0, rope_parameters={"rope_theta": 5000.0} | scaling
        )
    ).eval()
    for parameter in reference.parameters():
        parameter.data = parameter.data + 0.2 * torch.randn_like(parameter)
    tensors = reference.state_dict()
    _, trunk = load(dataclasses.replace(config, tie_word_embeddings=True), tensors)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: ScalarModel(config, rngs=nnx.Rngs(0))), nnx.Param)
    kernel = tensors["score.weight"].numpy().T
    nnx.replace_by_pure_dict(params, {"trunk": nnx.to_pure_dict(trunk), "score": {"kernel": kernel}})
    tokens = np.random.default_rng(0).integers(1, 31, (3, 9))
    mask = np.arange(9) < np.array([9, 4, 6])[:, None]
    tokens = np.where(mask, tokens, 0)
    with torch.no_grad():
        theirs = reference(torch.tensor(tokens), attention_mask=torch.tensor(mask.astype(int))).logits[:, 0].numpy()
    ours = jax.jit(reward_model.scores, static_argnums=0)(graphdef, params, jnp.asarray(tokens), jnp.asarray(mask))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_cannot_work_is_named(mesh, tmp_path):
    arithmetic = tasks.create({"name": "arithmetic"})
    assert reward_model.attach(arithmetic, configs.RewardModel(), mesh) is arithmetic
    with pytest.raises(ValueError, match="task 'arithmetic' has its own rewards"):
        reward_model.attach(arithmetic, configs.RewardModel(source="x"), mesh)
    with pytest.raises(ValueError, match="holds no reward model"):
        reward_model.load(str(tmp_path), mesh)
    with pytest.raises(ValueError, match="example 'train-0' has no chosen and rejected reply"):
        reward_model.comparisons(arithmetic.train[:1], arithmetic.tokenizer, 64)
    task = tasks.create({"name": "procedural_preferences"})
    kept, (chosen, rejected) = reward_model.comparisons(task.train[:50], task.tokenizer, 9)
    assert 0 < len(kept) < 50
    assert max(map(len, chosen + rejected)) <= 9
