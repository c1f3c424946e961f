"""The maps as bare `optax.GradientTransformation`s: no momentum, no learning rate, chainable.

Every one is stateless, acts on each matrix of each leaf by itself, keeps dtypes, and takes

- `view`: how leaves open as matrices (`MatrixView`, pattern, or function of the parameter tree);
  by default the last two axes are rows and columns as stored, and the rest is batch;
- `alpha`, for polar steps: multiplies them by `nu^alpha`, `nu = <D, polar(D)>` per matrix (1:
  PolarGrad, 0: Muon-like);
- `steps`, `method`, `coefficients`, `numerics`: how `polar_factor` computes.
"""

from typing import Unpack

import jax
import optax

from symoptax._centering import center_map, centered
from symoptax._cost import Side
from symoptax._hybrid import Order, hybrid_map
from symoptax._hyperparams import injectable
from symoptax._map import dual_norm_scaled
from symoptax._matrixwise import ViewOrFn, matrixwise
from symoptax._polar import PolarOptions, left_polar_map, polar_map, right_polar_map
from symoptax._row_norm import column_norm_map, row_norm_map

Alpha = float | jax.Array


@injectable()
def row_norm(*, view: ViewOrFn = None) -> optax.GradientTransformation:
    """Divide each row by its norm, `U_i = D_i / |D_i|`; commutes with P(rows) x O(cols)."""
    return matrixwise(row_norm_map(), view)


@injectable()
def column_norm(*, view: ViewOrFn = None) -> optax.GradientTransformation:
    """Divide each column by its norm; commutes with O(rows) x P(cols)."""
    return matrixwise(column_norm_map(), view)


@injectable("alpha")
def polar(
    alpha: Alpha = 0.0, *, view: ViewOrFn = None, **options: Unpack[PolarOptions]
) -> optax.GradientTransformation:
    """Replace `D = U S V^T` by its polar factor `U V^T`; commutes with O(rows) x O(cols)."""
    return matrixwise(dual_norm_scaled(polar_map(**options), alpha), view)


@injectable("alpha")
def right_polar(
    alpha: Alpha = 0.0, *, view: ViewOrFn = None, **options: Unpack[PolarOptions]
) -> optax.GradientTransformation:
    """Compute `D (D^T D)^(-1/2)` from the n x n Gram matrix; commutes with O(rows) x O(cols)."""
    return matrixwise(dual_norm_scaled(right_polar_map(**options), alpha), view)


@injectable("alpha")
def left_polar(
    alpha: Alpha = 0.0, *, view: ViewOrFn = None, **options: Unpack[PolarOptions]
) -> optax.GradientTransformation:
    """Compute `(D D^T)^(-1/2) D` from the m x m Gram matrix; commutes with O(rows) x O(cols)."""
    return matrixwise(dual_norm_scaled(left_polar_map(**options), alpha), view)


@injectable("alpha")
def hybrid(
    alpha: Alpha = 0.0,
    *,
    order: Order = "row_then_polar",
    side: Side = "auto",
    view: ViewOrFn = None,
    **options: Unpack[PolarOptions],
) -> optax.GradientTransformation:
    """Normalise rows, then take the polar factor, or the reverse; commutes with P(rows) x O(cols).

    Raises:
      ValueError: unknown order, or `alpha` other than 0 with "polar_then_row".
    """
    update_map = hybrid_map(alpha, order=order, side=side, **options)
    return matrixwise(update_map, view)


@injectable()
def center(*, view: ViewOrFn = None) -> optax.GradientTransformation:
    """Subtract the mean row, `P D = D - 1 1^T D / m`."""
    return matrixwise(center_map(), view)


@injectable()
def centered_row_norm(*, view: ViewOrFn = None) -> optax.GradientTransformation:
    """Compute `P row_norm(P D)`; commutes with P(rows) x O(cols) / shift."""
    return matrixwise(centered(row_norm_map()), view)


@injectable("alpha")
def centered_right_polar(
    alpha: Alpha = 0.0, *, view: ViewOrFn = None, **options: Unpack[PolarOptions]
) -> optax.GradientTransformation:
    """Compute `P right_polar(P D)`; commutes with P(rows) x O(cols) / shift."""
    return matrixwise(centered(dual_norm_scaled(right_polar_map(**options), alpha)), view)


@injectable("alpha")
def centered_left_polar(
    alpha: Alpha = 0.0, *, view: ViewOrFn = None, **options: Unpack[PolarOptions]
) -> optax.GradientTransformation:
    """Compute `P left_polar(P D)`; commutes with P(rows) x O(cols) / shift.

    The left Gram matrix of a centered matrix is exactly singular; its root is the pseudo-inverse.
    """
    return matrixwise(centered(dual_norm_scaled(left_polar_map(**options), alpha)), view)


@injectable("alpha")
def centered_hybrid(
    alpha: Alpha = 0.0,
    *,
    order: Order = "row_then_polar",
    side: Side = "auto",
    view: ViewOrFn = None,
    **options: Unpack[PolarOptions],
) -> optax.GradientTransformation:
    """Compute the hybrid with a centering before, between and after its two steps.

    Raises:
      ValueError: as `hybrid`.
    """
    update_map = hybrid_map(alpha, order=order, side=side, **options)
    return matrixwise(centered(update_map), view)
