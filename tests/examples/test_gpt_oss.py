"""The gpt-oss-style decoder: sinks, YaRN, clamped experts against oracles; audited and trained."""

import dataclasses
import functools
import math

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import symoptax
from models import gpt_oss
from models.gpt_oss import RULES, TINY, YARN, Experts, GptOss
from models.layers import attention, rope_frequencies, rotate

ONE_LAYER = dataclasses.replace(TINY, num_layers=1)
WITH_Z_LOSS = dataclasses.replace(ONE_LAYER, z_coef=0.001)
RAGGED = dataclasses.replace(TINY, experts="ragged")


def test_presets():
    decoders.check_presets(gpt_oss, GptOss)
    # The weights of openai/gpt-oss-20b, those in four bits counted as one each.
    assert decoders.count(GptOss, gpt_oss.GPT_OSS_20B) == 20_914_757_184


@pytest.mark.slow
def test_the_large_one():
    # The same for openai/gpt-oss-120b.
    assert decoders.count(GptOss, gpt_oss.GPT_OSS_120B) == 116_829_156_672


def test_gate_and_up_of_a_leaf_are_two_matrices():
    report = symoptax.routing_report(decoders.shapes(GptOss, TINY), RULES)
    rows = {row.leaf: row for row in report.rows}
    assert rows["layers/0/moe/gate_up"].matrices == "20 x 32 x 6 x 2"
    assert rows["layers/0/moe/router/kernel"].role == "router"
    others = {leaf.rpartition("/")[2] for leaf, row in rows.items() if row.role == "other"}
    assert others == {"bias", "sinks", "scale", "gate_up_bias", "down_bias"}
    (rule,) = (rule for rule in RULES if rule.pattern.endswith("gate_up"))
    leaf = jnp.arange(3 * 10).reshape(1, 3, 10)
    view = rule.view_for(leaf.shape)
    assert view is not None
    (stack,) = view.open(leaf)
    np.testing.assert_array_equal(stack[0, 0].T, leaf[0, :, ::2])
    np.testing.assert_array_equal(stack[0, 1].T, leaf[0, :, 1::2])


def test_causal():
    decoders.check_causality(GptOss, TINY)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_with_sinks_against_a_loop(window):
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (1, 7, 4, 8))
    k, v = (jax.random.normal(key, (1, 7, 2, 8)) for key in keys[1:3])
    sinks = jax.random.normal(keys[3], (4,))
    mixed = jax.jit(functools.partial(attention, window=window))(q, k, v, sinks=sinks)
    q, k, v, s = (np.asarray(a, np.float64) for a in (q[0], k[0], v[0], sinks))
    for head in range(4):
        for t in range(7):
            seen = range(max(0, t - (window or 7) + 1), t + 1)
            logits = [q[t, head] @ k[i, head // 2] / math.sqrt(8) for i in seen]
            weights = np.exp([*logits, s[head]])
            weights /= weights.sum()
            want = weights[:-1] @ v[list(seen), head // 2]
            np.testing.assert_allclose(mixed[0, t, head], want, atol=1e-5)


def test_layers_see_a_window_and_everything_in_turn():
    model = nnx.eval_shape(lambda: GptOss(gpt_oss.GPT_OSS_20B, nnx.Rngs(0)))
    assert [layer.attn.local for layer in model.layers] == [True, False] * 12


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    plain, yarn = rope_frequencies(64, 150000.0), YARN.frequencies(64, 150000.0)
    turns = 4096 * plain / (2 * np.pi)
    np.testing.assert_array_equal(yarn[turns >= 32], plain[turns >= 32])
    np.testing.assert_allclose(yarn[turns <= 1], plain[turns <= 1] / 32, rtol=1e-12)
    between = (turns < 32) & (turns > 1)
    assert np.all(yarn[between] < plain[between])
    assert np.all(yarn[between] > plain[between] / 32)
    assert [np.sum(turns >= 32), np.sum(between), np.sum(turns <= 1)] == [9, 9, 14]
    # Scores of rotated queries and keys grow by the square of this.
    assert pytest.approx(1.3465735902799727) == YARN.attention_factor
    x = jax.random.normal(jax.random.key(0), (1, 5, 1, 64))
    longer = jnp.linalg.norm(rotate(x, yarn, YARN.attention_factor)) / jnp.linalg.norm(x)
    assert float(longer) == pytest.approx(YARN.attention_factor, rel=1e-5)


@pytest.mark.parametrize("config", [TINY, RAGGED], ids=["dense", "ragged"])
def test_experts_against_a_loop(config):
    moe = Experts(config, nnx.Rngs(3))
    keys = iter(jax.random.split(jax.random.key(5), 5))
    router_bias = moe.router.bias
    assert router_bias is not None
    for leaf in (router_bias, moe.gate_up_bias, moe.down_bias):
        leaf[...] = jax.random.normal(next(keys), leaf.shape)
    moe.gate_up[...] *= 6.0
    x = jax.random.normal(next(keys), (2, 5, TINY.d_model))
    mixed, _ = jax.jit(moe)(x)
    leaves = (moe.gate_up, moe.gate_up_bias, moe.down, moe.down_bias)
    router, bias, gate_up, gate_up_bias, down, down_bias = (
        np.asarray(leaf[...], np.float64) for leaf in (moe.router.kernel, router_bias, *leaves)
    )
    clamped = 0
    for token, got in zip(
        np.asarray(x, np.float64).reshape(-1, TINY.d_model), mixed.reshape(10, -1), strict=True
    ):
        logits = token @ router + bias
        chosen = np.argsort(logits)[-TINY.num_active :]
        scores = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        want = np.zeros_like(token)
        for expert, score in zip(chosen, scores, strict=True):
            hidden = token @ gate_up[expert] + gate_up_bias[expert]
            gate, up = hidden[::2], hidden[1::2]
            clamped += np.sum(gate > 7) + np.sum(np.abs(up) > 7)
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            hidden = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            want += score * (hidden @ down[expert] + down_bias[expert])
        np.testing.assert_allclose(got, want, atol=1e-4)
    assert clamped > 20


def test_both_forms_have_one_gradient():
    x = jax.random.normal(jax.random.key(2), (2, 5, TINY.d_model))

    def gradient(config):
        graphdef, params = nnx.split(Experts(config, nnx.Rngs(3)))
        loss_fn = lambda params: jnp.sum(jnp.sin(nnx.merge(graphdef, params)(x)[0]))  # noqa: E731
        return nnx.to_pure_dict(jax.jit(jax.grad(loss_fn))(params))

    dense, ragged = gradient(TINY), gradient(RAGGED)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), dense, ragged)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(dense))


def test_a_z_loss_takes_the_shift_of_the_router():
    assert gpt_oss.rules_for(TINY) == RULES
    assert gpt_oss.rules_for(WITH_Z_LOSS) == gpt_oss.Z_LOSS_RULES
    assert [rule.role for rule in gpt_oss.Z_LOSS_RULES].count("router_no_shift") == 1


@pytest.mark.parametrize(
    "config",
    [ONE_LAYER, *(pytest.param(config, marks=pytest.mark.slow) for config in (TINY, WITH_Z_LOSS))],
    ids=["one layer", "tiny", "z-loss"],
)
def test_its_rules_pass_the_audit(config):
    held = decoders.claims_that_hold(GptOss, config, gpt_oss.rules_for(config))
    blocks = {"P(token)", "P(neuron)", "P(expert)", "P(head)", "sides of the product"}
    router = "router_no_shift: no shift" if config.z_coef else "router: shift"
    assert held == {*blocks, "only looked up", "lm_head: shift", router}


def test_a_tiny_model_learns():
    decoders.check_learning(GptOss, ONE_LAYER, RULES)
