"""The Qwen3-style decoder: against a NumPy oracle, causal, counted, routed, audited, trained."""

import dataclasses
import functools

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import symoptax
from models import qwen3
from models.layers import rope_frequencies, rotate
from models.qwen3 import RULES, TIED_RULES, TINY, Qwen3, rules_for

ONE_LAYER = dataclasses.replace(TINY, num_layers=1)
TIED = dataclasses.replace(TINY, tied=True)


def _model(config=TINY):
    return Qwen3(config, nnx.Rngs(0))


def _params(config=TINY):
    return nnx.as_pure(nnx.state(_model(config), nnx.Param))


@functools.partial(jax.jit, static_argnums=0)
def _logits(config, params, tokens):
    return nnx.merge(nnx.split(nnx.eval_shape(lambda: _model(config)))[0], params)(tokens)


def _tokens(batch=2, length=12):
    return jax.random.randint(jax.random.key(1), (batch, length), 0, TINY.vocab_size)


def _rms(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + TINY.norm_eps) * scale


def _turn(x, position):
    """Rotate the pairs (i, i + half) of one head vector as complex numbers."""
    half = len(x) // 2
    angle = position * TINY.rope_base ** (-np.arange(half) / half)
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag])


def _attention(p, x):
    """One sequence, one head and one position at a time."""
    dim, share = TINY.head_dim, TINY.num_heads // TINY.num_kv_heads
    q, k, v = (x @ p[f"{name}_proj"]["kernel"] for name in "qkv")
    out = np.zeros_like(q)
    for head in range(TINY.num_heads):
        mine = slice(head * dim, (head + 1) * dim)
        shared = slice(head // share * dim, (head // share + 1) * dim)
        queries = [_turn(_rms(row, p["q_norm"]["scale"]), i) for i, row in enumerate(q[:, mine])]
        keys = [_turn(_rms(row, p["k_norm"]["scale"]), i) for i, row in enumerate(k[:, shared])]
        for i, query in enumerate(queries):
            weights = np.exp([query @ key / np.sqrt(dim) for key in keys[: i + 1]])
            out[i, mine] = weights / weights.sum() @ v[: i + 1, shared]
    return out @ p["o_proj"]["kernel"]


def _oracle(params, tokens):
    """Logits of one sequence in float64."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(params))
    x = p["embed"]["embedding"][tokens]
    for layer in p["layers"].values():
        x = x + _attention(layer["attn"], _rms(x, layer["attn_norm"]["scale"]))
        h = _rms(x, layer["mlp_norm"]["scale"])
        gate = h @ layer["mlp"]["gate_proj"]["kernel"]
        up = h @ layer["mlp"]["up_proj"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp"]["down_proj"]["kernel"]
    return _rms(x, p["norm"]["scale"]) @ p["lm_head"]["kernel"]


def test_logits_equal_a_numpy_oracle():
    # Scales away from 1, so that a norm left out or misplaced shows.
    params = jax.tree.map(
        lambda x: x * jnp.linspace(0.5, 1.5, x.size) if x.ndim == 1 else x, _params()
    )
    tokens = _tokens()
    logits = _logits(TINY, params, tokens)
    expected = np.stack([_oracle(params, np.asarray(row)) for row in tokens])
    # float32 against float64 through two layers: a few hundred roundings of size 6e-8.
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("config", [TINY, TIED])
def test_shapes_and_parameter_count(config):
    params = _params(config)
    logits = _logits(config, params, _tokens())
    assert logits.shape == (2, 12, config.vocab_size)
    assert logits.dtype == jnp.float32
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == config.num_params()


def test_a_later_token_changes_no_earlier_logits():
    decoders.check_causality(Qwen3, TINY)


def test_rotary_products_depend_on_the_distance_only():
    ones = jnp.ones((1, 10, 1, TINY.head_dim))
    turned = rotate(ones, rope_frequencies(TINY.head_dim, 1e4))[0, :, 0]
    products = turned @ turned.T
    np.testing.assert_allclose(jnp.diagonal(products, 3), products[0, 3], rtol=1e-5)
    assert abs(float(products[0, 3] - products[0, 0])) > 0.1


@pytest.mark.parametrize(("config", "rules"), [(TINY, RULES), (TIED, TIED_RULES)])
def test_rules_cover_the_model_and_none_is_idle(config, rules):
    assert rules_for(config) == rules
    params = _params(config)
    symoptax.layerwise(1e-3, rules).init(params)
    for rule in rules:
        others = [other for other in rules if other != rule]
        with pytest.raises(ValueError, match="no rule matches"):
            symoptax.layerwise(1e-3, others).init(params)


def test_presets():
    decoders.check_presets(qwen3, Qwen3)
    # The sum of all shapes in the safetensors of Qwen/Qwen3-0.6B, the tied head counted once.
    assert decoders.count(Qwen3, qwen3.QWEN3_0_6B) == 596_049_920


@pytest.mark.parametrize(
    "config",
    [ONE_LAYER, *(pytest.param(config, marks=pytest.mark.slow) for config in (TINY, TIED))],
    ids=["one layer", "tiny", "tied"],
)
def test_its_rules_pass_the_audit(config):
    held = decoders.claims_that_hold(Qwen3, config, rules_for(config))
    ends = {"also the head"} if config.tied else {"only looked up", "lm_head: shift"}
    assert held == {"P(token)", "P(neuron)", "sides of the product", *ends}


def test_a_tiny_model_learns():
    decoders.check_learning(Qwen3, ONE_LAYER, RULES)
