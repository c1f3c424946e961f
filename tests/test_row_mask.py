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
    "column_norm": symoptax.column_norm_map(),
    "sign": symoptax.sign_map(),
    "hybrid": symoptax.hybrid_map(**STEPS),
    "hybrid, 0.5": symoptax.hybrid_map(0.5, **STEPS),
    "hybrid, left": symoptax.hybrid_map(1.0, side="left", **STEPS),
    "polar_then_row": symoptax.hybrid_map(order="polar_then_row", **STEPS),
}
MAPS |= {f"centered_{name}": centered(MAPS[name]) for name in MAPS}
MAPS |= {
    f"{name}, rms": symoptax.scaled(MAPS[name], "rms")
    for name in ("polar", "centered_row_norm", "centered_hybrid")
}
MAPS["center"] = symoptax.center_map()
MASK = np.array([True] * 6 + [False] + [True] * 3 + [False] * 4)
NOTHING = (0.0, 1e20, np.nan, np.inf)


def matrix(seed=0, cols=5):
    return oracle.conditioned(20, len(MASK), cols, seed=seed).astype(np.float32)


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


@pytest.mark.parametrize("name", MAPS)
def test_fewer_rows_than_columns_are_left(name):
    """Stored it is tall, what counts of it is wide: another Gram matrix is the smaller."""
    d, mask = matrix(cols=8), MASK & (np.arange(len(MASK)) < 5)
    update = np.asarray(row_masked(MAPS[name], mask)(jnp.asarray(d)))
    want = np.asarray(MAPS[name](jnp.asarray(d[mask])))
    np.testing.assert_allclose(update[mask], want, atol=2e-5 * np.max(np.abs(want)))
    assert not np.any(update[~mask])


def test_stages_of_your_own_see_zeros_and_make_nothing_there():
    seen = []

    def stage(d):
        seen.append(d)
        return d + 1

    own = symoptax.MatrixMap("own", symoptax.sign_map().symmetry, (stage,))
    update = row_masked(own, MASK)(jnp.full((len(MASK), 5), jnp.nan).at[MASK].set(2.0))
    rows = np.broadcast_to(MASK[:, None], update.shape)
    np.testing.assert_array_equal(seen[0], np.where(rows, 2, 0))
    np.testing.assert_array_equal(update, np.where(rows, 3, 0))


def test_no_row_at_all_gives_nothing():
    d, none = jnp.asarray(np.stack([matrix(), matrix(1)])), np.stack([MASK, 0 * MASK == 1])
    with jax.debug_nans(True):
        by_rows = symoptax.scaled(MAPS["row_norm"], lambda m, n: 1 / m)
        for update_map in (MAPS["centered_hybrid, rms"], MAPS["polar"], by_rows):
            update = row_masked(update_map, none)(d)
            assert np.any(update[0])
            assert not np.any(update[1])
            assert not np.any(row_masked(update_map, none[1])(d))


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


@pytest.mark.parametrize("cautious", [False, True])
def test_decay_alone_acts_on_masked_rows(cautious):
    params = {"w": jnp.ones((5, 14))}
    rules = [ParamRule("w", "lm_head", VIEWS["number"])]
    tx = symoptax.layerwise(0.1, rules, weight_decay=0.5, cautious=cautious)
    update, _ = tx.update({"w": jnp.asarray(matrix().T)}, tx.init(params), params)
    # The cautious form waits for an update of the same sign, which these rows never get.
    np.testing.assert_allclose(update["w"][:, 10:], 0.0 if cautious else -0.05, rtol=1e-6)


@pytest.mark.parametrize("role", ["lm_head", "expert_down", "router", "attention"])
def test_a_stack_trains_as_its_rows_would_alone(role):
    """Through momentum, scale and NaN gradients, with what each role gets by default."""
    stack = np.stack([matrix(0), matrix(1)])
    view = MatrixView("b m n -> b m n", valid_rows=MASK.tolist())
    trained = []
    for kept, rule in (
        (np.ones_like(MASK), ParamRule("w", role, view)),
        (MASK, ParamRule("w", role, "b m n -> b m n")),
    ):
        tx = symoptax.layerwise(0.1, [rule])
        params = {"w": jnp.asarray(stack[:, kept])}
        state = tx.init(params)
        for seed in range(3):
            grads = np.stack([matrix(2 * seed), matrix(2 * seed + 1)])
            grads[:, ~MASK] = np.nan
            change, state = tx.update({"w": jnp.asarray(grads[:, kept])}, state, params)
            params = {"w": params["w"] + change["w"]}
        trained.append(np.asarray(params["w"]))
    # Five default steps amplify rounding by 1600 at most; steps have the size 0.02.
    np.testing.assert_allclose(trained[0][:, MASK], trained[1], atol=1e-5)
    np.testing.assert_array_equal(trained[0][:, ~MASK], stack[:, ~MASK])


def test_leaves_with_other_masks_are_not_computed_together():
    d = jnp.asarray(matrix())
    views = {"all": MatrixView("m n -> m n"), "some": MatrixView("m n -> m n", valid_rows=10)}
    tree = {"all": d, "some": d, "some too": d}
    tx = symoptax.polar(view=lambda tree: {name: views[name[:4].strip()] for name in tree}, **STEPS)
    update, _ = tx.update(tree, tx.init(tree))
    np.testing.assert_allclose(update["all"], MAPS["polar"](d), atol=1e-6)
    np.testing.assert_allclose(update["some"][:10], MAPS["polar"](d[:10]), atol=2e-5)
    np.testing.assert_array_equal(update["some"], update["some too"])


SCALES = {"rms": "rms", "spectral": "spectral", "own": lambda m, n: float(m)}
MASKS = {
    "one for all": MASK,
    "one for all, of jax": jnp.asarray(MASK),
    "one each": np.stack([MASK, ~MASK, MASK | True]),
    "one each, of jax": jnp.asarray(np.stack([MASK, ~MASK, MASK | True])),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("rule", SCALES.values(), ids=SCALES.keys())
def test_scale_follows_the_rows_that_exist(rule, mask):
    stack = np.stack([matrix(0), matrix(1), matrix(2)])
    update_map = symoptax.scaled(symoptax.row_norm_map(), rule)
    masked = row_masked(update_map, mask)
    update = np.asarray(masked(jnp.asarray(stack)))
    for got, d, rows in zip(update, stack, np.broadcast_to(mask, stack.shape[:2]), strict=True):
        np.testing.assert_allclose(got[rows], update_map(jnp.asarray(d[rows])), rtol=1e-6)
    assert masked.scale is not None  # or `layerwise` would scale it once more
    assert masked(jnp.asarray(stack, jnp.bfloat16)).dtype == jnp.bfloat16
    # One more batch axis than the mask has, as where leaves are computed together.
    more = masked(jnp.asarray(np.stack([stack, 2 * stack])))
    np.testing.assert_allclose(more, np.stack([update, update]), rtol=1e-6)
    traced = jax.jit(lambda d, mask: row_masked(update_map, mask)(d))(stack, mask)
    np.testing.assert_allclose(traced, update, rtol=1e-6)


def test_scaled_after_it_is_masked_it_is_the_same():
    d = jnp.asarray(matrix())
    update_map = MAPS["polar"]
    np.testing.assert_array_equal(
        symoptax.scaled(row_masked(update_map, MASK), "rms")(d),
        row_masked(symoptax.scaled(update_map, "rms"), MASK)(d),
    )
