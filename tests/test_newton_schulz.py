"""The iteration: polynomials, its bound, methods and sides, accuracy, conditioning, CPU paths."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from symoptax import TABLES, inverse_sqrt, polar_factor
from symoptax._coefficients import coefficient_rows
from symoptax._minimax import apply_rows
from symoptax._newton_schulz import _largest_eigenvalue

DEFAULT = "minimax_9_5_l7e-4"
EPS = 2.0**-23
exactly = functools.partial(jnp.matmul, precision="highest")


def bound(s):
    """The bound on the largest singular value by which the iteration divides."""
    r = s**2
    center = np.sum(r**3) / np.sum(r**2)
    spread = np.linalg.norm(r**2 - center * r)
    bound = center / 2 + np.sqrt(center**2 / 4 + spread)
    return np.sqrt(min(bound, np.sum(r**4) ** 0.25))


def compiled(function, **options):
    return jax.jit(functools.partial(function, **options))


def singular_values(x):
    return np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)


# The polynomials


@pytest.mark.parametrize("method", ["direct", "gram"])
@pytest.mark.parametrize("steps", [2, 9])
@pytest.mark.parametrize("table", TABLES)
def test_every_singular_value_goes_through_the_polynomials(x64, table, steps, method):
    s = np.geomspace(1, 1e-3, 8)
    d = jnp.asarray(oracle.with_spectrum(s, 8, 24))
    rows = coefficient_rows(table, steps, float(np.finfo(np.float64).eps))
    want = apply_rows(rows, s / bound(s))
    polar = compiled(polar_factor, method=method, steps=steps, coefficients=table)
    got = singular_values(polar(d))
    # Float64 rounding of the Gram matrix, 1e-16, times slopes of 1500 and their square in a
    # segment; muon_quintic never converges and has slopes of 7e4 after nine steps.
    np.testing.assert_allclose(got, np.sort(want)[::-1], rtol=0, atol=1e-9)


def test_singular_vectors_stay(x64):
    s = np.geomspace(1, 1e-3, 8)
    d = oracle.with_spectrum(s, 8, 24)
    u, _, vt = np.linalg.svd(d, full_matrices=False)
    want = (u * apply_rows(coefficient_rows(DEFAULT, 5), s / bound(s))) @ vt
    for method in ("direct", "gram"):
        np.testing.assert_allclose(polar_factor(jnp.asarray(d), method=method), want, atol=1e-9)


def test_rows_of_your_own(x64):
    s = np.geomspace(1, 0.1, 6)
    d = jnp.asarray(oracle.with_spectrum(s, 6, 9))
    # Of every length, in one run: x, then degrees 3, 5, 7 and 9, up and down.
    rows = ((1.5, -0.5), (2.0, -1.5, 0.5), (1.0, 0.2, -0.1, 0.05), (1.1, 0, 0, 0, -0.2), (0.5, 0.1))
    want = apply_rows(rows, s / bound(s))
    for method in ("direct", "gram"):
        update = polar_factor(d, method=method, steps=5, coefficients=rows)
        # Rows of length 4 and 5 are evaluated in another basis, which costs no more than rounding.
        np.testing.assert_allclose(singular_values(update), np.sort(want)[::-1], atol=1e-13)


# The bound on the largest singular value


def two_levels(n):
    """Spectra of n values at two levels, where the bound is worst, as an array [..., n]."""
    tops = np.unique(np.geomspace(1, n - 1, 12).astype(int))
    return np.array(
        [
            np.append(np.ones(top), np.full(n - top, low))
            for top in tops
            for low in np.linspace(0, 0.99, 34)
        ]
    )


SPECTRA = {
    "two levels of 8": two_levels(8),
    "two levels of 64": two_levels(64),
    "two levels of 512": two_levels(512),
    "one value": np.ones((1, 1)),
    "equal": np.ones((1, 100)),
    "geometric": np.array([np.geomspace(1, c, 100) for c in (0.9, 0.1, 1e-3, 1e-8)]),
    "linear": np.linspace(1, 1e-3, 100)[None],
    "power law": np.array([np.arange(1, 101.0) ** -p for p in (0.1, 0.25, 0.5, 1, 2, 4)]),
    "random": np.sort(np.random.default_rng(0).random((50, 30)))[:, ::-1] ** 2,
}


@functools.cache
def moment_bounds(kind):
    """Return the library's bounds on singular values, from the diagonals of Gram matrices."""
    spectra = SPECTRA[kind]
    norm = np.linalg.norm(spectra**2, axis=-1)
    r = jnp.asarray((spectra**2 / norm[:, None])[:, None, :])
    largest = compiled(_largest_eigenvalue)(r, jnp.square(r))
    return np.sqrt(np.asarray(largest)[:, 0, 0] * norm)


@pytest.mark.parametrize("kind", SPECTRA)
def test_the_bound_is_one(x64, kind):
    spectra = SPECTRA[kind]
    found = moment_bounds(kind)
    largest = np.max(spectra, axis=-1)
    np.testing.assert_allclose(found, [bound(s) for s in spectra], rtol=1e-7)
    assert np.all(found >= largest * (1 - 1e-14))
    if kind.startswith("two levels"):
        # 1.56 for 195 of 512 values, the others at 0.64.
        assert np.all(found <= 1.6 * largest)


@pytest.mark.parametrize("kind", SPECTRA)
def test_the_bound_is_never_above_the_schatten_norm(x64, kind):
    spectra = SPECTRA[kind]
    schatten_8 = np.sum(spectra**8, axis=-1) ** (1 / 8)
    assert np.all(moment_bounds(kind) <= schatten_8 * (1 + 1e-14))


@pytest.mark.parametrize("kind", SPECTRA)
def test_rounding_does_not_bring_the_bound_down(kind):
    """In float32, of dense matrices, for which all sums are rounded."""
    spectra = SPECTRA[kind]
    for s in spectra[:: max(1, len(spectra) // 4)]:
        x = jnp.asarray(oracle.with_spectrum(s, len(s), len(s)), jnp.float32)
        r = exactly(x, x.T) / np.linalg.norm(s**2)
        largest = np.linalg.eigvalsh(np.asarray(r, np.float64))[-1]
        found = np.asarray(_largest_eigenvalue(r, exactly(r, r)), np.float64).item()
        assert found >= largest * (1 - 4 * EPS)
        assert found <= bound(s) ** 2 / np.linalg.norm(s**2) * (1 + 64 * EPS)


# Methods and sides


@pytest.mark.parametrize("side", ["left", "right", "auto"])
def test_methods_agree(x64, side):
    d = np.stack([oracle.conditioned(30, 12, 5, seed=seed) for seed in range(2)])
    want = oracle.polar(d)
    for method in ("direct", "gram", "svd", "qdwh", "auto"):
        got = compiled(polar_factor, method=method, side=side, steps=12)(jnp.asarray(d))
        # Float64 rounding times the slopes 3000 of the table; also on the singular side.
        np.testing.assert_allclose(got, want, atol=1e-10, err_msg=f"{method} {side}")


@pytest.mark.parametrize("method", ["direct", "gram", "auto", "svd", "qdwh"])
def test_scale_does_not_matter(method):
    d = oracle.conditioned(30, 24, 64)
    factors = np.array([1.0, 1e-25, 1e-12, 1e-6, 1e-3, 1e4, 1e15])[:, None, None]
    stack = jnp.asarray(factors * d, jnp.float32)
    update = np.asarray(compiled(polar_factor, method=method, steps=8)(stack), np.float64)
    # The input is rounded by 6e-8 of its largest value, which turns vectors by 30 times that.
    np.testing.assert_allclose(update, np.broadcast_to(oracle.polar(d), update.shape), atol=1e-5)


@pytest.mark.parametrize("method", ["direct", "gram", "auto", "svd", "qdwh"])
def test_a_zero_matrix_gives_zero(method):
    d = jnp.asarray(oracle.normal(3, 4, 6), jnp.float32).at[1].set(0)
    update = np.asarray(compiled(polar_factor, method=method)(d))
    assert not np.any(update[1])
    assert np.any(update, axis=(-2, -1)).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_float32(dtype):
    d = jnp.asarray(oracle.normal(2, 8, 24), dtype)
    want = polar_factor(d.astype(jnp.float32)).astype(dtype)
    got = polar_factor(d)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coefficients": "polar_express"}, "minimax_9_5_l7e-4.*taylor_quintic"),
        ({"coefficients": []}, "0 coefficient rows"),
        ({"coefficients": [(1.0,)]}, "two to five"),
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


# Accuracy in float32


def spread_out(k):
    return {
        "geometric": np.geomspace(1, 1.001e-3, k),
        "linear": np.linspace(1, 1.001e-3, k),
        "power law": np.maximum(1.001e-3, np.arange(1, k + 1.0) ** -2),
        "flat, one small": np.append(np.ones(k - 1), 1.001e-3),
        "flat, one large": np.append(1.0, np.full(k - 1, 1.001e-3)),
        "two levels": np.append(np.ones(3 * k // 8), np.full(k - 3 * k // 8, 0.64)),
    }


def many_small(k):
    """A half or a quarter is large, all others exactly 1e-3 of them.

    Such a space has no direction of its own in which to be rounded: all of the rounding there is
    felt. A direction among others that differ sees but a part of it.
    """
    return {
        f"1/{part}, {trial}": np.append(np.ones(k // part), np.full(k - k // part, 1.001e-3))
        for trial, part in itertools.product(range(3), (2, 4))
    }


def with_spectra(spectra, shape):
    d = [oracle.with_spectrum(s, *shape, seed=seed) for seed, s in enumerate(spectra)]
    return jnp.asarray(np.stack(d), jnp.float32)


def assert_near_one(update, d):
    """Check five steps on a Gram matrix: polynomials, and the rounding of the matrix on this CPU.

    A sum of thousands of products is as precise as the blocks in which a CPU adds it up: of 3072 at
    once, its error is five to eight times that of blocks of 256. Where it moves the small
    eigenvalues s^2 of `D D^T` by a part in [-e, e], it moves values that are brought to 1 by
    (1 - e)^(-1/2) at most.
    """
    left = np.asarray(compiled(exactly)(d, jnp.matrix_transpose(d)), np.float64)
    d = np.asarray(d, np.float64)
    for got, x, rounded in zip(singular_values(update), d, left, strict=True):
        values, u = np.linalg.eigh(x @ x.T)
        u = u[:, values < 1e-3 * values[-1]]
        moved = np.linalg.eigvalsh(u.T @ (rounded - x @ x.T) @ u) / (1e-6 * values[-1])
        low, high = min(moved, default=0), max(moved, default=0)
        # [0.87, 1.10] by the polynomials where the bound is at most 1.5 times too large.
        assert got.max() <= 1.12 / np.sqrt(1 - np.clip(-low, 0, 0.99))
        assert got.min() >= 0.85 / np.sqrt(1 + max(high, 0))


@pytest.mark.parametrize("shape", [(64, 64), (48, 3072)])
@pytest.mark.parametrize("spectra", [spread_out, many_small])
def test_default_steps_bring_singular_values_to_one(spectra, shape):
    d = with_spectra(spectra(min(shape)).values(), shape)
    direct = singular_values(polar_factor(d, method="direct"))
    assert 0.85 <= direct.min() <= direct.max() <= 1.15
    assert_near_one(polar_factor(d, method="gram"), d)
    # Rounding moves 1e-3 by 1e-4 of itself; eight steps are flat at 1, so little of it is left.
    for method in ("direct", "gram"):
        eight = singular_values(polar_factor(d, method=method, steps=8))
        np.testing.assert_allclose(eight, 1, atol=1e-5)


@pytest.mark.parametrize(("shape", "method"), [((64, 64), "direct"), ((16, 256), "gram")])
def test_auto_is_the_cheaper_one(shape, method):
    d = jnp.asarray(oracle.normal(*shape), jnp.float32)
    np.testing.assert_array_equal(polar_factor(d), polar_factor(d, method=method))


@pytest.mark.parametrize(
    ("condition", "worst", "directions"),
    [
        # Rounding D to float32 turns each singular vector pair by eps * condition, and eight steps
        # bring s / |D| to 1 as long as it is above 1e-3: both are 1e-4 at most here.
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


# What CPUs do with large matrices


def test_large_matrices_are_as_accurate_as_small_ones():
    spectra = spread_out(1024)["flat, one large"], many_small(1024)["1/4, 0"]
    d = with_spectra(spectra, (1024, 1024))
    norms = np.linalg.norm(polar_factor(d, method="direct"), 2, axis=(-2, -1))
    assert 0.8 <= norms.min() <= norms.max() <= 1.15
    assert_near_one(polar_factor(d, method="gram"), d)


@pytest.mark.parametrize("method", ["direct", "gram"])
@pytest.mark.parametrize("shape", [(16, 64), (200, 100)])
def test_matrices_of_a_stack_do_not_see_each_other(shape, method):
    """Small matrices are multiplied in a batch, those from 64 x 64 on one after another."""
    stack = oracle.normal(4, *shape).astype(np.float32)
    update = polar_factor(jnp.asarray(stack), method=method)
    for other in (0.0, 1e15, np.nan):
        changed = stack.copy()
        changed[[0, 1, 3]] *= np.float32(other)
        result = polar_factor(jnp.asarray(changed), method=method)
        np.testing.assert_array_equal(result[2], update[2])
    # Two axes of stacking are one.
    folded = polar_factor(jnp.asarray(stack.reshape(2, 2, *shape)), method=method)
    np.testing.assert_array_equal(folded.reshape(4, *shape), update)


@pytest.mark.parametrize("method", ["direct", "gram"])
@pytest.mark.parametrize("shape", [(64, 64), (63, 70)])
def test_stacks_equal_single_matrices(shape, method):
    stack = oracle.normal(4, *shape).astype(np.float32)
    update = polar_factor(jnp.asarray(stack), method=method)
    for matrix, result in zip(stack, np.asarray(update), strict=True):
        np.testing.assert_array_equal(polar_factor(jnp.asarray(matrix), method=method), result)


@pytest.mark.parametrize("shape", [(16, 64), (31, 33), (200, 100)])
def test_stacks_nearly_equal_single_matrices(shape):
    """Small sizes in a batch and transposed matrices in a loop are added up in another order."""
    stack = oracle.normal(3, *shape).astype(np.float32)
    update = polar_factor(jnp.asarray(stack), steps=8)
    for matrix, result in zip(stack, np.asarray(update), strict=True):
        # Eight steps converge, so the error is eps times the condition, here up to 100.
        np.testing.assert_allclose(
            polar_factor(jnp.asarray(matrix), steps=8), result, rtol=0, atol=2e-5
        )


# Inverse square roots


def inverse_root(a, damping=0.0):
    values, vectors = np.linalg.eigh(np.asarray(a, np.float64))
    return (vectors / np.sqrt(np.maximum(values, 0) + damping * values[-1])) @ vectors.T


@functools.cache
def orthogonal(n):
    return np.linalg.qr(oracle.normal(n, n))[0]


def gram(s):
    """A positive semidefinite matrix with these eigenvalues."""
    return (orthogonal(len(s)) * np.asarray(s)) @ orthogonal(len(s)).T


def distance(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want, 2) / np.linalg.norm(want, 2)


@pytest.mark.parametrize("n", [1, 8, 64, 256])
@pytest.mark.parametrize("method", ["newton_schulz", "eigh"])
def test_inverse_square_roots(n, method):
    for condition in (10, 1e3):
        a = gram(np.geomspace(1, 1 / condition, n) if n > 1 else [3.0])
        # Float32 moves an eigenvalue of 1 / condition by n^(1/2) eps at least, the damping of 16
        # eps by half of 16 eps condition.
        tolerance = 20 * EPS * condition * (1 if n < 100 else 2)
        got = inverse_sqrt(jnp.asarray(a, jnp.float32), method=method, steps=10)
        assert distance(got, inverse_root(a)) <= tolerance


@pytest.mark.parametrize("method", ["newton_schulz", "eigh"])
def test_inverse_square_roots_in_float64(x64, method):
    a = np.stack([gram(np.geomspace(1, 1e-4, 24)), 1e9 * gram(np.linspace(1, 0.5, 24))])
    got = inverse_sqrt(jnp.asarray(a), method=method, steps=12)
    assert got.dtype == jnp.float64
    for root, matrix in zip(got, a, strict=True):
        assert distance(root, inverse_root(matrix)) <= 1e-10


@pytest.mark.parametrize("damping", [1e-5, 1e-3, 0.1, 1.0])
@pytest.mark.parametrize("method", ["newton_schulz", "eigh"])
def test_damping_is_relative_to_the_largest_eigenvalue(x64, method, damping):
    s = np.append(np.full(8, 5.0), np.full(8, 2.0))
    root = compiled(inverse_sqrt, method=method, damping=damping, steps=12)
    got = root(jnp.asarray(gram(s)))
    # Newton-Schulz takes its bound on the largest eigenvalue instead, here 1.3 times as large.
    largest = 5.0 if method == "eigh" else bound(np.sqrt(s)) ** 2
    np.testing.assert_allclose(got, inverse_root(gram(s), damping * largest / 5), atol=1e-8)


@pytest.mark.parametrize(("n", "steps"), [(4, 8), (64, 5), (64, 8), (64, 12), (512, 12)])
def test_the_default_damping_suffices_for_singular_matrices(n, steps):
    x = jnp.asarray(oracle.normal(n, max(1, n // 4)), jnp.float32)
    half = n // 2
    cases = [
        exactly(x, x.T),
        gram(np.append(1.0, np.zeros(n - 1))),
        gram(np.append(np.ones(half), np.zeros(n - half))),
        gram(np.append(np.ones(n - half), np.full(half, 1e-8))),
        gram(np.append(np.geomspace(1, 1e-6, n - 1), 0)),
        np.zeros((n, n)),
    ]
    a = jnp.asarray(np.stack(cases), jnp.float32)
    got = np.asarray(inverse_sqrt(a, steps=steps), np.float64)
    assert not np.any(got[-1])
    largest = np.linalg.norm(np.asarray(a[:-1], np.float64), 2, axis=(-2, -1))
    roots = np.linalg.norm(got[:-1], 2, axis=(-2, -1)) * np.sqrt(16 * EPS * largest)
    # 1.1 by the polynomials after five steps, and an error of eps n^(1/2) / 2 in what is 16 eps.
    assert np.all(roots <= (1.2 if steps == 5 else 1.1))
    assert np.all(roots >= 0.5)


def test_large_singular_matrices_have_inverse_square_roots_too():
    v = oracle.normal(1100)
    v /= np.linalg.norm(v)
    d = np.append(np.ones(400), np.zeros(700))
    reflected = d * np.eye(1100) - 2 * np.outer(v, v * d)
    reflected = reflected - 2 * np.outer(reflected @ v, v)
    root = np.asarray(inverse_sqrt(jnp.asarray(reflected, jnp.float32)), np.float64)
    assert np.linalg.norm(root, 2) * np.sqrt(16 * EPS) <= 1.2


def test_eigh_without_damping_is_the_pseudo_inverse_root(x64):
    s = np.array([4.0, 1.0, 1e-3, 0.0, 0.0])
    got = inverse_sqrt(jnp.asarray(gram(s)), method="eigh")
    want = gram([0.5, 1.0, 1e-3**-0.5, 0, 0])
    np.testing.assert_allclose(got, want, atol=1e-9)


@pytest.mark.parametrize("method", ["newton_schulz", "eigh"])
def test_inverse_square_roots_scale(method):
    a = gram(np.geomspace(1, 0.05, 16))
    factors = np.array([1.0, 1e-25, 1e-12, 1e-3, 1e4, 1e15])
    stack = jnp.asarray(factors[:, None, None] * a, jnp.float32)
    got = np.asarray(inverse_sqrt(stack, method=method), np.float64)
    got *= np.sqrt(factors)[:, None, None]
    # Damping is 16 eps of the largest, 3e-4 of the smallest eigenvalue at most.
    for root in got:
        assert distance(root, inverse_root(a)) <= 1e-4
        assert distance(root, got[0]) <= 1e-5


@pytest.mark.parametrize("method", ["newton_schulz", "eigh"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_inverse_square_roots_of_zero_and_in_half_precision(method, dtype):
    a = np.zeros((3, 4, 4))
    a[1] = np.diag([4.0, 4.0, 1.0, 0.25])
    got = inverse_sqrt(jnp.asarray(a, dtype), method=method)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got[0], np.zeros((4, 4)))
    np.testing.assert_allclose(
        np.asarray(got[1], np.float64), np.diag([0.5, 0.5, 1.0, 2.0]), atol=1e-2
    )


@pytest.mark.parametrize(
    ("a", "options", "message"),
    [
        (jnp.ones((3, 4)), {}, "real floating matrices"),
        (jnp.ones(3), {}, "real floating matrices"),
        (jnp.ones((3, 3), int), {}, "real floating matrices"),
        (jnp.eye(3), {"method": "svd"}, "newton_schulz or eigh"),
        (jnp.eye(3), {"damping": 0.0}, "damping=0.0 for newton_schulz"),
        (jnp.eye(3), {"damping": 1e-7}, "at least 1e-06"),
        (jnp.eye(3), {"damping": -1.0, "method": "eigh"}, "damping=-1.0 for eigh"),
        (jnp.eye(3), {"steps": 0}, "steps=0"),
        (jnp.eye(3), {"coefficients": "muon"}, "'muon' is unknown"),
    ],
)
def test_inverse_square_roots_that_do_not_exist(untyped, a, options, message):
    with pytest.raises(ValueError, match=message):
        inverse_sqrt(a, **options)
