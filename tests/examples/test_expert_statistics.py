"""Statistics of routers by hand-made cases; what a run with experts writes; loss spikes."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_runs import SMALL, compile_once, write_texts

import pretrain
import symoptax
from models import gpt_oss, olmoe
from models.experts import Routing
from models.routing_statistics import expert_statistics, model_statistics
from pretraining.diagnostics import momentum_statistics
from pretraining.progress import read_metrics
from pretraining.spikes import loss_spikes
from pretraining.train import TrainState


@pytest.fixture(scope="module", autouse=True)
def little(tmp_path_factory):
    with compile_once(tmp_path_factory.mktemp("compiled")):
        yield


def of(logits, chosen):
    found = jax.jit(expert_statistics)(jnp.asarray(logits), jnp.asarray(chosen))
    return {name: np.asarray(value) for name, value in found.items()}


def test_an_even_load():
    chosen = [[e, (e + 1) % 4] for e in range(4)]
    found = of(np.zeros((4, 4), np.float32), chosen)
    np.testing.assert_array_equal(found.pop("load"), np.ones(4))
    ones = {"load_max", "load_min", "load_entropy", "router_entropy", "chosen_entropy"}
    for name, value in found.items():
        expected = math.log(4) ** 2 if name == "z" else float(name in ones)
        assert value == pytest.approx(expected, abs=1e-6), name


def test_all_tokens_to_one_expert():
    logits = np.full((5, 4), -30.0, np.float32)
    logits[:, 2] = 50.0
    found = of(logits, np.full((5, 1), 2))
    np.testing.assert_array_equal(found["load"], [0, 0, 4, 0])
    expected = {"load_max": 4, "load_min": 0, "load_cv": math.sqrt(3), "load_entropy": 0}
    expected |= {"idle": 0.75, "dropped": 0, "router_entropy": 0, "logit_max": 50, "z": 2500}
    expected |= {"logit_rms": math.sqrt((3 * 900 + 2500) / 4), "logit_shift": 10}
    expected |= {"chosen_entropy": 0}  # of a single one
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-5), name


def test_against_sums_over_tokens():
    rng = np.random.default_rng(0)
    logits = rng.normal(1.0, 2.0, (30, 6)).astype(np.float32)
    chosen = np.argsort(-logits, axis=1)[:, :2]
    found = of(logits, chosen)
    counts = np.array([np.sum(chosen == e) for e in range(6)])
    np.testing.assert_allclose(found["load"], counts / 10, rtol=1e-6)
    assert found["load_cv"] == pytest.approx(np.std(counts) / 10, rel=1e-5)
    share = counts / 60
    entropy = -np.sum(share[share > 0] * np.log(share[share > 0])) / math.log(6)
    assert found["load_entropy"] == pytest.approx(entropy, rel=1e-5)
    z = logits.astype(np.float64)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    entropy = -np.mean(np.sum(p * np.log(p), 1)) / math.log(6)
    assert found["router_entropy"] == pytest.approx(entropy, rel=1e-5)
    # Either order of top k and softmax, the weights of the chosen scaled to the sum 1.
    weights = np.take_along_axis(p, chosen, 1)
    weights /= weights.sum(1, keepdims=True)
    entropy = -np.mean(np.sum(weights * np.log(weights), 1)) / math.log(2)
    assert found["chosen_entropy"] == pytest.approx(entropy, rel=1e-5)
    assert found["logit_shift"] == pytest.approx(np.sqrt(np.mean(z.mean(1) ** 2)), rel=1e-5)


def test_a_shift_changes_what_a_softmax_does_not_see():
    logits = np.random.default_rng(1).normal(size=(20, 5)).astype(np.float32)
    chosen = np.argsort(-logits, axis=1)[:, :2]
    centered = logits - logits.mean(1, keepdims=True)
    before, after = of(centered, chosen), of(centered + 7, chosen)
    changed = {name for name in before if not np.allclose(before[name], after[name], atol=1e-4)}
    assert changed == {"logit_rms", "logit_max", "z", "logit_shift"}
    assert before["logit_shift"] == pytest.approx(0, abs=1e-6)
    assert after["logit_shift"] == pytest.approx(7, rel=1e-6)


def test_choices_beyond_the_experts_are_dropped():
    found = of(np.zeros((4, 3), np.float32), [[0, 1], [0, 3], [3, 3], [2, 1]])
    np.testing.assert_allclose(found["load"], np.array([2, 2, 1]) * 3 / 8)
    assert found["dropped"] == pytest.approx(3 / 8)
    assert found["load_entropy"] < 1
    nothing = of(np.zeros((2, 3), np.float32), np.full((2, 1), 3))
    assert nothing["dropped"] == 1
    assert all(np.all(np.isfinite(value)) for value in nothing.values())


def test_coarse_logits_are_measured_in_float32():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(64, 4)), jnp.bfloat16)
    chosen = jax.lax.top_k(logits, 1)[1]
    coarse, fine = of(logits, chosen), of(logits.astype(jnp.float32), chosen)
    assert all(value.dtype == np.float32 for value in coarse.values())
    assert all(np.array_equal(coarse[name], fine[name]) for name in fine)


def test_means_and_worst_of_the_layers():
    logits = jnp.stack([jnp.zeros((4, 4)), jnp.eye(4)])
    chosen = jnp.stack([jnp.arange(4), jnp.zeros(4, int)])[..., None]
    found = jax.jit(model_statistics)(Routing(logits, chosen, jnp.zeros(2)))
    np.testing.assert_array_equal(found["load"], [[1, 1, 1, 1], [4, 0, 0, 0]])
    expected = {"load_max": 2.5, "load_max_worst": 4, "load_min": 0.5, "load_min_worst": 0}
    expected |= {"idle": 0.375, "idle_worst": 0.75, "load_entropy": 0.5, "load_entropy_worst": 0}
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(value), name


@pytest.mark.parametrize("module", [olmoe, gpt_oss], ids=["olmoe", "gpt_oss"])
@pytest.mark.parametrize("form", ["dense", "ragged"])
def test_the_routing_of_a_model_is_that_of_its_output(module, form):
    config = dataclasses.replace(module.TINY, experts=form)
    model = {olmoe: olmoe.Olmoe, gpt_oss: gpt_oss.GptOss}[module](config, nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, config.vocab_size)
    routing, (_, auxiliary) = jax.jit(lambda t: (model.routing(t), model(t)))(tokens)
    assert routing.logits.shape == (2, 16, 6)
    np.testing.assert_array_equal(routing.chosen, np.argsort(-routing.logits, -1)[..., :2])
    assert float(jnp.mean(routing.auxiliary)) == pytest.approx(float(auxiliary))
    # The first router, from what stands before it.
    layer, x = model.layers[0], model.embed(tokens)
    x = layer.moe_norm(x + layer.attn(layer.attn_norm(x)))
    logits = layer.moe.router(x).reshape(16, 6)
    np.testing.assert_allclose(routing.logits[0], logits, atol=1e-5)


@pytest.mark.parametrize("make", ["layerwise", "adamw"])
def test_momenta_are_found_in_the_state(make):
    rules = [
        symoptax.ParamRule("a/kernel", "attention", "d out -> out d"),
        symoptax.ParamRule("embed", "embedding", "vocab d -> vocab d"),
        symoptax.ParamRule("a/bias", "other"),
    ]
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"a": {"kernel": jax.random.normal(keys[0], (6, 9)), "bias": jnp.ones(9)}}
    params["embed"] = jax.random.normal(keys[1], (20, 4))
    tx = symoptax.layerwise(1e-3, rules) if make == "layerwise" else optax.adamw(1e-3)
    _, state = tx.update(params, tx.init(params), params)
    found = jax.jit(momentum_statistics(rules))(TrainState(params, state))
    of_gradient = jax.jit(functools.partial(symoptax.measure, rules=rules))(params, params)
    share = 0.05 if make == "layerwise" else 0.1
    for role in ("attention", "embedding"):
        rank = float(of_gradient[role]["effective_rank"])
        assert float(found[f"momentum/{role}/effective_rank"]) == pytest.approx(rank, rel=1e-4)
        rms = share * float(of_gradient[role]["rms"])
        assert float(found[f"momentum/{role}/rms"]) == pytest.approx(rms, rel=1e-4)
    assert {name for name in found if "other" in name} == {"momentum/other/rms"}


def test_a_run_on_a_mesh_writes_them_beside_the_losses(tmp_path):
    (tmp_path / "texts").mkdir()
    write_texts(tmp_path / "texts")
    flags = [f"--data={tmp_path / 'texts'}", f"--cache_dir={tmp_path / 'cache'}", *SMALL]
    flags += [f"--out_dir={tmp_path / 'run'}", "--model=olmoe", "--mesh=fsdp:8"]
    assert pretrain.main(["pretrain", *flags, "--steps=3", "--monitor_every=2"]) == 0
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    (row,) = (row for row in rows if "experts/load" in row)
    assert row["step"] == 2
    load = np.array(row["experts/load"])
    assert load.shape == (2, 6)
    np.testing.assert_allclose(load.mean(axis=1), 1, atol=1e-4)
    assert row["experts/load_max"] == pytest.approx(load.max(1).mean(), abs=1e-4)
    assert row["experts/load_min_worst"] == pytest.approx(load.min(), abs=1e-4)
    assert row["experts/dropped"] == 0
    assert 0.5 < row["experts/router_entropy"] <= 1
    assert 1 <= row["momentum/router/effective_rank"] <= 6
    assert "router/spectral_norm" in row
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["loss_spikes"] == 0
    assert "Loss spikes: 0." in (tmp_path / "run" / "report.md").read_text()


def steady(count):
    return list(3.0 + 0.02 * np.random.default_rng(0).normal(size=count))


def test_a_spike_is_counted_once_however_long():
    losses = steady(200)
    assert loss_spikes(losses) == []
    for place in (60, 61, 62, 120):
        losses[place] += 0.5
    assert loss_spikes(losses) == [60, 120]


def test_small_leaps_and_the_first_steps_are_no_spikes():
    losses = steady(100)
    losses[10] += 2.0  # before there are twenty
    losses[50] += 0.05  # within five deviations and a tenth of a nat
    assert loss_spikes(losses) == []
    quiet = [3.0] * 60
    assert loss_spikes([*quiet, 3.09]) == []
    assert loss_spikes([*quiet, 3.11]) == [60]
    noisy = list(3.0 + 0.2 * np.random.default_rng(0).normal(size=100))
    assert loss_spikes([*noisy, 3.8]) == []
    assert loss_spikes([*noisy, 5.0]) == [100]


def test_a_loss_that_stays_high_or_is_none_is_one_spike():
    assert loss_spikes([*steady(80), *(x + 1 for x in steady(100))]) == [80]
    assert loss_spikes([*steady(80), *[math.nan] * 100]) == [80]
    assert loss_spikes([*steady(80), math.inf, *steady(40), 9.0]) == [80, 121]


def test_a_falling_loss_has_none():
    assert loss_spikes([11.0 - 7.0 * (1 - math.exp(-step / 60)) for step in range(300)]) == []
