"""Layout of batches: masks are carried, positions skip padding, splitting loses nothing."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.experience import batches
from jaxrl_llm.experience.data_order import example_indices
from jaxrl_llm.learning import minibatches
from jaxrl_llm.types import Rollout


def _rollout():
    # pad = end = 2: the end token inside the response is real, the padding behind it is not.
    return Rollout(
        prompt_tokens=np.array([[2, 2, 9], [7, 8, 9]], np.int32),
        prompt_mask=np.array([[0, 0, 1], [1, 1, 1]], bool),
        response_tokens=np.array([[5, 7, 2, 2, 2], [4, 4, 4, 4, 4]], np.int32),
        response_mask=np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool),
        finish_reason=np.array([0, 1], np.int32),
        behavior_logprobs=np.full((2, 5), -1.0, np.float32),
        group_ids=np.array([0, 1], np.int32),
        log_kept_mass=np.zeros((2, 5), np.float32),
    )


def test_rollout_is_laid_out_with_its_own_masks():
    batch = batches.from_rollout(_rollout(), jnp.array([0.5, -1.0]))
    np.testing.assert_array_equal(batch.tokens, [[2, 2, 9, 5, 7, 2, 2, 2], [7, 8, 9, 4, 4, 4, 4, 4]])
    np.testing.assert_array_equal(batch.segment_ids, [[0, 0, 1, 1, 1, 1, 0, 0], [1] * 8])
    np.testing.assert_array_equal(batch.positions[0, 2:6], [0, 1, 2, 3])
    np.testing.assert_array_equal(batch.positions[1], np.arange(8))
    np.testing.assert_array_equal(batch.response_mask, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    np.testing.assert_allclose(batch.advantages, [[0.5, 0.5, 0.5, 0, 0], [-1.0] * 5])
    np.testing.assert_array_equal(batch.response_tokens, _rollout().response_tokens)


def test_a_left_out_response_keeps_its_context():
    mask = np.array([[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], bool)
    batch = batches.from_rollout(_rollout(), jnp.array([0.5, -1.0]), mask)
    np.testing.assert_allclose(batch.advantages[0], np.zeros(5))
    np.testing.assert_array_equal(batch.segment_ids[0], [0, 0, 1, 1, 1, 1, 0, 0])


def test_pairs_are_demonstrations_with_advantage_one():
    batch = batches.from_pairs([[1, 2], [3]], [[4], [5, 6]], prompt_length=3, response_length=2, pad_id=0)
    np.testing.assert_array_equal(batch.tokens, [[0, 1, 2, 4, 0], [0, 0, 3, 5, 6]])
    np.testing.assert_array_equal(batch.response_mask, [[1, 0], [1, 1]])
    np.testing.assert_allclose(batch.advantages, [[1, 0], [1, 1]])


@pytest.mark.parametrize(("prompt", "response"), [([1, 2, 3, 4], [5]), ([1], [5, 6, 7]), ([], [5]), ([1], [])])
def test_a_pair_that_does_not_fit_is_named(prompt, response):
    with pytest.raises(ValueError, match="row 1: prompt of"):
        batches.from_pairs([[1], prompt], [[1], response], prompt_length=3, response_length=2, pad_id=0)


def test_split_interleaves_and_keeps_every_row():
    batch = batches.from_pairs([[i + 1] for i in range(6)], [[9]] * 6, 1, 1, 0)
    parts = minibatches.split(batch, 3)
    np.testing.assert_array_equal(parts.tokens[:, :, 0], [[1, 4], [2, 5], [3, 6]])
    with pytest.raises(ValueError, match="6 rows"):
        minibatches.split(batch, 4)


def test_example_stream_visits_each_example_once_an_epoch_and_needs_only_the_position():
    whole = example_indices(seed=3, position=0, count=30, size=10)
    for epoch in range(3):
        assert sorted(whole[10 * epoch : 10 * (epoch + 1)].tolist()) == list(range(10))
    assert whole[:10].tolist() != whole[10:20].tolist()
    pieces = [example_indices(3, start, count, 10) for start, count in [(0, 7), (7, 6), (13, 17)]]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert example_indices(4, 0, 10, 10).tolist() != whole[:10].tolist()
    with pytest.raises(ValueError, match="empty"):
        example_indices(0, 0, 1, 0)
