"""The iteration on matrices of every condition, shape and dtype, drawn by hypothesis.

By default two hundred examples, always the same. `-m slow` runs 5000 with a seed that it
prints; ROBUSTNESS_SEED repeats one. Time goes into compiling, so a few combinations of what is
static are drawn first, and for each of them matrices.
"""

import dataclasses
import functools
import math
import os
import random
import secrets

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from symoptax import BFLOAT16, BFLOAT16_X3, FLOAT32, TABLES, Numerics, polar_factor
from symoptax._coefficients import coefficient_rows
from symoptax._cost import gram_sizes, segments

SHAPES = [(1, 64), (64, 1), (5, 7), (24, 24), (48, 96), (192, 48), (16, 1024), (512, 8)]
NUMERICS = {
    "float32": FLOAT32,
    "bfloat16": BFLOAT16,
    "bfloat16_x3": BFLOAT16_X3,
    "stored in bfloat16": Numerics(storage=jnp.bfloat16),
}
# Refused with products coarser than float32.
SHARP = ("minimax_9_5_l7e-4", "minimax_9_l3e-3", "cans_cubic_l1e-3")
CONVERGING = ("minimax_9_5_l7e-4", "minimax_9_l3e-3", "polar_express_l1e-3_s1.01")
DTYPES = ("float32", "bfloat16", "float16", "float64")
METHODS = ("direct", "gram", "auto")
KINDS = ("geometric", "power law", "spike", "clustered", "deficient", "repeated", "centered")


@dataclasses.dataclass(frozen=True)
class Case:
    """What a program is compiled for."""

    shape: tuple[int, int]
    table: str
    steps: int
    method: str
    numerics: str
    dtype: str

    def __str__(self):
        return "-".join(map(str, dataclasses.astuple(self))).replace(" ", "")

    @property
    def rows(self):
        return coefficient_rows(self.table, self.steps)

    @property
    def epsilon(self):
        return NUMERICS[self.numerics].epsilon(self.dtype)

    def segments(self):
        k, length = gram_sizes(*self.shape, "auto")
        return segments(self.rows, k, length, self.method, self.epsilon)


@functools.lru_cache(maxsize=64)
def program(case):
    function = functools.partial(
        polar_factor,
        method=case.method,
        steps=case.steps,
        coefficients=case.table,
        numerics=NUMERICS[case.numerics],
    )
    return jax.jit(function)


def run(case, stack):
    """Return the polar factors in float64, and the matrices as they were after rounding."""
    with jax.enable_x64(case.dtype == "float64"):
        d = jnp.asarray(stack, case.dtype)
        update = program(case)(d)
        assert update.dtype == d.dtype
        assert update.shape == d.shape
        # By way of float32, which NumPy can cast from.
        return tuple(
            np.asarray(x.astype(jnp.promote_types(x.dtype, "float32"))) for x in (update, d)
        )


def matrix(kind, condition, shape, seed):
    m, n = shape
    k = min(m, n)
    s = {
        "geometric": np.geomspace(1, 1 / condition, k),
        "power law": np.arange(1, k + 1.0) ** (-math.log(condition) / math.log(max(k, 2))),
        "spike": np.append(1.0, np.full(k - 1, 1 / condition)),
        "clustered": np.append(np.ones(k - k // 2), np.full(k // 2, 1 / condition)),
        "deficient": np.geomspace(1, 1 / condition, k) * (np.arange(k) < (k + 1) // 2),
    }
    if kind in s:
        return oracle.with_spectrum(s[kind], m, n, seed)
    if kind == "repeated":
        return np.resize(oracle.normal(-(-m // 3), n, seed=seed), shape)
    # The columns of a centered matrix sum to zero; of a single row nothing is left.
    return oracle.center(oracle.normal(m, n, seed=seed)) if m > 1 else np.zeros(shape)


@st.composite
def stacks(draw, case):
    """Draw three matrices, one of them zero at times, each with a scale of its own, and zeros."""
    # float16 reaches from 6e-8 to 65504, and half of its digits are gone at 1e-4 already.
    low, high = (-2, 3) if case.dtype == "float16" else (-20, 15)
    result = np.zeros((4, *case.shape))
    for i in range(3):
        kind = draw(st.sampled_from(KINDS))
        condition = 10 ** draw(st.floats(0, 8))
        scale = 10 ** draw(st.floats(low, high))
        result[i] = scale * matrix(kind, condition, case.shape, draw(st.integers(0, 2**31)))
    return result


def highest(case):
    """Return the largest singular value that may come out."""
    # 1.25 by the polynomials. Rounding moves a value once more by the square root of the rounding
    # error of a Gram matrix, at most a third where eps is small, or by two or three eps.
    limit = 1.25 * (1 + 3 * case.epsilon)
    # Rounding the entries of the result.
    rounding = float(jnp.finfo(case.dtype).eps) / 2 * math.sqrt(min(case.shape))
    return limit * (1 + rounding) + 1e-3


def check(case, stack):
    update, d = run(case, stack)
    assert np.all(np.isfinite(update))
    zero = ~np.any(d, axis=(-2, -1))
    assert zero[-1]
    assert not np.any(update[zero])
    largest = np.linalg.norm(update.astype(np.float64), 2, axis=(-2, -1))
    assert largest.max() <= highest(case)
    assert np.all(largest[~zero] > 0)


def try_out(test, case, examples, seed=None):
    """Run `test(case, stack)` for so many drawn stacks, always the same ones without a seed."""

    @hypothesis.settings(
        max_examples=examples,
        derandomize=seed is None,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(stacks(case))
    def run_test(stack):
        test(case, stack)

    (run_test if seed is None else hypothesis.seed(seed)(run_test))()


def cases(count, seed, **fixed):
    """Draw cases at random so that every value of every field comes up equally often."""
    rng = random.Random(seed)
    values = {
        "shape": SHAPES,
        "table": list(TABLES),
        "steps": range(1, 13),
        "method": METHODS,
        "numerics": list(NUMERICS)[:4],
        "dtype": DTYPES,
    }
    columns = []
    for name, choices in values.items():
        choices = list(fixed.get(name, choices))
        column = (choices * -(-count // len(choices)))[:count]
        rng.shuffle(column)
        columns.append(column)
    drawn = [Case(*fields) for fields in zip(*columns, strict=True)]
    return [case for case in drawn if possible(case)]


def possible(case):
    return case.epsilon < 2.0**-12 or case.table not in SHARP


def equivariance_error(case, stack, seed):
    """Return how far permutations and rotations do not commute with the map, for each matrix."""
    m, n = case.shape
    update, d = run(case, stack)
    rng = np.random.default_rng(seed)
    rows, columns = rng.permutation(m), rng.permutation(n)
    # Householder reflections: orthogonal, dense, and made in no time.
    left, right = (np.eye(size) - 2 * unit_outer(rng, size) for size in (m, n))
    permuted, _ = run(case, d[:, rows][:, :, columns])
    rotated, _ = run(case, left @ d.astype(np.float64) @ right)
    differences = (
        permuted - update[:, rows][:, :, columns],
        rotated - left @ update.astype(np.float64) @ right,
    )
    return np.max([np.linalg.norm(x, 2, axis=(-2, -1)) for x in differences], axis=0)


def unit_outer(rng, size):
    v = rng.standard_normal(size)
    return np.outer(v, v) / (v @ v)


def amplification(case, stack):
    """Return how much more than eps an update may move when a matrix is rounded."""
    s = np.linalg.svd(stack, compute_uv=False)
    smallest = np.maximum(s[..., -1], 1e-30)
    condition = np.where(s[..., 0] > 0, s[..., 0] / smallest, 1.0)
    slopes = [math.prod(row[0] for row in rows) for rows in case.segments()]
    # Rounding an entry of D turns the smallest direction by eps times the condition, and the steps
    # bring out no more of it than the product of all slopes. A Gram matrix of a segment is rounded
    # relative to the square of the largest value: that is the condition once more, and no more of
    # it than the slopes of the segment.
    return np.minimum(condition, math.prod(slopes)) * np.minimum(condition, max(slopes))


def check_equivariance(case, stack):
    error = equivariance_error(case, stack, seed=0)
    # Rounding a result of norm 1, three times a step at sizes of 1000: 1e-5 in float32.
    assert np.all(error <= 100 * case.epsilon * amplification(case, stack))


@pytest.mark.parametrize("case", cases(32, seed=0), ids=str)
def test_results_are_finite_and_bounded(case):
    try_out(check, case, examples=6)


# Converged steps alone are as equivariant as their input is well-conditioned: before, the results
# lie in an interval around 1, and where in it changes as fast as the product of all slopes.
EQUIVARIANT = {
    "table": CONVERGING,
    "steps": range(8, 13),
    "numerics": ["float32"],
    "dtype": ["float32", "float64"],
}


@pytest.mark.parametrize("case", cases(8, seed=1, **EQUIVARIANT), ids=str)
def test_permutations_and_rotations_commute_with_the_map(case):
    try_out(check_equivariance, case, examples=5)


@pytest.mark.parametrize(("steps", "tolerance"), [(1, 5e-4), (5, 5e-2)])
@pytest.mark.parametrize("shape", [(24, 24), (48, 768)])
def test_unconverged_steps_commute_with_rotations_too(shape, steps, tolerance):
    """One step has slopes of 14 at most, so it shows rounding of the matrix, or of its bound."""
    k = min(shape)
    spectra = [np.ones(k), np.append(np.ones(k - 1), 0.1), np.linspace(1, 0.5, k)]
    stack = np.stack([oracle.with_spectrum(s, *shape) for s in spectra])
    for method in ("direct", "gram"):
        case = Case(shape, "minimax_9_5_l7e-4", steps, method, "float32", "float32")
        assert equivariance_error(case, stack, seed=0).max() <= tolerance


class ThreeProducts(Numerics):
    """What precision HIGH is on TPUs: float32 in two parts of bfloat16, and three products."""

    def matmul(self, a, b):
        (a, a_rest), (b, b_rest) = map(split, (a, b))
        return sum(FLOAT32.matmul(x, y) for x, y in ((a, b_rest), (a_rest, b), (a, b)))


class TensorFloat32(Numerics):
    """What precision HIGH is on GPUs: factors are rounded to ten bits."""

    def matmul(self, a, b):
        return FLOAT32.matmul(*(jax.lax.reduce_precision(x, 8, 10) for x in (a, b)))


def split(x):
    high = jax.lax.reduce_precision(x, 8, 7)
    return high, jax.lax.reduce_precision(x - high, 8, 7)


NUMERICS["emulated bfloat16_x3"] = ThreeProducts(precision=jax.lax.Precision.HIGH)
NUMERICS["emulated tensorfloat32"] = TensorFloat32(precision=jax.lax.Precision.HIGH)
USUAL = ("polar_express_l1e-3_s1.01", "dion")
# Precision HIGH itself is float32 on CPUs.
COARSE = [name for name in NUMERICS if name not in ("float32", "bfloat16_x3")]


@pytest.mark.parametrize(("method", "steps"), [("direct", 8), ("gram", 5)])
@pytest.mark.parametrize(
    "table",
    [
        *USUAL,
        *(pytest.param(t, marks=pytest.mark.slow) for t in sorted({*TABLES} - {*SHARP, *USUAL})),
    ],
)
@pytest.mark.parametrize("numerics", COARSE)
def test_coarse_products_stay_bounded(numerics, table, method, steps):
    """Of matrices with singular values where the polynomials have their peaks, among others."""
    stack = np.zeros((5, 24, 96))
    stack[0] = oracle.normal(24, 96)
    stack[1] = oracle.conditioned(10, 24, 96, seed=1)
    stack[2] = oracle.with_spectrum([1.0] * 12 + [0.01] * 12, 24, 96, seed=2)
    stack[3] = oracle.with_spectrum([1.0] * 23 + [1e-4], 24, 96, seed=4)
    check(Case((24, 96), table, steps, method, numerics, "float32"), stack)


@pytest.mark.slow
def test_thousands_of_examples():
    """200 programs, and 5000 stacks of four matrices."""
    seed = int(os.environ.get("ROBUSTNESS_SEED", secrets.randbits(32)))
    print(f"ROBUSTNESS_SEED={seed}")
    checks = [(check, case, 25) for case in cases(260, seed)[:180]]
    checks += [(check_equivariance, case, 25) for case in cases(20, seed, **EQUIVARIANT)]
    assert sum(examples for _, _, examples in checks) == 5000
    for number, (test, case, examples) in enumerate(checks):
        try:
            try_out(test, case, examples, seed)
        except BaseException:
            print(f"ROBUSTNESS_SEED={seed}: {test.__name__} of {case}")
            raise
        if number % 50 == 49:
            jax.clear_caches()
