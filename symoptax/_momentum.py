"""Momentum as the papers define it: an exponential moving average without bias correction."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from symoptax._hyperparams import surely_zero
from symoptax._paths import named_leaves


class MomentumState(NamedTuple):
    """State of `momentum`: one array per leaf, `mu`."""

    mu: optax.Updates


def momentum(
    beta: float | jax.Array = 0.95, *, nesterov: bool = False, mu_dtype: Any = None
) -> optax.GradientTransformation:
    """Replace gradients by their moving average `M <- beta M + (1 - beta) G`, starting from 0.

    With `nesterov`, pass on `beta M + (1 - beta) G` with the new M, one step ahead.

    Args:
      beta: decay rate, in [0, 1); the number 0 passes gradients on and keeps no state.
      nesterov: whether to look one step ahead.
      mu_dtype: dtype of the state; None keeps the parameter's. Sums are made in the wider of the
        state's and the gradient's dtype, at least float32, and rounded once. Not float16, in which
        a decaying average gets stuck above zero.

    Returns:
      A transformation whose updates have the dtype of the gradients.

    Raises:
      ValueError: for a beta outside [0, 1) or a state in float16; in `update`, for a leaf whose
        momentum is None; see the message.

    Source: Lau and Su (2026), arXiv 2605.18106.
    """
    if isinstance(beta, int | float) and not 0 <= beta < 1:
        raise ValueError(
            f"beta={beta}: a moving average needs a decay rate of at least 0, below 1."
        )
    if mu_dtype is not None and jnp.dtype(mu_dtype) == jnp.float16:
        raise ValueError("mu_dtype=float16 stops decaying near 6e-7; use bfloat16 or float32.")
    if surely_zero(beta):
        return optax.identity()

    def init(params: optax.Params) -> MomentumState:
        return MomentumState(optax.tree.zeros_like(params, dtype=mu_dtype))

    def average(g: jax.Array, mu: jax.Array) -> jax.Array:
        wide = jnp.promote_types(jnp.promote_types(g.dtype, mu.dtype), jnp.float32)
        return beta * mu.astype(wide) + (1 - beta) * g.astype(wide)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MomentumState]:
        del params
        _check_complete(updates, state.mu)
        mu = jax.tree.map(average, updates, state.mu)
        ahead = jax.tree.map(average, updates, mu) if nesterov else mu
        return (
            # A copy even where the dtype is the same: who donates the updates keeps the state.
            jax.tree.map(lambda a, g: jnp.array(a, g.dtype), ahead, updates),
            MomentumState(jax.tree.map(lambda new, old: new.astype(old.dtype), mu, state.mu)),
        )

    return optax.GradientTransformation(init, update)


def _check_complete(updates: optax.Updates, mu: optax.Updates) -> None:
    """Raise for the None that Orbax silently restores after the routing has changed."""
    named, structure = named_leaves(updates)
    momenta = structure.flatten_up_to(mu)
    missing = [name for (name, _), m in zip(named, momenta, strict=True) if m is None]
    if missing:
        raise ValueError(
            f"No momentum for {', '.join(missing)}: the state comes from another routing of the "
            "parameters; take the state of these leaves from a fresh init."
        )
