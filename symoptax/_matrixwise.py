"""The bridge from maps on matrices to transformations of parameter trees."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from symoptax._map import MatrixMap
from symoptax._paths import path_name
from symoptax._view import MatrixView, as_view

ViewFn = Callable[[Any], Any]
ViewOrFn = MatrixView | str | ViewFn | None


def matrixwise(update_map: MatrixMap, view: ViewOrFn = None) -> optax.GradientTransformation:
    """Apply a map to every matrix of every leaf.

    Leaves open through their view into stacks `[..., m, n]`, are computed in float32 (float64
    stays), and close again in their own dtype. Stacks of equal shape are computed together where
    the map gains from it; no matrix ever sees another.

    Args:
      update_map: the map.
      view: how leaves open: a `MatrixView`, its pattern, or a function from the parameter tree to
        a tree of views, such as `symoptax.view_fn(rules)`. None: the last two axes are rows and
        columns as stored, the rest is batch.

    Returns:
      A stateless transformation.

    Raises:
      ValueError: in `update`, for a leaf that the view does not fit or that is not real and
        floating; the message names the leaf.
    """
    fixed = None if callable(view) else as_view(view)

    def update(updates: Any, params: Any) -> Any:
        del params
        views = view(updates) if callable(view) else jax.tree.map(lambda _: fixed, updates)
        flat, structure = jax.tree_util.tree_flatten_with_path(updates)
        view_leaves = structure.flatten_up_to(views)
        opened = [
            _open(path_name(p), leaf, v) for (p, leaf), v in zip(flat, view_leaves, strict=True)
        ]
        results = iter(_apply(update_map, [stack for stacks in opened for stack in stacks]))
        closed = [
            v.close([next(results) for _ in stacks], leaf.shape).astype(leaf.dtype)
            for (_, leaf), v, stacks in zip(flat, view_leaves, opened, strict=True)
        ]
        return structure.unflatten(closed)

    return optax.stateless(update)


def _open(name: str, leaf: jax.Array, view: MatrixView) -> list[jax.Array]:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(f"{name}: need a real floating dtype, got {leaf.dtype}{list(leaf.shape)}.")
    try:
        return view.open(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)))
    except ValueError as error:
        raise ValueError(
            f"{name}: {error} Give this leaf a view that names its axes, or route it elsewhere."
        ) from error


def _apply(update_map: MatrixMap, stacks: Sequence[jax.Array]) -> list[jax.Array]:
    """Apply the map to every stack, once for all stacks of equal shape and dtype."""
    if not update_map.grouped:
        return [update_map(stack) for stack in stacks]
    groups: dict[Any, list[int]] = {}
    for index, stack in enumerate(stacks):
        groups.setdefault((stack.shape, stack.dtype), []).append(index)
    results: dict[int, jax.Array] = {}
    for indices in groups.values():
        if len(indices) == 1:
            results[indices[0]] = update_map(stacks[indices[0]])
        else:
            together = update_map(jnp.stack([stacks[index] for index in indices]))
            results.update(zip(indices, together, strict=True))
    return [results[index] for index in range(len(stacks))]
