"""The optimizers of the papers: momentum, then a map, decoupled weight decay, and a learning rate.

    M <- beta M + (1 - beta) G            momentum, no bias correction
    P <- P - lr (U(M) + weight_decay P)   U from the paper whose name the optimizer bears

All take `learning_rate` (a number or a schedule), `beta` and `weight_decay`; by keyword `alpha`,
the power of the dual norm in U (1, the papers' default, makes the update grow with the gradient; 0
does not), and the options of `matrix_optimizer`. The state is one momentum per matrix and, for
schedules, one counter. By default the rows of a matrix are its second-to-last axis as stored: right
for an embedding `(vocab, d)`; for a Flax head or router pass `view="d vocab -> vocab d"`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, Unpack

import jax
import optax

from symoptax._centering import centered as centered_map
from symoptax._cost import Method, Side
from symoptax._hybrid import Order, hybrid_map
from symoptax._hyperparams import check_numbers, injectable, surely_nonzero
from symoptax._lazy_momentum import lazy_momentum
from symoptax._map import MatrixMap, dual_norm_scaled, scaled
from symoptax._matrixwise import ViewOrFn, matrixwise
from symoptax._minimax import Row
from symoptax._momentum import momentum
from symoptax._numerics import Numerics
from symoptax._polar import PolarOptions, left_polar_map, polar_map, right_polar_map
from symoptax._row_norm import row_norm_map, sign_map
from symoptax._scaling import ScaleRule
from symoptax._view import FLAX_KERNEL
from symoptax._weight_decay import Mask, add_weight_decay

LearningRate = optax.ScalarOrSchedule
Scalar = float | jax.Array


class OptimizerOptions(TypedDict, total=False):
    """Keyword options of every optimizer; `matrix_optimizer` says what they do."""

    nesterov: bool
    scale: ScaleRule | None
    view: ViewOrFn
    mask: Mask
    cautious: bool
    independent_decay: bool
    mu_dtype: Any
    lazy: bool


class PolarOptimizerOptions(OptimizerOptions, total=False):
    """`OptimizerOptions` and the numerics of the polar step (see `polar_factor`)."""

    steps: int
    method: Method
    coefficients: str | Sequence[Row]
    numerics: Numerics


@injectable("learning_rate", "beta", "weight_decay")
def matrix_optimizer(
    learning_rate: LearningRate,
    beta: Scalar = 0.95,
    weight_decay: Scalar = 0.0,
    *,
    update_map: MatrixMap,
    nesterov: bool = False,
    scale: ScaleRule | None = None,
    view: ViewOrFn = None,
    mask: Mask = None,
    cautious: bool = False,
    independent_decay: bool = False,
    mu_dtype: Any = None,
    lazy: bool = False,
) -> optax.GradientTransformation:
    """Build the optimizer of any map; the named ones below are this with a map filled in.

    Args:
      learning_rate: a number or a schedule.
      beta: decay rate of the momentum; the number 0 leaves momentum, and its state, out.
      weight_decay: decoupled decay, `lr * weight_decay * P` per step.
      update_map: the map U.
      nesterov: look one step ahead with the momentum.
      scale: factor from the shape of a matrix, a rule of `shape_scale` or None; "rms" lets AdamW's
        learning rates serve unchanged.
      view: how leaves open as matrices; None takes the last two axes as rows and columns as stored.
      mask: which leaves decay, as in `optax.adamw`.
      cautious: decay only where update and parameter have the same sign.
      independent_decay: take `weight_decay * P` off per step as it is, not times the learning rate.
      mu_dtype: dtype of the momentum; None keeps the parameter's.
      lazy: take no step along rows that have had no gradient for 1 / (1 - beta) steps, see
        `lazy_momentum`; without it, as in the papers, a token that was seen once goes on for long.

    Returns:
      A named chain: the state is a dictionary with the keys momentum, update, weight_decay,
      learning_rate and independent_decay.

    Raises:
      TypeError: for a hyperparameter that is no number, or no map.
      ValueError: as `momentum`, `scaled` and `matrixwise`.
    """
    check_numbers(learning_rate=learning_rate, weight_decay=weight_decay)
    early, late = (0.0, weight_decay) if independent_decay else (weight_decay, 0.0)
    options = {"nesterov": nesterov, "mu_dtype": mu_dtype}
    return optax.named_chain(
        ("momentum", lazy_momentum(beta, view, **options) if lazy else momentum(beta, **options)),
        ("update", matrixwise(scaled(update_map, scale), view)),
        ("weight_decay", add_weight_decay(early, mask, cautious=cautious)),
        ("learning_rate", optax.scale_by_learning_rate(learning_rate)),
        ("independent_decay", add_weight_decay(-late, mask, cautious=cautious)),
    )


@injectable("learning_rate", "beta", "weight_decay")
def row_norm_m(
    learning_rate: LearningRate,
    beta: Scalar = 0.95,
    weight_decay: Scalar = 0.0,
    *,
    centered: bool = False,
    **options: Unpack[OptimizerOptions],
) -> optax.GradientTransformation:
    """RowNormM: each row of the momentum divided by its norm; for embeddings, LM heads, routers.

    Commutes with P(rows) x O(cols), modulo the shared shift when `centered`.
    Source: Lau and Su (2026), arXiv 2605.18106.
    """
    return matrix_optimizer(
        learning_rate,
        beta,
        weight_decay,
        update_map=_centered_if(centered, row_norm_map()),
        **options,
    )


@injectable("learning_rate", "beta", "weight_decay", "alpha")
def right_polar_grad_m(
    learning_rate: LearningRate,
    beta: Scalar = 0.95,
    weight_decay: Scalar = 0.0,
    *,
    alpha: Scalar = 1.0,
    centered: bool = False,
    **options: Unpack[PolarOptimizerOptions],
) -> optax.GradientTransformation:
    """RightPolarGradM: `nu^alpha M (M^T M)^(-1/2)`; for embeddings and LM heads.

    Commutes with O(rows) x O(cols), or P(rows) x O(cols) / shift when `centered`.
    Source: Lau and Su (2026), arXiv 2605.18106.
    """
    numerics, rest = _split(options)
    update_map = _centered_if(centered, dual_norm_scaled(right_polar_map(**numerics), alpha))
    return matrix_optimizer(learning_rate, beta, weight_decay, update_map=update_map, **rest)


@injectable("learning_rate", "beta", "weight_decay", "alpha")
def left_polar_grad_m(
    learning_rate: LearningRate,
    beta: Scalar = 0.95,
    weight_decay: Scalar = 0.0,
    *,
    alpha: Scalar = 1.0,
    centered: bool = False,
    **options: Unpack[PolarOptimizerOptions],
) -> optax.GradientTransformation:
    """LeftPolarGradM: `nu^alpha (M M^T)^(-1/2) M`; for routers, `centered` behind a softmax.

    Commutes with O(rows) x O(cols), or P(rows) x O(cols) / shift when `centered`.
    Source: Lau and Su (2026), arXiv 2605.18106.
    """
    numerics, rest = _split(options)
    update_map = _centered_if(centered, dual_norm_scaled(left_polar_map(**numerics), alpha))
    return matrix_optimizer(learning_rate, beta, weight_decay, update_map=update_map, **rest)


@injectable("learning_rate", "beta", "weight_decay", "alpha")
def hybrid_polar_grad_m(
    learning_rate: LearningRate,
    beta: Scalar = 0.95,
    weight_decay: Scalar = 0.0,
    *,
    alpha: Scalar = 1.0,
    centered: bool = False,
    order: Order = "row_then_polar",
    side: Side = "auto",
    **options: Unpack[PolarOptimizerOptions],
) -> optax.GradientTransformation:
    """HybridPolarGradM: row normalisation and a one-sided polar factor, in either order.

    Commutes with P(rows) x O(cols), modulo the shared shift when `centered`. `polar_then_row`
    discards the dual norm, so it needs `alpha=0`.
    Source: Lau and Su (2026), arXiv 2605.18106.
    """
    numerics, rest = _split(options)
    update_map = _centered_if(centered, hybrid_map(alpha, order=order, side=side, **numerics))
    return matrix_optimizer(learning_rate, beta, weight_decay, update_map=update_map, **rest)


@injectable("learning_rate", "beta", "weight_decay", "alpha")
def polar_grad_m(
    learning_rate: LearningRate,
    beta: Scalar = 0.95,
    weight_decay: Scalar = 0.0,
    *,
    alpha: Scalar = 1.0,
    **options: Unpack[PolarOptimizerOptions],
) -> optax.GradientTransformation:
    """PolarGradM: `nu^alpha U V^T` with the nuclear norm nu; for ordinary matrices.

    Commutes with O(rows) x O(cols). Source: Lau, Long and Su (2025), arXiv 2505.21799.
    """
    numerics, rest = _split(options)
    update_map = dual_norm_scaled(polar_map(**numerics), alpha)
    return matrix_optimizer(learning_rate, beta, weight_decay, update_map=update_map, **rest)


@injectable("learning_rate", "beta", "weight_decay")
def muon(
    learning_rate: LearningRate,
    beta: Scalar = 0.95,
    weight_decay: Scalar = 0.0,
    **options: Unpack[PolarOptimizerOptions],
) -> optax.GradientTransformation:
    """Build Muon: the polar factor of Nesterov momentum, scaled by shape; for dense kernels.

    The scale needs to know fan in and fan out, so the default view is a Flax kernel's,
    `"... input output -> ... output input"`. By default `scale="spectral"`, `sqrt(max(1, fan_out /
    fan_in))` (Keller Jordan, 2024); `scale="moonlight"` is `0.2 sqrt(max(fan_out, fan_in))` (Liu et
    al., arXiv 2502.16982). Commutes with O(rows) x O(cols).

    Departure: five Polar Express steps; `coefficients="muon_quintic"` is Jordan's polynomial.
    """
    numerics, rest = _split(options, nesterov=True, scale="spectral", view=FLAX_KERNEL)
    return matrix_optimizer(
        learning_rate, beta, weight_decay, update_map=polar_map(**numerics), **rest
    )


@injectable("learning_rate", "beta", "weight_decay", "radius")
def scion(
    learning_rate: LearningRate,
    beta: Scalar = 0.9,
    weight_decay: Scalar = 0.0,
    *,
    radius: Scalar = 1.0,
    norm: Literal["spectral", "embedding", "row", "sign"] = "spectral",
    constrained: bool = False,
    **options: Unpack[PolarOptimizerOptions],
) -> optax.GradientTransformation:
    """Build Scion: a step to the minimiser of the linearised loss over a norm ball.

    Unconstrained: `P <- P - lr (radius U(M) + weight_decay P)`. Constrained (Frank-Wolfe):
    `P <- (1 - lr) P - lr radius U(M)`, which keeps P in the ball if it starts there. With m = fan
    out and n = fan in, U is

    - "spectral": `sqrt(m / n) U V^T`, for hidden layers;
    - "embedding": rows of root-mean-square size 1, for embeddings `(vocab, d)`;
    - "row": rows of norm `1 / sqrt(n)`, and "sign": `sign(M) / n`, for the last layer.

    The default view is a Flax kernel's for "spectral", "row" and "sign", and as stored for
    "embedding". The paper uses radius 50 for hidden layers and 3000 for the last.

    Raises:
      ValueError: unknown norm, `scale` (the norm has its own), or any option about weight decay
        beside `constrained`, which is a decay already.

    Source: Pethick et al. (2025), "Training deep learning models with norm-constrained LMOs",
    arXiv 2502.07529.
    """
    check_numbers(radius=radius)
    default_view = None if norm == "embedding" else FLAX_KERNEL
    numerics, rest = _split(options, view=default_view)
    balls: dict[str, tuple[MatrixMap, Callable[[int, int], float]]] = {
        "spectral": (polar_map(**numerics), lambda m, n: (m / n) ** 0.5),
        "embedding": (row_norm_map(), lambda m, n: n**0.5),
        "row": (row_norm_map(), lambda m, n: n**-0.5),
        "sign": (sign_map(), lambda m, n: 1 / n),
    }
    if norm not in balls:
        raise ValueError(f"norm={norm!r} is unknown; choose from {sorted(balls)}.")
    if "scale" in rest:
        raise ValueError("scale does not apply: the norm fixes the size; change radius instead.")
    decays = rest.keys() & {"mask", "cautious", "independent_decay"}
    if constrained and (decays or surely_nonzero(weight_decay)):
        raise ValueError(
            "constrained=True shrinks P by the learning rate itself; drop weight_decay, mask, "
            "cautious and independent_decay."
        )
    update_map, factor = balls[norm]
    return matrix_optimizer(
        learning_rate,
        beta,
        1.0 if constrained else weight_decay,
        update_map=scaled(update_map, lambda m, n: radius * factor(m, n)),
        **rest,
    )


@injectable("learning_rate", "weight_decay")
def ssd(
    learning_rate: LearningRate,
    weight_decay: Scalar = 0.0,
    **options: Unpack[PolarOptimizerOptions],
) -> optax.GradientTransformation:
    """Stochastic spectral descent: the polar factor of the gradient times its nuclear norm.

    PolarGradM without momentum, so without state. Commutes with O(rows) x O(cols).
    Source: Carlson et al. (2015), "Preconditioned spectral descent for deep learning".
    """
    numerics, rest = _split(options)
    update_map = dual_norm_scaled(polar_map(**numerics), 1.0)
    return matrix_optimizer(learning_rate, 0.0, weight_decay, update_map=update_map, **rest)


def _centered_if(condition: bool, update_map: MatrixMap) -> MatrixMap:
    return centered_map(update_map) if condition else update_map


def _split(options: Any, **defaults: Any) -> tuple[PolarOptions, dict[str, Any]]:
    """Separate the numerics of the polar step from the rest, which starts from `defaults`."""
    numerics = {k: v for k, v in options.items() if k in PolarOptions.__annotations__}
    rest = {k: v for k, v in options.items() if k not in numerics}
    return numerics, defaults | rest  # pyright: ignore[reportReturnType]
