"""Checkpoints: what transformers saved is loaded and computes the same; what cannot be is refused by name."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments import parity
from jaxrl_llm.models import hf, hf_config, names
from jaxrl_llm.models.config import ModelConfig, MoEConfig, RopeScaling
from jaxrl_llm.models.decoder import Decoder

torch = pytest.importorskip("torch")
import transformers  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

QUICK = ["Llama 3 (scaled rotary, GQA)", "Qwen3-MoE"]  # compiling dominates; `decoder` and `moe` tests cover the others


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in parity.CASES])
def test_logits_gradients_and_the_way_back_equal_transformers(name, tmp_path):
    found = parity.compare(name, tmp_path)
    assert found.logits < 1e-4
    assert found.gradients < 1e-4
    assert found.exported < 1e-6


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(directory, transformers model) of a small Llama."""
    path = tmp_path_factory.mktemp("llama")
    return path, parity.reference("Llama 3 (scaled rotary, GQA)", path)


@pytest.fixture
def copy(llama, tmp_path):
    """A checkpoint to spoil."""
    shutil.copytree(llama[0], tmp_path / "copy")
    return tmp_path / "copy"


def edit(path, **changes):
    config = json.loads((path / "config.json").read_text())
    config = {name: value for name, value in (config | changes).items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))


def logits(path):
    config = hf.read_config(path)
    params, graphdef = hf.load(path, config), nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))[0]
    tokens, mask, positions = parity.inputs(31)
    forward = jax.jit(lambda m: m.logits(m.hidden(tokens, positions, mask.astype(np.int32))))
    return np.asarray(forward(nnx.merge(graphdef, params)))[mask]


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 0.1},
        {"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 3.0}},
        {
            "rope_parameters": parity.LLAMA3
            | {"rope_theta": 5000.0, "factor": 2.0, "original_max_position_embeddings": 64}
        },
        # As written before transformers 5.
        {"rope_parameters": ..., "rope_theta": 90.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        # The same matrices, cut into other heads.
        {"head_dim": 12, "num_attention_heads": 2, "num_key_value_heads": 1},
    ],
    ids=["eps", "theta", "linear", "llama3", "old_spelling", "heads"],
)
def test_a_changed_config_changes_logits_as_in_transformers(change, llama, copy):
    edit(copy, **change)
    reference = transformers.AutoModelForCausalLM.from_pretrained(copy).eval()
    tokens, mask, positions = parity.inputs(31)
    ours = logits(copy)
    theirs = parity.their_logits(reference, tokens, mask, positions).detach().numpy()[mask]
    before = parity.their_logits(llama[1], tokens, mask, positions).detach().numpy()[mask]
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert np.abs(ours - before).max() > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "unknown model_type .* 'gpt2'; choose from: llama, qwen2"),
        ({"model_type": "nothing"}, "unknown model_type 'nothing'; choose from: llama, qwen2"),
        ({"hidden_act": "gelu"}, "hidden_act of .* is 'gelu'; it must be 'silu'"),
        ({"attention_bias": True}, "attention_bias of .* is True; it must be False"),
        ({"mlp_bias": True}, "mlp_bias of .* is True; it must be False"),
        ({"sliding_window": 8}, "sliding_window of .* is 8; it must be None"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0}},
            "rope_type of .* is 'yarn'; it must be default, linear or llama3",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change, message, copy):
    edit(copy, **change)
    with pytest.raises(ValueError, match=message):
        hf.read_config(copy)


def test_every_tensor_is_accounted_for(copy):
    config, file = hf.read_config(copy), copy / "model.safetensors"
    tensors = load_file(file)

    def saved(**changes):
        save_file({k: v for k, v in (tensors | changes).items() if v is not None}, file)

    saved(**{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ValueError, match=r"lacks tensor model.layers.1.mlp.up_proj.weight \(40, 24\)"):
        hf.load(copy, config)
    saved(**{"model.layers.0.self_attn.k_proj.weight": np.zeros((24, 24), np.float32)})
    with pytest.raises(ValueError, match=r"k_proj.weight .* has shape \(24, 24\); it must be \(12, 24\)"):
        hf.load(copy, config)
    saved(**{"model.layers.0.self_attn.k_proj.bias": np.zeros(12, np.float32)})
    with pytest.raises(ValueError, match="no place for: model.layers.0.self_attn.k_proj.bias"):
        hf.load(copy, config)
    # Buffers that old checkpoints hold are no parameters.
    saved(**{"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3, np.float32)})
    hf.load(copy, config)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"checkpoint file .*model.safetensors cannot be read"):
        hf.load(copy, config)


def test_what_is_missing_is_said(tmp_path, copy):
    for source, message in (
        (str(tmp_path / "none"), "is no directory, no .gguf file and no hub id"),
        (str(tmp_path / "none.gguf"), "does not exist"),
        (str(tmp_path), "has no config.json"),
    ):
        with pytest.raises(ValueError, match=message):
            hf.find(source)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has neither model.safetensors nor model.safetensors.index.json"):
        hf.find(str(copy))
    (copy / "config.json").write_text("{")
    with pytest.raises(ValueError, match="the configuration of .* cannot be read"):
        hf.read_config(copy)


def test_shards_are_written_read_and_missed(llama, tmp_path):
    config = hf.read_config(llama[0])
    params = hf.load(llama[0], config)
    hf.save(tmp_path / "out", params, config, hf.transformers_config(llama[0]), None, "float32", max_shard_size=8000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in llama[1].state_dict().items():
        np.testing.assert_array_equal(reference[name].numpy(), tensor.numpy(), err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "out", config), params)
    with pytest.raises(ValueError, match="exists and is not empty"):
        hf.save(tmp_path / "out", params, config, hf.transformers_config(llama[0]), None)
    files[1].unlink()
    with pytest.raises(ValueError, match=f"checkpoint file .*{files[1].name} is missing"):
        hf.load(tmp_path / "out", config)


def test_dtype_and_placement_are_as_asked(llama):
    config = hf.read_config(llama[0], param_dtype="bfloat16", scan_unroll=2)
    assert (config.param_dtype, config.scan_unroll) == ("bfloat16", 2)
    mesh = Mesh(np.array(jax.devices()[:2]), "tensor")
    divided = NamedSharding(mesh, PartitionSpec(None, None, "tensor"))
    whole = NamedSharding(mesh, PartitionSpec())

    def places(tree):
        return jax.tree.map(lambda x: divided if x.ndim == 3 else whole, tree)

    params = hf.flatten(hf.load(llama[0], config, places))
    query = params["layers", "attention", "query", "kernel"]
    assert query.dtype == jnp.bfloat16
    expected = llama[1].model.layers[1].self_attn.q_proj.weight.detach().to(torch.bfloat16).float().numpy().T
    np.testing.assert_array_equal(np.asarray(query[1], np.float32), expected)
    assert query.addressable_shards[0].data.shape == (2, 24, 12)


@pytest.mark.parametrize(
    "fields",
    [
        {"qk_norm": False, "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 16)},
        {"qk_norm": False, "attention_bias": True, "tie_word_embeddings": False},
        {"rope_scaling": RopeScaling("linear", 2.0), "rope_theta": 77.0},
        {"moe": MoEConfig(4, 2, 8, norm_topk_prob=False, dense_layers=(1,))},
    ],
    ids=["llama", "qwen2", "qwen3", "qwen3_moe"],
)
def test_an_architecture_without_checkpoint_survives_the_way_through_transformers(fields):
    config = ModelConfig(**fields)
    theirs = hf_config.to_transformers(config)
    assert hf_config.from_transformers(type(theirs).from_dict(theirs.to_dict()), "x") == config


def test_an_architecture_that_transformers_lacks_is_refused():
    with pytest.raises(ValueError, match="no model type of transformers computes"):
        hf_config.to_transformers(ModelConfig(qk_norm=True, attention_bias=True))


def test_a_parameter_without_a_name_is_an_error():
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    with pytest.raises(ValueError, match="parameter extra.scale has no name"):
        names.tensors(ModelConfig(), {("extra", "scale"): shape})


def test_end_tokens_of_tokenizer_and_generation_config_count(copy):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    edit(copy, eos_token_id=[5, 9])
    assert hf.stop_ids(copy, type("T", (), {"eos_token_id": 7})) == (7, 5, 9)
    edit(copy, eos_token_id=None)
    (copy / "generation_config.json").unlink()
    with pytest.raises(ValueError, match="names no end token"):
        hf.stop_ids(copy, type("T", (), {"eos_token_id": None}))
