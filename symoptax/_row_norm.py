"""Row-normalised updates: the map of embeddings, LM heads and other blocks with named rows."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symoptax._map import MatrixMap
from symoptax._symmetry import Group, Symmetry
from symoptax._unit import nonzero


@functools.cache
def row_norm_map() -> MatrixMap:
    """Build the map that divides each row by its Euclidean norm: `U_i = D_i / |D_i|`, `0 -> 0`.

    Commutes with P(rows) x O(cols). Rows with norms from 1e-32 to 1e32 are normalised alike; there
    is no epsilon.

    Source: Lau and Su (2026), arXiv 2605.18106.

    >>> row_norm_map()(jnp.array([[3.0, 4.0], [0.0, 0.0]])).round(3).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    return MatrixMap(
        "row_norm",
        Symmetry(Group.PERMUTATION, Group.ORTHOGONAL),
        (normalize_rows,),
        rms=lambda m, n: 1 / math.sqrt(n),
    )


@functools.cache
def column_norm_map() -> MatrixMap:
    """Build the transpose of `row_norm_map`: `U_j = D_j / |D_j|` for each column.

    Commutes with O(rows) x P(cols).
    """
    return MatrixMap(
        "column_norm",
        Symmetry(Group.ORTHOGONAL, Group.PERMUTATION),
        (lambda d: normalize_rows(d, axis=-2),),
        rms=lambda m, n: 1 / math.sqrt(m),
    )


@functools.cache
def sign_map() -> MatrixMap:
    """Build the elementwise sign, the map of a max-norm ball: `U_ij = sign(D_ij)`.

    Commutes with P(rows) x P(cols) only: a baseline, and Scion's choice for the ends of a network.
    """
    return MatrixMap(
        "sign",
        Symmetry(Group.PERMUTATION, Group.PERMUTATION),
        (jnp.sign,),
        rms=lambda m, n: 1.0,
    )


@functools.partial(jax.jit, static_argnames="axis")
def normalize_rows(d: Float[Array, "*batch m n"], axis: int = -1) -> Float[Array, "*batch m n"]:
    """Divide the vectors along `axis` by their norms; zero vectors stay zero.

    Vectors are squared after they were multiplied by 2^44, or divided by it if that overflows, so
    those with norms between 1e-32 and 1e32 are normalised exactly (in float32; float64 reaches
    further). A CPU, which reads its memory once for every sum, only makes the sums that it needs.
    """
    factor = 2.0 ** int(0.35 * jnp.finfo(d.dtype).maxexp)

    def squares(d: Array, factor: float) -> Array:
        return jnp.sum(jnp.square(factor * d), axis=axis, keepdims=True)

    enlarged = squares(d, factor)
    fits = jnp.isfinite(enlarged)
    reduced = jax.lax.platform_dependent(
        d,
        cpu=lambda d: jax.lax.cond(
            jnp.all(fits), lambda d: jnp.ones_like(enlarged), lambda d: squares(d, 1 / factor), d
        ),
        default=lambda d: squares(d, 1 / factor),
    )
    inverse_norm = jnp.where(
        fits, factor / nonzero(jnp.sqrt(enlarged)), 1 / factor / nonzero(jnp.sqrt(reduced))
    )
    return d * inverse_norm.astype(d.dtype)
