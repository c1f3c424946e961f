"""Row-normalised updates: the map of embeddings, LM heads and other blocks with named rows."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from symoptax._map import MatrixMap
from symoptax._symmetry import Group, Symmetry
from symoptax._unit import nonzero, unit_scale


def row_norm_map() -> MatrixMap:
    """Build the map that divides each row by its Euclidean norm: `U_i = D_i / |D_i|`, `0 -> 0`.

    Commutes with P(rows) x O(cols). A row is divided by its largest entry first, so rows of every
    size that the dtype can hold are normalised alike; there is no epsilon.

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
    """Divide the vectors along `axis` by their norms; zero vectors stay zero."""
    unit, _ = unit_scale(d, axis)
    return unit / nonzero(jnp.sqrt(jnp.sum(jnp.square(unit), axis=axis, keepdims=True)))
