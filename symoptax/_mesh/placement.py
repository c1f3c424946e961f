"""Where a stack of matrices is computed on a mesh, chosen by what it costs.

Newton-Schulz on a matrix that is spread over devices sends it around in every step. It is cheaper
to exchange a stack once, so that every device holds whole matrices, and to exchange the results
back. Where there are fewer matrices than devices, the side that Gram matrices sum over stays
spread, at the price of summing them over the devices; or each matrix is cut along that side into
pieces, which travel like matrices.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from symoptax._cost import Cost

# The mesh axes over which each axis of an array is spread, outermost first; None: not known.
Layout = tuple[tuple[str, ...] | None, ...]

# So many floating-point operations take as long as sending one byte. On a TPU v5e, 33e12 a second
# (float32 by six bfloat16 products) to 1e11 bytes; GPUs with NVLink are much the same.
_FLOPS_PER_BYTE = 300.0
# A collective takes ten microseconds to begin.
_BYTES_PER_COLLECTIVE = 2.0**20

# Mesh axes over which parameters are usually copies.
_USUALLY_COPIES = ("data", "dp", "replica", "batch")


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a stack [*kept, count, m, n] goes to where it is computed.

    Attributes:
      padded: how many matrices there are along `count` with those that only fill up.
      pieces: into how many pieces each matrix is cut along the summed side.
      steps: the layouts on the way, of the stack [*kept, padded pieces, m, n] with m or n cut; one
        mesh axis moves at a time. The last one is where the stack is computed.
      matrices: how many matrices one device computes.
      shared: how many devices compute a matrix together, each a part of the summed side.
      repeated: how many devices do the same work.
      wire: bytes that one device sends, there and back.
      flops: floating-point operations of one device.
      memory: bytes of what one device holds of the stack in float32, and of its Gram matrices.
    """

    padded: int
    pieces: int
    steps: tuple[PartitionSpec, ...]
    matrices: int
    shared: int
    repeated: int
    wire: float
    flops: float
    memory: float

    @property
    def price(self) -> float:
        """What it costs in floating-point operations."""
        sends = self.wire + len(self.steps) * _BYTES_PER_COLLECTIVE
        return self.flops + _FLOPS_PER_BYTE * sends


@functools.lru_cache(maxsize=4096)
def choose(
    shape: tuple[int, ...],
    axes: tuple[tuple[str, int], ...],
    source: Layout,
    itemsize: int,
    cost: Cost | None,
    *,
    joined: bool = False,
    may_cut: bool = True,
) -> Placement:
    """Return the cheapest placement of a stack.

    Args:
      shape: the stack `(*kept, count, m, n)`.
      axes: names and sizes of the mesh axes.
      source: where the stack lies. What is not known is taken to lie on the matrices.
      itemsize: bytes per entry on the wire.
      cost: what the map does to one matrix, with the side that its Gram matrices sum over; None
        for a map that needs whole matrices.
      joined: whether the stack was put together along `count`, which has to be whole then.
      may_cut: whether the order of rows and columns means nothing to the map.
    """
    places = [*range(len(shape) - 2), *([] if cost is None else [cost.summed_axis + len(shape)])]
    candidates = []
    stack = _Stack(shape, axes, source, itemsize, cost, joined)
    for targets in itertools.product([*places, None], repeat=len(axes)):
        for gathers_first in (False, True):
            moves = stack.moves(targets, gathers_first=gathers_first)
            candidates.append(stack.placed(moves))
            if may_cut:
                candidates.append(stack.placed(moves, cut=True))
    return min((c for c in candidates if c), key=lambda c: (c.price, len(c.steps)))


class _Move(NamedTuple):
    """A mesh axis, and the axes of the stack that it goes from and to; -1 not known, None none."""

    name: str
    size: int
    here: int | None
    there: int | None


@dataclasses.dataclass(frozen=True)
class _Stack:
    """A stack, and where it lies; the arguments of `choose`."""

    shape: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]
    source: Layout
    itemsize: int
    cost: Cost | None
    joined: bool

    @property
    def count_axis(self) -> int:
        return len(self.shape) - 3

    def lies_on(self, name: str) -> int | None:
        """Return the axis of the stack that a mesh axis lies on; -1 not known, None on none."""
        for axis, names in enumerate(self.source):
            if names and name in names:
                return axis
        return -1 if None in self.source else None

    def moves(self, targets: Sequence[int | None], *, gathers_first: bool) -> list[_Move]:
        """Return how each mesh axis moves, in the order in which they do.

        First what only drops copies, which makes the rest smaller; what gathers last, unless that
        divides unevenly. Of several on one axis of the stack the innermost leaves first, which
        leaves the others contiguous.
        """
        moves = [
            _Move(name, size, self.lies_on(name), target)
            for (name, size), target in zip(self.axes, targets, strict=True)
        ]
        order = [name for name, _ in self.axes]

        def rank(move: _Move) -> tuple[int, int]:
            if move.here is None or (move.here < 0 and move.name in _USUALLY_COPIES):
                return 0, 0
            names = (self.source[move.here] if move.here >= 0 else None) or order
            stage = 2 if not gathers_first else 1
            return stage if move.there is None else 3 - stage, -names.index(move.name)

        return sorted(moves, key=rank)

    def placed(self, moves: Sequence[_Move], *, cut: bool = False) -> Placement | None:
        """Return the placement that the moves lead to, or None where it is useless or uneven."""
        ways = [1] * len(self.shape)
        for _, size, _, there in moves:
            if there is not None:
                if ways[there] >= self.shape[there] and not (cut and there == self.count_axis):
                    return None
                ways[there] *= size
        if cut:
            found = self._cut(moves, ways)
            if found is None:
                return None
            padded, pieces = found
        else:
            on_count = ways[self.count_axis]
            padded, pieces = -(-self.shape[self.count_axis] // on_count) * on_count, 1
        whole = self.joined or pieces > 1 or padded > self.shape[self.count_axis]
        layouts = self._layouts(moves, whole=whole)
        if not all(self._divides(layout) for layout in layouts[1:]):
            return None
        steps = tuple(_spec(layout) for layout in layouts)
        return self._priced(moves, ways, padded, pieces, steps)

    def _cut(self, moves: Sequence[_Move], ways: list[int]) -> tuple[int, int] | None:
        """Return how many matrices to fill up to, and the pieces that then make one per device."""
        sizes = [size for _, size, _, there in moves if there == self.count_axis]
        if not sizes or self.cost is None or ways[self.cost.summed_axis] > 1:
            return None
        last, before = sizes[-1], math.prod(sizes[:-1])
        count = -(-self.shape[self.count_axis] // before)
        pieces = last // count
        everything = math.prod(size for _, size in self.axes)
        if count >= last or last % count or self.shape[self.cost.summed_axis] % everything:
            return None
        return count * before, pieces

    def _layouts(self, moves: Sequence[_Move], *, whole: bool) -> list[Layout]:
        """Return the layouts on the way, from where the stack lies if anything is known of that.

        `whole` says that the stack has been joined, cut or filled up along its count.
        """
        layout = list(self.source)
        # Copies come back as copies, which only a whole axis says where nothing else is known.
        copies = any(move.here == -1 and move.name in _USUALLY_COPIES for move in moves)
        if whole or copies:
            layout[self.count_axis] = ()
        layouts: list[Layout] = [tuple(layout)]
        for name, _, here, there in moves:
            if here == there:
                continue
            if here is not None and here >= 0:
                layout[here] = tuple(n for n in layout[here] or () if n != name)
            if there is not None:
                layout[there] = (*(layout[there] or ()), name)
            layouts.append(tuple(layout))
        home = tuple(names or () for names in layout)
        if all(names is None for names in layouts[0]):
            layouts = layouts[1:]
        return [*layouts[:-1], home]

    def _divides(self, layout: Layout) -> bool:
        """Return whether all devices hold as much; else XLA gathers. The count is filled up."""
        sizes = dict(self.axes)
        return all(
            axis == self.count_axis or size % math.prod(sizes[n] for n in names or ()) == 0
            for axis, (size, names) in enumerate(zip(self.shape, layout, strict=True))
        )

    def _priced(
        self,
        moves: Sequence[_Move],
        ways: list[int],
        padded: int,
        pieces: int,
        steps: tuple[PartitionSpec, ...],
    ) -> Placement:
        *kept, _, m, n = self.shape
        on_count = ways[self.count_axis] // pieces
        matrices = -(-padded // on_count) * math.prod(
            -(-size // way) for size, way in zip(kept, ways, strict=False)
        )
        filled = -(-padded // on_count) * on_count
        held = self.itemsize * math.prod(kept) * filled * m * n
        held /= math.prod(size for _, size, here, _ in moves if here is not None)
        wire = 0.0
        for _, size, here, there in moves:
            part = (size - 1) / size
            if here == there:
                continue
            if here is None:
                wire += held * part  # the way back gathers
                held /= size
            elif there is None:
                held *= size
                wire += held * part
            elif here < 0 and there != self.count_axis and there >= len(kept):
                wire += held * part  # as likely as not it lies there already
            else:
                wire += 2 * held * part
        cost = self.cost
        shared = pieces * (1 if cost is None else ways[cost.summed_axis])
        repeated = math.prod(size for _, size, _, there in moves if there is None)
        if cost is None:
            flops, grams = 20.0 * m * n * min(m, n), 0.0
        else:
            k, length = cost.gram_size, m * n // cost.gram_size
            long = cost.long_products * k * k * length
            flops = 2.0 * (long / shared + cost.small_products * k**3)
            grams = 4.0 * k * k
            wire += matrices * len(cost.segments) * grams * 2 * (shared - 1) / shared
        return Placement(
            padded=padded,
            pieces=pieces,
            steps=steps,
            matrices=matrices,
            shared=shared,
            repeated=repeated,
            wire=wire,
            flops=flops * matrices,
            memory=matrices * (4.0 * m * n / shared + 3 * grams),
        )


def _spec(layout: Sequence[tuple[str, ...] | None]) -> PartitionSpec:
    return PartitionSpec(
        *(PartitionSpec.UNCONSTRAINED if names is None else names or None for names in layout)
    )
