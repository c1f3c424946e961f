"""The polynomial iteration: tables, methods, sides, convergence, conditioning."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from symoptax import TABLES, polar_factor
from symoptax._coefficients import coefficient_rows
from symoptax._minimax import apply_rows

DEFAULT = "polar_express_l1e-3_s1.01"


def schatten_4(s):
    """The bound on the largest singular value by which the iteration divides."""
    return np.sum(s**4) ** 0.25


def apply_rows(rows, s):
    for a, b, c in rows:
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize("steps", [3, 5, 8, 10, 16])
@pytest.mark.parametrize("table", TABLES)
def test_short_runs_take_the_first_rows_and_long_ones_repeat_the_last(x64, table, steps):
    rows = TABLES[table]
    taken = coefficient_rows(table, steps)
    assert taken == (rows + rows[-1:] * steps)[:steps]
    s = np.geomspace(1, 1e-3, 8)
    d = jnp.asarray(oracle.with_spectrum(s, 8, 24))
    # Every singular value goes through the polynomials; float64 rounding times slopes of 3e4.
    want = np.sort(apply_rows(taken, s / schatten_4(s)))
    for method in ("direct", "gram"):
        update = polar_factor(d, method=method, steps=steps, coefficients=table)
        got = np.sort(np.linalg.svd(update, compute_uv=False))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


def test_polar_express_converges():
    s = np.geomspace(1e-3, 1, 1000)
    five = apply_rows(coefficient_rows(DEFAULT, 5), s)
    assert five[0] >= 0.84
    assert five.min() >= 0.84
    assert five.max() <= 1.13
    np.testing.assert_allclose(apply_rows(coefficient_rows(DEFAULT, 10), s), 1, atol=5e-4)
    # The last five rows alone, as a table that is cycled would take them, leave 1e-3 at 0.05.
    assert apply_rows(TABLES[DEFAULT][-5:], s)[0] < 0.06


SPECTRA = {
    "even in logarithm": np.geomspace(1, 1e-3, 48),
    "flat, one small": np.append(np.ones(47), 1e-3),
    "flat, one large": np.append(np.full(47, 1e-3), 1.0),
}


@pytest.mark.parametrize("shape", [(64, 48), (48, 64)])
@pytest.mark.parametrize("kind", SPECTRA)
def test_default_steps_bring_singular_values_to_one(kind, shape):
    # The table is made for [1e-3, 1] after division by the Schatten-4 norm, which is at most
    # 48^(1/4) = 2.6 times the largest singular value.
    s = np.maximum(SPECTRA[kind], 1.001e-3 * schatten_4(SPECTRA[kind]))
    s = np.maximum(s, 1.001e-3 * schatten_4(s))
    d = jnp.asarray(oracle.with_spectrum(s, *shape), jnp.float32)
    five = np.linalg.svd(polar_factor(d), compute_uv=False)
    assert 0.84 <= five.min() <= five.max() <= 1.13
    # Float32 resolves 1e-3 to 1e-4 of itself; eight steps are flat at 1, so little of it is left.
    eight = np.linalg.svd(polar_factor(d, steps=8), compute_uv=False)
    np.testing.assert_allclose(eight, 1, atol=1e-5)


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (2, 7, 7)])
def test_methods_and_sides_agree(x64, shape):
    m, n = shape[-2:]
    d = np.broadcast_to(oracle.conditioned(30, m, n), shape)
    want = oracle.polar(d)
    combinations = itertools.product(("direct", "gram", "svd", "auto"), ("left", "right", "auto"))
    for method, side in combinations:
        got = polar_factor(jnp.asarray(d), method=method, side=side, steps=12)
        # Float64 rounding times the slopes 3000 of the table; also on the singular side.
        np.testing.assert_allclose(got, want, atol=1e-10, err_msg=f"{method} {side}")


@pytest.mark.parametrize("steps", [5, 8])
@pytest.mark.parametrize(
    ("k", "length", "method"), [(64, 64, "direct"), (64, 256, "gram"), (64, 4096, "gram")]
)
def test_cheaper_method(k, length, method, steps):
    assert cheaper_method(k, length, coefficient_rows(DEFAULT, steps)) == method


@pytest.mark.parametrize(
    ("condition", "worst", "directions"),
    [
        # Rounding D to float32 turns each singular vector pair by eps * condition, and eight steps
        # bring sigma / |D|_4 to 1 as long as it is above 1e-3: both are 1e-4 at most here.
        (1e2, 5e-5, 1e-4),
        (1e3, 2e-4, 1e-4),
        # Below, a step multiplies a singular value by at most its slope: eight make 1e-4 / 1.5
        # 0.53, so the smallest direction lacks half its length, and none points elsewhere.
        (1e4, 0.5, 1e-3),
    ],
)
@pytest.mark.parametrize("method", ["direct", "gram"])
def test_ill_conditioned_matrices_degrade_gracefully(method, condition, worst, directions):
    d = np.stack([oracle.conditioned(condition, 256, 32, seed=seed) for seed in range(4)])
    d32 = jnp.asarray(d, jnp.float32)
    update = np.asarray(polar_factor(d32, side="right", steps=8, method=method), np.float64)
    assert np.max(np.linalg.norm(update - oracle.polar(d), ord=2, axis=(-2, -1))) <= worst
    u, s, vt = np.linalg.svd(d, full_matrices=False)
    seen = np.swapaxes(u, -1, -2) @ update @ np.swapaxes(vt, -1, -2)
    along = np.diagonal(seen, axis1=-2, axis2=-1)
    want = apply_rows(coefficient_rows(DEFAULT, 8), s[0] / schatten_4(s[0]))
    assert np.max(np.abs(along - want)) <= directions
    assert np.max(np.abs(seen - along[..., None, :] * np.eye(32))) <= directions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coefficients": "polar_express"}, "polar_express_l1e-3_s1.01.*taylor_quintic"),
        ({"coefficients": []}, "0 coefficient rows"),
        ({"steps": 0}, "steps=0"),
        ({"method": "eigh"}, "auto, direct, gram or svd"),
        ({"side": "top"}, "'left', 'right' or 'auto'"),
    ],
)
def test_unknown_options_are_refused(untyped, options, message):
    with pytest.raises(ValueError, match=message):
        polar_factor(jnp.eye(3), **options)


@pytest.mark.parametrize("d", [jnp.ones(3), jnp.ones((2, 2), int), jnp.ones((2, 2), complex)])
def test_only_stacks_of_real_matrices(untyped, d):
    with pytest.raises(ValueError, match="real floating matrices"):
        polar_factor(d)
