"""Where every leaf will be computed on a mesh, and what that costs, before anything runs."""

import dataclasses
import math
import warnings
from typing import Any

import jax
import optax

from symoptax._mesh.layouts import on_mesh
from symoptax._mesh.record import Decision, MeshWarning, recording
from symoptax._paths import named_leaves
from symoptax._state_shardings import state_shardings


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """Leaves that are computed together.

    Attributes:
      leaves: their names.
      map: the name of the map, or "elementwise".
      shape: the stack that they make together, `(*batch, m, n)`, or the shape of the leaf.
      where: where it is computed, in words.
      sent: bytes that one device sends in a step.
      flops: floating-point operations of one device in a step, in matrix products.
      memory: bytes of one device in passing, for the stack in float32 and its Gram matrices.
    """

    leaves: tuple[str, ...]
    map: str
    shape: tuple[int, ...]
    where: str
    sent: float = 0.0
    flops: float = 0.0
    memory: float = 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `plan` found; prints as a table.

    Attributes:
      rows: one for every group of leaves.
      warnings: what costs more than it had to.
    """

    rows: tuple[PlanRow, ...]
    warnings: tuple[str, ...]

    @property
    def sent(self) -> float:
        """Bytes that one device sends in a step."""
        return sum(row.sent for row in self.rows)

    @property
    def flops(self) -> float:
        """Floating-point operations of one device in a step, in matrix products."""
        return sum(row.flops for row in self.rows)

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            shape = " x ".join(map(str, row.shape))
            lines.append(f"{', '.join(row.leaves)}: {row.map}, {shape}")
            numbers = f"{row.sent / 2**20:.4g} MiB sent, {row.flops / 1e9:.3g} GF"
            lines.append(f"    {row.where}; {numbers}, {row.memory / 2**20:.3g} MiB")
        lines.append(
            f"One device sends {self.sent / 2**20:.4g} MiB and does {self.flops / 1e9:.3g} GF in "
            "matrix products."
        )
        return "\n".join([*lines, *(f"Warning: {text}" for text in self.warnings)])


def plan(
    tx: optax.GradientTransformation, params: Any, grads: Any = None, *, strict: bool = False
) -> Plan:
    """Return where every leaf will be computed, and what one device sends and multiplies.

    It is read off the program of `on_mesh(tx, params)` while that is traced, so it is what the
    compiled program does. On Explicit mesh axes that is the program of `tx` itself; on Auto axes,
    where only XLA knows how parameters are spread, `tx` without `on_mesh` takes the same way for
    the usual layouts. `collectives` counts what the compiled program sends.

    Args:
      tx: the transformation, of the whole tree.
      params: arrays on a mesh, or `jax.ShapeDtypeStruct`s with a `NamedSharding`.
      grads: the gradients, where their dtype is another, which is then that of what is sent.
      strict: raise for a plan that gathers or repeats what could be shared.

    Raises:
      ValueError: for parameters that do not lie on a mesh, and with `strict` for a plan with
        warnings.
    """
    told = on_mesh(tx, params)
    state = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        jax.eval_shape(tx.init, params),
        state_shardings(tx, params),
    )
    with recording() as decisions, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MeshWarning)
        given = params if grads is None else grads
        jax.jit(lambda *args: told.update(*args)).trace(given, state, params)
    problems = tuple(str(w.message) for w in caught if issubclass(w.category, MeshWarning))
    if strict and problems:
        raise ValueError("The plan costs more than it had to:\n" + "\n".join(problems))
    rows = [_row(decision) for decision in decisions]
    taken = {name for row in rows for name in row.leaves}
    for name, leaf in named_leaves(params)[0]:
        if not any(name == other or name.endswith(f"/{other}") for other in taken):
            rows.append(PlanRow((name,), "elementwise", tuple(leaf.shape), "where it lies"))
    return Plan(tuple(rows), problems)


def _row(decision: Decision) -> PlanRow:
    leaves, name, shape, placement, sent = decision
    if placement is None:
        return PlanRow(leaves, name, shape, "where it lies", sent)
    matrices = placement.matrices
    where = "1 matrix" if matrices == 1 else f"{matrices} matrices"
    if placement.shared > 1:
        where += f" on {placement.shared} devices that share the longer side"
    else:
        where += " on a device"
    if placement.repeated > 1:
        where += f", repeated {placement.repeated} times"
    if placement.padded > math.prod(shape[:-2]):
        where += f", padded to {placement.padded}"
    return PlanRow(leaves, name, shape, where, sent, placement.flops, placement.memory)
