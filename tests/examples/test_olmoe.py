"""The OLMoE-style decoder: its experts against a loop over tokens, its losses; audited, trained."""

import dataclasses

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import symoptax
from models import olmoe
from models.experts import load_balance, z_loss
from models.olmoe import RULES, TINY, Z_LOSS_RULES, Experts, Olmoe, rules_for

ONE_LAYER = dataclasses.replace(TINY, num_layers=1)
WITH_Z_LOSS = dataclasses.replace(ONE_LAYER, z_coef=0.001)
RAGGED = dataclasses.replace(TINY, experts="ragged")


def test_presets():
    decoders.check_presets(olmoe, Olmoe)
    # The sum of all shapes in the safetensors of allenai/OLMoE-1B-7B-0924.
    assert decoders.count(Olmoe, olmoe.OLMOE_1B_7B) == 6_919_161_856


def test_every_parameter_has_a_rule():
    report = symoptax.routing_report(decoders.shapes(Olmoe, TINY), RULES)
    assert not report.unused_rules
    roles = {row.leaf.split("/")[-2]: row.role for row in report.rows}
    assert roles["router"] == "router"
    assert roles["embed"] == "embedding"
    experts = {row.leaf: row.matrices for row in report.rows if row.role.startswith("expert")}
    assert experts["layers/0/moe/gate"] == experts["layers/0/moe/up"] == "24 x 32 x 6"


def test_causal():
    decoders.check_causality(Olmoe, TINY)


@pytest.mark.parametrize("config", [TINY, RAGGED], ids=["dense", "ragged"])
def test_experts_against_a_loop(config):
    moe = Experts(config, nnx.Rngs(3))
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


def test_both_forms_have_one_gradient():
    x = jax.random.normal(jax.random.key(2), (2, 5, TINY.d_model))

    def gradient(config):
        graphdef, params = nnx.split(Experts(config, nnx.Rngs(3)))

        def loss_fn(params):
            mixed, routing = nnx.merge(graphdef, params)(x)
            return jnp.sum(jnp.sin(mixed)) + routing.auxiliary

        return nnx.to_pure_dict(jax.jit(jax.grad(loss_fn))(params))

    dense, ragged = gradient(TINY), gradient(RAGGED)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), dense, ragged)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(dense))


def test_an_expert_that_nobody_chose():
    moe = Experts(RAGGED, nnx.Rngs(3))
    moe.router.kernel[...] = moe.router.kernel[...].at[:, 2].set(-100.0)
    x = jnp.abs(jax.random.normal(jax.random.key(2), (1, 5, TINY.d_model)))
    before, _ = moe(x)
    moe.up[...] = moe.up[...].at[2].multiply(-3.0)
    np.testing.assert_array_equal(moe(x)[0], before)
    moe.up[...] = moe.up[...] * -3.0
    assert bool(jnp.all(moe(x)[0] != before))


def test_an_even_load_costs_one():
    even = jnp.full((6, 6), 1 / 6)
    each_twice = jnp.stack([jnp.arange(6), (jnp.arange(6) + 1) % 6], axis=1)
    assert float(load_balance(even, each_twice)) == pytest.approx(1.0)
    # All to one of six: it costs as many times as much as there are experts.
    one = jax.nn.one_hot(jnp.zeros(6, int), 6)
    assert float(load_balance(one, jnp.zeros((6, 1), int))) == pytest.approx(6.0)


def test_the_losses_are_weighted_and_added():
    x = jax.random.normal(jax.random.key(2), (2, 5, TINY.d_model))
    config = dataclasses.replace(TINY, balance_coef=0.5, z_coef=0.25)
    moe = Experts(config, nnx.Rngs(3))
    logits = np.asarray(moe.router(x).reshape(10, -1), np.float64)
    scores = np.exp(logits)
    z = np.mean(np.log(scores.sum(axis=1)) ** 2)
    np.testing.assert_allclose(z_loss(jnp.asarray(logits, jnp.float32)), z, rtol=1e-5)
    scores /= scores.sum(axis=1, keepdims=True)
    load = np.bincount(np.argsort(scores, axis=1)[:, -2:].ravel(), minlength=6) / 20
    balance = 6 * np.sum(load * scores.mean(axis=0))
    np.testing.assert_allclose(moe(x)[1].auxiliary, 0.5 * balance + 0.25 * z, rtol=1e-5)


def test_a_z_loss_takes_the_shift_of_the_router():
    assert rules_for(TINY) == RULES
    assert rules_for(WITH_Z_LOSS) == Z_LOSS_RULES
    assert [rule.role for rule in Z_LOSS_RULES].count("router_no_shift") == 1
    x = jax.random.normal(jax.random.key(2), (2, 5, TINY.d_model))
    for config, moves in ((ONE_LAYER, False), (WITH_Z_LOSS, True)):
        moe = Experts(config, nnx.Rngs(3))
        before = moe(x)
        shift = jax.random.normal(jax.random.key(4), (TINY.d_model, 1))
        moe.router.kernel[...] += jnp.broadcast_to(shift, moe.router.kernel.shape)
        after = moe(x)
        np.testing.assert_allclose(after[0], before[0], atol=1e-5)
        moved = abs(float(after[1].auxiliary - before[1].auxiliary))
        assert (moved > 1e-3) == moves


@pytest.mark.parametrize(
    "config",
    [ONE_LAYER, *(pytest.param(config, marks=pytest.mark.slow) for config in (TINY, WITH_Z_LOSS))],
    ids=["one layer", "tiny", "z-loss"],
)
def test_its_rules_pass_the_audit(config):
    held = decoders.claims_that_hold(Olmoe, config, rules_for(config))
    blocks = {"P(token)", "P(neuron)", "P(expert)", "P(head)", "sides of the product"}
    router = "router_no_shift: no shift" if config.z_coef else "router: shift"
    assert held == {*blocks, "only looked up", "lm_head: shift", router}


def test_a_tiny_model_learns():
    decoders.check_learning(Olmoe, ONE_LAYER, RULES)
