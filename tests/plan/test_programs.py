"""Plans of a tiny run on the host's eight devices, against sizes and FLOPs worked out by hand; verdicts; topology names."""

import dataclasses

import jax
import pytest

from jaxrl_llm.config import RunConfig
from jaxrl_llm.hub import hf_config, presets
from jaxrl_llm.parallel import sharding
from jaxrl_llm.plan import chips, programs, report
from jaxrl_llm.plan.programs import Program
from tests import tiny


@pytest.fixture(scope="module")
def run():
    return RunConfig.read(
        {
            "model": {
                "architecture": tiny.SIZES | {"vocab_size": 64, "intermediate_size": 64, "num_layers": 3},
                "remat": "full",
            },
            "rollout": {
                "prompts": 8,
                "group_size": 4,
                "max_prompt_length": 8,
                "max_response_length": 24,
                "capture_top_k": 4,
            },
            "objective": {"name": "pdm"},
            "training": {"updates_per_rollout": 2, "micro_batches": 2},
            "mesh": {"data": 1, "fsdp": 4, "tensor": 2},
        }
    )


@pytest.fixture(scope="module")
def mesh(run):
    return sharding.create_mesh(run.mesh)


# By hand: embedding 64 x 32; per layer query 32 x 32, key and value 32 x 16, out 32 x 32, three of 32 x 64, norms 2 x 32
# (whole on every device) and 2 x 8; the final norm.
MATRICES = 64 * 32 + 3 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64)
NORMS = 3 * (2 * 32 + 2 * 8) + 32


def test_the_training_step_of_a_tiny_run(run, mesh):
    program = programs.training_program(run, mesh)
    assert program.resident["parameters"] == 4 * (MATRICES / 8 + NORMS)
    assert program.resident["optimizer"] == pytest.approx(2 * program.resident["parameters"], rel=0.01)
    assert program.uncounted_loops == 0
    # Layers are computed again in the backward pass: 4/3 of the ideal for them, and causal attention is not skipped.
    assert 1.0 < program.flops / program.ideal_flops < 1.9
    assert program.collective_bytes["all-gather"] > 0
    assert program.temporary > 0


def test_the_decoding_step_of_a_tiny_run(run, mesh):
    program = programs.decoding_program(run, mesh)
    keys_and_values = 3 * 2 * 32 * 32 * 2 * 8 * 4  # layers, both, rows, slots, heads, head_dim, bytes
    valid = 32 * 32
    assert program.resident["KV cache"] == keys_and_values / 8 + valid / 4
    assert program.flops > 0
    # Experience over fsdp, halved over tensor, but for the norms; the final one is the training parameters' own.
    assert program.resident["sampler's copy"] == 4 * (MATRICES / 2 + NORMS - 32)


def test_a_model_that_computes_in_bfloat16_is_copied_in_bfloat16(run, mesh):
    narrow = dataclasses.replace(run, model=dataclasses.replace(run.model, dtype="bfloat16"))
    program = programs.decoding_program(narrow, mesh)
    assert program.resident["sampler's copy"] == 2 * MATRICES / 2 + 4 * (NORMS - 32)


@pytest.mark.parametrize(
    ("source", "billions"),
    [
        ("Qwen/Qwen3-4B", 4.02),
        ("Qwen/Qwen3-8B", 8.19),
        ("Qwen/Qwen3-30B-A3B", 30.53),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1.78),
        ("meta-llama/Llama-3.2-1B-Instruct", 1.24),
    ],
)
def test_presets_have_the_size_that_their_model_cards_state(source, billions):
    run = RunConfig.read({"model": {"source": source}})
    _, params = programs._abstract_model(programs.model_config(run), sharding.create_mesh(run.mesh))
    assert sum(p.size for p in jax.tree.leaves(params)) / 1e9 == pytest.approx(billions, abs=0.006)


def test_qwen3_5_is_what_transformers_takes_for_the_default():
    transformers = pytest.importorskip("transformers")
    rope = {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25}  # the class has another theta
    theirs = hf_config.from_transformers(transformers.Qwen3_5MoeTextConfig(rope_parameters=rope), "the default")
    run = RunConfig.read({"model": {"source": "Qwen/Qwen3.5-35B-A3B"}})
    assert programs.model_config(run) == theirs


def test_an_unknown_checkpoint_is_named():
    with pytest.raises(ValueError, match="unknown checkpoint config.model.source 'no/such'.*Qwen/Qwen3-4B"):
        presets.architecture("no/such")


GIB = 2**30


def program(**resident):
    return Program("training step", resident, 10 * GIB, 459e12, 459e12 / 2, {"all-gather": 300e9}, 0)


def test_verdict_and_advice():
    chip = chips.CHIPS["v5p"]
    small, large = program(parameters=5 * GIB), program(parameters=85 * GIB)
    assert report.fits(small, chip) and report.advice(small, chip) == "FITS"
    assert not report.fits(large, chip)  # 95 GiB of 95, nothing left for the runtime
    assert "parameters take the most; try more devices in config.mesh.fsdp" in report.advice(large, chip)
    least = report.estimate(small, chip)
    assert (least.compute, least.links) == (1.0, 0.5)
    assert least.total == 1.0
    rows = dict(report.table([small], chip))
    assert rows["peak"] == "15.00 GiB of 95.00 GiB"
    assert rows["times the model's own / devices"] == "2.00"
    assert rows["verdict"] == "FITS"


def test_topologies_are_checked_by_name():
    assert chips.chip("v6e:16x16") is chips.CHIPS["v6e"]
    with pytest.raises(ValueError, match="unknown chip in --topology 'v9'.*v5p"):
        chips.chip("v9:2x2")
    with pytest.raises(ValueError, match="--topology is 'v5p'; it must be like v5p:4x4x4"):
        chips.chip("v5p")
