"""Centering: removing the direction that adds one vector to all rows."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from symoptax._map import MatrixMap, Stage
from symoptax._symmetry import Group, Symmetry

# In units of the rounding error of the largest entry.
_RESOLUTION = 8.0


@jax.jit
def center_rows(d: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
    """Subtract the mean row of each matrix: `P D = D - 1 1^T D / m`.

    Rows that are equal up to rounding give zero, lest a map that follows normalises the rounding.
    """
    resolution = _RESOLUTION * float(jnp.finfo(d.dtype).eps)
    # Column by column first: CPUs read a matrix fastest that way.
    low, high = (reduce(d, axis=-2, keepdims=True) for reduce in (jnp.min, jnp.max))
    spread, largest = (
        jnp.max(x, axis=-1, keepdims=True) for x in (high - low, jnp.maximum(high, -low))
    )
    mean = jnp.mean(d, axis=-2, keepdims=True)
    return jnp.where(spread > resolution * largest, d - mean, 0)


def center_map() -> MatrixMap:
    """Build the projection `P` by itself; commutes with P(rows) x O(cols) / shift."""
    symmetry = Symmetry(Group.PERMUTATION, Group.ORTHOGONAL, shift=True)
    return MatrixMap("center", symmetry, (center_rows,))


def centered(update_map: MatrixMap) -> MatrixMap:
    """Return `P U(P D)`: the map on matrices modulo a shared shift of their rows.

    For an LM head or a router behind a softmax, adding one vector to all rows changes nothing; the
    centered map neither sees nor makes such a change. Maps of several stages are projected between
    the stages too, because scaling rows leaves the centered subspace.
    """
    stages: list[Stage] = [center_rows]
    for stage in update_map.stages:
        stages += [stage, center_rows]
    rows = min(update_map.symmetry.rows, Group.PERMUTATION)
    return dataclasses.replace(
        update_map,
        name=f"centered_{update_map.name}",
        symmetry=Symmetry(rows, update_map.symmetry.cols, shift=True),
        stages=tuple(stages),
    )
