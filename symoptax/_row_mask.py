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
    polar factor, and a scale that depends on the shape, are those of the remaining rows.

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

    scale = update_map.scale
    if scale is not None and isinstance(mask, np.ndarray) and mask.ndim == 1:
        scale = functools.partial(_scale_of_rows, scale, int(np.sum(mask)))
    stages = (only, *map(masked, update_map.stages), only)
    return dataclasses.replace(update_map, stages=stages, scale=scale)


def _scale_of_rows(scale: ShapeScale, count: int, m: int, n: int) -> float | Array:
    """Return the factor of a matrix of `count` rows in place of the m that are stored."""
    del m
    return scale(count, n)
