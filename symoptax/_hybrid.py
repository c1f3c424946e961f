"""Hybrid updates: row normalisation and a one-sided polar factor, one after the other."""

from typing import Literal, Unpack

import jax

from symoptax._cost import Side
from symoptax._hyperparams import surely_nonzero
from symoptax._map import MatrixMap, dual_norm_scaled
from symoptax._polar import PolarOptions, left_polar_map, polar_map, right_polar_map
from symoptax._row_norm import row_norm_map
from symoptax._symmetry import Group, Symmetry

Order = Literal["row_then_polar", "polar_then_row"]

_POLAR_MAPS = {"left": left_polar_map, "right": right_polar_map, "auto": polar_map}


def hybrid_map(
    alpha: float | jax.Array = 0.0,
    *,
    order: Order = "row_then_polar",
    side: Side = "auto",
    **options: Unpack[PolarOptions],
) -> MatrixMap:
    """Build `polar(row_norm(D))` or `row_norm(polar(D))`; both commute with P(rows) x O(cols).

    Args:
      alpha: power of the dual norm of the polar step, `nu = <N, polar(N)>` with N the matrix
        that this step receives; for "row_then_polar" N has unit rows, so the update does not grow
        with D.
      order: "row_then_polar" (the authors' default) ends with orthonormal directions,
        "polar_then_row" with unit rows.
      side: which Gram matrix the polar step forms, "right" that of the columns, "left" that of the
        rows, "auto" the smaller one. The factor is the same, what it costs is not.
      **options: numerics of the polar step, of five steps by default, as `polar_map`.

    Raises:
      ValueError: unknown order or side, or an alpha that "polar_then_row" would discard.
    """
    if order not in ("row_then_polar", "polar_then_row"):
        raise ValueError(f"order={order!r} is unknown; choose row_then_polar or polar_then_row.")
    if side not in _POLAR_MAPS:
        raise ValueError(f"side={side!r} is unknown; choose 'left', 'right' or 'auto'.")
    if order == "polar_then_row" and surely_nonzero(alpha):
        raise ValueError(
            f"alpha={alpha} with order='polar_then_row': unit rows discard the dual norm; "
            "pass alpha=0, or order='row_then_polar'."
        )
    row = row_norm_map()
    polar = dual_norm_scaled(_POLAR_MAPS[side](**{"steps": 5, **options}), alpha)
    first, last = (row, polar) if order == "row_then_polar" else (polar, row)
    return MatrixMap(
        "hybrid",
        Symmetry(Group.PERMUTATION, Group.ORTHOGONAL),
        first.stages + last.stages,
        rms=last.rms,
        grouped=True,
        work=polar.work,
    )
