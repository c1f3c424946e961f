"""Which matrices are computed together: equal shapes under one map that lie alike on a mesh."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from symoptax._cost import Cost
from symoptax._each_matrix import unstack, written_out
from symoptax._map import MatrixMap
from symoptax._mesh.exchange import Spread, compute, placement_of
from symoptax._mesh.layouts import Place, sums_sent
from symoptax._mesh.record import Decision, record, warn
from symoptax._row_mask import row_masked
from symoptax._symmetry import Group, Symmetry
from symoptax._view import MatrixView

# Less work than this takes less than a millisecond.
_LARGE_FLOPS = 1e10


@dataclasses.dataclass(frozen=True)
class Matrices:
    """One stack of a leaf, with its map.

    Attributes:
      name: the name of the leaf.
      map: the map.
      view: how the leaf opened.
      stack: the array `[*batch, m, n]`.
      place: where it lies on a mesh; None where there is none.
    """

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


def apply_together(matrices: Sequence[Matrices]) -> list[jax.Array]:
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


def _on_mesh(group: Sequence[Matrices]) -> list[jax.Array]:
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


def _spread(each: Matrices) -> Spread:
    """Return the stack, turned where its transpose serves as well and equals other stacks."""
    assert each.place is not None
    m, n = each.stack.shape[-2:]
    rows, cols = each.place.layout[-2:]
    turned = _serves_transposed(each, m, n) and (m, str(rows)) > (n, str(cols))
    return Spread(each.stack, each.place, (each.view.rows, each.view.cols), turned)


def _serves_transposed(each: Matrices, m: int, n: int) -> bool:
    """Return whether `U(D^T)^T = U(D)` at the same cost, as for a polar factor."""
    symmetry, work, scale = each.map.symmetry, each.map.work, each.map.scale
    return (
        symmetry == Symmetry(Group.ORTHOGONAL, Group.ORTHOGONAL)
        and each.view.valid_rows is None
        and work is not None
        and work(m, n).multiplications == work(n, m).multiplications
        and (scale is None or _equal(scale(m, n), scale(n, m)))
    )


def _equal(a: Any, b: Any) -> bool:
    return isinstance(a, int | float) and isinstance(b, int | float) and a == b
