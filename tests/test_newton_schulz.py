"""The polynomial iteration: tables, methods, sides, convergence, conditioning."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from symoptax import TABLES, cost, inverse_sqrt, minimax_table, polar_factor
from symoptax._coefficients import coefficient_rows
from symoptax._cost import segments
from symoptax._minimax import apply_rows

DEFAULT = "minimax_9_5_l7e-4"


def bound(s):
    """The bound on the largest singular value by which the iteration divides."""
    m2, m3, m4 = (np.sum((s**2) ** i) for i in (2, 3, 4))
    spread = max(m4 - m3**2 / m2, 0) + 8 * np.finfo(float).eps * m4
    center = m3 / m2 / 2
    return np.sqrt(center + np.sqrt(center**2 + np.sqrt(spread)))


@pytest.mark.parametrize("steps", [3, 5, 8, 10, 16])
@pytest.mark.parametrize("table", TABLES)
def test_every_singular_value_goes_through_the_polynomials(x64, table, steps):
    rows = TABLES[table]
    taken = coefficient_rows(table, steps)
    assert taken[:-1] == (rows + rows[-1:] * steps)[: steps - 1]
    s = np.geomspace(1, 1e-3, 8)
    d = jnp.asarray(oracle.with_spectrum(s, 8, 24))
    # Float64 rounding times slopes of 3e4.
    want = np.sort(apply_rows(taken, s / bound(s)))
    for method in ("direct", "gram"):
        update = polar_factor(d, method=method, steps=steps, coefficients=table)
        got = np.sort(np.linalg.svd(update, compute_uv=False))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("steps", range(1, 13))
def test_no_table_leads_above_a_quarter_more_than_one(table, steps):
    highest = np.max(apply_rows(coefficient_rows(table, steps), np.linspace(0, 1, 10001)))
    assert highest <= 1.25 + 1e-5


def test_stored_tables_are_minimax_tables():
    made = minimax_table(7e-4, 7, degree=(9, 5, 5, 5, 5, 5, 5))
    for stored, row in zip(TABLES[DEFAULT], made, strict=True):
        np.testing.assert_allclose(stored, row, rtol=1e-9)
    made = minimax_table(3e-3, 5, degree=9)
    for stored, row in zip(TABLES["minimax_9_l3e-3"], made, strict=True):
        np.testing.assert_allclose(stored, row, rtol=1e-9)
    made = minimax_table(1e-3, 10, degree=3, cushion=0)
    for stored, row in zip(TABLES["cans_cubic_l1e-3"], made, strict=True):
        np.testing.assert_allclose(stored, row, rtol=1e-9)
    # The first row of the paper's table, before its safety factor, from the paper's cushion.
    (first,) = minimax_table(1e-3, 1, cushion=0.02407327424182761)
    np.testing.assert_allclose(
        first, (8.28721201814563, -23.595886519098837, 17.300387312530933), rtol=1e-6
    )


def test_default_table_converges():
    s = np.geomspace(1e-3 / 1.5, 1, 1000)
    five = apply_rows(coefficient_rows(DEFAULT, 5), s)
    assert 0.87 <= five.min() <= five.max() <= 1.1
    np.testing.assert_allclose(apply_rows(coefficient_rows(DEFAULT, 8), s), 1, atol=1e-9)


SPECTRA = {
    "even in logarithm": np.geomspace(1, 1.001e-3, 48),
    "linear": np.linspace(1, 1.001e-3, 48),
    "flat, one small": np.append(np.ones(47), 1.001e-3),
    "flat, one large": np.append(np.full(47, 1.001e-3), 1.0),
}


@pytest.mark.parametrize("shape", [(64, 48), (48, 64), (48, 3072)])
@pytest.mark.parametrize("kind", SPECTRA)
def test_default_steps_bring_singular_values_to_one(kind, shape):
    d = jnp.asarray(oracle.with_spectrum(SPECTRA[kind], *shape), jnp.float32)
    five = np.linalg.svd(polar_factor(d), compute_uv=False)
    assert 0.85 <= five.min() <= five.max() <= 1.15
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


@pytest.mark.parametrize(
    ("shape", "steps", "segments"),
    [
        ((64, 64), 5, (1, 1, 1, 1, 1)),
        ((64, 256), 5, (5,)),
        ((4096, 64), 5, (5,)),
        ((64, 4096), 3, (3,)),
    ],
)
def test_cost_chooses_the_cheaper_method(shape, steps, segments):
    price = cost(shape, steps=steps)
    assert price.segments == segments
    assert price.method == ("direct" if len(segments) == steps else "gram")
    for method in ("direct", "gram"):
        assert price.multiplications <= cost(shape, steps=steps, method=method).multiplications


def test_eight_steps_restart_before_rounding_shows():
    for segment in segments(coefficient_rows(DEFAULT, 8), 64, 4096, "auto", 2.0**-23):
        assert len(segment) == 1 or np.prod([row[0] for row in segment]) <= 40


@pytest.mark.parametrize(
    ("condition", "worst", "directions"),
    [
        # Rounding D to float32 turns each singular vector pair by eps * condition, and eight steps
        # bring sigma / |D|_4 to 1 as long as it is above 1e-3: both are 1e-4 at most here.
        (1e2, 5e-5, 1e-4),
        (1e3, 2e-4, 1e-4),
        # Below, a step multiplies a singular value by at most its slope, so the smallest direction
        # lacks part of its length, and none points elsewhere.
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
    want = apply_rows(coefficient_rows(DEFAULT, 8), s[0] / bound(s[0]))
    assert np.max(np.abs(along - want)) <= directions
    assert np.max(np.abs(seen - along[..., None, :] * np.eye(32))) <= directions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coefficients": "polar_express"}, "minimax_9_5_l7e-4.*taylor_quintic"),
        ({"coefficients": []}, "0 coefficient rows"),
        ({"steps": 0}, "steps=0"),
        ({"method": "eigh"}, "auto, direct, gram, svd or qdwh"),
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


@pytest.mark.parametrize("method", ["newton_schulz", "eigh"])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e15])
def test_inverse_sqrt(method, scale):
    x = oracle.conditioned(20, 16, 16)
    a = x @ x.T
    values, vectors = np.linalg.eigh(a)
    want = (vectors / np.sqrt(values)) @ vectors.T / np.sqrt(scale)
    got = np.asarray(inverse_sqrt(jnp.asarray(a * scale, jnp.float32), method=method), np.float64)
    # Damping of 16 eps is 8e-4 of the smallest eigenvalue here.
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-3 * np.max(np.abs(want)))
    zero = inverse_sqrt(jnp.zeros((2, 3, 3)), method=method)
    np.testing.assert_array_equal(zero, np.zeros((2, 3, 3)))
