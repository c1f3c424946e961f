"""Centering: removing the direction that adds one vector to all rows."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from symoptax._map import MatrixMap, Stage
from symoptax._symmetry import Group, Symmetry

# In units of the rounding error of the largest entry.
_RESOLUTION = 8.0


@jax.jit
def center_rows(
    d: Float[Array, "*batch m n"], mask: Bool[ArrayLike, "*#batch m"] | None = None
) -> Float[Array, "*batch m n"]:
    """Subtract the mean row of each matrix: `P D = D - 1 1^T D / m`.

    Rows that are equal up to rounding give zero, lest a map that follows normalises the rounding;
    NaN and infinity do not count as equal, and show.
    With a mask, the rows where it is False give zero and count in no mean.
    """
    resolution = _RESOLUTION * float(jnp.finfo(d.dtype).eps)
    where = None if mask is None else jnp.broadcast_to(jnp.asarray(mask)[..., None], d.shape)
    reduced = functools.partial(_reduce_rows, d, where)
    # Column by column first: CPUs read a matrix fastest that way.
    low, high = reduced(jnp.min, initial=jnp.inf), reduced(jnp.max, initial=-jnp.inf)
    spread, largest = (
        jnp.max(x, axis=-1, keepdims=True) for x in (high - low, jnp.maximum(high, -low))
    )
    keep = ~((spread <= resolution * largest) & jnp.isfinite(largest))
    keep = keep if where is None else keep & where
    return jnp.where(keep, d - reduced(jnp.mean), 0)


def _reduce_rows(
    d: Float[Array, "*batch m n"], where: Array | None, reduce: Callable[..., Array], **initial: Any
) -> Float[Array, "*batch 1 n"]:
    options = {} if where is None else {"where": where, **initial}
    return reduce(d, axis=-2, keepdims=True, **options)


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
