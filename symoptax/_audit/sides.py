"""Whether the rows and columns of a kernel are the two sides of its product."""

import jax
import numpy as np

from symoptax._audit.probe import Probe, integers
from symoptax._audit.report import AuditRow, Verdict
from symoptax._routing import Role, Routing

_NOT_PRODUCTS = (Role.EMBEDDING, Role.TIED_EMBEDDING, Role.OTHER)

# Singular values below this part of the largest are zero; rounding in float32 leaves some 1e-6.
_RANK = 1e-4


def side_rows(probe: Probe, routing: Routing) -> list[AuditRow]:
    """Return the leaves whose gradient over a few tokens has too many singular values.

    The gradient of a product `x W` is a sum of outer products, one for each token, between the two
    sides of W. Slices that mix the sides, because a batch axis was taken for rows or a row axis for
    a batch, have no reason to be of such a low rank.
    """
    if probe.few_tokens is None:
        why = "the loss gives no gradient for a batch cut to one sequence of 3 tokens"
    elif probe.eps > _RANK / 10:
        why = "gradients are too coarse; audit in float32"
    else:
        return _measured(routing, *probe.few_tokens)
    return [AuditRow("", "", "sides of the products", "unclear", advice=why)]


def _measured(routing: Routing, gradient: list, batch: object) -> list[AuditRow]:
    leaves = jax.tree.leaves(batch)
    tokens = max(leaves[i].size for i in integers(batch))
    rows = []
    for leaf, g in zip(routing.leaves, gradient, strict=True):
        if leaf.view is None or leaf.role in _NOT_PRODUCTS or g is None:
            continue
        rank = max(_rank(np.asarray(stack, np.float64)) for stack in leaf.view.open(g))
        if not rank or all(min(stack[-2:]) <= tokens for stack in leaf.matrices()):
            continue
        verdict: Verdict = "fails" if rank > tokens else "holds"
        advice = (
            f"the gradient over {tokens} tokens has rank {rank}: rows and columns mix input and "
            "output of the product, unless the leaf is used more than once"
        )
        claim = "sides of the product"
        shown = advice if verdict == "fails" else ""
        rows.append(AuditRow(leaf.path, str(leaf.role), claim, verdict, advice=shown))
    return rows


def _rank(stack: np.ndarray) -> int:
    s = np.linalg.svd(stack.reshape(-1, *stack.shape[-2:]), compute_uv=False)
    return int(np.max(np.sum(s > _RANK * np.max(s[:, :1], initial=1e-300), axis=-1)))
