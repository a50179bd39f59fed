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
from jaxrl_llm.hub import hf_config, names, pretrained
from jaxrl_llm.models.config import ModelConfig, MoEConfig, RopeScaling
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.heads import ScalarModel
from jaxrl_llm.reward_models import scoring

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


def logits(path, lengths=(9, 5)):
    config = pretrained.read_config(path)
    params, graphdef = (
        pretrained.load(path, config),
        nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))[0],
    )
    tokens, mask, positions = parity.inputs(31, lengths)
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
        pretrained.read_config(copy)


@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3_5Moe"])
def test_the_text_part_of_a_multimodal_checkpoint(family, tmp_path):
    """As published: names under model.language_model, experts fused, vision tower and multi-token head beside them."""
    name = {"Qwen3_5": "Qwen3.5", "Qwen3_5Moe": "Qwen3.5-MoE"}[family]
    _, fields, rope = parity.CASES[name]
    text = parity.COMMON | fields | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    text |= {"rope_parameters": rope | {"rope_theta": 70.0, "rope_type": "default", "mrope_section": [1, 1, 0]}}
    text |= {"tie_word_embeddings": False}  # what the whole model says counts
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 24}
    vision |= {"num_position_embeddings": 16, "patch_size": 4}
    config = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=family == "Qwen3_5"
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.2 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path, save_original_format=False)
    tensors = load_file(tmp_path / "model.safetensors")
    fused = "model.language_model.layers.0.mlp.experts.gate_up_proj" in tensors
    assert (fused, "lm_head.weight" in tensors) == ((False, False) if family == "Qwen3_5" else (True, True))
    assert any(tensor.startswith("model.visual.") for tensor in tensors)
    extra = {
        "mtp.norm.weight": np.ones(24, np.float32),
        "mtp.layers.0.mlp.experts.gate_up_proj": np.ones(3, np.float32),
    }
    save_file(tensors | extra, tmp_path / "model.safetensors")
    tokens, mask, _ = parity.inputs(31, (9, 9))
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor(tokens, dtype=torch.long)).logits.numpy()[mask]
    np.testing.assert_allclose(logits(tmp_path, (9, 9)), theirs, atol=1e-4)
    save_file(tensors | {"model.language_model.audio": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no place for: model.language_model.audio"):
        pretrained.load(tmp_path, pretrained.read_config(tmp_path))


def test_a_tied_model_may_store_its_unembedding_if_it_is_the_embedding(tmp_path):
    theirs = transformers.LlamaConfig(**parity.COMMON, num_attention_heads=2, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(theirs).save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", pretrained.read_config(tmp_path)
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, file)
    np.testing.assert_array_equal(
        pretrained.load(tmp_path, config)["embedding"][...], tensors["model.embed_tokens.weight"]
    )
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1e-3}, file)
    with pytest.raises(ValueError, match="tensor lm_head.weight of .* differs from model.embed_tokens.weight"):
        pretrained.load(tmp_path, config)


# Architectures of published reward models.
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_a_sequence_classifier_scores_as_in_transformers_and_survives_the_way_back(family, tmp_path):
    fields = parity.COMMON | {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "num_labels": 1}
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForSequenceClassification")(
        getattr(transformers, f"{family}Config")(**fields, tie_word_embeddings=family == "Qwen3")
    ).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.2 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "theirs")
    tokens = np.random.default_rng(0).integers(1, 31, (3, 9))
    mask = np.arange(9) < np.array([9, 4, 1])[:, None]
    tokens = np.where(mask, tokens, 0)  # transformers finds the last valid token by the padding's id

    def their_scores(model):
        with torch.no_grad():
            inputs = torch.tensor(tokens), torch.tensor(mask, dtype=torch.long)
            return model(inputs[0], attention_mask=inputs[1]).logits[:, 0].numpy()

    config = pretrained.read_config(tmp_path / "theirs")
    params = pretrained.load_scalar(tmp_path / "theirs", config)
    graphdef = nnx.split(nnx.eval_shape(lambda: ScalarModel(config, rngs=nnx.Rngs(0))), nnx.Param)[0]
    ours = jax.jit(scoring.scores, static_argnums=0)(
        graphdef, params, jnp.asarray(tokens, jnp.int32), jnp.asarray(mask)
    )
    np.testing.assert_allclose(ours, their_scores(model), rtol=1e-4, atol=1e-5)
    theirs = pretrained.transformers_config(tmp_path / "theirs")
    pretrained.save(tmp_path / "ours", params, config, theirs, None, "float32")
    back = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").eval()
    assert back.num_labels == 1
    np.testing.assert_allclose(their_scores(back), their_scores(model), atol=1e-6)


def test_a_language_model_has_no_score_head_unless_it_is_asked_to_get_one(llama):
    config = pretrained.read_config(llama[0])
    with pytest.raises(ValueError, match=r"lacks tensor score.weight \(1, 24\)"):
        pretrained.load_scalar(llama[0], config)
    params = pretrained.flatten(pretrained.load_scalar(llama[0], config, new_head=True))
    assert not np.any(params["score", "kernel"])
    trunk = pretrained.flatten(pretrained.load(llama[0], config))
    assert {path[1:] for path in params if path[0] == "trunk"} == trunk.keys() - {("head",)}
    np.testing.assert_array_equal(params["trunk", "embedding"], trunk["embedding",])


def test_every_tensor_is_accounted_for(copy):
    config, file = pretrained.read_config(copy), copy / "model.safetensors"
    tensors = load_file(file)

    def saved(**changes):
        save_file({k: v for k, v in (tensors | changes).items() if v is not None}, file)

    saved(**{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ValueError, match=r"lacks tensor model.layers.1.mlp.up_proj.weight \(40, 24\)"):
        pretrained.load(copy, config)
    saved(**{"model.layers.0.self_attn.k_proj.weight": np.zeros((24, 24), np.float32)})
    with pytest.raises(ValueError, match=r"k_proj.weight .* has shape \(24, 24\); it must be \(12, 24\)"):
        pretrained.load(copy, config)
    saved(**{"model.layers.0.self_attn.k_proj.bias": np.zeros(12, np.float32)})
    with pytest.raises(ValueError, match="no place for: model.layers.0.self_attn.k_proj.bias"):
        pretrained.load(copy, config)
    # Buffers that old checkpoints hold are no parameters.
    saved(**{"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3, np.float32)})
    pretrained.load(copy, config)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"checkpoint file .*model.safetensors cannot be read"):
        pretrained.load(copy, config)


def test_what_is_missing_is_said(tmp_path, copy):
    for source, message in (
        (str(tmp_path / "none"), "is no directory, no .gguf file and no hub id"),
        (str(tmp_path / "none.gguf"), "does not exist"),
        (str(tmp_path), "has no config.json"),
    ):
        with pytest.raises(ValueError, match=message):
            pretrained.find(source)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has neither model.safetensors nor model.safetensors.index.json"):
        pretrained.find(str(copy))
    (copy / "config.json").write_text("{")
    with pytest.raises(ValueError, match="the configuration of .* cannot be read"):
        pretrained.read_config(copy)


def test_shards_are_written_read_and_missed(llama, tmp_path):
    config = pretrained.read_config(llama[0])
    params = pretrained.load(llama[0], config)
    pretrained.save(
        tmp_path / "out", params, config, pretrained.transformers_config(llama[0]), None, "float32", max_shard_size=8000
    )
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in llama[1].state_dict().items():
        np.testing.assert_array_equal(reference[name].numpy(), tensor.numpy(), err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, pretrained.load(tmp_path / "out", config), params)
    with pytest.raises(ValueError, match="exists and is not empty"):
        pretrained.save(tmp_path / "out", params, config, pretrained.transformers_config(llama[0]), None)
    files[1].unlink()
    with pytest.raises(ValueError, match=f"checkpoint file .*{files[1].name} is missing"):
        pretrained.load(tmp_path / "out", config)


def test_dtype_and_placement_are_as_asked(llama):
    config = pretrained.read_config(llama[0], param_dtype="bfloat16", scan_unroll=2)
    assert (config.param_dtype, config.scan_unroll) == ("bfloat16", 2)
    mesh = Mesh(np.array(jax.devices()[:2]), "tensor")
    divided = NamedSharding(mesh, PartitionSpec(None, None, "tensor"))
    whole = NamedSharding(mesh, PartitionSpec())

    def places(tree):
        return jax.tree.map(lambda x: divided if x.ndim == 3 else whole, tree)

    params = pretrained.flatten(pretrained.load(llama[0], config, places))
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
    assert pretrained.stop_ids(copy, type("T", (), {"eos_token_id": 7})) == (7, 5, 9)
    edit(copy, eos_token_id=None)
    (copy / "generation_config.json").unlink()
    with pytest.raises(ValueError, match="names no end token"):
        pretrained.stop_ids(copy, type("T", (), {"eos_token_id": None}))
