"""Rows that are not there: padding of a vocabulary, experts that are never used."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from symoptax._centering import center_rows
from symoptax._map import MatrixMap, Stage
from symoptax._scaling import ShapeScale


def row_masked(
    update_map: MatrixMap, mask: Bool[Array, "*batch m"] | Bool[np.ndarray, "*batch m"]
) -> MatrixMap:
    """Return the map on the rows where `mask` is True, as if the matrix had no others.

    The other rows get no update and count in no mean, whatever stands in them, NaN included. A
    polar factor, and a scale that the map has, are those of the remaining rows of each matrix.

    Args:
      update_map: the map; stages of your own see zeros in the masked rows.
      mask: one boolean per row, for all matrices of a stack or for each.

    Raises:
      ValueError: when the map is applied, for a mask of another length or of no booleans.
    """

    def only(d: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        if mask.dtype != bool or mask.shape[-1:] != d.shape[-2:-1]:
            raise ValueError(
                f"A row mask {mask.dtype}{list(mask.shape)} for matrices {list(d.shape)}: need one "
                "boolean per row."
            )
        return jnp.where(jnp.asarray(mask)[..., None], d, 0)

    def masked(stage: Stage) -> Stage:
        return functools.partial(center_rows, mask=mask) if stage is center_rows else stage

    rms, scale = update_map.rms, update_map.scale
    stages = [only, *map(masked, update_map.stages), only]
    if isinstance(mask, np.ndarray) and mask.ndim == 1:
        count = max(int(np.sum(mask)), 1)
        rms, scale = (f and functools.partial(_of_rows, f, count) for f in (rms, scale))
    elif scale is not None:
        stages.append(functools.partial(_rescaled, scale, mask))
    return dataclasses.replace(update_map, stages=tuple(stages), rms=rms, scale=scale)


def _of_rows(factor: ShapeScale, count: int, m: int, n: int) -> float | Array:
    """Return the factor of a matrix of `count` rows in place of the m that are stored."""
    del m
    return factor(count, n)


def _rescaled(
    scale: ShapeScale, mask: Array | np.ndarray, d: Float[Array, "*batch m n"]
) -> Float[Array, "*batch m n"]:
    """Turn the scale of all rows, which the map applies, into that of each matrix's own rows."""
    m, n = d.shape[-2:]
    # By the number of rows, since a mask may be traced and scales are functions of numbers.
    ratios = jnp.asarray([scale(max(count, 1), n) / scale(m, n) for count in range(m + 1)])
    own = ratios.astype(d.dtype)[jnp.sum(mask, axis=-1)]
    return jnp.broadcast_to(own[..., None, None], d.shape) * d
