"""Is each claimed symmetry true of this model and loss? Measured on them, without training."""

from typing import Any

import jax
import numpy as np

from symoptax._audit.permutations import permutation_rows
from symoptax._audit.probe import LossFn, Probe
from symoptax._audit.report import AuditReport
from symoptax._audit.rotation import rotation_rows
from symoptax._audit.shift import shift_rows
from symoptax._audit.sides import side_rows
from symoptax._routing import Fallback, route
from symoptax.routes._auto import Rules, rules_for


def audit(
    loss_fn: LossFn,
    params: Any,
    batch: Any,
    rules: Rules,
    *,
    key: jax.Array | None = None,
    fallback: Fallback = None,
) -> AuditReport:
    """Test what the rules claim on the model and the loss themselves, without training.

    - **Permutations**: tokens (in all tables and in the batch), the neurons of every gate, up and
      down, experts (with the rows of their router and with biases) and heads are renumbered
      together, by the axes that the views name. The loss must not change. Where it does, other axes
      are tried, so that a wrong one is named.
    - **Shift**: one vector is added to all rows of heads and routers. The loss must not change, and
      the mean row of the gradient must vanish.
    - **Sides**: over a few tokens the gradient of a kernel has at most as many singular values, if
      rows and columns are the two sides of its product.
    - **Lookup**: an untied embedding has no gradient in rows of tokens that the batch lacks.
    - **Rotation** of the residual basis, for information: with norm scales made equal, do all axes
      that bear the name of the embedding's columns turn together?

    The parameters are yours, except that leaves of equal numbers (zeros, ones) get random ones.
    Audit in float32; in bfloat16 the loss resolves too little.

    Args:
      loss_fn: `(params, batch) -> loss`, a real scalar or a tuple that begins with one; without
        dropout, and with every auxiliary loss that training has.
      params: the parameter tree; random ones at initialisation will do.
      batch: any tree. Its integer arrays may hold tokens; which of them do is found out. A sequence
        or two are enough.
      rules: as in `layerwise`.
      key: a JAX random key; None is `jax.random.key(0)`.
      fallback: as in `layerwise`.

    Returns:
      A report with one line for each claim; print it.

    Raises:
      ValueError: as `route`; for a loss that is no real scalar, not finite, or random.
    """
    key = jax.random.key(0) if key is None else key
    routing = route(params, rules_for(params, rules)[1], fallback=fallback)
    probe = Probe(loss_fn, params, batch, key)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist())
    return AuditReport(
        (
            *permutation_rows(probe, routing, rng),
            *shift_rows(probe, routing, rng),
            *side_rows(probe, routing),
            *rotation_rows(probe, routing, key),
        )
    )
