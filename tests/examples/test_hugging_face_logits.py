"""The decoders against transformers: the same weights give the same logits, and go there and back.

`tests/data/make_hugging_face_logits.py` made the weights, the tokens and the logits.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import gemma3, gpt_oss, olmoe, qwen3

DATA = Path(__file__).parents[1] / "data"
HEADS: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 4}
SIZES: dict[str, Any] = {"vocab_size": 64, "d_model": 16}
MODELS = {
    "qwen3": (
        qwen3,
        qwen3.Qwen3,
        qwen3.Qwen3Config(num_layers=2, d_ff=24, tied=True, **SIZES, **HEADS),
    ),
    "gemma3": (
        gemma3,
        gemma3.Gemma3,
        gemma3.Gemma3Config(
            num_layers=3,
            d_ff=24,
            query_scalar=5,
            window=5,
            global_every=3,
            rope_factor=8,
            **SIZES,
            **HEADS,
        ),
    ),
    "olmoe": (
        olmoe,
        olmoe.Olmoe,
        olmoe.OlmoeConfig(num_layers=2, d_ff=12, num_heads=2, num_experts=6, num_active=2, **SIZES),
    ),
    "gpt_oss": (
        gpt_oss,
        gpt_oss.GptOss,
        gpt_oss.GptOssConfig(
            num_layers=2, d_ff=12, num_experts=5, num_active=2, window=5, **SIZES, **HEADS
        ),
    ),
}


def archive(name):
    with np.load(DATA / f"hugging_face_logits_{name}.npz") as data:
        weights = dict(data)
    return weights.pop("tokens"), weights.pop("logits"), weights


def logits_of(build, config, params, tokens):
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: build(config, nnx.Rngs(0))))
    output = jax.jit(lambda params: nnx.merge(graphdef, params)(tokens))(params)
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name):
    module, build, config = MODELS[name]
    tokens, expected, weights = archive(name)
    params = module.from_hugging_face(config, weights)
    logits = logits_of(build, config, params, jnp.asarray(tokens))
    # Both are float32; logits are as large as 25.
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name):
    module, _, config = MODELS[name]
    _, _, weights = archive(name)
    back = module.to_hugging_face(module.from_hugging_face(config, weights))
    assert back.keys() == weights.keys()
    for path, weight in weights.items():
        np.testing.assert_array_equal(back[path], weight, err_msg=path)
        assert back[path].dtype == weight.dtype


def test_what_does_not_fit_is_named():
    _, _, weights = archive("qwen3")
    config = MODELS["qwen3"][2]
    head = "lm_head.weight"  # Of a tied model, the embedding once more.
    qwen3.from_hugging_face(config, {**weights, head: weights["model.embed_tokens.weight"]})
    q = "model.layers.1.self_attn.q_proj.weight"
    problems = {
        "has no model.layers.1.self_attn.q_proj.weight": {q: None},
        r"q_proj.weight: shape \(16, 24\); need \(24, 16\)": {q: weights[q].T},
        r"lacks: \['model.layers.9.x'\]": {"model.layers.9.x": weights[q]},
    }
    for message, changed in problems.items():
        state_dict = {k: v for k, v in {**weights, **changed}.items() if v is not None}
        with pytest.raises(ValueError, match=message):
            qwen3.from_hugging_face(config, state_dict)
