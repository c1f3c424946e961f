"""How large an update is: the dual norm of the gradient, and factors that depend on shape alone."""

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from symoptax._unit import unit_scale

ShapeScale = Callable[[int, int], float | Array]
ScaleRule = Literal["rms", "spectral", "moonlight"] | ShapeScale

# The root-mean-square size of AdamW's updates in training, which makes one learning rate serve
# matrices and AdamW alike: Liu et al. (2025), "Muon is scalable for LLM training",
# arXiv 2502.16982.
ADAMW_RMS = 0.2


def dual_norm_power(
    d: Float[Array, "*batch m n"], update: Float[Array, "*batch m n"], alpha: float | Array
) -> Float[Array, "*batch 1 1"]:
    """Return `nu^alpha` with `nu = <D, U>` for each matrix by itself; 0 for D = 0 and alpha > 0.

    For the polar factor nu is the nuclear norm of D. D is divided by its largest entry first and
    multiplied back under the power, so nothing overflows that the result does not overflow.
    """
    unit, largest = unit_scale(d)
    nu = jnp.sum(unit * update, axis=(-2, -1), keepdims=True)
    # <D, U> is non-negative for every map; rounding may leave -0 or a small negative number.
    return jnp.power(largest, alpha) * jnp.power(jnp.maximum(nu, 0), alpha)


@functools.cache
def shape_scale(rule: ScaleRule, rms: ShapeScale | None) -> ShapeScale:
    """Return the factor for m x n matrices under a rule.

    - "rms": bring an update of full rank to a root-mean-square size of 0.2, AdamW's.
    - "spectral": `sqrt(max(1, m / n))`, m = fan out, n = fan in (Keller Jordan's Muon).
    - "moonlight": `0.2 sqrt(max(m, n))`; for polar maps the same as "rms".
    - a function (m, n) -> factor of your own.

    Args:
      rule: one of the above.
      rms: the root-mean-square size of the map's unscaled update, as a function of (m, n).

    Raises:
      ValueError: unknown rule, or "rms" for a map whose size follows the gradient.
    """
    if callable(rule):
        return rule
    if rule == "spectral":
        return lambda m, n: math.sqrt(max(1.0, m / n))
    if rule == "moonlight":
        return lambda m, n: ADAMW_RMS * math.sqrt(max(m, n))
    if rule != "rms":
        raise ValueError(
            f"scale={rule!r} is unknown; choose rms, spectral, moonlight or a function."
        )
    if rms is None:
        raise ValueError(
            "scale='rms' needs a map whose size does not follow the gradient: alpha=0."
        )
    return lambda m, n: ADAMW_RMS / rms(m, n)
