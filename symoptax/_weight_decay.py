"""Decoupled weight decay, with the cautious and the learning-rate-independent form."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from symoptax._hyperparams import check_numbers, surely_zero

Mask = Any | Callable[[optax.Params], Any] | None


def add_weight_decay(
    weight_decay: float | jax.Array, mask: Mask = None, *, cautious: bool = False
) -> optax.GradientTransformation:
    """Add `weight_decay * P` to the updates: decoupled weight decay.

    Stands before the learning rate; after it, for a decay that does not follow the schedule, pass
    the negative coefficient.

    Args:
      weight_decay: the coefficient; a known zero gives `optax.identity()`.
      mask: which leaves decay, as in `optax.adamw`.
      cautious: decay an entry only where the update points the same way, `U P > 0`. An entry whose
        update is exactly zero (an unseen token, an unused expert) then does not decay, while plain
        decay acts on it.

    Raises:
      ValueError: in `update` without `params`, or for a mask that does not fit, optax's own error.
      TypeError: for a coefficient that is no number.

    Source of the cautious form: Chen et al. (2025), arXiv 2510.12402.
    """
    check_numbers(weight_decay=weight_decay)
    if surely_zero(weight_decay):
        return optax.identity()
    if not cautious:
        return optax.add_decayed_weights(weight_decay, mask)

    plain = optax.add_decayed_weights(weight_decay)

    def add_where_aligned(u: jax.Array, decay: jax.Array) -> jax.Array:
        return u + jnp.where(u * decay > 0, decay, jnp.zeros_like(decay))

    def update(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        zeros = optax.tree.zeros_like(updates)
        decay, _ = plain.update(zeros, optax.EmptyState(), params)
        return jax.tree.map(add_where_aligned, updates, decay)

    transformation = optax.stateless(update)
    return transformation if mask is None else optax.masked(transformation, mask)
