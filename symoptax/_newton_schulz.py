"""Polar factors of stacks of matrices, by matrix products alone.

Everything is computed per matrix of a stack `[..., m, n]`: a matrix is divided by its own largest
entry before anything is squared, so results do not depend on the scale of the input, and a zero
matrix gives zero.
"""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symoptax._coefficients import DEFAULT_TABLE, Row, coefficient_rows
from symoptax._unit import nonzero, unit_scale

Side = Literal["left", "right", "auto"]
Method = Literal["auto", "direct", "gram", "svd"]

# TPUs multiply float32 in bfloat16 unless told otherwise, and a Gram matrix in bfloat16 resolves
# singular values only down to 1/16 of the largest.
_PRECISION = jax.lax.Precision.HIGHEST

# A Gram segment multiplies the rounding error of the Gram matrix by the product of its slopes
# p'(0). Measured in float32 with eight steps: unbounded 5e-5 to 3e-4, at most 40 per segment 5e-6.
_MAX_GRAM_AMPLIFICATION = 40.0


def polar_factor(
    d: Float[Array, "*batch m n"],
    *,
    side: Side = "auto",
    method: Method = "auto",
    steps: int = 5,
    coefficients: str | Sequence[Row] = DEFAULT_TABLE,
) -> Float[Array, "*batch m n"]:
    """Compute the polar factor of each matrix of a stack.

    `polar(D) = U V^T` over the non-zero singular values of `D = U S V^T`, the same partial isometry
    as `(D D^T)^(-1/2) D` and `D (D^T D)^(-1/2)` with pseudo-inverse roots. The iteration applies
    one odd polynomial per step to the singular values: with the default table five steps bring
    those above 1e-3 of the Schatten-4 norm (between the largest and min(m, n)^(1/4) times that)
    into [0.84, 1.13], eight to 1 within rounding. Smaller ones, and directions in which D vanishes,
    stay below the same limits.

    Args:
      d: matrices in a floating dtype; bfloat16 and float16 are computed in float32.
      side: which Gram matrix the iteration forms: "left" m x m, "right" n x n, "auto" the smaller.
      method: "direct" iterates on D, "gram" on the Gram matrix with restarts, "svd" is exact up to
        a relative cutoff of max(m, n) eps; "auto" takes direct or gram, whichever multiplies less.
      steps: number of polynomial steps (not used by "svd").
      coefficients: a name in `symoptax.TABLES` or rows (a, b, c).

    Returns:
      An array of the shape and dtype of `d`.

    Raises:
      ValueError: unknown side, method or table, or an input that is no stack of real matrices.

    Source: Lau, Long and Su (2025), arXiv 2505.21799; Amsel et al. (2025), arXiv 2505.16932.

    >>> polar_factor(jnp.array([[0.0, 3.0], [-2.0, 0.0]]), method="svd").tolist()
    [[0.0, 1.0], [-1.0, 0.0]]
    """
    check_options(side, method)
    if d.ndim < 2 or not jnp.issubdtype(d.dtype, jnp.floating):
        raise ValueError(f"Need real floating matrices [..., m, n], got {d.dtype}{list(d.shape)}.")
    rows = coefficient_rows(coefficients, steps)
    x, _ = unit_scale(d.astype(jnp.promote_types(d.dtype, jnp.float32)))
    m, n = d.shape[-2:]
    if method == "svd":
        return _svd_polar(x).astype(d.dtype)
    on_right = side == "right" or (side == "auto" and n < m)
    x = jnp.matrix_transpose(x) if on_right else x
    if method == "auto":
        method = cheaper_method(x.shape[-2], x.shape[-1], rows)
    x = _direct(x, rows) if method == "direct" else _gram(x, rows)
    x = jnp.matrix_transpose(x) if on_right else x
    return x.astype(d.dtype)


def check_options(side: str, method: str) -> None:
    """Raise ValueError for a side or method that does not exist."""
    if side not in ("left", "right", "auto"):
        raise ValueError(f"side={side!r} is unknown; choose 'left', 'right' or 'auto'.")
    if method not in ("auto", "direct", "gram", "svd"):
        raise ValueError(f"method={method!r} is unknown; choose auto, direct, gram or svd.")


def cheaper_method(k: int, length: int, rows: Sequence[Row]) -> Literal["direct", "gram"]:
    """Return the method with fewer multiplications for a k x length matrix with a k x k Gram."""
    tall, small = k * k * length, k**3
    direct = len(rows) * (2 * tall + small)
    segments = _segments(rows)
    # Per segment: the Gram matrix and the final product on the long side; R^2 in every step, and
    # Q P, P R, (P R) P between steps.
    gram = sum(2 * tall + small * (len(s) + 3 * (len(s) - 1)) for s in segments)
    return "direct" if direct <= gram else "gram"


def _frobenius(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=_PRECISION)


def _gram_of(x: Array) -> Array:
    return _matmul(x, jnp.matrix_transpose(x))


def _normalised(x: Array) -> tuple[Array, Array]:
    """Scale x to spectral norm at most 1 and return it with its left Gram matrix.

    The bound is the Schatten-4 norm `|X X^T|_F^(1/2)`, which costs nothing here because the first
    step needs the Gram matrix anyway, and is tighter than the Frobenius norm.
    """
    gram = _gram_of(x)
    norm = nonzero(jnp.sqrt(_frobenius(gram)))
    return x / norm, gram / jnp.square(norm)


def _direct(x: Array, rows: Sequence[Row]) -> Array:
    """Iterate `X <- a X + (b A + c A^2) X` with `A = X X^T`."""
    x, gram = _normalised(x)
    for step, (a, b, c) in enumerate(rows):
        gram = gram if step == 0 else _gram_of(x)
        x = a * x + _matmul(b * gram + c * _matmul(gram, gram), x)
    return x


def _gram(x: Array, rows: Sequence[Row]) -> Array:
    """Iterate on the Gram matrix, touching the long side twice per segment."""
    x, gram = _normalised(x)
    for number, segment in enumerate(_segments(rows)):
        gram = gram if number == 0 else _gram_of(x)
        x = _matmul(_root_segment(gram, segment), x)
    return x


def _root_segment(gram: Array, rows: Sequence[Row]) -> Array:
    """Accumulate `Q = P_s ... P_1` with `P = a I + b R + c R^2` and `R <- P R P`."""
    identity = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)
    root = None
    for step, (a, b, c) in enumerate(rows):
        factor = a * identity + b * gram + c * _matmul(gram, gram)
        root = factor if root is None else _matmul(factor, root)
        if step + 1 < len(rows):
            gram = _matmul(_matmul(factor, gram), factor)
    assert root is not None
    return root


def _segments(rows: Sequence[Row]) -> list[list[Row]]:
    """Cut the steps where the product of the slopes p'(0) would pass the limit."""
    segments: list[list[Row]] = []
    slope = float("inf")
    for row in rows:
        slope *= row[0]
        if slope > _MAX_GRAM_AMPLIFICATION:
            segments.append([])
            slope = row[0]
        segments[-1].append(row)
    return segments


def _svd_polar(x: Array) -> Array:
    u, s, vt = jnp.linalg.svd(x, full_matrices=False)
    cutoff = max(x.shape[-2:]) * jnp.finfo(x.dtype).eps * s[..., :1]
    kept = u * (s > cutoff)[..., None, :]
    # Where a row or column of x is zero the products leave rounding noise, not zero.
    rows, cols = (jnp.any(x != 0, axis=axis, keepdims=True) for axis in (-1, -2))
    return jnp.where(rows & cols, _matmul(kept, vt), 0)
