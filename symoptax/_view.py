"""How a parameter leaf opens into stacks of matrices `[..., rows, cols]`, and closes again."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Shaped

_TOKEN = re.compile(r"\.\.\.|[A-Za-z_]\w*|[()]|\S")

Axes = tuple[tuple[str, ...], ...]  # one tuple of names per axis; several names where it is packed


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """A named way to see a leaf as stacks of matrices, in the notation of einops.

    The left side names every axis of the leaf as stored, the right side the same names as they
    form matrices: the last two axes are rows and columns, all before them are batch axes. Names in
    parentheses are packed into one axis, the first one outermost. Batch axes are never packed.

    >>> MatrixView("d layer vocab -> layer vocab d").shapes((4, 2, 10))
    [(2, 10, 4)]

    A leaf that holds several matrices side by side is cut into `sections`: of an axis of the left
    side after unpacking, for instance queries, keys and values of 4, 2 and 2 heads of size 3:

    >>> qkv = MatrixView("d (head k) -> (head k) d", sizes={"k": 3}, sections={"head": (4, 2, 2)})
    >>> qkv.shapes((5, 24))
    [(12, 5), (6, 5), (6, 5)]

    Args:
      pattern: `"left -> right"`. A leading `...` on both sides stands for any number of batch axes.
      sizes: sizes of packed axes; at most one per packed axis may be left out.
      sections: at most one axis name, with the sizes into which it is cut.
      valid_rows: which rows exist, if not all: the number of the first ones (a vocabulary padded
        at its end), or one boolean per row. The others get no update and count in no mean; weight
        decay acts on them as on any parameter.

    Raises:
      ValueError: when built, for a pattern that does not parse; when applied, for a leaf whose
        shape does not fit.
    """

    pattern: str
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    sections: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict, hash=False)
    valid_rows: int | Sequence[bool] | None = None
    _left: Axes = dataclasses.field(init=False, repr=False, compare=False)
    _right: Axes = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        left, arrow, right = str(self.pattern).partition("->")
        if not arrow:
            raise ValueError(
                f"View {self.pattern!r} needs the form 'stored axes -> batch rows cols'."
            )
        object.__setattr__(self, "_left", self._parse(left))
        object.__setattr__(self, "_right", self._parse(right))
        if self.valid_rows is not None:
            rows = np.asarray(self.valid_rows)
            if (rows.ndim, rows.dtype.kind) not in ((0, "i"), (0, "u"), (1, "b")):
                raise ValueError(
                    f"View {self.pattern!r}: valid_rows={self.valid_rows!r}; need the number of "
                    "the first rows, or one boolean per row."
                )
            given = tuple(rows.tolist()) if rows.ndim else rows.item()
            object.__setattr__(self, "valid_rows", given)
        self._validate()

    @property
    def rows(self) -> str:
        """The names of the row axis, as in the pattern."""
        return " ".join(self._right[-2])

    @property
    def cols(self) -> str:
        """The names of the column axis, as in the pattern."""
        return " ".join(self._right[-1])

    @property
    def batch(self) -> tuple[str, ...]:
        """The names of the batch axes, as in the pattern."""
        return tuple(name for group in self._right[:-2] for name in group)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order in which the leaf is stored."""
        return tuple(name for group in self._left for name in group)

    def apart(self, name: str) -> "MatrixView":
        """Return the view with an axis that was packed in rows or columns as a batch axis.

        >>> MatrixView("d head k -> (head k) d").apart("head").pattern
        'd head k -> head k d'
        """
        if name not in (*self._right[-2], *self._right[-1]):
            return self
        sides = [[n for n in side if n != name] for side in self._right[-2:]]
        if not all(sides):
            raise ValueError(f"View {self.pattern!r}: {name!r} is all of its rows or columns.")
        right = [*self.batch, name, *(_in_print(side) for side in sides)]
        pattern = f"{self.pattern.partition('->')[0].strip()} -> {' '.join(right)}"
        return dataclasses.replace(self, pattern=pattern)

    @property
    def column_axes(self) -> tuple[int, ...]:
        """The stored axes that make up the columns, counted from the last one, -1.

        Raises:
          ValueError: where a column axis is packed with others into one stored axis.
        """
        cols, size = set(self._right[-1]), len(self._left)
        axes = [i - size for i, group in enumerate(self._left) if cols & set(group)]
        if mixed := [_in_print(self._left[i]) for i in axes if not cols >= set(self._left[i])]:
            raise ValueError(f"View {self.pattern!r}: {mixed[0]} packs columns with other axes.")
        return tuple(axes)

    @property
    def ndim(self) -> int:
        """How many axes a leaf has for this view, where it names every axis."""
        return len(self._left)

    @property
    def names_every_axis(self) -> bool:
        """Whether the pattern has no `...`."""
        return ("...",) not in self._left

    @property
    def transposes(self) -> bool:
        """Whether stacks have their axes in another order than the leaf."""
        return list(self.names) != [name for group in self._right for name in group]

    def shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the shapes `(*batch, m, n)` of the stacks of a leaf, one per section."""
        return self._opening(shape).stacks

    def row_mask(self, m: int) -> Bool[np.ndarray, " m"] | None:
        """Return which of m rows exist, or None for all."""
        match self.valid_rows:
            case None:
                return None
            case int(count) if 0 < count <= m:
                return np.arange(m) < count
            case tuple(rows) if len(rows) == m and any(rows):
                return np.array(rows)
        rows = self.valid_rows
        given = rows if isinstance(rows, int) else f"{len(rows)} booleans, {sum(rows)} of them True"
        raise ValueError(
            f"View {self.pattern!r}: valid_rows={given} of {m} rows; need a number from 1 to {m}, "
            f"or {m} booleans, not all False."
        )

    def locate(self, name: str, shape: Sequence[int]) -> "StoredAxis":
        """Return where the axis `name` of the pattern lies in a stored leaf of `shape`."""
        axis = next(i for i, group in enumerate(self._left) if name in group)
        sizes = self._unpack(self._left[axis], shape[axis], shape)
        place, products = list(sizes).index(name), list(sizes.values())
        return StoredAxis(
            axis,
            math.prod(products[:place]),
            tuple(self.sections.get(name, (sizes[name],))),
            math.prod(products[place + 1 :]),
        )

    def open(self, leaf: Shaped[Array, "..."]) -> list[Shaped[Array, "... _m _n"]]:
        """Open a leaf into its stacks, one per section."""
        opening = self._opening(leaf.shape)
        pieces = jnp.split(leaf.reshape(opening.unpacked), opening.cuts, opening.axis)
        return [
            piece.transpose(opening.order).reshape(stack)
            for piece, stack in zip(pieces, opening.stacks, strict=True)
        ]

    def close(
        self, stacks: Sequence[Shaped[Array, "... _m _n"]], shape: Sequence[int]
    ) -> Shaped[Array, "..."]:
        """Put stacks back into a leaf of `shape`: the exact inverse of `open`."""
        opening = self._opening(shape)
        back = [opening.order.index(axis) for axis in range(len(opening.order))]
        pieces = [
            stack.reshape([piece[axis] for axis in opening.order]).transpose(back)
            for stack, piece in zip(stacks, opening.pieces, strict=True)
        ]
        leaf = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, opening.axis)
        return leaf.reshape(tuple(shape))

    def layout(self, spread: Sequence[tuple[str, ...] | None]) -> list[tuple[str, ...] | None]:
        """Return what is spread over each axis of a stack, given that of each axis of the leaf.

        A stored axis in which several names are packed is spread along the outermost.
        """
        left = _number_batch(self._left, len(spread) - len(self._left) + 1)
        right = _number_batch(self._right, len(spread) - len(self._left) + 1)
        on = {group[0]: axes for group, axes in zip(left, spread, strict=True)}
        found = [[on.get(name, ()) for name in group] for group in right]
        return [
            None if None in axes else tuple(itertools.chain(*filter(None, axes))) for axes in found
        ]

    def breaks(
        self,
        shape: Sequence[int],
        spread: Sequence[tuple[str, ...] | None],
        mesh_axes: Sequence[tuple[str, int]],
    ) -> str | None:
        """Return which spread axis of the leaf cannot be opened in place, in words, or None."""
        sizes = dict(mesh_axes)
        left = _number_batch(self._left, len(spread) - len(self._left) + 1)
        for group, size, names in zip(left, shape, spread, strict=True):
            ways = math.prod(sizes.get(name, 1) for name in names or ())
            if ways == 1:
                continue
            if cut := next((name for name in group if name in self.sections), None):
                return f"axis {cut!r} is spread over {ways} devices and cut into sections"
            outermost = next(iter(self._unpack(group, size, shape).values()))
            if len(group) > 1 and outermost % ways:
                return f"axis {_in_print(group)} is spread over {ways} devices, not by whole parts"
        return None

    def _opening(self, shape: Sequence[int]) -> "_Opening":
        """Work out every size and permutation for a leaf of `shape`."""
        extra = len(shape) - len(self._left) + (not self.names_every_axis)
        left, right = _number_batch(self._left, extra), _number_batch(self._right, extra)
        if len(left) != len(shape):
            raise ValueError(
                f"View {self.pattern!r} names {len(left)} axes; the leaf has shape {tuple(shape)}."
            )
        dims = {}
        for group, size in zip(left, shape, strict=True):
            dims.update(self._unpack(group, size, shape))
        names = list(dims)
        axis_name, sections = next(iter(self.sections.items()), (names[0], (dims[names[0]],)))
        if sum(sections) != dims[axis_name]:
            raise ValueError(
                f"View {self.pattern!r}: sections {tuple(sections)} of {axis_name!r} add up to "
                f"{sum(sections)}, but a leaf of shape {tuple(shape)} has {dims[axis_name]}."
            )
        parts = [{**dims, axis_name: section} for section in sections]
        self.row_mask(math.prod(dims[name] for name in right[-2]))
        return _Opening(
            unpacked=tuple(dims.values()),
            axis=names.index(axis_name),
            cuts=[sum(sections[:i]) for i in range(1, len(sections))],
            pieces=[tuple(part.values()) for part in parts],
            order=[names.index(name) for group in right for name in group],
            stacks=[tuple(math.prod(part[n] for n in group) for group in right) for part in parts],
        )

    def _unpack(self, group: tuple[str, ...], size: int, shape: Sequence[int]) -> dict[str, int]:
        """Return the sizes of the names packed into one stored axis, outermost first."""
        unknown = [name for name in group if name not in self.sizes]
        if len(unknown) > 1:
            raise ValueError(f"View {self.pattern!r}: give sizes for all but one of {unknown}.")
        known = math.prod(self.sizes[name] for name in group if name in self.sizes)
        if size % max(known, 1) or (not unknown and size != known):
            raise ValueError(
                f"View {self.pattern!r}: axis ({' '.join(group)}) with sizes {dict(self.sizes)} "
                f"does not fit {size} of a leaf of shape {tuple(shape)}."
            )
        return {name: self.sizes.get(name, size // max(known, 1)) for name in group}

    def _parse(self, side: str) -> Axes:
        axes: list[tuple[str, ...]] = []
        group: list[str] | None = None
        for token in _TOKEN.findall(side):
            if token == "(" and group is None:
                group = []
            elif token == ")" and group:
                axes.append(tuple(group))
                group = None
            elif group is None and (token == "..." or token.isidentifier()):
                axes.append((token,))
            elif group is not None and token.isidentifier():
                group.append(token)
            else:
                raise ValueError(
                    f"View {self.pattern!r}: cannot read {token!r} in {side.strip()!r}."
                )
        if group is not None:
            raise ValueError(f"View {self.pattern!r}: a parenthesis is not closed.")
        return tuple(axes)

    def _validate(self) -> None:
        left = [name for group in self._left for name in group]
        right = [name for group in self._right for name in group]
        problem = None
        if len(set(left)) < len(left) or sorted(left) != sorted(right):
            problem = "both sides must name the same axes, each once"
        elif len(self._right) < 2 or ("...",) in self._right[-2:]:
            problem = "the right side must end with a row and a column axis"
        elif any(len(group) > 1 for group in self._right[:-2]):
            problem = "batch axes must stay apart; give each a place of its own on the right"
        elif "..." in left and (self._left[0] != ("...",) or self._right[0] != ("...",)):
            problem = "'...' must stand first on both sides"
        elif not set(self.sizes) <= set(left):
            problem = f"sizes name unknown axes {sorted(set(self.sizes) - set(left))}"
        elif (
            len(self.sections) > 1
            or not set(self.sections) <= set(left) - {"..."}
            or any(np.ndim(cut) != 1 for cut in self.sections.values())
        ):
            problem = f"sections must cut one named axis, got {dict(self.sections)}"
        elif not all(
            isinstance(size, int | np.integer) and size > 0
            for size in (*self.sizes.values(), *itertools.chain(*self.sections.values()))
        ):
            problem = "sizes and sections must be whole numbers above 0"
        elif self.sections and self.valid_rows is not None:
            problem = "valid_rows and sections do not go together"
        if problem:
            raise ValueError(f"View {self.pattern!r}: {problem}.")


class StoredAxis(NamedTuple):
    """A named axis inside an axis of a stored leaf, `(outer size inner)`.

    Attributes:
      axis: the position of the stored axis.
      outer: the product of the sizes packed outside of the named axis.
      sizes: the size of the named axis, or of each of its sections.
      inner: the product of the sizes packed inside of it.
    """

    axis: int
    outer: int
    sizes: tuple[int, ...]
    inner: int

    @property
    def length(self) -> int:
        """The size of the whole stored axis."""
        return self.outer * sum(self.sizes) * self.inner

    def permute(
        self, leaf: Shaped[Array, "..."], permutation_of: Callable[[int], np.ndarray]
    ) -> Shaped[Array, "..."]:
        """Return the leaf with the named axis permuted, each section by that of its own size."""
        starts = np.cumsum([0, *self.sizes[:-1]])
        order = [
            start + permutation_of(size) for start, size in zip(starts, self.sizes, strict=True)
        ]
        index = np.arange(self.length).reshape(self.outer, sum(self.sizes), self.inner)
        return jnp.take(leaf, index[:, np.concatenate(order)].ravel(), axis=self.axis)


class _Opening(NamedTuple):
    """A view applied to the shape of one leaf."""

    unpacked: tuple[int, ...]  # the leaf with one axis per name
    axis: int  # the axis that is cut into sections
    cuts: list[int]  # where all sections but the first begin
    pieces: list[tuple[int, ...]]  # each section, one axis per name, in stored order
    order: list[int]  # the permutation from stored to matrix order
    stacks: list[tuple[int, ...]]  # each section as [*batch, m, n]


def _number_batch(axes: Axes, count: int) -> Axes:
    """Write a leading `...` out as `count` numbered axes."""
    if axes[0] != ("...",):
        return axes
    return (*((f"...{i}",) for i in range(count)), *axes[1:])


def _in_print(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"({' '.join(names)})"


AS_STORED = MatrixView("... row col -> ... row col")
FLAX_KERNEL = MatrixView("... input output -> ... output input")


def as_view(view: MatrixView | str | None) -> MatrixView:
    """Return `view` as a `MatrixView`; None is the last two axes as stored."""
    if view is None:
        return AS_STORED
    if not isinstance(view, MatrixView | str):
        raise TypeError(f"view={view!r}: need a MatrixView, or its pattern 'd out -> out d'.")
    return MatrixView(view) if isinstance(view, str) else view
