"""Whether tokens, neurons, experts and heads can be renumbered along the axes that views name."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from symoptax._audit.families import HEADS, Axes, Family, families
from symoptax._audit.probe import Probe, integers
from symoptax._audit.report import AuditRow, Verdict
from symoptax._routing import RoutedLeaf, Routing
from symoptax._view import StoredAxis

# A symmetry holds if the loss changes by less than this part of what it changes by when the
# symmetry is broken on purpose: sums in another order differ by some 1e-6, deep networks amplify.
_TOLERANCE = 3e-4

# How many other choices of axes are tried to mend a family, and for each how many choices of the
# leaves that take part besides: 2 for each bias.
_MENDS, _CHOICES = 200, 32

_ADVICE = {
    "token": "no axis of these tables is the vocabulary; see their views and the batch",
    "neuron": "no permutation of an axis that these leaves share is a symmetry: see their roles, "
    "and whether gate, up and down of one MLP all have rules",
    "expert": "experts cannot be renumbered together with the rows of their router: see the roles "
    "and views, and whether noise, fixed assignments or groups tell experts apart",
    "head": "heads cannot be renumbered: see along which axis, and in which order within it, the "
    "views split them",
}


class _Way(NamedTuple):
    """A way to permute axes of a size, and what it means if only this one is a symmetry."""

    permutation_of: Callable[[int], np.ndarray]
    smaller_group: str = ""


def permutation_rows(probe: Probe, routing: Routing, rng: np.random.Generator) -> list[AuditRow]:
    """Permute each family together; where that is no symmetry, say of which leaves it is not."""
    rows, mends = [], {}
    for family in families(routing):
        rows += _family_rows(probe, routing, family, rng, mends)
    return rows


def _family_rows(
    probe: Probe,
    routing: Routing,
    family: Family,
    rng: np.random.Generator,
    mends: dict[Any, tuple[StoredAxis, ...]],
) -> list[AuditRow]:
    def row(block: str, verdict: Verdict, change: float | None, advice: str = "") -> AuditRow:
        return AuditRow(block, family.kind, claim, verdict, change, control, advice)

    leaves = [routing.leaves[index] for index in family.claimed]
    claim = f"P({family.kind})" + (f", {len(leaves)} leaves together" if len(leaves) > 1 else "")
    block = "token tables" if family.kind == "token" else family.scope
    ways = list(_ways(probe, routing, family.kind, family.claimed, rng))
    control = max(
        probe.change({i: axis.permute(probe.leaves[i], ways[0].permutation_of)})
        for i, axis in itertools.islice(family.claimed.items(), 3)
    )
    if family.kind == "token" and not integers(probe.batch):
        return [row(block, "unclear", None, "the batch has no integers to renumber")]
    if control <= 20 * probe.resolution:
        return [row(block, "unclear", None, "these leaves hardly change the loss at all")]
    tolerance = max(probe.resolution, _TOLERANCE * min(control, 1.0))
    best = math.inf
    for way in ways:
        change = _change(probe, family, family.claimed, way, tolerance)
        best = min(best, change)
        if change <= tolerance:
            verdict: Verdict = "partly" if way.smaller_group else "holds"
            return [row(block, verdict, change, way.smaller_group)]
    # Layers that are alike have one mend, and the search is long.
    claimed = tuple(family.claimed.values())
    form = (*(re.sub(r"\d+", "*", leaf.path) for leaf in leaves), *claimed)
    if form not in mends:
        mends[form] = _mend(probe, routing, family, rng, tolerance)
    wrong = [
        row(leaf.path, "fails", best, _mend_in_words(family.kind, leaf, axis, true))
        for leaf, axis, true in zip(leaves, claimed, mends[form], strict=True)
        if axis != true
    ]
    return wrong or [row(leaf.path, "fails", best, _ADVICE[family.kind]) for leaf in leaves]


def _mend_in_words(kind: str, leaf: RoutedLeaf, axis: StoredAxis, true: StoredAxis) -> str:
    if axis.axis != true.axis:
        return (
            f"its {kind}s lie along axis {true.axis} of {leaf.shape}, and the view says axis "
            f"{axis.axis}"
        )
    place = "outermost" if true.outer == 1 else "innermost"
    return f"its {kind}s are packed {place} in axis {axis.axis} of {leaf.shape}; the view differs"


def _change(probe: Probe, family: Family, axes: Axes, way: _Way, tolerance: float) -> float:
    """Return the smallest change of the loss over the ways in which other leaves may take part."""
    smallest = math.inf
    for choice in itertools.islice(itertools.product(*family.others.values()), _CHOICES):
        taken = zip(family.others, choice, strict=True)
        chosen = {**axes, **{i: axis for i, axis in taken if axis is not None}}
        changed = {i: a.permute(probe.leaves[i], way.permutation_of) for i, a in chosen.items()}
        batches = _renumbered(probe.batch, axes, way) if family.kind == "token" else [probe.batch]
        for batch in batches:
            smallest = min(smallest, probe.change(changed, batch))
            if smallest <= tolerance:
                return smallest
    return smallest


def _mend(
    probe: Probe, routing: Routing, family: Family, rng: np.random.Generator, tolerance: float
) -> tuple[StoredAxis, ...]:
    """Return axes under which the permutation is a symmetry, as near to the claimed ones as can be.

    The claimed ones if there are none, or too many to try.
    """
    others = {i: _other_axes(routing.leaves[i], axis) for i, axis in family.claimed.items()}
    candidates = (
        family.claimed | dict(zip(changed, axes, strict=True))
        for count in range(1, len(others) + 1)
        for changed in itertools.combinations(others, count)
        for axes in itertools.product(*(others[i] for i in changed))
    )
    # Only heads may be of several sizes, those of queries and those of keys.
    fitting = (
        axes
        for axes in itertools.islice(candidates, 100 * _MENDS)
        if family.kind == "head" or len({axis.sizes for axis in axes.values()}) == 1
    )
    for axes in itertools.islice(fitting, _MENDS):
        for way in _ways(probe, routing, family.kind, axes, rng):
            if way.smaller_group:
                break
            if _change(probe, family, axes, way, tolerance) <= tolerance:
                return tuple(axes.values())
    return tuple(family.claimed.values())


def _other_axes(leaf: RoutedLeaf, claimed: StoredAxis) -> list[StoredAxis]:
    """Return the other stored axes of a leaf, and the claimed one packed in the other order."""
    turned = claimed._replace(outer=claimed.inner, inner=claimed.outer)
    stored = [StoredAxis(i, 1, (size,), 1) for i, size in enumerate(leaf.shape or ()) if size > 1]
    return [axis for axis in (turned, *stored) if axis != claimed]


def _ways(
    probe: Probe, routing: Routing, kind: str, axes: Axes, rng: np.random.Generator
) -> Iterator[_Way]:
    """Yield ways to permute a family: of the whole claimed group first, of smaller groups then."""
    sizes = [size for axis in axes.values() for size in axis.sizes]
    if kind == "head":
        return _head_ways(math.gcd(*sizes), rng)
    if kind == "token":
        return _token_ways(probe, routing, axes, min(sizes), rng)
    whole = _Way(functools.cache(lambda size: _moving(size, rng)))
    return itertools.chain([whole], _expert_ways(min(sizes), rng) if kind == "expert" else [])


def _token_ways(
    probe: Probe, routing: Routing, axes: Axes, size: int, rng: np.random.Generator
) -> Iterator[_Way]:
    leaves = [routing.leaves[i] for i in axes]
    masks = [leaf.view.row_mask(leaf.matrices()[0][-2]) for leaf in leaves if leaf.view is not None]
    # Rows up to the first that does not exist.
    count = min(size, *(int(np.argmin([*mask, False])) for mask in masks if mask is not None), size)
    yield _first(_moving(count, rng))
    predicted = min(
        (
            _rows_with_gradient(leaf, probe.gradient[i])
            for i, leaf in zip(axes, leaves, strict=True)
            if leaf.role in HEADS
        ),
        default=count,
    )
    if 0 < predicted < count:
        yield _first(
            _moving(predicted, rng),
            f"only the first {predicted} rows are ever predicted: a padded vocabulary; say "
            f"valid_rows={predicted} in the view of its head",
        )
    for apart in (1, 4):
        order = np.arange(count)
        order[apart:] = apart + _moving(count - apart, rng)
        yield _first(order, f"the first {apart} ids are special: harmless")


def _rows_with_gradient(leaf: RoutedLeaf, gradient: Any) -> int:
    """Return the number of the last row that has a gradient."""
    assert leaf.view is not None
    stack = leaf.view.open(gradient)[0]
    rows = jnp.any(stack.reshape(-1, *stack.shape[-2:]) != 0, axis=(0, -1))
    return int(np.max(np.flatnonzero(rows), initial=-1)) + 1


def _expert_ways(count: int, rng: np.random.Generator) -> Iterator[_Way]:
    for groups in (g for g in range(2, count // 2 + 1) if count % g == 0):
        each = count // groups
        order = np.concatenate([g * each + _moving(each, rng) for g in range(groups)])
        text = f"experts are chosen in {groups} groups of {each}: a smaller group acts, harmless"
        yield _first(order, text)
    for apart in range(1, min(3, count - 2) + 1):
        order = np.concatenate([np.arange(apart), apart + _moving(count - apart, rng)])
        for which, way in (("first", order), ("last", count - 1 - order[::-1])):
            text = f"the {which} {apart} of the stack are apart: shared experts? give them a leaf"
            yield _first(way, text)


def _head_ways(keys: int, rng: np.random.Generator) -> Iterator[_Way]:
    """Permute the heads of keys, and those of queries in their groups, in both usual orders.

    Query head `key * each + i` belongs to `key` in the first, `i * keys + key` in the second.
    """
    outer = _moving(keys, rng)
    inner = functools.cache(lambda each: np.stack([_moving(each, rng) for _ in range(keys)]))

    def way(place: Callable[[int], np.ndarray]) -> _Way:
        def permutation_of(size: int) -> np.ndarray:
            places = place(size)  # [key, i]
            order = np.empty(size, int)
            order[places] = places[outer[:, None], inner(size // keys)]
            return order

        return _Way(permutation_of)

    yield way(lambda size: np.arange(size).reshape(keys, -1))
    yield way(lambda size: np.arange(size).reshape(-1, keys).T)


def _first(order: np.ndarray, smaller_group: str = "") -> _Way:
    """Permute the first entries of every axis in one order, and leave the rest."""

    def permutation_of(size: int) -> np.ndarray:
        return np.concatenate([order[order < size], np.arange(len(order), size)])

    return _Way(permutation_of, smaller_group)


def _moving(size: int, rng: np.random.Generator) -> np.ndarray:
    """Return a permutation that respects no groups: a random cycle of all but the middle entry.

    A random one, of few experts, keeps their groups by chance, and special first ids in place.
    """
    order = np.arange(size)
    cycle = rng.permutation(np.delete(order, size // 2) if size > 2 else order)
    order[cycle] = np.roll(cycle, 1)
    return order


def _renumbered(batch: Any, axes: Axes, way: _Way) -> Iterator[Any]:
    """Yield the batch with the tokens of its integer arrays renumbered: of all first, then fewer.

    A table permuted by p has the row of token t at the place i with p[i] = t.
    """
    size = min(size for axis in axes.values() for size in axis.sizes)
    new_id = np.argsort(way.permutation_of(size))
    leaves, structure = jax.tree.flatten(batch)
    numbered = integers(batch)[:6]

    def renumber(x: Array) -> Array:
        known = (x >= 0) & (x < size)
        return jnp.where(known, jnp.asarray(new_id, x.dtype)[jnp.clip(x, 0, size - 1)], x)

    for count in range(len(numbered), 0, -1):
        for chosen in itertools.combinations(numbered, count):
            yield structure.unflatten(
                [renumber(x) if i in chosen else x for i, x in enumerate(leaves)]
            )
