"""Continuous batching: what a sequence gets never depends on how many slots there are or who else is in them."""

import functools

import jax
import numpy as np
import pytest

from jaxrl_llm.rollout.sampler import Sampler, Usage, pad
from jaxrl_llm.rollout.slots import SamplingConfig
from jaxrl_llm.types import FinishReason
from tests import tiny

# Widths 1 to 8: the last fills its columns to the brim.
PROMPTS = [[1, 5, 6, 7], [1], [1, 9, 9, 9, 9, 3], [4, 4], [1, 2, 3, 4, 5, 6, 7, 8], [8, 1, 8], [1, 7]]
GROUP = 3
STOPS = (2, 5, 11)


@functools.cache
def run(slots, stop_ids=STOPS, count=7):
    """(rollout, usage, finished after every chunk) of the first `count` prompts."""
    config, graphdef, params = tiny.decoder(num_layers=1)
    sampling = SamplingConfig(
        max_response_length=12,
        stop_ids=stop_ids,
        capture_top_k=4,
        capture_entropy=True,
        slots=slots,
        first_chunk=4,
    )
    seen = []
    rollout = Sampler(graphdef, config, sampling)(
        params,
        PROMPTS[:count],
        jax.random.key(5),
        group_size=GROUP,
        policy_step=17,
        report=lambda finished, usage: seen.append((finished, usage)),
    )
    return rollout, seen[-1][1] if seen else Usage(), [finished for finished, _ in seen]


@pytest.mark.parametrize("slots", [1, 4, 100])
def test_any_number_of_slots_gives_the_same_completions(slots):
    together, some = run(0)[0], run(slots)[0]
    lengths = np.asarray(together.response_mask).sum(axis=1)
    assert lengths.min() < 4 < lengths.max()  # or nothing would be refilled
    for name in ("prompt_tokens", "response_tokens", "response_mask", "finish_reason", "group_ids", "policy_step"):
        np.testing.assert_array_equal(getattr(some, name), getattr(together, name), err_msg=name)
    np.testing.assert_array_equal(some.topk.ids, together.topk.ids)
    for name in ("behavior_logprobs", "entropy", "log_kept_mass"):
        np.testing.assert_allclose(getattr(some, name), getattr(together, name), atol=1e-5, err_msg=name)
    np.testing.assert_allclose(some.topk.logprobs, together.topk.logprobs, atol=1e-5)
    assert some.policy_step == 17


def test_prompts_are_prefilled_once_and_finished_rows_make_room():
    _, usage, finished = run(4)
    tokens = int(np.sum(run(0)[0].response_mask))
    assert usage.tokens == run(0)[1].tokens == tokens
    # Blocks of two prompts (4 slots, groups of 3), of which the last holds a filler.
    assert usage.prefilled == 8
    assert run(0)[1].prefilled == len(PROMPTS)
    assert finished == sorted(finished)
    assert finished[-1] == len(PROMPTS) * GROUP
    # 21 sequences of up to 12 tokens, four at a time, in batches that wait for their longest:
    lengths = np.asarray(run(0)[0].response_mask).sum(axis=1)
    static = sum(4 * lengths[i : i + 4].max() for i in range(0, len(lengths), 4))
    assert tokens <= usage.row_steps < static


def test_the_number_of_programs_is_bounded():
    for slots in (0, 1, 4):
        _, usage, _ = run(slots)
        rows = slots or len(PROMPTS) * GROUP
        # Prompts of up to 8 tokens; room for 4, then for all 12.
        assert usage.programs <= {(rows, 8 + 4), (rows, 8 + 12)}


def test_a_smaller_batch_goes_on_with_the_last_sequences():
    rollout = run(0)[0]
    config, graphdef, params = tiny.decoder(num_layers=1)
    sampling = SamplingConfig(12, STOPS, capture_top_k=4, capture_entropy=True, first_chunk=4, slots=32)
    seen = []
    many = Sampler(graphdef, config, sampling)(
        params, PROMPTS * 2, jax.random.key(5), group_size=GROUP, report=lambda _, usage: seen.append(usage)
    )
    # The first half has the same seeds (their indices) as before.
    np.testing.assert_array_equal(many.response_tokens[:21], rollout.response_tokens)
    assert {rows for rows, _ in seen[-1].programs} == {32, 8}


def test_sequences_that_end_at_once():
    rollout, usage, _ = run(4, stop_ids=tuple(range(19)))
    assert np.asarray(rollout.response_mask).sum(axis=1).tolist() == [1] * len(PROMPTS) * GROUP
    assert (rollout.finish_reason == FinishReason.STOP).all()
    assert usage.tokens == len(PROMPTS) * GROUP


def test_sequences_that_never_end_fill_the_cache_to_its_limit():
    together, some = run(0, stop_ids=()), run(4, stop_ids=())
    assert together[0].response_mask.all()
    assert (some[0].finish_reason == FinishReason.LENGTH).all()
    np.testing.assert_array_equal(some[0].response_tokens, together[0].response_tokens)


def test_a_stop_at_the_last_position_is_a_stop():
    config, graphdef, params = tiny.decoder(num_layers=1)
    sampling = SamplingConfig(max_response_length=1, stop_ids=tuple(range(9)))
    rollout = Sampler(graphdef, config, sampling)(params, PROMPTS, jax.random.key(0), group_size=GROUP)
    stopped = rollout.response_tokens[:, 0] < 9
    assert 0 < stopped.sum() < len(stopped)
    np.testing.assert_array_equal(rollout.finish_reason == FinishReason.STOP, stopped)


def test_an_empty_queue():
    rollout, usage, finished = run(2, count=0)
    assert rollout.response_tokens.shape == (0, 12)
    assert rollout.topk.ids.shape == (0, 12, 4)
    assert (usage.tokens, usage.chunks, finished) == (0, 0, [])


@pytest.mark.parametrize(("longest", "width"), [(1, 4), (4, 4), (5, 6), (7, 8), (8, 8), (9, 12), (13, 16), (100, 128)])
def test_prompts_are_padded_to_few_widths(longest, width):
    tokens, mask = pad([[3] * longest, [4]], pad_id=9)
    assert tokens.shape == (2, width)
    assert tokens[1].tolist() == [9] * (width - 1) + [4]
    assert mask.sum(axis=1).tolist() == [longest, 1]


def test_bad_slots_are_named():
    with pytest.raises(ValueError, match="slots is -1; it must be an integer of 0 or more"):
        SamplingConfig(1, (), slots=-1)
