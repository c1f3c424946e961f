"""Dividing by what may be zero or out of range, which every map does before it squares anything."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float


def nonzero(norm: Float[Array, "..."]) -> Float[Array, "..."]:
    """Replace zeros by ones, so that zero divided by its norm is zero."""
    return jnp.where(norm == 0, jnp.ones_like(norm), norm)


def unit_scale(
    x: Float[Array, "..."], axis: int | Sequence[int] = (-2, -1)
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Divide by the largest magnitude along `axis` and return it too (1 where all is zero).

    Squares of the result neither underflow nor overflow, whatever the scale of `x`.
    """
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    largest = nonzero(jnp.max(jnp.abs(x), axis=axes, keepdims=True))
    return x / largest, largest
