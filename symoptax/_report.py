"""The routing report: what will happen to every leaf, to be read before training."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from symoptax._map import scaled
from symoptax._paths import matches
from symoptax._recipes import Recipe, Update, recipes
from symoptax._routing import Fallback, Role, RoutedLeaf, Routing, route
from symoptax._scaling import ScaleRule
from symoptax.routes._auto import Rules, rules_for

_HEADER = ("leaf", "shape", "role", "view", "symmetry", "update", "scale", "lr x", "state")


@dataclasses.dataclass(frozen=True)
class ReportRow:
    """One leaf; `matrices` reads "m x n x batch", and stacks of a fused leaf are joined by +."""

    leaf: str
    shape: tuple[int, ...]
    role: str
    matrices: str
    symmetry: str
    update: str
    scale: str
    lr_multiplier: float
    state_bytes: int


@dataclasses.dataclass(frozen=True)
class RoutingReport:
    """What `layerwise` does with a parameter tree; `str()` gives the table."""

    rows: tuple[ReportRow, ...]
    adamw_bytes: int
    unused_rules: tuple[str, ...]
    library: str = ""

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state for all leaves, single counters left out."""
        return sum(row.state_bytes for row in self.rows)

    def __str__(self) -> str:
        cells = [_HEADER, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADER))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
        lines.insert(1, "  ".join("-" * width for width in widths))
        share = self.state_bytes / max(self.adamw_bytes, 1)
        lines.append(
            f"{len(self.rows)} leaves; state {_bytes(self.state_bytes)}, {share:.2f} of AdamW's "
            f"{_bytes(self.adamw_bytes)}"
        )
        if self.library:
            tied = any(row.role == Role.TIED_EMBEDDING for row in self.rows)
            lines.append(f"rules of {self.library}; {'tied' if tied else 'not tied'}")
        lines += [f"rule {pattern!r} matches no leaf" for pattern in self.unused_rules]
        return "\n".join(line.rstrip() for line in lines)

    def to_json(self) -> str:
        """Return the report as JSON: `{"library": ..., "rows": [{"leaf": ..., ...}, ...], ...}`."""
        return json.dumps(dataclasses.asdict(self) | {"state_bytes": self.state_bytes}, indent=1)

    def to_markdown(self) -> str:
        """Return the table in Markdown."""
        cells = [_HEADER, ("---",) * len(_HEADER), *(_cells(row) for row in self.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def routing_report(
    params: Any,
    rules: Rules,
    *,
    updates: Mapping[Any, Update] | None = None,
    lr_multipliers: Mapping[Any, float] | None = None,
    scale: ScaleRule | None = "rms",
    mu_dtype: Any = None,
    lazy: bool = True,
    fallback: Fallback = None,
    strict: bool = True,
) -> RoutingReport:
    """Describe what `layerwise` does to each leaf, before any step.

    Args:
      params: the parameter tree, or its shapes from `jax.eval_shape`.
      rules: as in `layerwise`, like all that follow; its other arguments do not matter here.
      updates: role -> update.
      lr_multipliers: role -> multiple of the learning rate.
      scale: factor from the shape of a matrix.
      mu_dtype: dtype of the momenta.
      lazy: whether the state counts the steps of rows that no data picks.
      fallback: what leaves that no rule matches get.
      strict: refuse a map that does not respect the symmetry of its role.

    Raises:
      ValueError: as `layerwise` and `route`.
    """
    library, rules = rules_for(params, rules)
    routing = route(params, rules, fallback=fallback)
    by_role = recipes(updates, lr_multipliers, 0.0, strict=strict)
    sizes = [
        _recipe_bytes(routing, index, by_role, mu_dtype, lazy)
        for index in range(len(routing.leaves))
    ]
    rows = [
        _row(leaf, by_role[leaf.role], scale, size)
        for leaf, size in zip(routing.leaves, sizes, strict=True)
    ]
    names = [leaf.path for leaf in routing.leaves]
    # The tables of whole libraries have rules for all of their models.
    mine = [] if library else rules
    unused = [r.pattern for r in mine if not any(matches(r.pattern, name) for name in names)]
    adamw = sum(2 * _state_bytes(leaf, None) for leaf in routing.leaves)
    return RoutingReport(tuple(rows), adamw, tuple(unused), library)


def _row(leaf: RoutedLeaf, recipe: Recipe, scale: ScaleRule | None, state_bytes: int) -> ReportRow:
    symmetry, view = leaf.role.symmetry, leaf.view
    stacks = leaf.matrices()
    return ReportRow(
        leaf=leaf.path,
        shape=leaf.shape or (),
        role=str(leaf.role),
        matrices=" + ".join(_in_print(stack) for stack in stacks),
        symmetry=symmetry.describe(view.rows, view.cols) if symmetry and view else "",
        update=recipe.name,
        scale=_scale(recipe, stacks, scale),
        lr_multiplier=recipe.lr_multiplier,
        state_bytes=state_bytes,
    )


def _scale(recipe: Recipe, stacks: Sequence[tuple[int, ...]], rule: ScaleRule | None) -> str:
    if recipe.map is None:
        return ""
    factor = scaled(recipe.map, None if recipe.map.scale else rule).scale or (lambda m, n: 1.0)
    filled = [stack for stack in stacks if math.prod(stack)]
    return " + ".join(dict.fromkeys(f"{factor(*stack[-2:]):.3g}" for stack in filled))


def _recipe_bytes(
    routing: Routing, index: int, by_role: Mapping[Role, Recipe], mu_dtype: Any, lazy: bool
) -> int:
    """Return the bytes of state of one leaf."""
    leaf = routing.leaves[index]
    recipe = by_role[leaf.role]
    if recipe.name == "frozen":
        return 0
    if recipe.transformation is not None:
        # The leaf in its tree, as a partition shows it, since a view may depend on the path.
        alone: list[Any] = [optax.MaskedNode()] * len(routing.leaves)
        alone[index] = jax.ShapeDtypeStruct(leaf.shape or (), leaf.dtype)
        state = jax.eval_shape(recipe.transformation.init, routing.structure.unflatten(alone))
        arrays = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
        return sum(x.size * x.dtype.itemsize for x in arrays)
    if recipe.map is not None:
        rows = sum(math.prod(stack[:-1]) for stack in leaf.matrices())
        counters = 4 * rows if lazy and recipe.picked_by_data else 0
        return _state_bytes(leaf, mu_dtype) + counters
    return _state_bytes(leaf, mu_dtype) + _state_bytes(leaf, None)


def _state_bytes(leaf: RoutedLeaf, dtype: Any) -> int:
    return math.prod(leaf.shape or ()) * jnp.dtype(dtype or leaf.dtype).itemsize


def _in_print(stack: tuple[int, ...]) -> str:
    *batch, m, n = stack
    return " x ".join(str(size) for size in (m, n, *batch))


def _cells(row: ReportRow) -> tuple[str, ...]:
    return (
        row.leaf,
        str(row.shape),
        row.role,
        row.matrices,
        row.symmetry,
        row.update,
        row.scale,
        f"{row.lr_multiplier:g}",
        _bytes(row.state_bytes),
    )


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
