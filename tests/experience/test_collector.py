"""Which rows a rollout's batch is made of, and with whose parameters it is sampled."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import RunConfig
from jaxrl_llm.experience.collector import Collector, Experience, choose_groups, to_batch
from jaxrl_llm.experience.scored_rollout import ScoredRollout, concatenate, flat_groups
from jaxrl_llm.experience.stream import ExperienceStream
from jaxrl_llm.learning.advantages import assess
from jaxrl_llm.rollout.placement import Loaded
from jaxrl_llm.tasks import Example
from jaxrl_llm.types import Rollout

NAN = np.nan


def make_rollout(prompts, group_size, marks):
    """A rollout of one-token responses: the number in `marks` for each row."""
    width, rows = max(map(len, prompts)), len(prompts) * group_size
    tokens = np.array([[0] * (width - len(p)) + list(p) for p in prompts], np.int32)
    ones = np.ones((rows, 1), np.float32)
    return Rollout(
        prompt_tokens=np.repeat(tokens, group_size, axis=0),
        prompt_mask=np.repeat(tokens > 0, group_size, axis=0),
        response_tokens=np.array(marks, np.int32)[:, None],
        response_mask=ones > 0,
        finish_reason=np.zeros(rows, np.int32),
        behavior_logprobs=-ones,
        group_ids=np.arange(rows, dtype=np.int32) // group_size,
        log_kept_mass=0 * ones,
    )


def test_flat_groups_by_hand():
    rewards = np.array([1, 1, 0, 1, NAN, 1, NAN, NAN, 0, 0, NAN, 0, 0.5, NAN, 1])
    assert flat_groups(rewards, 3).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize(
    ("flat", "wanted", "rows", "trained"),
    [
        ([0, 0], 2, [0, 1, 2, 3], [1, 1, 1, 1]),
        ([1, 0, 0, 0], 2, [2, 3, 4, 5], [1, 1, 1, 1]),  # the last one is not needed
        ([1, 0, 1, 1], 2, [0, 1, 2, 3], [0, 0, 1, 1]),  # the bound was reached: one accepted group, one filler
        ([1, 1], 2, [0, 1, 2, 3], [0, 0, 0, 0]),
    ],
)
def test_choice_of_groups_by_hand(flat, wanted, rows, trained):
    chosen, kept = choose_groups(np.array(flat, bool), wanted, 2)
    assert chosen.tolist() == rows and kept.tolist() == [bool(t) for t in trained]


def test_prompts_of_other_widths_are_padded_to_one():
    parts = [
        ScoredRollout(make_rollout([[5], [6]], 2, [1, 2, 3, 4]), "aabb", "abcd", np.arange(4.0)),
        ScoredRollout(make_rollout([[7, 8, 9]], 2, [5, 6]), "cc", "ef", np.arange(2.0)),
    ]
    whole = concatenate(parts)
    assert whole.rollout.prompt_tokens.tolist() == [[0, 0, 5]] * 2 + [[0, 0, 6]] * 2 + [[7, 8, 9]] * 2
    assert whole.rollout.prompt_mask.sum(axis=1).tolist() == [1, 1, 1, 1, 3, 3]
    assert whole.rollout.group_ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert whole.rollout.response_tokens[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert "".join(whole.examples) == "aabbcc" and "".join(whole.completions) == "abcdef"
    assert whole.rewards.tolist() == [0, 1, 2, 3, 0, 1]


class Answers:
    """Stands for sampler, task and tokenizer: row `seed` answers `seed`, and `score(seed)` is its reward."""

    name, tokenizer, truncated = "answers", None, "keep"

    def __init__(self, examples, score):
        self.train = [Example(str(i), f"{i + 1}", "") for i in range(examples)]
        self.reward, self.asked = score, []

    def load(self, params):
        return Loaded(params, ())

    def __call__(self, params, prompts, key, *, group_size, seeds, policy_step):
        self.asked.append([p[0] - 1 for p in prompts])
        self.key, self.policy_step = key, policy_step
        return make_rollout(prompts, group_size, list(seeds))

    def score(self, examples, completions, lengths, truncated):
        return [self.reward(int(c)) for c in completions]

    def encode(self, text, **options):
        return [int(text)]

    def decode(self, tokens):
        return str(tokens[0]) if tokens else ""


def collector_of(answers, **rollout):
    config = {"rollout": {"prompts": 2, "group_size": 2, **rollout}, "training": {"updates_per_rollout": 2}}
    policy = types.SimpleNamespace(tokenizer=answers)
    return Collector(RunConfig.read(config), answers, policy, answers, jax.random.key(0))


@pytest.fixture(autouse=True)
def decoded(monkeypatch):
    texts = lambda rollout, tokenizer: [str(token) for token in rollout.response_tokens[:, 0]]  # noqa: E731
    monkeypatch.setattr("jaxrl_llm.experience.scored_rollout.decode", texts)


def test_without_refills_every_group_stays():
    answers = Answers(8, lambda seed: 1.0)
    experience = collector_of(answers)(None, 1, 4)
    assert len(answers.asked) == 1 and experience.position == 6
    assert experience.trained.all() and experience.metrics()["advantage/zero_groups"] == 1


def test_refills_replace_flat_groups_until_the_batch_is_full():
    # Rows 0, 1 and 4, 5 are flat; 2, 3 and 6, 7 are not; the third round is never needed.
    answers = Answers(100, lambda seed: float(seed in (3, 7)))
    collector = collector_of(answers, refill_rounds=2)
    experience = collector(None, 3, 10)
    assert len(answers.asked) == 2 and experience.position == 14
    assert experience.rows.tolist() == [2, 3, 6, 7] and experience.trained.all()
    metrics = experience.metrics()
    assert metrics["advantage/zero_groups"] == 0.5 and metrics["rollout/rounds"] == 2 and metrics["rollout/filler"] == 0
    assert metrics["reward/mean"] == 0.25  # of everything sampled, so that refills do not flatter it
    batch = assess(collector.run, None, experience, to_batch(collector.task, experience), None)[0]
    assert batch.response_tokens[:, 0].tolist() == [2, 3, 6, 7]
    np.testing.assert_allclose(batch.advantages[:, 0], [-(0.5**0.5), 0.5**0.5] * 2, rtol=1e-5)


def test_at_the_bound_the_accepted_groups_are_trained_on_and_the_shape_stays():
    answers = Answers(3, lambda seed: float(seed == 11))  # three prompts: the stream begins a new epoch on the way
    collector = collector_of(answers, refill_rounds=2)
    experience = collector(None, 1, 0)
    assert len(answers.asked) == 3 and experience.position == 6
    assert sorted(answers.asked[0] + answers.asked[1][:1]) == [0, 1, 2]
    batch = assess(collector.run, None, experience, to_batch(collector.task, experience), None)[0]
    assert batch.tokens.shape == (4, 2)
    assert batch.response_mask[:, 0].tolist() == [False, False, True, True]
    assert batch.response_tokens[:, 0].tolist() == [0, 1, 10, 11]
    np.testing.assert_allclose(batch.advantages[:, 0], [0, 0, -(0.5**0.5), 0.5**0.5], rtol=1e-5)
    assert experience.metrics()["rollout/filler"] == 0.5


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_parameters_lag_and_a_resumed_run_continues_the_lag(staleness, overlap):
    """Parameters after rollout r are the number r; what each rollout was sampled with is known in closed form."""
    seen = {}
    run = RunConfig.read({"rollout": {"staleness": staleness}, "training": {"rollouts": 6}})

    def collect(params, rollout, position):
        seen[rollout] = (int(params["w"]), position)
        return Experience(None, None, None, position + 10 + rollout, 0)

    collector = type("Fake", (), {"run": run, "__call__": staticmethod(collect)})()
    behind, position = ({"w": jnp.int32(0)},) * staleness, 0
    for first, end in ((0, 2), (2, 3), (3, 6)):  # two interruptions
        with ExperienceStream(collector, first, position, behind, overlap) as source:
            for rollout in range(first + 1, end + 1):
                position = source.next({"w": jnp.int32(rollout - 1)}).position
            behind = source.lagging
        assert [int(p["w"]) for p in behind] == [max(0, end - 1 - i) for i in range(staleness)][::-1]
    positions = np.cumsum([0, 11, 12, 13, 14, 15])
    assert seen == {r: (max(0, r - 1 - staleness), positions[r - 1]) for r in range(1, 7)}


def test_an_error_while_collecting_ahead_reaches_the_caller():
    run = RunConfig.read({"rollout": {"staleness": 1}})

    def collect(params, rollout, position):
        if rollout == 2:
            raise KeyError("no such prompt")
        return Experience(None, None, None, position, 0)

    collector = type("Fake", (), {"run": run, "__call__": staticmethod(collect)})()
    with ExperienceStream(collector, 0, 0, ({"w": jnp.int32(0)},), overlap=True) as source:
        source.next({"w": jnp.int32(0)})
        with pytest.raises(KeyError, match="no such prompt"):
            source.next({"w": jnp.int32(1)})


def test_with_a_kl_in_it_a_reward_counts_also_where_its_response_carries_no_loss():
    collector = collector_of(Answers(8, lambda seed: float(seed % 2)))
    experience = collector(None, 1, 4)
    batch = to_batch(collector.task, experience)
    mask, zeros = np.array(batch.response_mask), np.zeros(batch.response_mask.shape, np.float32)
    mask[1] = False  # a truncated response, say
    batch = batch.replace(response_mask=mask, old_logprobs=zeros, reference_logprobs=zeros)
    run = dataclasses.replace(collector.run, kl=dataclasses.replace(collector.run.kl, reward=0.1))
    batch = assess(run, None, experience, batch, None)[0]
    np.testing.assert_allclose(batch.advantages[:, 0], [-(0.5**0.5), 0, -(0.5**0.5), 0.5**0.5], rtol=1e-5)
