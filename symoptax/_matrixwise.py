"""The bridge from maps on matrices to transformations of parameter trees."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from symoptax._grouping import Matrices, apply_together
from symoptax._map import MatrixMap, check_map
from symoptax._mesh.exchange import back_in_place, placed_by_the_compiler
from symoptax._mesh.layouts import Place, opened_place, places
from symoptax._mesh.record import warn
from symoptax._paths import check_floating, in_print, paired_leaves
from symoptax._view import MatrixView, as_view

ViewFn = Callable[[Any], Any]
ViewOrFn = MatrixView | str | ViewFn | None
MapFn = Callable[[Any], Any]


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
    return matrixwise_by_leaf(lambda tree: jax.tree.map(lambda _: update_map, tree), view)


def matrixwise_by_leaf(maps: MapFn, view: ViewOrFn) -> optax.GradientTransformation:
    """Apply to every leaf the map of its own; leaves without one pass.

    Args:
      maps: from the tree to a tree of maps, None where a leaf passes.
      view: as in `matrixwise`.
    """
    fixed = None if callable(view) else as_view(view)

    def checked(tree: Any) -> list[_Leaf]:
        views = view(tree) if callable(view) else jax.tree.map(lambda _: fixed, tree)
        views = paired_leaves(tree, views, "What `view` returned")
        of_leaves = paired_leaves(tree, maps(tree), "The tree of maps")
        return [
            _Leaf(name, own, None if own is None else _checked(name, leaf, leaf_view))
            for (name, leaf, leaf_view), (_, _, own) in zip(views, of_leaves, strict=True)
        ]

    def init(params: optax.Params) -> optax.EmptyState:
        checked(params)
        return optax.EmptyState()

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        own = checked(updates)
        arrays, structure = jax.tree.flatten(updates)
        taken = [index for index, leaf in enumerate(own) if leaf.map is not None]
        arrays = [jnp.asarray(x) if i in set(taken) else x for i, x in enumerate(arrays)]
        where = places([own[i].name for i in taken], [arrays[i] for i in taken])

        def compute(given: Sequence[jax.Array]) -> list[jax.Array]:
            return _apply([own[index] for index in taken], given, where)

        results = placed_by_the_compiler(compute, [arrays[index] for index in taken])
        beside = structure.flatten_up_to(updates if params is None else params)
        beside = [beside[index] for index in taken]
        kinds = [own[index].view for index in taken]
        results = back_in_place(results, beside, where, kinds)
        for index, result in zip(taken, results, strict=True):
            arrays[index] = result
        return structure.unflatten(arrays), state

    return optax.GradientTransformation(init, update)


class _Leaf(NamedTuple):
    """What is done to a leaf: nothing if it has no map."""

    name: str
    map: MatrixMap | None
    view: MatrixView | None


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
    leaves: Sequence[_Leaf], arrays: Sequence[jax.Array], where: Sequence[Place | None]
) -> list[jax.Array]:
    """Open the leaves, apply their maps, and close them."""
    matrices: list[Matrices] = []
    opened: list[list[jax.Array]] = []
    for leaf, array, place in zip(leaves, arrays, where, strict=True):
        assert leaf.map is not None
        assert leaf.view is not None
        if place is not None:
            _warn_of_moves(leaf, array, place)
        stacks = leaf.view.open(array)
        opened.append(stacks)
        own = None if place is None else opened_place(place, leaf.view)
        matrices += [Matrices(leaf.name, leaf.map, leaf.view, stack, own) for stack in stacks]
    results = iter(apply_together(matrices))
    return [
        leaf.view.close([next(results) for _ in stacks], array.shape)
        for leaf, array, stacks in zip(leaves, arrays, opened, strict=True)
        if leaf.view is not None
    ]


def _warn_of_moves(leaf: _Leaf, array: jax.Array, place: Place) -> None:
    """Warn where a leaf cannot be opened without sending it around."""
    assert leaf.view is not None
    if moved := leaf.view.breaks(array.shape, place.layout, place.axes):
        size = f"{array.nbytes / 2**20:.3g} MiB"
        mend = "spread another axis, or keep the parts in leaves of their own"
        warn([leaf.name], f"{moved}, so that {size} have to be sent around", mend)
