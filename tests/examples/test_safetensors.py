"""Folders of the Hugging Face hub: weights and sizes from them and back, training from them."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tiny_runs import SMALL, compile_once, logged_losses, saved_arrays, write_texts

import export
import pretrain
from models import gemma3, gpt_oss, mxfp4, olmoe, qwen3
from models.catalog import MODELS, model_name
from models.hub_config import config_from_hugging_face, config_to_hugging_face
from models.hub_folder import from_safetensors, read_config, to_safetensors
from pretraining.sharding import make_mesh, placed


def tiny(name, **changes):
    """Return an architecture, its tiny sizes and parameters none of which is 0 or 1."""
    architecture = MODELS[name]
    config = dataclasses.replace(architecture.presets["tiny"], **changes)
    shapes = nnx.eval_shape(lambda: architecture.build(config, nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32),
        nnx.as_pure(nnx.state(shapes, nnx.Param)),
    )
    return architecture, config, params


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert leaf.dtype == other.dtype
        np.testing.assert_array_equal(leaf, other, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("max_bytes", [5e9, 2e4], ids=["one file", "several"])
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_on_disk(name, max_bytes, tmp_path):
    architecture, config, params = tiny(name)
    to_safetensors(architecture, config, params, tmp_path, max_bytes=max_bytes)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert read_config(tmp_path) == config
    assert_equal(from_safetensors(architecture, config, tmp_path), params)
    if max_bytes > 1e9:
        assert files == ["model.safetensors"]
        return
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    contents = {file: load_file(tmp_path / file) for file in files}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file in files for name in contents[file]}
    sizes = [[weight.nbytes for weight in content.values()] for content in contents.values()]
    assert index["metadata"]["total_size"] == sum(map(sum, sizes))
    assert all(sum(part) <= max_bytes or len(part) == 1 for part in sizes)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_half_precision_is_rounded_once(dtype, tmp_path):
    architecture, config, params = tiny("olmoe")
    to_safetensors(architecture, config, params, tmp_path, dtype=dtype)
    rounded = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    assert_equal(from_safetensors(architecture, config, tmp_path, dtype=dtype), rounded)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded)
    assert_equal(from_safetensors(architecture, config, tmp_path), wide)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == np.dtype(dtype).name


def test_leaves_are_placed_as_asked(tmp_path):
    architecture, config, params = tiny("gpt_oss")
    to_safetensors(architecture, config, params, tmp_path)
    shapes = placed(make_mesh("fsdp:4,tensor:2"), params)
    found = from_safetensors(architecture, config, tmp_path, shapes=shapes)
    assert_equal(found, params)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, found, shapes))


def test_what_does_not_fit_is_named(tmp_path):
    architecture, config, params = tiny("qwen3")
    to_safetensors(architecture, config, params, tmp_path)
    with pytest.raises(ValueError, match="not empty"):
        to_safetensors(architecture, config, params, tmp_path)
    path, up = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(path)
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    save_file(weights | buffers, path)
    assert_equal(from_safetensors(architecture, config, tmp_path), params)
    problems = {
        rf"layers/1/mlp/up_proj/kernel: the state dict has no {up}": {up: None},
        r"up_proj.weight: shape \(32, 64\); need \(64, 32\)": {up: weights[up].T.copy()},
        r"lacks: \['model.layers.2.x', 'y'\]": {"model.layers.2.x": np.ones(1), "y": np.ones(1)},
        f"{up} is of dtype I32": {up: weights[up].astype(np.int32)},
        r"need _blocks": {f"{up}_blocks": np.ones((2, 16), np.uint8)},
    }
    for message, changed in problems.items():
        save_file({k: v for k, v in (weights | changed).items() if v is not None}, path)
        with pytest.raises(ValueError, match=message):
            from_safetensors(architecture, config, tmp_path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read"):
        from_safetensors(architecture, config, tmp_path)
    index = {"weight_map": {"z": "part.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    path.rename(tmp_path / "part.safetensors")
    save_file(weights, tmp_path / "part.safetensors")
    with pytest.raises(ValueError, match=r"part\.safetensors: has no z, against"):
        from_safetensors(architecture, config, tmp_path)
    with pytest.raises(ValueError, match=r"config.json: there is no such file"):
        read_config(tmp_path / "elsewhere")


def test_mxfp4_is_the_formula():
    rng = np.random.default_rng(0)
    halves = rng.integers(0, 16, (2, 3, 4, 32)).astype(np.uint8)
    scales = rng.integers(0, 250, (2, 3, 4)).astype(np.uint8)
    scales[1, 2, 3] = 255
    # Two numbers in a byte, the first in its low half.
    found = mxfp4.dequantized(halves[..., ::2] | halves[..., 1::2] << 4, scales)
    numbers = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    expected = numbers * scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)[..., None]
    assert np.isnan(expected[1, 2, 3]).all()
    np.testing.assert_array_equal(found, expected.reshape(2, 3, 128).swapaxes(1, 2))
    assert found.dtype == np.float32
    assert found.shape == mxfp4.shape_of((2, 3, 4, 16))


def test_gpt_oss_in_four_bits(tmp_path):
    architecture, config, params = tiny("gpt_oss", d_model=64, d_ff=32)
    weights = gpt_oss.to_hugging_face(params)
    rng = np.random.default_rng(0)
    expected = dict(weights)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = weights.pop(name).shape
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16)).astype(np.uint8)
        scales = rng.integers(120, 125, blocks.shape[:-1]).astype(np.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = mxfp4.dequantized(blocks, scales)
    names = sorted(weights)  # Blocks and scales in two files.
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: np.ascontiguousarray(weights[name]) for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = from_safetensors(architecture, config, tmp_path)
    assert_equal(found, gpt_oss.from_hugging_face(config, expected))


# Fields of the files on the hub; those that name tokens and versions are left out.
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 262144,
}
OLMOE_1B_7B = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 50304,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}
GEMMA3_270M = {
    **GEMMA3_1B,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
    "_sliding_window_pattern": 6,
    "use_bidirectional_attention": False,
}


@pytest.mark.parametrize(
    ("fields", "preset"),
    [
        (QWEN3_0_6B, qwen3.QWEN3_0_6B),
        (GEMMA3_1B, gemma3.GEMMA3_1B),
        (GEMMA3_270M, gemma3.GEMMA3_270M),
        (OLMOE_1B_7B, olmoe.OLMOE_1B_7B),
        (GPT_OSS_20B, gpt_oss.GPT_OSS_20B),
    ],
)
def test_published_sizes(fields, preset):
    assert config_from_hugging_face(fields) == preset
    # What is written has the same sizes, and the same values of the fields that it shares.
    written = config_to_hugging_face(preset)
    for name in written.keys() & fields.keys() - {"max_position_embeddings"}:
        assert written[name] == fields[name], name


def test_every_preset_and_its_file_are_the_same():
    for name, architecture in MODELS.items():
        for config in architecture.presets.values():
            text = json.dumps(config_to_hugging_face(config))
            assert config_from_hugging_face(json.loads(text)) == config
            assert model_name(config) == name
    large = dataclasses.replace(gemma3.GEMMA3_1B, rope_factor=8.0, rope_base=1e5, global_every=3)
    assert config_from_hugging_face(config_to_hugging_face(large)) == large


def test_rotary_positions_as_written_since_version_5():
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e6}
    nested = {
        "full_attention": linear,
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    fields = {k: v for k, v in GEMMA3_1B.items() if not k.startswith("rope_")}
    config = config_from_hugging_face({**fields, "rope_parameters": nested})
    assert (config.rope_base, config.rope_factor, config.local_rope_base) == (3e6, 8.0, 2e4)
    fields = {k: v for k, v in QWEN3_0_6B.items() if not k.startswith("rope_")}
    plain = {"rope_type": "default", "rope_theta": 5e5}
    assert config_from_hugging_face({**fields, "rope_parameters": plain}).rope_base == 5e5


REFUSED = {
    "another model": (QWEN3_0_6B, {"model_type": "llama"}, "'llama': the models here are qwen3"),
    "missing": (QWEN3_0_6B, {"hidden_size": None}, "has no hidden_size"),
    "biases": (QWEN3_0_6B, {"attention_bias": True}, "attention_bias is True"),
    "activation": (QWEN3_0_6B, {"hidden_act": "gelu"}, "'gelu'.*'silu'"),
    "YaRN": (QWEN3_0_6B, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
    "old name": (QWEN3_0_6B, {"rope_scaling": {"type": "dynamic"}}, "'dynamic'"),
    "a window": (
        QWEN3_0_6B,
        {"use_sliding_window": True, "sliding_window": 64},
        "not have sliding_window=64, use_sliding_window=True",
    ),
    "layers": (QWEN3_0_6B, {"layer_types": ["sliding_attention"] * 28}, "layer_types"),
    "quantised": (QWEN3_0_6B, {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    "unknown": (QWEN3_0_6B, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
    "soft-capped logits": (GEMMA3_1B, {"final_logit_softcapping": 30.0}, "final_logit_softcap"),
    "soft-capped scores": (GEMMA3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcap"),
    "both ways": (GEMMA3_1B, {"use_bidirectional_attention": True}, "bidirectional"),
    "other order": (
        GEMMA3_1B,
        {"layer_types": ["full_attention", *["sliding_attention"] * 25]},
        "layer_types",
    ),
    "renormalised": (OLMOE_1B_7B, {"norm_topk_prob": True}, "norm_topk_prob is True"),
    "clipped": (OLMOE_1B_7B, {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    "grouped": (OLMOE_1B_7B, {"num_key_value_heads": 4}, "num_key_value_heads is 4"),
    "tied": (OLMOE_1B_7B, {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    "no YaRN": (GPT_OSS_20B, {"rope_scaling": None}, "'default'.*'yarn'"),
    "rounded YaRN": (
        GPT_OSS_20B,
        {"rope_scaling": {**GPT_OSS_20B["rope_scaling"], "truncate": True}},
        "truncate is True",
    ),
    "mscale": (
        GPT_OSS_20B,
        {"rope_scaling": {**GPT_OSS_20B["rope_scaling"], "mscale": 1.0}},
        "mscale",
    ),
    "other bits": (GPT_OSS_20B, {"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
}


@pytest.mark.parametrize(("fields", "changed", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_models_do_not_have_is_refused(fields, changed, message):
    with pytest.raises(ValueError, match=message):
        config_from_hugging_face({**fields, **changed})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run pretrain.py on a small corpus, without a preset."""
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder)
    data = [f"--data={folder}", f"--cache_dir={tmp_path_factory.mktemp('cache')}"]
    settings = [flag for flag in SMALL if not flag.startswith("--preset")]
    settings += ["--optimizer=adamw"]

    def call(out_dir, *flags):
        return pretrain.main(["pretrain", f"--out_dir={out_dir}", *data, *settings, *flags])

    with compile_once(tmp_path_factory.mktemp("compiled")):
        yield call


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """Return the folder of a run of two steps, and what was exported of it."""
    folder = tmp_path_factory.mktemp("exported")
    flags = ["--preset=tiny", "--steps=2", "--eval_every=2"]
    assert run(folder / "run", *flags) == 0
    written = [f"--run={folder / 'run'}", f"--out_dir={folder / 'hub'}", "--max_gb=1e-5"]
    assert export.main(["export", *written]) == 0
    return folder / "run", folder / "hub"


def test_training_starts_from_an_exported_run_and_resumes_without_it(run, exported, tmp_path):
    before, hub = exported
    # A learning rate that moves nothing: the losses are those of the exported model.
    flags = [f"--init_from={tmp_path / 'moved'}", "--learning_rate=1e-12"]
    flags += ["--steps=2", "--eval_every=1", "--mesh=fsdp:2"]
    hub.rename(tmp_path / "moved")
    assert run(tmp_path / "run", *flags, "--stop_at_step=1") == 0
    (tmp_path / "moved").rename(hub)
    assert run(tmp_path / "run", *flags, "--resume") == 0
    expected = [loss for _, _, loss in logged_losses(before) if loss]
    found = [loss for _, _, loss in logged_losses(tmp_path / "run") if loss]
    np.testing.assert_allclose(found, [expected[-1]] * 2, rtol=1e-5)
    assert "qwen3 model from" in (tmp_path / "run" / "report.md").read_text()
    # The weights were read to the last bit.
    params = from_safetensors(MODELS["qwen3"], read_config(hub), hub)
    saved = {k: v for k, v in saved_arrays(before, 2).items() if k.startswith("params")}
    loaded = jax.tree_util.tree_leaves_with_path(params)
    assert len(saved) == len(loaded)
    for path, leaf in loaded:
        name = re.sub(r"\[(\d+)\]", r"['\1']", jax.tree_util.keystr(path))
        np.testing.assert_array_equal(leaf, saved[f"params{name}"])


def test_what_training_cannot_start_from(run, exported, tmp_path, capsys):
    _, hub = exported
    (tmp_path / "words.txt").write_text("another text " * 4000)
    (tmp_path / "more.txt").write_text("of other words " * 4000)
    start = [f"--init_from={hub}"]
    problems = {
        "config.json: there is no such file": [f"--init_from={tmp_path}"],
        "give --model=qwen3": [*start, "--model=olmoe"],
        "--preset: leave it out": [*start, "--preset=tiny"],
        "--vocab_size: leave it out": [*start, "--vocab_size=300"],
        "a tokenizer of this text": [*start, f"--data={tmp_path}"],
    }
    for message, flags in problems.items():
        assert run(tmp_path / "run", *flags) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not (tmp_path / "run").exists()


def test_what_cannot_be_exported(exported, tmp_path, capsys):
    before, hub = exported
    problems = {
        "has no checkpoints": [f"--run={tmp_path}", f"--out_dir={tmp_path / 'out'}"],
        "is not an empty folder": [f"--run={before}", f"--out_dir={hub}"],
        "'float8'": ["--dtype=float8"],
        "unexpected argument 'x'": ["x"],
    }
    for message, flags in problems.items():
        assert export.main(["export", *flags]) == 2
        error = capsys.readouterr().err
        assert message.strip("'") in error
        assert error.count("\n") == 1
