"""The bridge from maps on matrices to transformations of parameter trees."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from symoptax._cost import Cost
from symoptax._each_matrix import unstack, written_out
from symoptax._map import MatrixMap, check_map
from symoptax._mesh.exchange import (
    Spread,
    back_in_place,
    compute,
    placed_by_the_compiler,
    placement_of,
)
from symoptax._mesh.layouts import Place, opened_place, places, sums_sent
from symoptax._mesh.record import Decision, record, warn
from symoptax._paths import check_floating, in_print, paired_leaves
from symoptax._row_mask import row_masked
from symoptax._symmetry import Group, Symmetry
from symoptax._view import MatrixView, as_view

ViewFn = Callable[[Any], Any]
ViewOrFn = MatrixView | str | ViewFn | None
MapFn = Callable[[Any], Any]

# Less work than this takes less than a millisecond.
_LARGE_FLOPS = 1e10


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


@dataclasses.dataclass(frozen=True)
class _Matrices:
    """One stack of a leaf, with its map; `place` is None where nothing is spread over a mesh."""

    name: str
    map: MatrixMap
    view: MatrixView
    stack: jax.Array
    place: Place | None

    def apply(self, stack: jax.Array) -> jax.Array:
        """Apply the map to a stack of such matrices, in float32 at least."""
        mask = self.view.row_mask(stack.shape[-2])
        one = self.map if mask is None else row_masked(self.map, mask)
        # Cast here, so that stacks travel in their own dtype.
        wide = jnp.promote_types(stack.dtype, jnp.float32)
        return one(stack.astype(wide)).astype(stack.dtype)

    def alone(self) -> jax.Array:
        """Apply the map to this stack, by itself and where it lies."""
        if self.place is not None:
            shape = tuple(self.stack.shape)
            record(Decision((self.name,), self.map.name, shape, None, sums_sent(self.place, shape)))
        return self.apply(written_out(self.stack) if self.view.transposes else self.stack)


def _apply(
    leaves: Sequence[_Leaf], arrays: Sequence[jax.Array], where: Sequence[Place | None]
) -> list[jax.Array]:
    """Open the leaves, apply their maps, and close them."""
    matrices: list[_Matrices] = []
    opened: list[list[jax.Array]] = []
    for leaf, array, place in zip(leaves, arrays, where, strict=True):
        assert leaf.map is not None
        assert leaf.view is not None
        if place is not None:
            _warn_of_moves(leaf, array, place)
        stacks = leaf.view.open(array)
        opened.append(stacks)
        own = None if place is None else opened_place(place, leaf.view)
        matrices += [_Matrices(leaf.name, leaf.map, leaf.view, stack, own) for stack in stacks]
    results = iter(_apply_together(matrices))
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


def _apply_together(matrices: Sequence[_Matrices]) -> list[jax.Array]:
    """Apply the maps, once for all stacks of equal shape, dtype, map and row mask."""
    results: dict[int, jax.Array] = {}
    groups: dict[Any, list[int]] = {}
    for index, each in enumerate(matrices):
        if not each.map.grouped:
            results[index] = each.alone()
        elif each.place is None:
            key = (each.stack.shape, each.stack.dtype)
            groups.setdefault((each.map, each.view.valid_rows, key), []).append(index)
        else:
            key = _spread(each).key()
            groups.setdefault((each.map, each.view.valid_rows, key), []).append(index)
    for indices in groups.values():
        group = [matrices[index] for index in indices]
        if group[0].place is not None:
            together = _on_mesh(group)
        elif len(group) == 1:
            together = [group[0].alone()]
        else:
            together = unstack(group[0].apply(jnp.stack([each.stack for each in group])))
        results.update(zip(indices, together, strict=True))
    return [results[index] for index in range(len(matrices))]


def _on_mesh(group: Sequence[_Matrices]) -> list[jax.Array]:
    """Send stacks that lie alike to where they are computed, and back."""
    first, spreads = group[0], [_spread(each) for each in group]
    m, n = spreads[0].sides
    cost = None if first.map.work is None else first.map.work(m, n)
    may_cut = first.view.valid_rows is None
    placement = placement_of(spreads, cost, may_cut=may_cut)
    summed_axis = -1 if cost is None else cost.summed_axis
    names = tuple(each.name for each in group)
    shape = (sum(math.prod(each.stack.shape[:-2]) for each in group), m, n)
    record(Decision(names, first.map.name, shape, placement, placement.wire))
    if placement.repeated > 1 and placement.flops > _LARGE_FLOPS:
        devices = f"{placement.repeated} devices do the same {placement.flops / 1e9:.3g} GF each"
        warn(names, devices, _mend((m, n), cost, first.place))
    return compute(first.apply, spreads, placement, summed_axis)


def _mend(shape: tuple[int, int], cost: Cost | None, place: Place | None) -> str:
    """Say what would let all devices share the work."""
    if cost is None:
        return "use method='auto', which can share a matrix between devices"
    devices = math.prod(size for _, size in place.axes) if place else 1
    if shape[cost.summed_axis] % devices:
        return f"make the size {shape[cost.summed_axis]} a multiple of the {devices} devices"
    return "there are more devices than such small matrices can use"


def _spread(each: _Matrices) -> Spread:
    """Return the stack, turned where its transpose serves as well and equals other stacks."""
    assert each.place is not None
    m, n = each.stack.shape[-2:]
    rows, cols = each.place.layout[-2:]
    turned = _serves_transposed(each, m, n) and (m, str(rows)) > (n, str(cols))
    return Spread(each.stack, each.place, (each.view.rows, each.view.cols), turned)


def _serves_transposed(each: _Matrices, m: int, n: int) -> bool:
    """Return whether `U(D^T)^T = U(D)` at the same cost, as for a polar factor."""
    symmetry, work, scale = each.map.symmetry, each.map.work, each.map.scale
    return (
        symmetry == Symmetry(Group.ORTHOGONAL, Group.ORTHOGONAL)
        and each.view.valid_rows is None
        and work is not None
        and work(m, n).multiplications == work(n, m).multiplications
        and (scale is None or bool(scale(m, n) == scale(n, m)))
    )
