"""Momentum as the papers define it: an exponential moving average without bias correction."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from symoptax._hyperparams import check_numbers, surely_zero
from symoptax._paths import check_floating, in_print, named_leaves, paired_leaves


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
      ValueError: for a beta outside [0, 1) or a state in float16 or in no floating dtype; in `init`
        and `update`, for a leaf that is not real and floating; in `update`, for one whose momentum
        is None or has another shape; see the message.
      TypeError: for a beta that is no number.

    Source: Lau and Su (2026), arXiv 2605.18106.
    """
    check_numbers(beta=beta)
    if isinstance(beta, int | float) and not 0 <= beta < 1:
        raise ValueError(
            f"beta={beta}: a moving average needs a decay rate of at least 0, below 1."
        )
    if mu_dtype is not None:
        _check_dtype(mu_dtype)
    if surely_zero(beta):
        return optax.identity()

    def init(params: optax.Params) -> MomentumState:
        for name, leaf in named_leaves(params)[0]:
            check_floating(name, leaf)
        return MomentumState(optax.tree.zeros_like(params, dtype=mu_dtype))

    def average(g: jax.Array, mu: jax.Array) -> jax.Array:
        wide = jnp.promote_types(jnp.promote_types(g.dtype, mu.dtype), jnp.float32)
        return beta * mu.astype(wide) + (1 - beta) * g.astype(wide)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MomentumState]:
        del params
        _check_fitting(updates, getattr(state, "mu", None))
        updates = jax.tree.map(jnp.asarray, updates)
        mu = jax.tree.map(average, updates, state.mu)
        ahead = jax.tree.map(average, updates, mu) if nesterov else mu
        return (
            # A copy even where the dtype is the same: who donates the updates keeps the state.
            jax.tree.map(lambda a, g: jnp.array(a, g.dtype), ahead, updates),
            MomentumState(jax.tree.map(lambda new, old: new.astype(old.dtype), mu, state.mu)),
        )

    return optax.GradientTransformation(init, update)


def _check_dtype(mu_dtype: Any) -> None:
    try:
        wide = jnp.finfo(mu_dtype).maxexp >= jnp.finfo(jnp.bfloat16).maxexp
    except (TypeError, ValueError):
        raise ValueError(f"mu_dtype={mu_dtype!r} is no floating dtype.") from None
    if not wide:
        name = jnp.dtype(mu_dtype).name
        raise ValueError(f"mu_dtype={name} stops decaying too early; use bfloat16 or float32.")


def _check_fitting(updates: optax.Updates, mu: Any) -> None:
    """Raise for momenta of other leaves, and the None that Orbax silently restores for those."""
    triples = paired_leaves(updates, mu, "The momentum")
    for name, g, m in triples:
        check_floating(name, g)
        if m is not None and g.shape != getattr(m, "shape", None):
            raise ValueError(
                f"{name}: an update {in_print(g)} for a momentum {in_print(m)}; pass gradients of "
                "the parameters that `init` was called with."
            )
    if missing := [name for name, _, m in triples if m is None]:
        raise ValueError(
            f"No momentum for {', '.join(missing)}: the state comes from another routing of the "
            "parameters; take the state of these leaves from a fresh init."
        )
