"""Whether the rows and columns of a kernel are the two sides of its product."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from symoptax._audit.probe import Probe
from symoptax._audit.report import AuditRow
from symoptax._routing import Role, Routing

_NOT_PRODUCTS = (Role.EMBEDDING, Role.TIED_EMBEDDING, Role.OTHER)
_RANK = 1e-4


def side_rows(probe: Probe, routing: Routing) -> list[AuditRow]:
    """Return the leaves whose gradient over a few tokens has too many singular values.

    The gradient of a product `x W` is a sum of outer products, one for each token, between the two
    sides of W. Slices that mix the sides, because a batch axis was taken for rows or a row axis for
    a batch, have no reason to be of such a low rank.
    """
    batch, tokens = _few_tokens(probe.batch)
    try:
        gradient = probe.gradient(batch)
    except (TypeError, ValueError, IndexError) as error:
        text = f"the loss does not take a batch cut to one sequence of 3 tokens ({error!r:.60})"
        return [AuditRow("", "", "sides of the products", "unclear", advice=text)]
    rows = []
    for leaf, g in zip(routing.leaves, gradient, strict=True):
        if leaf.view is None or leaf.role in _NOT_PRODUCTS or g is None:
            continue
        ranks = [_rank(np.asarray(stack, np.float64)) for stack in leaf.view.open(g)]
        told = any(min(stack[-2:]) > tokens for stack in leaf.matrices())
        if not told or not max(ranks):
            continue
        row = AuditRow(leaf.path, str(leaf.role), "sides of the product", "holds")
        if max(ranks) > tokens:
            text = (
                f"the gradient over {tokens} tokens has rank {max(ranks)}: rows and columns mix "
                "input and output of the product, unless the leaf is used more than once"
            )
            row = AuditRow(leaf.path, str(leaf.role), row.claim, "fails", advice=text)
        rows.append(row)
    return rows


def _few_tokens(batch: Any) -> tuple[Any, int]:
    """Return one sequence of three tokens."""

    def cut(x: Any) -> Any:
        x = jnp.asarray(x)
        return x[:1, :3] if x.ndim > 1 else x[:1] if x.ndim else x

    few = jax.tree.map(cut, batch)
    sizes = [x.size for x in jax.tree.leaves(few) if x.ndim > 1 and x.dtype.kind in "iu"]
    return few, max(sizes, default=3)


def _rank(stack: np.ndarray) -> int:
    s = np.linalg.svd(stack.reshape(-1, *stack.shape[-2:]), compute_uv=False)
    return int(np.max(np.sum(s > _RANK * np.max(s[:, :1], initial=1e-300), axis=-1)))
