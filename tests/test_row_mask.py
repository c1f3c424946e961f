"""Rows that do not exist get nothing and count in nothing, whatever stands in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import symoptax
from symoptax import MatrixView, ParamRule, centered, row_masked

STEPS = {"steps": 8}
MAPS = {
    "row_norm": symoptax.row_norm_map(),
    "polar": symoptax.polar_map(**STEPS),
    "polar_grad": symoptax.dual_norm_scaled(symoptax.polar_map(**STEPS), 1.0),
    "right_polar": symoptax.right_polar_map(),
    "left_polar": symoptax.left_polar_map(),
    "hybrid": symoptax.hybrid_map(1.0, **STEPS),
    "polar_then_row": symoptax.hybrid_map(order="polar_then_row", **STEPS),
}
MAPS |= {f"centered_{name}": centered(MAPS[name]) for name in MAPS}
MAPS |= {
    f"{name}, rms": symoptax.scaled(MAPS[name], "rms")
    for name in ("polar", "centered_hybrid")
    if MAPS[name].rms
}
MASK = np.array([True] * 6 + [False] + [True] * 3 + [False] * 4)
NOTHING = (0.0, 1e20, np.nan, np.inf)


def matrix(seed=0):
    return oracle.conditioned(20, len(MASK), 5, seed=seed).astype(np.float32)


@pytest.mark.parametrize("name", MAPS)
def test_a_masked_map_is_the_map_on_the_other_rows(name):
    d = matrix()
    want = np.asarray(MAPS[name](jnp.asarray(d[MASK])))
    first = None
    for number in NOTHING:
        update = np.asarray(
            row_masked(MAPS[name], MASK)(jnp.asarray(np.where(MASK[:, None], d, number)))
        )
        assert not np.any(update[~MASK])
        # Eight steps in float32 err by 5e-6; zero rows change the order of sums.
        np.testing.assert_allclose(update[MASK], want, atol=2e-5 * np.max(np.abs(want)))
        first = update if first is None else first
        np.testing.assert_array_equal(update, first)
    if name.startswith("centered"):
        assert np.max(np.abs(np.mean(update[MASK], axis=0))) <= 1e-6 * np.max(np.abs(want))


def test_every_matrix_of_a_stack_may_have_its_own_mask():
    stack = np.stack([matrix(0), matrix(1)])
    masks = np.stack([MASK, MASK[::-1]])
    update_map = MAPS["centered_hybrid"]
    update = row_masked(update_map, masks)(jnp.asarray(stack))
    for one, d, mask in zip(update, stack, masks, strict=True):
        want = update_map(jnp.asarray(d[mask]))
        np.testing.assert_allclose(one[mask], want, atol=2e-5)
        assert not np.any(one[~mask])
    # A mask may be computed.
    traced = jax.jit(lambda d, m: row_masked(update_map, m)(d))(stack, masks)
    np.testing.assert_allclose(traced, update, atol=1e-5)


VIEWS = {
    "number": MatrixView("d vocab -> vocab d", valid_rows=10),
    "booleans": MatrixView("d vocab -> vocab d", valid_rows=[True] * 10 + [False] * 4),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_padded_head_trains_as_one_without_padding(view):
    padded, head = {"w": jnp.asarray(matrix().T)}, {"w": jnp.asarray(matrix()[:10].T)}
    updates = {"lm_head": centered(symoptax.hybrid_map(**STEPS))}
    trained = []
    for params, rule in (
        (padded, ParamRule("w", "lm_head", view)),
        (head, ParamRule("w", "lm_head", "d vocab -> vocab d")),
    ):
        tx = symoptax.layerwise(0.1, [rule], updates=updates)
        state = tx.init(params)
        for seed in range(3):
            grads = {"w": jnp.asarray(matrix(seed + 1).T[:, : params["w"].shape[1]])}
            change, state = tx.update(grads, state, params)
            params = {"w": params["w"] + change["w"]}
        trained.append(params["w"])
    np.testing.assert_allclose(trained[0][:, :10], trained[1], atol=1e-5)
    np.testing.assert_array_equal(trained[0][:, 10:], padded["w"][:, 10:])


def test_decay_alone_acts_on_masked_rows():
    params = {"w": jnp.ones((5, 14))}
    rules = [ParamRule("w", "lm_head", VIEWS["number"])]
    tx = symoptax.layerwise(0.1, rules, weight_decay=0.5)
    update, _ = tx.update({"w": jnp.asarray(matrix().T)}, tx.init(params), params)
    np.testing.assert_allclose(update["w"][:, 10:], -0.05, rtol=1e-6)


def test_leaves_with_other_masks_are_not_computed_together():
    d = jnp.asarray(matrix())
    views = {"all": MatrixView("m n -> m n"), "some": MatrixView("m n -> m n", valid_rows=10)}
    tree = {"all": d, "some": d, "some too": d}
    tx = symoptax.polar(view=lambda tree: {name: views[name[:4].strip()] for name in tree}, **STEPS)
    update, _ = tx.update(tree, tx.init(tree))
    np.testing.assert_allclose(update["all"], MAPS["polar"](d), atol=1e-6)
    np.testing.assert_allclose(update["some"][:10], MAPS["polar"](d[:10]), atol=2e-5)
    np.testing.assert_array_equal(update["some"], update["some too"])


def test_scale_follows_the_rows_that_exist():
    d = jnp.asarray(matrix())
    rms = symoptax.scaled(symoptax.polar_map(**STEPS), lambda m, n: float(m))
    update = row_masked(rms, MASK)(d)
    np.testing.assert_allclose(update[MASK], rms(d[MASK]), rtol=1e-3)
