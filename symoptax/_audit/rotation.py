"""Whether the basis of the residual stream can be turned: for information, as norms forbid it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from symoptax._audit.families import VOCABULARY
from symoptax._audit.probe import Probe
from symoptax._audit.report import AuditRow
from symoptax._routing import Routing


def rotation_rows(probe: Probe, routing: Routing, key: jax.Array) -> list[AuditRow]:
    """Turn every axis with the name of a table's columns, while norm scales are all equal."""
    tables = [(i, leaf) for i, leaf in enumerate(routing.leaves) if leaf.role in VOCABULARY]
    if not tables or tables[0][1].view is None:
        return []
    first, (name, *packed) = tables[0][0], tables[0][1].view.cols.split()
    axes, equal = {}, {}
    for index, leaf in enumerate(routing.leaves):
        if leaf.view is not None and leaf.shape is not None and name in leaf.view.names:
            axes[index] = leaf.view.locate(name, leaf.shape)
    size = axes[first].length
    if packed or any(
        axis.outer * axis.inner > 1 or axis.sizes != (size,) for axis in axes.values()
    ):
        return []
    for index, leaf in enumerate(routing.leaves):
        if leaf.view is None and size in (leaf.shape or ()):
            equal[index] = _without_direction(probe.leaves[index], (leaf.shape or ()).index(size))
    turn = jax.random.orthogonal(key, size)

    def turned(index: int) -> Array:
        leaf, axis = probe.leaves[index], axes[index].axis
        rotated = jnp.tensordot(leaf, turn.astype(leaf.dtype), ((axis,), (0,)), precision="highest")
        return jnp.moveaxis(rotated, -1, axis)

    still = probe.loss(equal)
    change = abs(probe.loss({**equal, **{index: turned(index) for index in axes}}) - still)
    control = abs(probe.loss({**equal, first: turned(first)}) - still)
    if not control > 20 * probe.resolution:
        return []
    holds = change <= max(10 * probe.resolution, 1e-3 * min(control, 1.0))
    text = (
        "the basis of the residual stream can be turned, as long as norm scales are equal"
        if holds
        else f"the basis of the residual stream cannot be turned: a LayerNorm, or an axis {name!r} "
        "with another name somewhere"
    )
    return [AuditRow("", "", f"O({name}) of all blocks", "note", change, control, text)]


def _without_direction(leaf: Array, axis: int) -> Array:
    """Replace scales by their mean, and biases, whose mean is small, by zero."""
    scale = jnp.abs(jnp.mean(leaf)) > 0.7 * jnp.sqrt(jnp.mean(jnp.square(leaf)))
    mean = jnp.mean(leaf, axis=axis, keepdims=True)
    return jnp.broadcast_to(jnp.where(scale, mean, 0), leaf.shape)
