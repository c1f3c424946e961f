"""Whether one vector added to all rows of a head or a router changes the loss."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from symoptax._audit.families import VOCABULARY
from symoptax._audit.probe import Probe, integers
from symoptax._audit.report import AuditRow, Verdict
from symoptax._routing import Role, RoutedLeaf, Routing

_OTHER = {
    Role.LM_HEAD: Role.LM_HEAD_NO_SHIFT,
    Role.ROUTER: Role.ROUTER_NO_SHIFT,
    Role.LM_HEAD_NO_SHIFT: Role.LM_HEAD,
    Role.ROUTER_NO_SHIFT: Role.ROUTER,
}

# The mean row of the gradient, as a part of what it is for gradients all of one direction.
_MEAN_ROW = 1e-3


def shift_rows(probe: Probe, routing: Routing, rng: np.random.Generator) -> list[AuditRow]:
    """Return what the shift does to every head and router, and what unseen tokens say of tables."""
    rows = []
    for index, leaf in enumerate(routing.leaves):
        if leaf.role in _OTHER:
            rows.append(_shift_row(probe, routing, index, rng))
        if leaf.role in (Role.EMBEDDING, Role.TIED_EMBEDDING):
            rows += _lookup_rows(probe, leaf, index)
    return rows


def _shift_row(probe: Probe, routing: Routing, index: int, rng: np.random.Generator) -> AuditRow:
    leaf = routing.leaves[index]
    claims = leaf.role in (Role.LM_HEAD, Role.ROUTER)
    seed = int(rng.integers(2**31))

    def change(size: float, half: bool = False) -> float:
        again = np.random.default_rng(seed)
        return probe.change({index: _shifted(probe, leaf, index, size, again, half)})

    # The larger the vector, the clearer a z-loss, and the more experts that rounding exchanges.
    size = next((s for s in (1.0, 10.0) if change(s, half=True) > 0.1), 100.0)
    control, moved = change(size, half=True), change(size)
    # Logits as large as the shift are rounded like it.
    tolerance = max(probe.resolution * (1 + size / 30), 3e-4 * min(control, 1.0))
    holds = moved <= tolerance and _mean_row(leaf, probe.gradient[index]) <= _MEAN_ROW
    claim = "shift" if claims else "no shift"
    row = AuditRow(leaf.path, str(leaf.role), claim, "holds", moved, control)
    if control <= 20 * tolerance:
        return _replace(row, "unclear", "this leaf hardly changes the loss at all")
    if holds == claims:
        return row
    if holds:
        text = f"the shift is a symmetry here: role {str(_OTHER[leaf.role])!r} would center it"
        return _replace(row, "note", text)
    # Far out, a z-loss grows with the square; caps, sigmoids and norms saturate.
    far, farther = change(100.0), change(200.0)
    return _replace(row, "fails", _advice(routing, leaf, 3 * far < farther < np.inf))


def _advice(routing: Routing, leaf: RoutedLeaf, z_loss: bool) -> str:
    role = _OTHER[leaf.role]
    if leaf.role == Role.LM_HEAD and sum(x.role in VOCABULARY for x in routing.leaves) == 1:
        cause, role = "tied with the embedding", Role.TIED_EMBEDDING
    elif z_loss:
        cause = "a z-loss sees the shift"
    elif leaf.role == Role.ROUTER:
        cause = "sigmoid scores or a bias, or not a router at all"
    else:
        cause = "soft-capped logits"
    return f"{cause}: role {str(role)!r}, not centered; or rows and columns are swapped in the view"


def _lookup_rows(probe: Probe, leaf: RoutedLeaf, index: int) -> list[AuditRow]:
    """Tell a table that is only looked up from one that also makes the logits."""
    assert leaf.view is not None
    gradient, batch = probe.few_tokens or (probe.gradient, probe.batch)
    (stack,) = leaf.view.open(gradient[index])
    rows = int(jnp.sum(jnp.any(stack.reshape(-1, *stack.shape[-2:]) != 0, axis=(0, -1))))
    arrays = jax.tree.leaves(batch)
    ids = [np.ravel(arrays[i]) for i in integers(batch)]
    seen = len(np.unique(np.concatenate(ids))) if ids else stack.shape[-2]
    if seen >= stack.shape[-2]:
        return []
    tied = leaf.role == Role.TIED_EMBEDDING
    row = AuditRow(
        leaf.path, str(leaf.role), "also the head" if tied else "only looked up", "holds"
    )
    if (rows > seen) == tied:
        return [row]
    if tied:
        text = f"only {rows} rows of {seen} tokens have a gradient: not the head, role 'embedding'"
        return [_replace(row, "fails", text)]
    text = (
        f"{rows} rows have a gradient, and the batch has {seen} tokens: tied with the head, role "
        "'tied_embedding'; or rows and columns are swapped in the view"
    )
    return [_replace(row, "fails", text)]


def _replace(row: AuditRow, verdict: Verdict, advice: str) -> AuditRow:
    return AuditRow(row.block, row.role, row.claim, verdict, row.change, row.control, advice)


def _shifted(
    probe: Probe,
    leaf: RoutedLeaf,
    index: int,
    size: float,
    rng: np.random.Generator,
    half: bool = False,
) -> Array:
    """Add one vector, `size` times as large as a row, to all rows, for control to half of them."""
    assert leaf.view is not None
    stored = probe.leaves[index]
    stacks = []
    for stack in leaf.view.open(stored):
        m, n = stack.shape[-2:]
        length = size * jnp.sqrt(jnp.mean(jnp.square(stack)))
        vector = length * rng.normal(size=(*stack.shape[:-2], 1, n))
        rows = rng.permuted(np.arange(m) % 2 if half else np.ones(m))[:, None]
        stacks.append(
            (stack + vector * rows.reshape((1,) * (stack.ndim - 2) + (m, 1))).astype(stack.dtype)
        )
    return leaf.view.close(stacks, stored.shape)


def _mean_row(leaf: RoutedLeaf, gradient: Array) -> float:
    """Return the largest of `|sum of rows| / (sqrt(m) |G|)` over all matrices: 1 for equal rows."""
    assert leaf.view is not None
    worst = 0.0
    for stack in leaf.view.open(gradient):
        total = jnp.sqrt(jnp.sum(jnp.square(jnp.sum(stack, axis=-2)), axis=-1))
        norm = jnp.sqrt(stack.shape[-2] * jnp.sum(jnp.square(stack), axis=(-2, -1)))
        worst = max(worst, float(jnp.max(total / jnp.where(norm > 0, norm, 1))))
    return worst
