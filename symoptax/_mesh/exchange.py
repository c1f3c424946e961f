"""Stacks of matrices on a mesh: sent to where they are computed, and back.

The exchange goes one mesh axis after another; XLA would gather the whole stack if it had to do two
at once. Stacks that lie alike travel together.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental.shard_alike import shard_alike
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from symoptax._cost import Cost
from symoptax._mesh.layouts import Place
from symoptax._mesh.placement import Placement, choose


@dataclasses.dataclass(frozen=True)
class Spread:
    """A stack [*batch, m, n] on a mesh.

    Attributes:
      stack: the array.
      place: its mesh, and how it is spread over it, as far as that is known. Batch axes that
        nothing is known of are taken to be whole.
      names: how rows and columns are called: where nothing is known, what is called alike is taken
        to lie alike.
      turned: whether it travels as its transpose.
    """

    stack: jax.Array
    place: Place
    names: tuple[str, str]
    turned: bool = False

    @property
    def sides(self) -> tuple[int, int]:
        """The sizes m and n of the matrices as they travel."""
        m, n = self.stack.shape[-2:]
        return (n, m) if self.turned else (m, n)

    @property
    def kept(self) -> list[int]:
        """The batch axes that are spread already, and so are not joined with others."""
        return [axis for axis, names in enumerate(self.place.layout[:-2]) if names]

    @property
    def free(self) -> list[int]:
        """The other batch axes."""
        return [axis for axis, names in enumerate(self.place.layout[:-2]) if not names]

    def key(self) -> Any:
        """Return what stacks that travel together have in common."""
        stack, layout = self.stack, self.place.layout
        kept = tuple((stack.shape[axis], layout[axis]) for axis in self.kept)
        sides = tuple(zip(stack.shape[-2:], layout[-2:], strict=True))
        names = self.names if None in layout else None
        return self.place.mesh, kept, sides[:: -1 if self.turned else 1], stack.dtype, names

    def flat(self) -> jax.Array:
        """Return the stack as [*kept, count, m, n], turned if need be."""
        stack, last = self.stack, self.stack.ndim
        stack = stack.transpose(*self.kept, *self.free, last - 2, last - 1)
        stack = stack.reshape(*stack.shape[: len(self.kept)], -1, *stack.shape[-2:])
        return stack.mT if self.turned else stack

    def count(self) -> int:
        """Return how many matrices there are along the joined axis."""
        return math.prod(self.stack.shape[axis] for axis in self.free)

    def unflat(self, flat: jax.Array) -> jax.Array:
        """Put what `flat` returned back into the order of the stack."""
        flat = flat.mT if self.turned else flat
        order = [*self.kept, *self.free, flat.ndim]
        shape = self.stack.shape
        batch = flat.reshape([*(shape[axis] for axis in order[:-1]), *shape[-2:]])
        back = [order.index(axis) for axis in range(len(order) - 1)]
        return batch.transpose(*back, batch.ndim - 2, batch.ndim - 1)


def placement_of(group: Sequence[Spread], cost: Cost | None, *, may_cut: bool) -> Placement:
    """Choose where the stacks of a group are computed together."""
    first = group[0]
    kept = [(first.stack.shape[axis], first.place.layout[axis]) for axis in first.kept]
    sides = list(zip(first.stack.shape[-2:], first.place.layout[-2:], strict=True))
    sides = sides[:: -1 if first.turned else 1]
    known = None not in first.place.layout
    count = sum(spread.count() for spread in group)
    # One stack by itself may lie along its only batch axis without our knowing.
    source = () if known or len(group) > 1 or len(first.free) > 1 else None
    axes = [*kept, (count, source), *sides]
    return choose(
        tuple(size for size, _ in axes),
        first.place.axes,
        tuple(names for _, names in axes),
        first.stack.dtype.itemsize,
        cost,
        joined=len(group) > 1,
        may_cut=may_cut,
    )


def compute(
    update_map: Callable[[jax.Array], jax.Array],
    group: Sequence[Spread],
    placement: Placement,
    summed_axis: int,
) -> list[jax.Array]:
    """Apply a map to the stacks of a group where the placement says."""
    flat = [spread.flat() for spread in group]
    typed = jax.typeof(flat[0]).sharding.mesh
    mesh = group[0].place.mesh if typed.empty else typed
    axis = flat[0].ndim - 3
    stack = jnp.concatenate(flat, axis) if len(flat) > 1 else flat[0]
    count, pieces = stack.shape[axis], placement.pieces
    if fill := placement.padded - count:
        stack = jnp.pad(stack, [(0, fill * (i == axis)) for i in range(stack.ndim)])

    def place(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    *on_the_way, home = placement.steps
    stack = cut(stack, pieces, summed_axis, strided=True)
    for spec in (*on_the_way, home):
        stack = place(stack, spec)
    result = update_map(uncut(stack, pieces, summed_axis, strided=False))
    result = cut(result, pieces, summed_axis, strided=False)
    for spec in (home, *reversed(on_the_way)):
        result = place(result, spec)
    result = uncut(result, pieces, summed_axis, strided=True)

    if fill:
        result = jax.lax.slice_in_dim(result, 0, count, axis=axis)
    ends = [sum(spread.count() for spread in group[: i + 1]) for i in range(len(group) - 1)]
    parts = jnp.split(result, ends, axis) if ends else [result]
    return [spread.unflat(part) for spread, part in zip(group, parts, strict=True)]


def cut(x: jax.Array, pieces: int, summed_axis: int, *, strided: bool) -> jax.Array:
    """Cut each matrix along the summed side into pieces that count as matrices.

    Strided pieces take every so many rows or columns, which a spread side gives without sending
    anything. They are put together one behind the other all the same: an order that means nothing
    to the map.

    >>> cut(jnp.arange(4).reshape(1, 1, 4), 2, -1, strided=True).tolist()
    [[[0, 2]], [[1, 3]]]
    """
    if pieces == 1:
        return x
    if summed_axis == -2:
        return cut(x.mT, pieces, -1, strided=strided).mT
    *kept, count, m, n = x.shape
    parts = (n // pieces, pieces) if strided else (pieces, n // pieces)
    x = jnp.moveaxis(x.reshape(*kept, count, m, *parts), -1 if strided else -2, -3)
    return x.reshape(*kept, count * pieces, m, n // pieces)


def uncut(x: jax.Array, pieces: int, summed_axis: int, *, strided: bool) -> jax.Array:
    """Put pieces together: the inverse of `cut`."""
    if pieces == 1:
        return x
    if summed_axis == -2:
        return uncut(x.mT, pieces, -1, strided=strided).mT
    *kept, count, m, part = x.shape
    x = x.reshape(*kept, count // pieces, pieces, m, part)
    x = jnp.moveaxis(x, -3, -1 if strided else -2)
    return x.reshape(*kept, count // pieces, m, part * pieces)


def back_in_place(
    results: Sequence[jax.Array],
    beside: Sequence[jax.Array],
    where: Sequence[Place | None],
    kinds: Sequence[Hashable],
) -> list[jax.Array]:
    """Have XLA spread results like their parameters, where only XLA knows how that is.

    Leaves of one kind are taken to lie alike.
    """
    seen: dict[Any, list[Hashable]] = {}

    def alike(
        result: jax.Array, param: jax.Array, place: Place | None, kind: Hashable
    ) -> jax.Array:
        if place is None or None not in place.layout or not isinstance(result, Tracer):
            return result
        others = seen.setdefault((result.shape, result.dtype, param.dtype), [])
        if kind not in others:
            others.append(kind)
        # JAX lowers it once for arguments of the same type, which ties all of them together.
        apart = tuple(range(others.index(kind)))
        pair = (jnp.expand_dims(x, apart) for x in (param, result))
        return jnp.squeeze(shard_alike(*pair)[1], apart)

    return [alike(*each) for each in zip(results, beside, where, kinds, strict=True)]


def placed_by_the_compiler(
    compute: Callable[[Sequence[jax.Array]], list[jax.Array]], leaves: Sequence[jax.Array]
) -> list[jax.Array]:
    """Compute leaves from leaves, equally sharded, with their Explicit mesh axes as Auto ones.

    `jax.make_mesh` makes Explicit axes, on which every product would need its layout spelled out.
    """
    shardings = [jax.typeof(leaf).sharding for leaf in leaves]
    if not any(AxisType.Explicit in sharding.mesh.axis_types for sharding in shardings):
        return compute(leaves)
    placed: Any = jax.sharding.auto_axes(compute, out_sharding=shardings)
    return placed(leaves)
