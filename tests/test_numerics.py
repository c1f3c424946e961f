"""Dtypes and precision of the products: what is allowed, what is lowered, what it is good for."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from symoptax import (
    BFLOAT16,
    BFLOAT16_X3,
    FLOAT32,
    Numerics,
    cost,
    inverse_sqrt,
    polar_factor,
    polar_map,
)

SAFE = "polar_express_l1e-3_s1.01"
STORED = Numerics(storage=jnp.bfloat16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": jnp.int32}, "storage.*need a floating dtype"),
        ({"products": jnp.complex64}, "products.*need a floating dtype"),
        ({"accumulate": bool}, "accumulate.*need a floating dtype"),
        # 65504 is the largest float16, and R^4 of what is not yet scaled would be more.
        ({"storage": jnp.float16}, "Gram matrices overflow"),
    ],
)
def test_dtypes_that_do_not_work(options, message):
    with pytest.raises(ValueError, match=message):
        Numerics(**options)


def test_iterates_are_stored_in_float32_or_better():
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        assert FLOAT32.stored_as(dtype) == BFLOAT16.stored_as(dtype) == jnp.float32
        assert STORED.stored_as(dtype) == jnp.bfloat16
    assert FLOAT32.stored_as(jnp.float64) == jnp.float64


@pytest.mark.parametrize(
    ("numerics", "dtype", "epsilon"),
    [
        (FLOAT32, jnp.float32, 2.0**-23),
        (FLOAT32, jnp.bfloat16, 2.0**-23),
        (FLOAT32, jnp.float64, 2.0**-52),
        (BFLOAT16, jnp.float32, 2.0**-7),
        (BFLOAT16, jnp.float64, 2.0**-7),
        (BFLOAT16_X3, jnp.float32, 2.0**-10),  # TF32, which it is on GPUs
        (STORED, jnp.float32, 2.0**-7),
        (Numerics(precision=jax.lax.Precision.DEFAULT), jnp.float32, 2.0**-7),
        (Numerics(products=jnp.float16), jnp.float32, 2.0**-10),
        (Numerics(products=jnp.float32), jnp.float64, 2.0**-23),
        # Precision is a matter of float32 alone.
        (BFLOAT16_X3, jnp.float64, 2.0**-52),
    ],
)
def test_epsilon_is_that_of_the_coarsest_number(numerics, dtype, epsilon):
    assert numerics.epsilon(dtype) == epsilon


def test_numerics_are_static_arguments():
    assert Numerics() == FLOAT32
    assert len({FLOAT32, Numerics(), BFLOAT16, BFLOAT16_X3, STORED}) == 4
    jitted = jax.jit(polar_factor, static_argnames="numerics")
    d = jnp.asarray(oracle.normal(8, 8), jnp.float32)
    np.testing.assert_allclose(
        jitted(d, numerics=FLOAT32), polar_factor(d), atol=1e-4, rtol=0
    )  # fused differently; the default five steps amplify rounding


def products(function, *shape, **options):
    """Return what is lowered for a GPU, and of every product its dtypes and its precision."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    traced = jax.jit(functools.partial(function, **options)).trace(x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    tensor = r"tensor<(?:\d+x)*(\w+)>"
    precision = r"(?:precision = \[(\w+), \w+\] )?"
    pattern = rf"dot_general .*?{precision}: \({tensor}, {tensor}\) -> {tensor}"
    lines = [line for line in text.splitlines() if "dot_general" in line]
    assert lines
    return text, {re.search(pattern, line).groups() for line in lines}


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (polar_factor, {"method": "direct"}),
        (polar_factor, {"method": "gram", "steps": 3}),
        (inverse_sqrt, {}),
    ],
)
def test_what_is_multiplied(function, options):
    # Small matrices go in batches, large ones one by one.
    for shape in ((2, 8, 8), (2, 64, 64)):
        text, found = products(function, *shape, **options)
        assert "bf16" not in text
        assert found == {("HIGHEST", "f32", "f32", "f32")}
        _, found = products(function, *shape, numerics=BFLOAT16, **options)
        assert {product[1:] for product in found} == {("bf16", "bf16", "f32")}
        _, found = products(function, *shape, numerics=BFLOAT16_X3, **options)
        assert found == {("HIGH", "f32", "f32", "f32")}
        _, found = products(function, *shape, numerics=STORED, **options)
        assert {product[1:] for product in found} == {("bf16", "bf16", "f32")}


def test_float64_is_multiplied_in_float64(x64):
    x = jax.ShapeDtypeStruct((8, 8), jnp.float64)
    text = jax.jit(polar_factor).lower(x).as_text()
    assert not re.search(r"\bb?f(16|32)>", text)


def test_products_may_be_coarser_than_what_is_accumulated():
    a = jnp.asarray(oracle.normal(16, 300), jnp.float32)
    got = BFLOAT16.matmul(a, a.T)
    assert got.dtype == jnp.float32
    rounded = np.asarray(a.astype(jnp.bfloat16).astype(jnp.float32), np.float64)
    # Products of bfloat16 are exact in float32, and 300 of them are added in it.
    np.testing.assert_allclose(got, rounded @ rounded.T, rtol=0, atol=300 * 300 * 2.0**-24)
    assert STORED.matmul(a.astype(jnp.bfloat16), a.T.astype(jnp.bfloat16)).dtype == jnp.float32
    narrow = Numerics(storage=jnp.bfloat16, accumulate=jnp.bfloat16)
    assert narrow.matmul(a.astype(jnp.bfloat16), a.T.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("method", ["direct", "gram"])
@pytest.mark.parametrize(
    ("numerics", "dtype"),
    [(BFLOAT16, jnp.float32), (BFLOAT16, jnp.bfloat16), (STORED, jnp.float32)],
    ids=["products", "input", "storage"],
)
def test_bfloat16_orthogonalises_well_conditioned_matrices(dtype, numerics, method):
    d = jnp.asarray(oracle.conditioned(10, 48, 192), dtype)
    options = {"numerics": numerics, "method": method, "coefficients": SAFE}
    five, eight = (
        jax.jit(functools.partial(polar_factor, steps=steps, **options))(d) for steps in (5, 8)
    )
    assert five.dtype == dtype
    s = np.linalg.svd(np.asarray(five, np.float64), compute_uv=False)
    # [0.84, 1.13] by the polynomials, whose slopes at the last step are near 2; rounding of 2^-8 in
    # every product before.
    assert 0.8 <= s.min() <= s.max() <= 1.16
    eight = np.asarray(eight, np.float64)
    s = np.linalg.svd(eight, compute_uv=False)
    np.testing.assert_allclose(s, 1, rtol=0, atol=2e-2)
    # Singular vectors turn by eps / 2 times the condition, 4e-2, and mostly by less.
    assert np.linalg.norm(eight - oracle.polar(np.asarray(d, np.float64)), 2) <= 6e-2


@pytest.mark.parametrize("numerics", [BFLOAT16, STORED], ids=["products", "storage"])
@pytest.mark.parametrize("shape", [(8, 8), (8, 512), (512, 8), (256, 64)])
def test_bfloat16_is_multiplied_in_every_shape(shape, numerics):
    d = jnp.asarray(oracle.normal(*shape), jnp.float32)
    update = polar_factor(d, steps=2, coefficients=SAFE, numerics=numerics)
    assert np.all(np.isfinite(update))


@pytest.mark.parametrize("numerics", [BFLOAT16, BFLOAT16_X3, STORED], ids=["x1", "x3", "storage"])
@pytest.mark.parametrize("table", ["minimax_9_5_l7e-4", "minimax_9_l3e-3", "cans_cubic_l1e-3"])
def test_tables_for_float32_are_refused_below(table, numerics):
    options = {"coefficients": table, "numerics": numerics}
    for refused in (
        lambda: polar_factor(jnp.eye(3), **options),
        lambda: inverse_sqrt(jnp.eye(3), **options),
        lambda: cost((3, 3), **options),
        lambda: polar_map(**options),
    ):
        with pytest.raises(ValueError, match=f"{table}.*needs products in float32.*{SAFE}"):
            refused()


def test_the_default_table_is_one_that_the_numerics_bear():
    d = jnp.asarray(oracle.conditioned(30, 8, 24), jnp.float32)
    for numerics, table in ((BFLOAT16, SAFE), (BFLOAT16_X3, SAFE), (FLOAT32, "minimax_9_5_l7e-4")):
        np.testing.assert_array_equal(
            polar_factor(d, numerics=numerics),
            polar_factor(d, numerics=numerics, coefficients=table),
        )
