"""The runs of the paper: their numbers, what each role gets, and that they train."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.catalog import MODELS
from pretraining import paper
from pretraining.config import Config, define_flags, parse_flags
from pretraining.errors import InputError
from pretraining.optimizers import make_optimizer, make_schedule

RUNS = [(model, name) for model, its in paper.MODELS.items() for name in its.runs]


def test_there_is_one_run_per_line_of_the_tables():
    assert len(RUNS) == 3 + 3 + 4 + 4
    budgets = {name: (model.steps, model.batch_size) for name, model in paper.MODELS.items()}
    assert budgets == {
        "qwen3": (30_000, 224),
        "gemma3": (50_000, 144),
        "olmoe": (30_000, 160),
        "gpt_oss": (60_000, 64),
    }
    hybrid = paper.MODELS["qwen3"].runs["hybrid"]
    assert hybrid == paper.PaperRun(("hybrid", 1.0), ("hybrid", 1e-2), 2e-2, 5e-2)
    router = paper.MODELS["gpt_oss"].runs["row_norm_left_polar_router"]
    assert router.router == ("left_polar", 7.5e-4)
    assert (router.embedding, router.lm_head) == (("row_norm", 1e-1), ("row_norm", 1e-3))


def tiny(model):
    architecture = MODELS[model]
    config = architecture.presets["tiny"]
    params = nnx.as_pure(nnx.state(architecture.build(config, nnx.Rngs(0)), nnx.Param))
    return params, architecture.rules_for(config)


@pytest.mark.parametrize(("model", "name"), RUNS)
def test_every_run_moves_every_parameter(model, name):
    params, rules = tiny(model)
    config = Config(model=model, optimizer=f"paper_{name}", weight_decay=0.0, steps=10)
    tx = make_optimizer(config, rules, {})
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(params))))
    grads = jax.tree.map(lambda p: jax.random.normal(next(keys), p.shape, p.dtype), params)
    # Warm-up begins at a rate of 0.
    step = jax.jit(tx.update)
    _, state = step(grads, tx.init(params), params)
    updates, _ = step(grads, state, params)
    assert all(np.all(np.isfinite(u)) and np.any(u) for u in jax.tree.leaves(updates))


def test_rows_are_as_long_as_the_rate_and_heads_are_centered():
    params, rules = tiny("olmoe")
    run = paper.MODELS["olmoe"].runs["row_norm"]
    tx = paper.make_optimizer(run, rules, 100)
    grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), params)
    updates, _ = tx.update(grads, tx.init(params), params)
    table = updates["embed"]["embedding"]
    np.testing.assert_allclose(jnp.linalg.norm(table, axis=1), 0.5, rtol=1e-5)
    head = updates["lm_head"]["kernel"]
    np.testing.assert_allclose(jnp.linalg.norm(head, axis=0), 5e-3, rtol=0.1)
    np.testing.assert_allclose(jnp.mean(head, axis=1), 0.0, atol=1e-6)


def test_maps_fall_at_the_end_and_adamw_follows_a_cosine():
    config = Config(model="qwen3", optimizer="paper_row_norm", weight_decay=0.0, steps=1000)
    schedule = make_schedule(config)
    rates = [float(schedule(step)) for step in (0, 599, 800, 1000)]
    assert rates == pytest.approx([2e-2, 2e-2, 1e-2, 0.0], abs=1e-9)


def test_the_preset_brings_the_settings_that_are_not_given():
    flags = ["pretrain", "--model=gemma3", "--preset=paper", "--optimizer=paper_row_norm"]
    config = parse_flags(define_flags(), flags)
    assert (config.steps, config.batch_size, config.seq_len) == (50_000, 144, 1024)
    assert (config.weight_decay, config.clip_norm, config.seed) == (0.0, 0.0, 42)
    config = parse_flags(define_flags(), [*flags, "--steps=7", "--seed=1"])
    assert (config.steps, config.seed, config.batch_size) == (7, 1, 144)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"optimizer": "paper_hybrid", "model": "olmoe"}, "the runs of olmoe are"),
        ({"optimizer": "paper_row_norm", "learning_rate": 0.1}, "rates and dtypes of its own"),
        ({"optimizer": "paper_row_norm", "weight_decay": 0.1}, "no decay"),
        ({"optimizer": "paper_row_norm", "update": ("embedding:polar",)}, "has no roles"),
    ],
)
def test_it_refuses_what_the_paper_does_not_have(change, named):
    config = Config(**{"weight_decay": 0.0, **change})
    with pytest.raises(InputError, match=named):
        make_optimizer(config, tiny(config.model)[1], {})


def test_the_report_says_what_each_role_gets():
    text = paper.describe(paper.MODELS["olmoe"].runs["row_norm"], tiny("olmoe")[1])
    assert [line.split() for line in text.splitlines()[1:3]] == [
        ["embedding", "row_norm", "0.5"],
        ["lm_head", "row_norm", "0.005"],
    ]
