"""Row-normalised updates: the map of embeddings, LM heads and other blocks with named rows."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from symoptax._map import MatrixMap
from symoptax._symmetry import Group, Symmetry
from symoptax._unit import nonzero


def row_norm_map() -> MatrixMap:
    """Build the map that divides each row by its Euclidean norm: `U_i = D_i / |D_i|`, `0 -> 0`.

    Commutes with P(rows) x O(cols). Rows of every size that the dtype can hold are normalised
    alike; there is no epsilon.

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


def normalize_rows(d: Float[Array, "*batch m n"], axis: int = -1) -> Float[Array, "*batch m n"]:
    """Divide the vectors along `axis` by their norms; zero vectors stay zero.

    A vector whose sum of squares comes near the ends of the dtype's range is scaled by a power of
    two before it is squared; dividing every vector by its largest entry would read it once more.

    Source: Blue (1978), "A Portable Fortran Program to Find the Euclidean Norm of a Vector".
    """
    top = jnp.finfo(d.dtype).maxexp
    squares = jnp.sum(jnp.square(d), axis=axis, keepdims=True)
    down, up = jnp.asarray([-0.75 * top, 0.75 * top], d.dtype)
    power = jnp.where(squares > 2.0 ** (0.75 * top), down, 0.0)
    power = jnp.where(squares < 2.0 ** (-0.55 * top), up, power)
    scaled = d * jnp.exp2(power)
    return scaled / nonzero(jnp.sqrt(jnp.sum(jnp.square(scaled), axis=axis, keepdims=True)))
