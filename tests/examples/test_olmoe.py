"""The OLMoE-style decoder: causal, routed without a gap, its experts against a loop over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import symoptax
from models.olmoe import RULES, TINY, Experts, Olmoe


@pytest.fixture(scope="module")
def model():
    return Olmoe(TINY, nnx.Rngs(0))


def test_every_parameter_has_a_rule(model):
    report = symoptax.routing_report(nnx.state(model, nnx.Param), RULES)
    assert not report.unused_rules
    roles = {row.leaf.split("/")[-2]: row.role for row in report.rows}
    assert roles["router"] == "router"
    assert roles["embed"] == "embedding"
    experts = {row.leaf: row.matrices for row in report.rows if row.role.startswith("expert")}
    assert experts["layers/0/moe/gate"] == experts["layers/0/moe/up"] == "24 x 32 x 6"


def test_logits_are_causal_and_the_loss_is_finite(model):
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, TINY.vocab_size)
    forward = jax.jit(lambda tokens: model(tokens))
    logits, balance = forward(tokens)
    assert logits.shape == (2, 12, TINY.vocab_size)
    changed, _ = forward(tokens.at[:, 8:].add(1))
    np.testing.assert_allclose(changed[:, :8], logits[:, :8], atol=1e-6)
    assert np.any(changed[:, 8:] != logits[:, 8:])
    assert 0.9 < balance < 3  # 1 for an even load


def test_experts_against_a_loop():
    moe = Experts(TINY, nnx.Rngs(3))
    x = jax.random.normal(jax.random.key(2), (2, 5, TINY.d_model))
    mixed, _ = moe(x)
    router, gate, up, down = (
        np.asarray(a, np.float64)
        for a in (moe.router.kernel[...], moe.gate[...], moe.up[...], moe.down[...])
    )
    for token, got in zip(
        np.asarray(x, np.float64).reshape(-1, TINY.d_model), mixed.reshape(10, -1), strict=True
    ):
        scores = np.exp(token @ router)
        scores /= scores.sum()  # over all experts, and not again over the chosen ones
        want = np.zeros_like(token)
        for expert in np.argsort(scores)[-TINY.num_active :]:
            hidden = token @ gate[expert]
            hidden = hidden / (1 + np.exp(-hidden)) * (token @ up[expert])
            want += scores[expert] * (hidden @ down[expert])
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_an_even_load_costs_one():
    moe = Experts(TINY, nnx.Rngs(3))
    moe.router.kernel[...] = jnp.zeros_like(moe.router.kernel[...])
    _, balance = moe(jnp.ones((1, 4, TINY.d_model)))
    assert float(balance) == pytest.approx(1.0)
