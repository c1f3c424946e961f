"""Polar factors and inverse square roots of stacks of matrices, by matrix products alone.

Everything is computed per matrix of a stack `[..., m, n]`: a matrix is divided by its own largest
entry before anything is squared, so results do not depend on the scale of the input, and a zero
matrix gives zero.

One step applies an odd polynomial to the singular values, `X <- P X` with `P = a I + b R + c R^2`
and `R = X X^T`. Steps may also run on the Gram matrix alone, `R <- P R P` and `Q <- P Q`, and touch
the long side of X only once per segment, `X <- Q X`; `_cost.py` decides where segments end.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from symoptax._coefficients import coefficient_rows
from symoptax._cost import (
    Method,
    Rows,
    Side,
    check_options,
    forms_right_gram,
    gram_sizes,
    segments,
)
from symoptax._each_matrix import check_stack, each_matrix, one_by_one
from symoptax._minimax import Row
from symoptax._numerics import FLOAT32, Numerics, check_numerics
from symoptax._unit import nonzero, unit_scale

Product = Callable[[Array, Array], Array]


def polar_factor(
    d: Float[Array, "*batch m n"],
    *,
    side: Side = "auto",
    method: Method = "auto",
    steps: int = 5,
    coefficients: str | Sequence[Row] | None = None,
    numerics: Numerics = FLOAT32,
) -> Float[Array, "*batch m n"]:
    """Compute the polar factor of each matrix of a stack.

    `polar(D) = U V^T` over the non-zero singular values of `D = U S V^T`, the same partial isometry
    as `(D D^T)^(-1/2) D` and `D (D^T D)^(-1/2)` with pseudo-inverse roots. The iteration applies
    one odd polynomial per step to the singular values: with the default table five steps bring
    those above 1e-3 of the largest into [0.85, 1.15], eight into 1 +- 1e-5. Smaller ones, and
    directions in which D vanishes, stay below the same limits. After five steps of "gram" in
    float32 some near 1e-3 may reach 1.3, where many are alike or sums are long.

    Args:
      d: matrices in a floating dtype; bfloat16 and float16 are computed in float32 by default.
      side: which Gram matrix the iteration forms: "left" m x m, "right" n x n, "auto" the smaller.
      method: "direct" visits the long side in every step, "gram" as seldom as rounding allows,
        "auto" whatever multiplies least (see `cost`); "svd" is exact up to a relative cutoff of
        max(m, n) eps; "qdwh" is `jax.lax.linalg.qdwh`, which inflates rounding noise in
        directions where D vanishes to length 1.
      steps: number of polynomial steps (not used by "svd" and "qdwh").
      coefficients: a name in `symoptax.TABLES`, or rows (see `minimax_table`); None:
        "minimax_9_5_l7e-4", or "polar_express_l1e-3_s1.01" with products coarser than float32.
      numerics: dtypes and precision of the products.

    Returns:
      An array of the shape and dtype of `d`.

    Raises:
      ValueError: unknown side, method or table, or an input that is no stack of real matrices.

    Source: Lau, Long and Su (2025), arXiv 2505.21799; Amsel et al. (2025), arXiv 2505.16932.

    >>> polar_factor(jnp.array([[0.0, 3.0], [-2.0, 0.0]]), method="svd").tolist()
    [[0.0, 1.0], [-1.0, 0.0]]
    """
    check_options(side, method, numerics)
    check_stack(d)
    epsilon = numerics.epsilon(d.dtype)
    rows = coefficient_rows(coefficients, steps, epsilon)
    k, length = gram_sizes(d.shape[-2], d.shape[-1], side)
    parts = segments(rows, k, length, method, epsilon)
    on_right = forms_right_gram(d.shape[-2], d.shape[-1], side)
    return _polar_factor(d, method, on_right, parts, numerics) if d.size else d


def inverse_sqrt(
    a: Float[Array, "*batch n n"],
    *,
    method: Literal["newton_schulz", "eigh"] = "newton_schulz",
    damping: float | None = None,
    steps: int = 8,
    coefficients: str | Sequence[Row] | None = None,
    numerics: Numerics = FLOAT32,
) -> Float[Array, "*batch n n"]:
    """Compute `(A + delta |A| I)^(-1/2)` of symmetric positive semidefinite matrices.

    |A| is the spectral norm, replaced by a bound on it in the iteration. A zero matrix gives zero.
    A polar factor is better computed by `polar_factor`: a Gram matrix has already lost the singular
    values below sqrt(eps) of the largest.

    Args:
      a: symmetric positive semidefinite matrices in a floating dtype.
      method: "newton_schulz" takes products alone; eigenvalues below 1e-6 of the largest are not
        brought all the way. "eigh" diagonalises.
      damping: delta. None: 16 eps of the products for "newton_schulz", without which eigenvalues
        that rounding has made negative would grow in every step, and for "eigh" 0, where
        directions below n eps of the largest eigenvalue become zero (the pseudo-inverse root).
      steps: as in `polar_factor`, like all that follow.
      coefficients: table or rows.
      numerics: dtypes and precision of the products.

    Returns:
      An array of the shape and dtype of `a`, in units of `a^(-1/2)`.

    Raises:
      ValueError: unknown method or table, damping too small for the method, or an input that is
        no stack of real square matrices.

    >>> inverse_sqrt(jnp.array([[4.0, 0.0], [0.0, 0.25]])).round(4).tolist()
    [[0.5, 0.0], [0.0, 2.0]]
    """
    if a.ndim < 2 or a.shape[-2] != a.shape[-1] or not jnp.issubdtype(a.dtype, jnp.floating):
        raise ValueError(f"Need real floating matrices [..., n, n], got {a.dtype}{list(a.shape)}.")
    if method not in ("newton_schulz", "eigh"):
        raise ValueError(f"method={method!r} is unknown; choose newton_schulz or eigh.")
    check_numerics(numerics)
    epsilon = numerics.epsilon(a.dtype)
    rows = coefficient_rows(coefficients, steps, epsilon)
    least = 8 * epsilon if method == "newton_schulz" else 0.0
    damping = 2 * least if damping is None else damping
    if damping < least:
        raise ValueError(f"damping={damping} for {method}: need at least {least:.1g}.")
    return _inverse_sqrt(a, method, damping, rows, numerics) if a.size else a


@functools.partial(jax.jit, static_argnames=("method", "on_right", "parts", "numerics"))
def _polar_factor(
    d: Array, method: Method, on_right: bool, parts: tuple[Rows, ...], numerics: Numerics
) -> Array:
    polar = {"svd": _svd_polar, "qdwh": functools.partial(one_by_one, _qdwh_polar)}.get(
        method, functools.partial(_iterate, parts=parts, numerics=numerics)
    )

    def scaled(d: Array) -> Array:
        x, _ = unit_scale(d.astype(numerics.stored_as(d.dtype)))
        x = polar(jnp.matrix_transpose(x) if on_right else x)
        return (jnp.matrix_transpose(x) if on_right else x).astype(d.dtype)

    return scaled(d) if method in ("svd", "qdwh") else each_matrix(scaled, d)


@functools.partial(jax.jit, static_argnames=("method", "damping", "rows", "numerics"))
def _inverse_sqrt(a: Array, method: str, damping: float, rows: Rows, numerics: Numerics) -> Array:
    x, unit = unit_scale(a.astype(numerics.stored_as(a.dtype)))
    if method == "eigh":
        root = _eigh_root(x, damping)
    else:
        root = each_matrix(
            lambda x: _root(x, rows, numerics, x.dtype, normalise=True, damping=damping), x
        )
    # Where a row of x is zero, so is the root's by convention.
    seen = jnp.any(x != 0, axis=(-2, -1), keepdims=True)
    return jnp.where(seen, root / jnp.sqrt(unit), 0).astype(a.dtype)


def _iterate(x: Array, parts: tuple[Rows, ...], numerics: Numerics) -> Array:
    """Apply the steps to x, one segment after another."""
    for number, rows in enumerate(parts):
        gram = numerics.matmul(x, jnp.matrix_transpose(x))
        root = _root(gram, rows, numerics, x.dtype, normalise=number == 0)
        x = numerics.matmul(root, x).astype(x.dtype)
    return x


def _root(
    gram: Array,
    rows: Rows,
    numerics: Numerics,
    stored: jnp.dtype,
    *,
    normalise: bool,
    damping: float = 0.0,
) -> Array:
    """Run a segment on `G = X X^T` and return the Q for which `Q X` has taken its steps.

    `normalise` scales G to eigenvalues of at most 1 for the first step; Q is for the unscaled X.
    """
    product = numerics.matmul
    r, square, scale = gram.astype(stored), None, 1.0
    if normalise:
        norm = nonzero(_frobenius(gram))
        r = (gram / norm).astype(stored)
        square = product(r, r)
        bound = _largest_eigenvalue(r, square)
        r, square, scale = r / bound, square / jnp.square(bound), jax.lax.rsqrt(norm * bound)
        if damping:
            eye = _identity(r)
            square = square + 2 * damping * r + damping**2 * eye
            r, square, scale = (
                (r + damping * eye) / (1 + damping),
                square / (1 + damping) ** 2,
                scale / math.sqrt(1 + damping),
            )
        r = r.astype(stored)
    q = None
    for step, row in enumerate(rows):
        if square is None and len(row) > 2:
            square = product(r, r)
        p = _polynomial(r, square, row, product)
        if step + 1 == len(rows):
            p = p * scale
        p = p.astype(stored)
        q = p if q is None else product(p, q).astype(stored)
        if step + 1 < len(rows):
            r, square = product(product(p, r).astype(stored), p).astype(stored), None
    assert q is not None
    return q


def _polynomial(r: Array, square: Array | None, row: Row, product: Product) -> Array:
    """Evaluate `a I + b R + c R^2 + d R^3 + e R^4`."""
    stored, r = r.dtype, r.astype(jnp.promote_types(r.dtype, jnp.float32))
    eye = _identity(r)
    if len(row) == 2:
        return row[0] * eye + row[1] * r
    assert square is not None
    if len(row) == 3:
        return row[0] * eye + row[1] * r + row[2] * square
    # Coefficients of degree 9 reach 600 while the polynomial stays below 16 on [0, 1]; those of its
    # Chebyshev polynomials are as small as it is, and so is the rounding error.
    c0, c1, c2, c3, c4 = _chebyshev(tuple(row))
    t1 = 2 * r - eye
    t2 = 8 * (square - r) + eye
    tail = product(t2.astype(stored), (2 * c3 * t1 + 2 * c4 * t2).astype(stored))
    return (c0 - c4) * eye + (c1 - c3) * t1 + c2 * t2 + tail


@functools.cache
def _chebyshev(row: Row) -> tuple[float, ...]:
    """Return the five coefficients of the row's polynomial in R in the basis T_i(2 R - 1)."""
    polynomial = np.polynomial.Polynomial(row).convert(
        kind=np.polynomial.Chebyshev, domain=[0.0, 1.0]
    )
    return (*polynomial.coef.tolist(), 0.0)[:5]


def _largest_eigenvalue(r: Array, square: Array) -> Array:
    """Bound the eigenvalues of R >= 0 from above, by its moments `m_i = tr(R^i)`.

    Every eigenvalue obeys `|r (r - c)| <= |R^2 - c R|`, the Frobenius norm, for any c, and most
    tightly for c = m3 / m2 where many equal ones dominate. Where one does, the Schatten-4 norm
    `m4^(1/4)` of R is less. Both are invariant under rotations.
    """
    m2, m3, m4 = (_inner(x, y) for x, y in ((r, r), (r, square), (square, square)))
    center = m3 / nonzero(m2)
    half, spread = center / 2, _frobenius(square - center * r)
    bound = half + jnp.sqrt(jnp.square(half) + spread)
    return nonzero(jnp.minimum(bound, jnp.sqrt(jnp.sqrt(m4))))


def _identity(like: Array) -> Array:
    return jnp.broadcast_to(jnp.eye(like.shape[-1], dtype=like.dtype), like.shape)


def _inner(x: Array, y: Array) -> Array:
    return jnp.sum(x * y, axis=(-2, -1), keepdims=True)


def _frobenius(x: Array) -> Array:
    return jnp.sqrt(_inner(x, x))


def _svd_polar(x: Array) -> Array:
    u, s, vt = jnp.linalg.svd(x, full_matrices=False)
    cutoff = max(x.shape[-2:]) * jnp.finfo(x.dtype).eps * s[..., :1]
    kept = u * (s > cutoff)[..., None, :]
    # Where a row or column of x is zero the products leave rounding noise, not zero.
    rows, cols = (jnp.any(x != 0, axis=axis, keepdims=True) for axis in (-1, -2))
    return jnp.where(rows & cols, FLOAT32.matmul(kept, vt), 0)


def _qdwh_polar(x: Array) -> Array:
    wide = x.shape[-2] < x.shape[-1]
    x = jnp.matrix_transpose(x) if wide else x
    # qdwh divides by the norm.
    u, *_ = jax.lax.linalg.qdwh(jnp.where(jnp.any(x != 0), x, jnp.eye(*x.shape, dtype=x.dtype)))
    u = jnp.where(jnp.any(x != 0), u, 0)
    return jnp.matrix_transpose(u) if wide else u


def _eigh_root(a: Array, damping: float) -> Array:
    values, vectors = jnp.linalg.eigh(a)
    largest = values[..., -1:]
    cutoff = 0.0 if damping else a.shape[-1] * jnp.finfo(a.dtype).eps
    kept = values > cutoff * largest
    damped = jnp.maximum(values, 0) + damping * largest
    roots = jnp.where(kept | (damping > 0), jax.lax.rsqrt(nonzero(damped)), 0)
    return FLOAT32.matmul(vectors * roots[..., None, :], jnp.matrix_transpose(vectors))
