"""The planner lowers the loop's own step: FP8 in the trainer, the critic, the reference policy and their batch fields."""

import pytest

from jaxrl_llm.config import RunConfig
from jaxrl_llm.parallel import sharding
from jaxrl_llm.plan import programs
from tests import tiny

ARCHITECTURE = tiny.SIZES | {"vocab_size": 64, "intermediate_size": 64}
# By hand: query and out 32 x 32, key and value 32 x 16, three of 32 x 64, norms of 2 x 32 and 2 x 8; embedding, final norm.
DECODER = 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32 + 2 * 8) + 32
HEAD = 32


@pytest.fixture
def plan(monkeypatch):
    """(StableHLO text, resident bytes by part) of the step that would be compiled; compiling it would show no more."""

    def planned(**sections):
        monkeypatch.setattr(programs, "_program", lambda name, lowered, resident, flops: (lowered.as_text(), resident))
        rollout = {"prompts": 8, "max_prompt_length": 8, "max_response_length": 8} | sections.pop("rollout", {})
        config = {"model": {"architecture": ARCHITECTURE}, "rollout": rollout, "mesh": {"data": -1}, **sections}
        run = RunConfig.read(config)
        return programs.training_program(run, sharding.create_mesh(run.mesh))

    return planned


def test_fp8_is_in_the_trainer_only_end_to_end(plan):
    sites = {"weights": "e4m3", "activations": "e4m3"}
    texts = {scope: plan(rollout={"fp8": sites | {"scope": scope}})[0] for scope in ("rollout_only", "end_to_end")}
    assert "f8E4M3FN" in texts["end_to_end"]
    assert "f8E4M3FN" not in texts["rollout_only"]


def test_critic_and_reference_are_resident_with_what_their_losses_read(plan):
    _, plain = plan(objective={"name": "pg_is"})
    _, whole = plan(objective={"name": "ppo_clip", "penalty": {"kl": 0.1}}, kl={"target": 0.05})
    assert plain["parameters"] == whole["parameters"] == whole["reference"] == 4 * DECODER
    assert "reference" not in plain and "critic" not in plain
    # Parameters, two moments, and the counts of Adam and of its schedule.
    assert whole["critic"] == pytest.approx(3 * 4 * (DECODER + HEAD), abs=16)
    # 64 sequences a mini-batch on 8 devices: reference log-probs, old values and returns of 8 tokens, one factor a row.
    rows = 8 * 8 // 4 // 8
    assert whole["batch"] - plain["batch"] == rows * 4 * (3 * 8 + 1)


def test_the_critic_adds_its_trunk_to_the_program(plan):
    policy, own = (plan(objective={"name": "ppo_clip"}, critic={"trunk": trunk}) for trunk in ("policy", "own"))
    assert policy[1]["critic"] == pytest.approx(3 * 4 * HEAD, abs=16)
    assert len(own[0]) > len(policy[0])
