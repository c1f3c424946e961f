"""Inputs that break optimizers: tiny and huge, zero, half precision, rank one, spikes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import oracle
import symoptax
from symoptax import centered, dual_norm_scaled, hybrid_map

POLARS = {
    "polar": symoptax.polar_map(),
    "right_polar": symoptax.right_polar_map(),
    "left_polar": symoptax.left_polar_map(),
}
# name: alpha -> map. U(c D) = c^alpha U(D) for the first table, U(D) for the second.
GRADED = {name: lambda alpha, m=m: dual_norm_scaled(m, alpha) for name, m in POLARS.items()}
GRADED |= {
    "centered_right_polar": lambda alpha: centered(GRADED["right_polar"](alpha)),
    "centered_left_polar": lambda alpha: centered(GRADED["left_polar"](alpha)),
}
# Eight steps are flat at 1, so that what is left is rounding.
hybrid_map = functools.partial(hybrid_map, steps=8)
DEGREE_ZERO = {
    "hybrid": hybrid_map,
    "hybrid_left": lambda alpha: hybrid_map(alpha, side="left"),
    "centered_hybrid": lambda alpha: centered(hybrid_map(alpha)),
    "polar_then_row": lambda alpha: hybrid_map(order="polar_then_row"),
    "row_norm": lambda alpha: symoptax.row_norm_map(),
    "column_norm": lambda alpha: symoptax.column_norm_map(),
    "sign": lambda alpha: symoptax.sign_map(),
    "centered_row_norm": lambda alpha: centered(symoptax.row_norm_map()),
}
MAPS = GRADED | DEGREE_ZERO
WITHOUT_ALPHA = [name for name in DEGREE_ZERO if not name.endswith(("hybrid", "left"))]
ALPHAS = [
    (name, alpha) for name in MAPS for alpha in (0.0, 0.5, 1.0)[: 1 if name in WITHOUT_ALPHA else 3]
]


@pytest.mark.parametrize(("name", "alpha"), ALPHAS)
def test_scale(name, alpha):
    """`U(c G) = c^degree U(G)` for every c that float32 can hold, in one stack."""
    g = oracle.normal(64, 64)
    g /= np.linalg.norm(g)
    factors = np.array([1.0, 1e-25, 1e-12, 1e-6, 1e-3, 1e4, 1e15])
    stack = jnp.asarray(factors[:, None, None] * g, jnp.float32)
    degree = alpha if name in GRADED else 0.0
    update = np.asarray(MAPS[name](alpha)(stack), np.float64)
    update /= factors[:, None, None] ** degree
    # Rounding c G to float32 moves it by 6e-8 of a norm of 1, which its smallest singular value,
    # about 1 / 512, turns into 3e-5 of the polar factor.
    assert np.max(np.abs(update - update[0])) <= 1e-4 * np.max(np.abs(update[0]))


def test_rows_of_any_size_are_normalised():
    sizes = np.array([1e-30, 1e-25, 1e-9, 1.0, 1e9, 1e30])[:, None]
    rows = oracle.normal(6, 32)
    for update_map in (symoptax.row_norm_map(), hybrid_map(steps=8)):
        small, plain = (update_map(jnp.asarray(d, jnp.float32)) for d in (sizes * rows, rows))
        # The polar step turns roundings of unit rows, 1e-7, by the condition of the rows, about 4.
        np.testing.assert_allclose(small, plain, atol=5e-6)


OPTIMIZERS = {
    "row_norm": lambda alpha: symoptax.row_norm_m(0.1),
    "centered_row_norm": lambda alpha: symoptax.row_norm_m(0.1, centered=True),
    "polar": lambda alpha: symoptax.polar_grad_m(0.1, alpha=alpha),
    "right_polar": lambda alpha: symoptax.right_polar_grad_m(0.1, alpha=alpha),
    "centered_left_polar": lambda alpha: symoptax.left_polar_grad_m(
        0.1, alpha=alpha, centered=True
    ),
    "hybrid": lambda alpha: symoptax.hybrid_polar_grad_m(0.1, alpha=alpha),
}


@pytest.mark.parametrize(
    ("name", "alpha"),
    [(n, a) for n in OPTIMIZERS for a in ((0.0,) if "row_norm" in n else (0.0, 0.5, 1.0))],
)
def test_zero_gradients(name, alpha):
    """Three steps with zero matrices and one without, for a matrix and for a slice of a stack."""
    optimizer = OPTIMIZERS[name](alpha)
    last = {"w": oracle.normal(8, 32, seed=1), "experts": oracle.normal(4, 16, 8)}
    last = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), last)
    first = {"w": jnp.zeros((8, 32)), "experts": last["experts"].at[2].set(0)}
    step = optimizer.update  # not jitted: NaNs are looked for after every operation
    with jax.debug_nans(True):
        state = optimizer.init(last)
        for _ in range(3):
            updates, state = step(first, state)
            assert not np.any(updates["w"])
            assert not np.any(updates["experts"][2])
            assert all(np.all(np.any(updates["experts"][i], (-2, -1))) for i in (0, 1, 3))
        updates, state = step(last, state)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((updates, state)))
    # After zeros the momentum is (1 - beta) G, so the first update is a fresh optimizer's.
    fresh, _ = step(last, optimizer.init(last))
    np.testing.assert_array_equal(updates["w"], fresh["w"])
    np.testing.assert_array_equal(updates["experts"][2], fresh["experts"][2])


@pytest.mark.parametrize(("name", "alpha"), ALPHAS)
def test_matrices_of_a_stack_do_not_see_each_other(name, alpha):
    update_map = MAPS[name](alpha)
    stack = jnp.asarray(oracle.normal(4, 16, 8), jnp.float32)
    update = update_map(stack)
    for others in (0.0, 1e20, 1e-12, np.nan):
        changed = update_map(stack.at[jnp.array([0, 2, 3])].multiply(others))
        np.testing.assert_array_equal(changed[1], update[1])
        assert np.any(changed[0] != 0) == (others != 0)
        one = update_map(stack.at[1].multiply(others))
        np.testing.assert_array_equal(one[jnp.array([0, 2, 3])], update[jnp.array([0, 2, 3])])
    # Alone it is the same program on the same numbers, whatever the matrix products batch.
    np.testing.assert_array_equal(update_map(stack[1]), update[1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", MAPS)
def test_half_precision(name, dtype):
    update_map = MAPS[name](0.0 if name in WITHOUT_ALPHA else 1.0)
    d = jnp.asarray(oracle.normal(3, 16, 8), dtype)
    want = update_map(d.astype(jnp.float32))
    largest, eps = np.max(np.abs(want)), float(jnp.finfo(dtype).eps)
    # A transformation computes in float32 and rounds once.
    through_tree, _ = symoptax.matrixwise(update_map).update({"w": d}, optax.EmptyState())
    assert through_tree["w"].dtype == dtype
    assert np.max(np.abs(through_tree["w"].astype(jnp.float32) - want)) <= eps / 2 * largest
    # A bare map may compute in the dtype itself: a division, a norm, a mean, for each stage.
    bare = update_map(d)
    assert bare.dtype == dtype
    assert np.max(np.abs(bare.astype(jnp.float32) - want)) <= 8 * eps * largest


SINGULAR = np.stack(
    [
        np.outer(oracle.normal(16), oracle.normal(12, seed=1)),  # rank one
        np.repeat(oracle.normal(4, 12), 4, axis=0),  # repeated rows
        np.pad([[1e4]], ((5, 10), (3, 8))),  # one spike, the rest zero
        oracle.conditioned(1e8, 16, 12),
        oracle.with_spectrum([1.0] * 11 + [1e-8], 16, 12),
    ]
)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64])
@pytest.mark.parametrize("name", MAPS)
def test_singular_matrices(name, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        update = np.asarray(MAPS[name](0.0)(jnp.asarray(SINGULAR, dtype)).astype(float))
    assert np.all(np.isfinite(update))
    assert np.all(np.any(update, axis=(-2, -1)))
    if "polar" in name or "hybrid" in name:
        bound = 4.0 + 1e-6 if name == "polar_then_row" else 1.25  # 16 rows of norm 1; 1.13 + room
        assert np.max(np.linalg.norm(update, ord=2, axis=(-2, -1))) <= bound
