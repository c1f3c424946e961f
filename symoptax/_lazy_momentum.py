"""Momentum for rows that data picks: after a while without a gradient they stand still."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from symoptax._hyperparams import surely_zero
from symoptax._momentum import MomentumState, momentum
from symoptax._paths import paired_leaves
from symoptax._view import MatrixView, as_view


class LazyMomentumState(NamedTuple):
    """State of `lazy_momentum`: the average, and per row the steps since its last gradient.

    `unseen` is shaped like the parameter, with size 1 in place of the columns.
    """

    mu: optax.Updates
    unseen: optax.Updates


def lazy_momentum(
    beta: float | jax.Array = 0.95,
    view: MatrixView | str | Callable[[Any], Any] | None = None,
    *,
    nesterov: bool = False,
    mu_dtype: Any = None,
) -> optax.GradientTransformation:
    """Average as `momentum` does, and pass on zero for rows unseen for 1 / (1 - beta) steps.

    A row is seen when its gradient is not exactly zero. The average of a row that is not seen any
    more keeps its direction and shrinks by beta a step; taken as it is, it would move its parameter
    by `1 + beta + beta^2 + ... = 1 / (1 - beta)` of its first step. A map that makes every row
    equally long undoes the shrinking: a token that was seen once would take full steps until its
    average underflows in float32, after 1,500 steps or more at beta 0.95. Here it takes
    1 / (1 - beta) of them, 20, and stops. Being seen depends on no basis and no numbering, so that
    what commutes with P(rows) x O(cols) still does.

    Args:
      beta: decay rate, in [0, 1); the number 0 passes gradients on and keeps no state.
      view: how leaves open as matrices, as in `matrixwise`.
      nesterov: as in `momentum`.
      mu_dtype: as in `momentum`.

    Returns:
      A transformation whose updates have the dtype of the gradients.

    Raises:
      ValueError: as `momentum`; for a view that packs columns and other axes into one stored axis.
      TypeError: as `momentum`.

    >>> tx = lazy_momentum(0.5)  # two steps
    >>> state = tx.init(jnp.zeros((2, 1)))
    >>> for second in (4.0, 0.0, 0.0):
    ...     updates, state = tx.update(jnp.array([[4.0], [second]]), state)
    ...     print(updates.ravel().tolist())
    [2.0, 2.0]
    [3.0, 1.0]
    [3.5, 0.0]
    """
    inner: Any = momentum(beta, nesterov=nesterov, mu_dtype=mu_dtype)
    if surely_zero(beta):
        return inner
    fixed = None if callable(view) else as_view(view)

    def columns_of(tree: Any) -> list[tuple[int, ...]]:
        views = view(tree) if callable(view) else jax.tree.map(lambda _: fixed, tree)
        return [own.column_axes for _, _, own in paired_leaves(tree, views, "What `view` returned")]

    def init(params: optax.Params) -> LazyMomentumState:
        mu = inner.init(params).mu
        leaves, structure = jax.tree.flatten(params)
        unseen = map(_count_from_zero, leaves, columns_of(params))
        return LazyMomentumState(mu, structure.unflatten(unseen))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, LazyMomentumState]:
        average, averaged = inner.update(updates, MomentumState(state.mu), params)
        gradients, structure = jax.tree.flatten(updates)
        seen = structure.unflatten(map(_seen, gradients, columns_of(updates)))
        unseen = jax.tree.map(lambda s, n: jnp.where(s, 0, n + 1), seen, state.unseen)
        lapse = jnp.asarray(1 - beta, jnp.float32)
        moving = jax.tree.map(
            lambda n, x: jnp.where(n * lapse < 1, x, jnp.zeros_like(x)), unseen, average
        )
        return moving, LazyMomentumState(averaged.mu, unseen)

    return optax.GradientTransformation(init, update)


def _count_from_zero(leaf: jax.Array, columns: tuple[int, ...]) -> jax.Array:
    shape = np.array(leaf.shape)
    shape[list(columns)] = 1
    return jnp.zeros(shape, jnp.int32)


def _seen(gradient: jax.Array, columns: tuple[int, ...]) -> jax.Array:
    return jnp.any(gradient != 0, axis=columns, keepdims=True)
