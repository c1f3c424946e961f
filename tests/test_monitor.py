"""What `monitor` measures, against singular values; and that it changes and costs nothing else."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import symoptax
from symoptax import ParamRule

RULES = [
    ParamRule("attn", "attention", "layer d out -> layer out d"),
    ParamRule("embed", "embedding", "vocab d -> vocab d"),
    ParamRule("scale", "other"),
]


def tree(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    shapes = {"attn": (3, 8, 12), "embed": (20, 6), "scale": (5,)}
    return {n: jnp.asarray(scale * rng.normal(size=s), jnp.float32) for n, s in shapes.items()}


def test_the_numbers_are_those_of_the_singular_values():
    updates, params = tree(0), tree(1, 3.0)
    updates["embed"] = updates["embed"].at[:5].set(0)
    tx = symoptax.monitor(RULES, every=1)
    passed, state = tx.update(updates, tx.init(params), params)
    chex.assert_trees_all_equal(passed, updates)
    found = symoptax.monitored(state)
    u = np.asarray(updates["embed"], np.float64)
    s = np.linalg.svd(u, compute_uv=False)
    rows = np.linalg.norm(u, axis=1)[5:]
    expected = {
        "rms": np.sqrt(np.mean(u**2)),
        "effective_rank": np.sum(s**2) ** 2 / np.sum(s**4),
        "orthogonality_error": np.sqrt(np.mean((s**2 / np.mean(s**2) - 1) ** 2)),
        "row_norm_spread": np.std(rows) / np.mean(rows),
        "zero_rows": 0.25,
        "shared_shift": np.sqrt(20) * np.linalg.norm(u.mean(0)) / np.linalg.norm(u),
        "to_weight": np.sqrt(np.mean(u**2) / np.mean(np.asarray(params["embed"]) ** 2)),
    }
    for name, value in expected.items():
        assert found[f"embedding/{name}"] == pytest.approx(value, rel=1e-4), name
    assert 0.97 * s[0] <= found["embedding/spectral_norm"] <= 1.0001 * s[0]
    assert set(found) == {
        *(
            f"{role}/{n}"
            for role in ("embedding", "attention")
            for n in (*expected, "spectral_norm")
        ),
        "other/rms",
        "other/to_weight",
    }
    stack = np.asarray(updates["attn"]).swapaxes(1, 2)
    mean = np.mean([np.sqrt(np.mean(matrix**2)) for matrix in stack])
    assert found["attention/rms"] == pytest.approx(mean, rel=1e-5)


def test_updates_are_what_their_maps_promise():
    tx = optax.chain(
        symoptax.layerwise(1.0, RULES, updates={"embedding": "row_norm"}, scale=None),
        symoptax.monitor(RULES, every=1),
    )
    _, state = tx.update(tree(0), tx.init(tree(1)), tree(1))
    found = symoptax.monitored(state)
    assert found["attention/orthogonality_error"] < 0.2
    assert found["attention/effective_rank"] > 0.95 * 8
    assert found["embedding/row_norm_spread"] < 1e-5
    head = [ParamRule("w", "lm_head", "vocab d -> vocab d")]
    tx = optax.chain(symoptax.layerwise(1.0, head), symoptax.monitor(head, every=1))
    params = {"w": tree(2)["embed"]}
    _, state = tx.update(params, tx.init(params), params)
    assert symoptax.monitored(state)["lm_head/shared_shift"] < 1e-5


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_no_size_makes_a_number_that_is_none(scale):
    updates = tree(0, scale) if scale else jax.tree.map(jnp.zeros_like, tree(0))
    tx = symoptax.monitor(RULES[:2], every=1, fallback="adamw")
    _, state = tx.update(updates, tx.init(tree(1)), tree(1))
    matrices = {n: v for n, v in symoptax.monitored(state).items() if not n.startswith("other")}
    assert all(np.isfinite(value) for value in matrices.values())
    if scale == 0:
        assert matrices["embedding/effective_rank"] == 0
        assert matrices["embedding/zero_rows"] == 1


def test_only_every_so_many_steps_are_measured():
    tx = symoptax.monitor(RULES, every=3)
    state = tx.init(tree(0))
    step = jax.jit(tx.update)
    seen = []
    for count in range(5):
        _, state = step(tree(count), state, tree(9))
        seen.append(symoptax.monitored(state)["other/rms"])
    assert seen[0] == seen[1] == 0 != seen[2] == seen[3] == seen[4]
    assert step._cache_size() == 1


def test_parameters_are_not_copied_to_be_measured():
    tx = optax.chain(optax.sgd(0.1), symoptax.monitor(RULES, every=3))

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1))
    text = compiled.lower(tree(0), tx.init(tree(0)), tree(1)).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert "conditional(" in entry
    assert not re.findall(r"= f32\[\d.* copy\(", entry)


def test_what_is_measured_outside_of_a_chain_is_the_same():
    updates, params = tree(3), tree(4)
    tx = symoptax.monitor(RULES, every=1)
    _, state = tx.update(updates, tx.init(params), params)
    found = symoptax.measure(updates, params, RULES)
    chex.assert_trees_all_close(found, state.values, rtol=1e-5)
    # The leaves of some roles alone, by path, as they lie in the state of `optax.partition`.
    part = symoptax.measure({"attn": updates["attn"]}, {"attn": params["attn"]}, RULES)
    chex.assert_trees_all_close(part, {"attention": state.values["attention"]}, rtol=1e-5)
    with pytest.raises(ValueError, match="only one has embed"):
        symoptax.measure(updates, {n: x for n, x in params.items() if n != "embed"}, RULES)


def test_several_monitors_are_numbered_and_bad_input_is_refused():
    tx = optax.chain(
        symoptax.momentum(), symoptax.monitor(RULES, every=1), symoptax.monitor(RULES, every=1)
    )
    names = symoptax.monitored(tx.init(tree(0)))
    assert {name.split("/")[0] for name in names} == {"0", "1"}
    assert symoptax.monitored(optax.EmptyState()) == {}
    with pytest.raises(ValueError, match="every=0"):
        symoptax.monitor(RULES, every=0)
    with pytest.raises(symoptax.RoutingError, match="scale"):
        symoptax.monitor(RULES[:2]).init(tree(0))
