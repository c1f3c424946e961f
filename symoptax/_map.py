"""`MatrixMap`: an update rule for stacks of matrices that knows the symmetry it commutes with."""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from symoptax._cost import Cost
from symoptax._each_matrix import check_stack
from symoptax._hyperparams import check_numbers, surely_nonzero, surely_zero
from symoptax._scaling import ScaleRule, ShapeScale, dual_norm_power, shape_scale
from symoptax._symmetry import Symmetry

Stage = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class MatrixMap:
    """An update rule `U(D)` on stacks `[..., m, n]`, every matrix by itself.

    `U(D) = scale(m, n) * stage_k(... stage_1(D))`. Maps are values: `centered`, `scaled` and
    `dual_norm_scaled` return new ones.

    Attributes:
      name: how reports call it.
      symmetry: the group that the map commutes with.
      stages: array functions [..., m, n] -> [..., m, n], applied in order.
      rms: root-mean-square size of an unscaled full-rank update as a function of (m, n), or None
        where it follows the gradient.
      scale: factor as a function of (m, n), or None for 1.
      grouped: whether equal shapes of different leaves are worth computing as one stack.
      work: what the map does to an m x n matrix, where it is products of matrices; a map that is
        grouped and has none needs whole matrices.
    """

    name: str
    symmetry: Symmetry
    stages: tuple[Stage, ...]
    rms: ShapeScale | None = None
    scale: ShapeScale | None = None
    grouped: bool = False
    work: Callable[[int, int], Cost] | None = None

    def __call__(self, d: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        """Apply the map to a stack of matrices; one without entries is returned as it is.

        Raises:
          ValueError: for what is no stack of real matrices, or a stage that changes the shape.
        """
        check_stack(d)
        if d.size == 0:
            return d
        update = d
        for stage in self.stages:
            update = stage(update)
        if update.shape != d.shape:
            raise ValueError(
                f"The map {self.name!r} makes {list(update.shape)} of {list(d.shape)}: a stage has "
                "to keep the shape."
            )
        return update if self.scale is None else self.scale(*d.shape[-2:]) * update


def check_map(update_map: MatrixMap) -> None:
    """Raise TypeError for what is no map, such as its name."""
    if not isinstance(update_map, MatrixMap):
        raise TypeError(f"update_map={update_map!r}: need a MatrixMap, such as polar_map().")


def dual_norm_scaled(update_map: MatrixMap, alpha: float | jax.Array) -> MatrixMap:
    """Multiply a map by `nu^alpha`, `nu = <D, U(D)>` for each matrix: 1 is PolarGrad, 0 Muon-like.

    Apply it before `centered`, and to the polar step of a hybrid by `hybrid_map(alpha)`.

    Raises:
      ValueError: for a map of several stages, whose dual norm is not the one of its polar step, or
        a negative alpha, which makes NaN of a zero matrix.

    Source: Lau, Long and Su (2025), arXiv 2505.21799.
    """
    check_numbers(alpha=alpha)
    if isinstance(alpha, int | float) and not alpha >= 0:
        raise ValueError(f"alpha={alpha}: the power of the dual norm has to be at least 0.")
    if surely_zero(alpha):
        return update_map
    if len(update_map.stages) > 1:
        raise ValueError(
            f"The map {update_map.name!r} has several stages; scale its polar step instead: "
            "centered(dual_norm_scaled(map, alpha)), or hybrid_map(alpha)."
        )

    def stage(d: Array) -> Array:
        update = update_map(d)
        return dual_norm_power(d, update, alpha).astype(d.dtype) * update

    rms = None if surely_nonzero(alpha) else update_map.rms
    return dataclasses.replace(update_map, stages=(stage,), rms=rms, scale=None)


def scaled(update_map: MatrixMap, rule: ScaleRule | None) -> MatrixMap:
    """Multiply a map by a factor that depends on (m, n) alone; None leaves it as it is.

    See `symoptax.shape_scale` for the rules "rms", "spectral" and "moonlight".

    Raises:
      ValueError: as `shape_scale`, and for a map that has a scale already.
      TypeError: for what is no map.
    """
    check_map(update_map)
    if rule is None:
        return update_map
    if update_map.scale is not None:
        raise ValueError(f"The map {update_map.name!r} has a scale already; pass scale=None.")
    return dataclasses.replace(update_map, scale=shape_scale(rule, update_map.rms))
