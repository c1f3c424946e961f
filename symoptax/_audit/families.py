"""Which leaves share an axis: the gate, up and down of one MLP, the experts and their router."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from symoptax._routing import Role, RoutedLeaf, Routing
from symoptax._view import StoredAxis

HEADS = (Role.TIED_EMBEDDING, Role.LM_HEAD, Role.LM_HEAD_NO_SHIFT)
VOCABULARY = (Role.EMBEDDING, *HEADS)
ROUTERS = (Role.ROUTER, Role.ROUTER_NO_SHIFT)
_EXPERTS = (Role.EXPERT_IN, Role.EXPERT_DOWN)

Axes = dict[int, StoredAxis]  # number of the leaf -> one of its axes


class Family(NamedTuple):
    """Leaves that a symmetry permutes together, each along the axis that its view claims.

    Attributes:
      kind: what is permuted: "token", "neuron", "expert" or "head".
      scope: the path that all of them have in common.
      claimed: the axis of every leaf with a view.
      others: leaves in the same scope of which the rules do not say whether they belong (biases,
        norm scales, attention sinks), with the axes that may: None for a leaf that does not.
        Likely choices come first, and leaves of which less is known.
    """

    kind: str
    scope: str
    claimed: Axes
    others: dict[int, list[StoredAxis | None]]


def families(routing: Routing) -> list[Family]:
    """Return all families of a routed tree."""

    def of(*roles: Role) -> list[int]:
        return [i for i, leaf in enumerate(routing.leaves) if leaf.role in roles]

    def by_row(members: Sequence[int]) -> Axes:
        return {i: _row_axis(routing.leaves[i]) for i in members}

    found = []
    if tables := of(*VOCABULARY):
        found.append(_family("token", "", by_row(tables), routing))
    for ends in ((Role.MLP_IN, Role.MLP_DOWN), _EXPERTS):
        for scope, members in _by_scope(routing, of(ends[0]), of(ends[1])):
            found.append(_family("neuron", scope, by_row(members), routing))
    for scope, members in _by_scope(routing, of(*ROUTERS), of(*_EXPERTS)):
        found.append(_family("expert", scope, _expert_axes(routing, members), routing))
    attention = of(Role.ATTENTION)
    for scope, members in _by_scope(routing, attention, attention):
        claimed = {i: axis for i in members if (axis := _head_axis(routing.leaves[i]))}
        if len(claimed) > 1:
            found.append(_family("head", scope, claimed, routing))
    return found


def _family(kind: str, scope: str, claimed: Axes, routing: Routing) -> Family:
    """Add the leaves of which the rules do not say whether they belong."""
    forms = {axis.length: axis for axis in claimed.values()}
    forms |= {size: StoredAxis(0, 1, (size,), 1) for a in claimed.values() for size in a.sizes}
    beside = {_folder(routing.leaves[i].path) for i in claimed}
    others = {}
    for index, leaf in enumerate(routing.leaves):
        if index in claimed or (scope and not leaf.path.startswith(f"{scope}/")):
            continue
        shape = enumerate(leaf.shape or ())
        if leaf.view is None:
            axes = [forms[size]._replace(axis=axis) for axis, size in shape if size in forms]
        elif kind == "head" and leaf.role == Role.ATTENTION:
            # A projection of which the view does not name the heads: packed outermost, perhaps.
            sizes = sorted({size for axis in claimed.values() for size in axis.sizes}, reverse=True)
            axes = [
                StoredAxis(axis, 1, (size,), length // size)
                for axis, length in shape
                for size in sizes
                if length % size == 0
            ]
        else:
            continue
        if axes:
            close = _folder(leaf.path) in beside
            others[index] = [*axes, None] if close else [None, *axes]
    # Products vary their last factor fastest.
    ordered = dict(sorted(others.items(), key=lambda item: item[1][0] is not None))
    return Family(kind, scope, claimed, ordered)


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _by_scope(
    routing: Routing, first: Sequence[int], second: Sequence[int]
) -> Iterable[tuple[str, list[int]]]:
    """Group leaves by the longest path that they share with a leaf of the other sort.

    Where there is no such leaf, by what they share with any leaf that is no bias.
    """
    scopes: dict[str, list[int]] = {}
    for index in sorted({*first, *second}):
        leaf = routing.leaves[index]
        partners = [other for other in (second if index in first else first) if other != index] or [
            other
            for other, found in enumerate(routing.leaves)
            if other != index and len(found.shape or ()) >= len(leaf.shape or ())
        ]
        shared = [_common(leaf.path, routing.leaves[other].path) for other in partners]
        scopes.setdefault(max(shared, key=len, default=""), []).append(index)
    return scopes.items()


def _common(a: str, b: str) -> str:
    pairs = zip(a.split("/"), b.split("/"), strict=False)
    return "/".join(x for x, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _row_axis(leaf: RoutedLeaf) -> StoredAxis:
    """Return the axis of the rows; of packed rows, the longest."""
    assert leaf.view is not None
    axes = [leaf.view.locate(name, leaf.shape or ()) for name in leaf.view.rows.split()]
    return max(axes, key=lambda axis: sum(axis.sizes))


def _head_axis(leaf: RoutedLeaf) -> StoredAxis | None:
    """Return the axis named "head", "kv_head" and so on; "heads" may be heads and features."""
    assert leaf.view is not None
    named = [name for name in leaf.view.names if name.split("_")[-1] == "head"]
    return leaf.view.locate(named[0], leaf.shape or ()) if named else None


def _expert_axes(routing: Routing, members: Sequence[int]) -> Axes:
    """Return the rows of the routers, and of the stacks the batch axis with that name or size."""
    axes, names, sizes = {}, set(), set()
    for index in members:
        leaf = routing.leaves[index]
        if leaf.role in ROUTERS:
            axes[index] = _row_axis(leaf)
            sizes.update(axes[index].sizes)
            names.add(leaf.view.rows if leaf.view else "")
    for index in members:
        leaf = routing.leaves[index]
        if index in axes or leaf.view is None or leaf.shape is None:
            continue
        batch = {name: leaf.view.locate(name, leaf.shape) for name in leaf.view.batch}
        fitting = [axis for name, axis in batch.items() if name in names]
        fitting += [axis for axis in batch.values() if set(axis.sizes) <= sizes]
        fitting += list(batch.values())
        if fitting:
            axes[index] = fitting[0]
    return axes
