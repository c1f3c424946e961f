"""How far an update rule is from commuting with a symmetry: measured, not believed."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from symoptax._symmetry import Group, GroupElement, Symmetry, random_element
from symoptax._view import MatrixView, as_view

UpdateRule = optax.GradientTransformation | Callable[[Array], Array]

_GENERATORS = {
    "P(rows)": Symmetry(Group.PERMUTATION, Group.TRIVIAL),
    "O(rows)": Symmetry(Group.ORTHOGONAL, Group.TRIVIAL),
    "P(cols)": Symmetry(Group.TRIVIAL, Group.PERMUTATION),
    "O(cols)": Symmetry(Group.TRIVIAL, Group.ORTHOGONAL),
    "shift": Symmetry(Group.TRIVIAL, Group.TRIVIAL, shift=True),
}


def equivariance_error(
    update_rule: UpdateRule,
    symmetry: Symmetry,
    shape: tuple[int, int],
    key: jax.Array,
    dtype: DTypeLike | None = None,
    *,
    steps: int = 3,
    view: MatrixView | str | None = None,
) -> float:
    """Measure how far an update rule is from commuting with a random element g of a symmetry.

    Two runs of a few steps, on normal gradients G and on their images g G, from a normal parameter
    W and its image g W, give the updates U and U'. Returns `max |U' - g U| / max |U|` over all
    entries and steps: zero up to rounding for a rule that commutes, 0.1 to 2 for one that does not.

    With `symmetry.shift`, g also adds one vector to all rows of W and G. The updates are then
    compared modulo their mean rows, and the mean row of U, which should vanish, counts as error
    too. (W has no mean row in the first run: decay may shrink the mean row that W has in the other,
    which the loss does not see.)

    Args:
      update_rule: any `optax.GradientTransformation`, with whatever state it keeps, or a function
        of one matrix such as a `MatrixMap`. A transformation sees the tree `{"w": leaf}`.
      symmetry: the group to try, of which one random element is drawn.
      shape: (m, n), rows and columns of the matrix.
      key: a JAX random key.
      dtype: floating dtype of parameters and gradients; None is JAX's default. Rounding is left out
        of account best in float64.
      steps: how many updates to compare.
      view: how the leaf of a transformation opens as the matrix; None is as stored. Two axes.
    """
    element_key, w_key, g_key = jax.random.split(key, 3)
    g = random_element(symmetry, shape, element_key, dtype)
    w = jax.random.normal(w_key, shape, dtype)
    if symmetry.shift:
        w -= jnp.mean(w, axis=0, keepdims=True)
    gradients = jax.random.normal(g_key, (steps, *shape), dtype)
    tx = _as_transformation(update_rule)
    updates = _run(tx, w, gradients, as_view(view))
    moved = _run(tx, g.act(w), g.act(gradients), as_view(view))
    linear = GroupElement(g.left, g.right, jnp.zeros_like(g.shift))
    difference = moved - linear.act(updates)
    error = jnp.max(jnp.abs(difference))
    if symmetry.shift:
        centered = difference - jnp.mean(difference, axis=-2, keepdims=True)
        mean_row = jnp.mean(updates, axis=-2)
        error = jnp.maximum(jnp.max(jnp.abs(centered)), jnp.max(jnp.abs(mean_row)))
    largest = jnp.max(jnp.abs(updates))
    return float(error / jnp.where(largest > 0, largest, 1))


@dataclasses.dataclass(frozen=True)
class EquivarianceTable:
    """Errors of many update rules under many symmetries; `str()` gives the table.

    Attributes:
      rules: names of the lines.
      symmetries: names of the columns.
      errors: what `equivariance_error` says, one line for each rule.
    """

    rules: tuple[str, ...]
    symmetries: tuple[str, ...]
    errors: np.ndarray

    def __str__(self) -> str:
        width = max(len(name) for name in ("update rule", *self.rules))
        lines = ["  ".join(["update rule".ljust(width), *(s.rjust(8) for s in self.symmetries)])]
        for name, errors in zip(self.rules, self.errors, strict=True):
            lines.append("  ".join([name.ljust(width), *(f"{e:.0e}".rjust(8) for e in errors)]))
        return "\n".join(lines)


def equivariance_table(
    update_rules: Mapping[str, UpdateRule],
    shape: tuple[int, int] = (12, 8),
    key: jax.Array | None = None,
    dtype: DTypeLike | None = None,
    *,
    symmetries: Mapping[str, Symmetry] | None = None,
    steps: int = 3,
) -> EquivarianceTable:
    """Measure many update rules under many symmetries.

    Args:
      update_rules: name -> transformation or map, as in `equivariance_error`.
      shape: (m, n), rows and columns of the matrix.
      key: a JAX random key; None is `jax.random.key(0)`.
      dtype: floating dtype of parameters and gradients; None is JAX's default.
      symmetries: name -> symmetry; None: permutations and rotations of each side, and the shift.
      steps: how many updates to compare.
    """
    key = jax.random.key(0) if key is None else key
    symmetries = _GENERATORS if symmetries is None else symmetries
    errors = [
        [
            equivariance_error(rule, symmetry, shape, key, dtype, steps=steps)
            for symmetry in symmetries.values()
        ]
        for rule in update_rules.values()
    ]
    return EquivarianceTable(tuple(update_rules), tuple(symmetries), np.array(errors))


def _as_transformation(update_rule: UpdateRule) -> optax.GradientTransformation:
    if isinstance(update_rule, optax.GradientTransformation):
        return update_rule
    return optax.stateless(lambda updates, params: jax.tree.map(update_rule, updates))


def _run(
    tx: optax.GradientTransformation,
    w: Float[Array, "m n"],
    gradients: Float[Array, "steps m n"],
    view: MatrixView,
) -> Float[Array, "steps m n"]:
    """Return the update of every step, from parameter `w` on."""
    stored = next((s for s in (w.shape, w.shape[::-1]) if view.shapes(s) == [w.shape]), None)
    if stored is None:
        raise ValueError(f"View {view.pattern!r} does not open a leaf of two axes as one matrix.")

    def leaf(matrix: Array) -> Any:
        return {"w": view.close([matrix], stored)}

    params, results = leaf(w), []
    state = tx.init(params)
    for gradient in gradients:
        updates, state = tx.update(leaf(gradient), state, params)
        params = optax.apply_updates(params, updates)
        results += view.open(jax.tree.leaves(updates)[0])
    return jnp.stack(results)
