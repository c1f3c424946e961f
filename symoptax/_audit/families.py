"""Which leaves share an axis: the gate, up and down of one MLP, the experts and their router."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from symoptax._routing import Role, RoutedLeaf, Routing
from symoptax._view import StoredAxis

VOCABULARY = (Role.EMBEDDING, Role.TIED_EMBEDDING, Role.LM_HEAD, Role.LM_HEAD_NO_SHIFT)
ROUTERS = (Role.ROUTER, Role.ROUTER_NO_SHIFT)
_EXPERTS = (Role.EXPERT_IN, Role.EXPERT_DOWN)

Axes = dict[int, StoredAxis]  # number of the leaf -> one of its axes


class Family(NamedTuple):
    """Leaves that a symmetry permutes together, each along the axis that its view claims.

    Attributes:
      kind: what is permuted: "token", "neuron", "expert" or "head".
      scope: the path that all of them have in common.
      claimed: the axis of every leaf with a view.
      others: leaves without a view in the same scope, with the axes that may belong: biases,
        norm scales, attention sinks.
    """

    kind: str
    scope: str
    claimed: Axes
    others: dict[int, list[StoredAxis]]


def families(routing: Routing) -> list[Family]:
    """Return all families of a routed tree."""
    leaves = list(enumerate(routing.leaves))

    def of(*roles: Role) -> list[int]:
        return [i for i, leaf in leaves if leaf.role in roles]

    found = []
    if tables := of(*VOCABULARY):
        claimed = {i: _row_axis(routing.leaves[i]) for i in tables}
        found.append(_family("token", "", claimed, routing))
    for ends in ((Role.MLP_IN, Role.MLP_DOWN), _EXPERTS):
        for scope, members in _by_scope(routing, of(ends[0]), of(ends[1])):
            claimed = {i: _row_axis(routing.leaves[i]) for i in members}
            found.append(_family("neuron", scope, claimed, routing))
    for scope, members in _by_scope(routing, of(*ROUTERS), of(*_EXPERTS)):
        found.append(_family("expert", scope, _expert_axes(routing, members), routing))
    attention = of(Role.ATTENTION)
    for scope, members in _by_scope(routing, attention, attention):
        claimed = {i: axis for i in members if (axis := _head_axis(routing.leaves[i]))}
        if len(claimed) > 1:
            found.append(_family("head", scope, claimed, routing))
    return found


def axes_of_size(leaf: RoutedLeaf, size: int) -> list[StoredAxis]:
    """Return every stored axis of a leaf that has a size."""
    return [StoredAxis(i, 1, (size,), 1) for i, s in enumerate(leaf.shape or ()) if s == size]


def _family(kind: str, scope: str, claimed: Axes, routing: Routing) -> Family:
    """Add the leaves without a view whose axes are as long as one of the family."""
    forms = {axis.length: axis for axis in claimed.values()}
    forms |= {size: StoredAxis(0, 1, (size,), 1) for a in claimed.values() for size in a.sizes}
    others = {}
    for index, leaf in enumerate(routing.leaves):
        if leaf.view is None and _inside(leaf.path, scope):
            axes = [
                forms[size]._replace(axis=axis)
                for axis, size in enumerate(leaf.shape or ())
                if size in forms
            ]
            if axes:
                others[index] = axes
    return Family(kind, scope, claimed, others)


def _by_scope(
    routing: Routing, first: Sequence[int], second: Sequence[int]
) -> Iterable[tuple[str, list[int]]]:
    """Group leaves by the longest path that they share with a leaf of the other sort."""
    scopes: dict[str, list[int]] = {}
    for index in sorted({*first, *second}):
        partners = second if index in first else first
        path = routing.leaves[index].path
        shared = [_common(path, routing.leaves[other].path) for other in partners if other != index]
        if shared:
            scopes.setdefault(max(shared, key=len), []).append(index)
    return scopes.items()


def _common(a: str, b: str) -> str:
    pairs = zip(a.split("/"), b.split("/"), strict=False)
    return "/".join(x for x, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _inside(path: str, scope: str) -> bool:
    return not scope or path.startswith(f"{scope}/")


def _row_axis(leaf: RoutedLeaf) -> StoredAxis:
    """Return the axis of the rows; of packed rows, the outermost name."""
    assert leaf.view is not None
    return leaf.view.locate(leaf.view.rows.split()[0], leaf.shape or ())


def _head_axis(leaf: RoutedLeaf) -> StoredAxis | None:
    assert leaf.view is not None
    named = [name for name in leaf.view.names if "head" in name and "dim" not in name]
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
