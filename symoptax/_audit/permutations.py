"""Whether tokens, neurons, experts and heads can be renumbered along the axes that views name."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from symoptax._audit.families import Axes, Family, axes_of_size
from symoptax._audit.probe import Probe
from symoptax._audit.report import AuditRow, Verdict
from symoptax._routing import Routing

# A symmetry holds if the loss changes by less than this part of what it changes by when the
# symmetry is broken on purpose: sums in another order differ by some 1e-6, deep networks amplify.
_TOLERANCE = 3e-4

# How many ways to permute a family are tried before it is given up.
_MOST_TRIES = 200


class _Way(NamedTuple):
    """A way to permute axes of a size, and what it means if only this one is a symmetry."""

    permutation_of: Callable[[int], np.ndarray]
    smaller_group: str = ""


def permutation_rows(
    probe: Probe, routing: Routing, family: Family, rng: np.random.Generator
) -> list[AuditRow]:
    """Permute a family together; where that is no symmetry, say of which leaves it is not."""

    def row(block: str, verdict: Verdict, change: float | None, advice: str = "") -> AuditRow:
        return AuditRow(block, family.kind, claim, verdict, change, control, advice)

    paths = {index: routing.leaves[index].path for index in family.claimed}
    claim = f"P({family.kind})" + (f", {len(paths)} leaves together" if len(paths) > 1 else "")
    ways = list(_ways(family, routing, rng))
    control = max(
        probe.change({i: axis.permute(probe.leaves[i], ways[0].permutation_of)})
        for i, axis in itertools.islice(family.claimed.items(), 3)
    )
    tolerance = max(probe.resolution, _TOLERANCE * min(control, 1.0))
    if family.kind == "token" and not _integers(probe.batch):
        return [row(family.scope, "unclear", None, "the batch has no integers to renumber")]
    if control <= 20 * probe.resolution:
        return [row(family.scope, "unclear", None, "these leaves hardly change the loss at all")]
    best = math.inf
    for way in ways:
        change = _try(probe, family, family.claimed, way, tolerance)
        best = min(best, change)
        if change <= tolerance:
            verdict: Verdict = "partly" if way.smaller_group else "holds"
            return [row(family.scope or "token tables", verdict, change, way.smaller_group)]
    mended = _mend(probe, routing, family, ways[0], tolerance)
    wrong = {i: axis for i, axis in mended.items() if axis != family.claimed[i]}
    if not wrong:
        advice = _ADVICE[family.kind]
        return [row(path, "fails", best, advice) for path in paths.values()]
    return [
        row(
            path,
            "fails",
            best,
            f"its {family.kind}s lie along axis {wrong[i].axis} of {routing.leaves[i].shape}, and "
            f"the view says axis {family.claimed[i].axis}",
        )
        for i, path in paths.items()
        if i in wrong
    ]


_ADVICE = {
    "token": "no axis of these tables is the vocabulary; see their views and the batch",
    "neuron": "no permutation of an axis that these leaves share is a symmetry: see their roles, "
    "and whether gate, up and down of one MLP all have rules",
    "expert": "experts cannot be renumbered together with the rows of their router: see the roles "
    "and views, and whether noise, fixed assignments or groups tell experts apart",
    "head": "heads cannot be renumbered: see along which axis, and in which order within it, the "
    "views split them",
}


def _try(probe: Probe, family: Family, axes: Axes, way: _Way, tolerance: float) -> float:
    """Return the smallest change of the loss over the ways in which other leaves may take part."""
    smallest = math.inf
    options = [[*choices, None] for choices in family.others.values()]
    for choice in itertools.islice(itertools.product(*options), 64):
        taken = zip(family.others, choice, strict=True)
        chosen = {**axes, **{i: axis for i, axis in taken if axis is not None}}
        changed = {i: a.permute(probe.leaves[i], way.permutation_of) for i, a in chosen.items()}
        batches = _renumbered(probe.batch, axes, way) if family.kind == "token" else [probe.batch]
        for batch in batches:
            smallest = min(smallest, probe.change(changed, batch))
            if smallest <= tolerance:
                return smallest
    return smallest


def _mend(probe: Probe, routing: Routing, family: Family, way: _Way, tolerance: float) -> Axes:
    """Return axes under which the permutation is a symmetry, as near to the claimed ones as can be.

    Empty if there are none, or too many to try.
    """
    shapes = [routing.leaves[i].shape or () for i in family.claimed]
    sizes = {size for shape in shapes for size in shape if size > 1}
    candidates = []
    for size in sizes:
        options = [
            [*([axis] if set(axis.sizes) == {size} else []), *axes_of_size(routing.leaves[i], size)]
            for i, axis in family.claimed.items()
        ]
        candidates += itertools.islice(itertools.product(*options), 4 * _MOST_TRIES)
    claimed = list(family.claimed.values())

    def distance(axes: Sequence[Any]) -> int:
        return sum(
            axis != own and axis != own._replace(outer=1, inner=1, sizes=axis.sizes)
            for axis, own in zip(axes, claimed, strict=True)
        )

    for axes in sorted(candidates, key=distance)[:_MOST_TRIES]:
        chosen = dict(zip(family.claimed, axes, strict=True))
        if distance(axes) and _try(probe, family, chosen, way, tolerance) <= tolerance:
            return chosen
    return {}


def _ways(family: Family, routing: Routing, rng: np.random.Generator) -> Iterator[_Way]:
    """Yield ways to permute a family: of the whole claimed group first, of smaller groups then."""
    sizes = sorted({size for axis in family.claimed.values() for size in axis.sizes})
    if family.kind == "head":
        yield from _head_ways(sizes, rng)
        return
    if family.kind == "token":
        valid = [_valid_rows(routing, index) for index in family.claimed]
        yield _same_first(_moving(min([*sizes, *valid]), rng))
        for apart in (1, 4):
            order = np.arange(min(sizes))
            order[apart:] = apart + _moving(len(order) - apart, rng)
            yield _same_first(order, f"the first {apart} ids are special: harmless")
        return
    orders = {size: _moving(size, rng) for size in sizes}
    yield _Way(lambda size: orders[size])
    if family.kind == "expert":
        yield from _expert_ways(min(sizes), rng)


def _expert_ways(count: int, rng: np.random.Generator) -> Iterator[_Way]:
    for groups in (g for g in range(2, count // 2 + 1) if count % g == 0):
        each = count // groups
        order = np.concatenate([g * each + _moving(each, rng) for g in range(groups)])
        text = f"experts are chosen in {groups} groups of {each}: a smaller group acts, harmless"
        yield _same_first(order, text)
    for apart in range(1, min(3, count - 2) + 1):
        head, tail = np.arange(count), np.arange(count)
        head[apart:] = apart + _moving(count - apart, rng)
        tail[:-apart] = _moving(count - apart, rng)
        for which, order in (("first", head), ("last", tail)):
            text = f"the {which} {apart} of the stack are apart: shared experts? give them a leaf"
            yield _same_first(order, text)


def _head_ways(sizes: Sequence[int], rng: np.random.Generator) -> Iterator[_Way]:
    """Permute the heads of keys, and those of queries in their groups, in both usual orders."""
    keys = math.gcd(*sizes)
    outer = _moving(keys, rng)
    inner = {size: [_moving(size // keys, rng) for _ in range(keys)] for size in sizes}

    def grouped(size: int) -> np.ndarray:
        each = size // keys
        return np.concatenate([outer[k] * each + inner[size][k] for k in range(keys)])

    def interleaved(size: int) -> np.ndarray:
        each = size // keys
        return grouped(size).reshape(keys, each).T.ravel() // each + keys * (
            grouped(size).reshape(keys, each).T.ravel() % each
        )

    yield _Way(grouped)
    yield _Way(interleaved)


def _same_first(order: np.ndarray, smaller_group: str = "") -> _Way:
    """Permute the first entries of every axis in one order, and leave the rest."""

    def permutation_of(size: int) -> np.ndarray:
        full = np.arange(size)
        count = min(size, len(order))
        full[:count] = order[order < count]
        return full

    return _Way(permutation_of, smaller_group)


def _moving(size: int, rng: np.random.Generator) -> np.ndarray:
    """Return a random permutation that is not the identity, if there is one."""
    order = rng.permutation(size)
    return np.roll(order, 1) if np.array_equal(order, np.arange(size)) else order


def _valid_rows(routing: Routing, index: int) -> int:
    leaf = routing.leaves[index]
    assert leaf.view is not None
    mask = leaf.view.row_mask(leaf.matrices()[0][-2])
    return leaf.matrices()[0][-2] if mask is None else int(np.argmin([*mask, False]))


def _integers(batch: Any) -> list[int]:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
    return [i for i, x in enumerate(leaves) if np.issubdtype(x.dtype, np.integer) and x.size]


def _renumbered(batch: Any, axes: Axes, way: _Way) -> Iterator[Any]:
    """Yield the batch with the tokens of its integer arrays renumbered: of all first, then fewer.

    A table permuted by p has the row of token t at the place i with p[i] = t.
    """
    size = min(size for axis in axes.values() for size in axis.sizes)
    new_id = np.argsort(way.permutation_of(size))
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, batch))
    numbered = _integers(batch)[:6]

    def renumber(x: Array) -> Array:
        known = (x >= 0) & (x < size)
        return jnp.where(known, jnp.asarray(new_id, x.dtype)[jnp.clip(x, 0, size - 1)], x)

    for count in range(len(numbered), 0, -1):
        for chosen in itertools.combinations(numbered, count):
            yield structure.unflatten(
                [renumber(x) if i in chosen else x for i, x in enumerate(leaves)]
            )
