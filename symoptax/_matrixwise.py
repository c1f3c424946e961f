"""The bridge from maps on matrices to transformations of parameter trees."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from symoptax._distribute import placed_by_the_compiler, spread
from symoptax._each_matrix import unstack, written_out
from symoptax._map import MatrixMap, check_map
from symoptax._paths import check_floating, in_print, paired_leaves
from symoptax._row_mask import row_masked
from symoptax._view import MatrixView, as_view

ViewFn = Callable[[Any], Any]
ViewOrFn = MatrixView | str | ViewFn | None


def matrixwise(update_map: MatrixMap, view: ViewOrFn = None) -> optax.GradientTransformation:
    """Apply a map to every matrix of every leaf.

    Leaves open through their view into stacks `[..., m, n]`, are computed in float32 (float64
    stays), and close again in their own dtype. Stacks of equal shape are computed together where
    the map gains from it, on a mesh every matrix on one device; no matrix ever sees another.

    Args:
      update_map: the map.
      view: how leaves open: a `MatrixView`, its pattern, or a function from the parameter tree to
        a tree of views, such as `symoptax.view_fn(rules)`. None: the last two axes are rows and
        columns as stored, the rest is batch.

    Returns:
      A stateless transformation.

    Raises:
      ValueError: in `init` and `update`, for a leaf that the view does not fit or that is not real
        and floating; the message names the leaf.
    """
    check_map(update_map)
    fixed = None if callable(view) else as_view(view)

    def checked_views(tree: Any) -> list[MatrixView]:
        views = view(tree) if callable(view) else jax.tree.map(lambda _: fixed, tree)
        triples = paired_leaves(tree, views, "What `view` returned")
        return [_checked(name, leaf, leaf_view) for name, leaf, leaf_view in triples]

    def init(params: optax.Params) -> optax.EmptyState:
        checked_views(params)
        return optax.EmptyState()

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        views = checked_views(updates)
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, updates))

        def compute(leaves: Sequence[jax.Array]) -> list[jax.Array]:
            opened = [leaf_view.open(leaf) for leaf, leaf_view in zip(leaves, views, strict=True)]
            together = _apply(
                update_map,
                [stack for stacks in opened for stack in stacks],
                [leaf_view for leaf_view, s in zip(views, opened, strict=True) for _ in s],
            )
            results = iter(together)
            return [
                leaf_view.close([next(results) for _ in stacks], leaf.shape)
                for leaf, leaf_view, stacks in zip(leaves, views, opened, strict=True)
            ]

        return structure.unflatten(placed_by_the_compiler(compute, leaves)), state

    return optax.GradientTransformation(init, update)


def _checked(name: str, leaf: Any, view: Any) -> MatrixView:
    """Return the view, or raise for a leaf that cannot open by it."""
    if view is None:
        raise ValueError(
            f"{name} {in_print(leaf)}: has no view; keep it from this map by a partition or a mask."
        )
    check_floating(name, leaf)
    view = as_view(view)
    try:
        view.shapes(leaf.shape)
    except ValueError as error:
        raise ValueError(
            f"{name} {in_print(leaf)}: {error} Give this leaf a view that names its axes, or route "
            "it elsewhere."
        ) from error
    return view


def _apply(
    update_map: MatrixMap, stacks: Sequence[jax.Array], views: Sequence[MatrixView]
) -> list[jax.Array]:
    """Apply the map to every stack, once for all stacks of equal shape, dtype and row mask."""

    def apply(index: int, stack: jax.Array) -> jax.Array:
        mask = views[index].row_mask(stack.shape[-2])
        one = update_map if mask is None else row_masked(update_map, mask)

        def in_float32(stack: jax.Array) -> jax.Array:
            # Cast here, so that stacks travel in their own dtype.
            wide = jnp.promote_types(stack.dtype, jnp.float32)
            return one(stack.astype(wide)).astype(stack.dtype)

        return spread(in_float32, stack) if update_map.grouped else in_float32(stack)

    def apply_alone(index: int) -> jax.Array:
        stack = stacks[index]
        return apply(index, written_out(stack) if views[index].transposes else stack)

    if not update_map.grouped:
        return [apply_alone(index) for index in range(len(stacks))]
    groups: dict[Any, list[int]] = {}
    for index, stack in enumerate(stacks):
        groups.setdefault((stack.shape, stack.dtype, views[index].valid_rows), []).append(index)
    results: dict[int, jax.Array] = {}
    for indices in groups.values():
        if len(indices) == 1:
            results[indices[0]] = apply_alone(indices[0])
        else:
            together = apply(indices[0], jnp.stack([stacks[index] for index in indices]))
            results.update(zip(indices, unstack(together), strict=True))
    return [results[index] for index in range(len(stacks))]
