"""How healthy an optimizer is while it trains: a few numbers per role, every so many steps."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from symoptax._paths import named_leaves, paired_leaves
from symoptax._routing import Fallback, ParamRule, Role, RoutedLeaf, route
from symoptax._unit import nonzero, unit_scale

# Each brings the estimate from below to the spectral norm; five suffice for two digits.
_POWER_STEPS = 8


class MonitorState(NamedTuple):
    """State of `monitor`: steps taken, and the latest numbers by role and name."""

    step: jax.Array
    values: dict[str, dict[str, jax.Array]]


def monitor(
    rules: Sequence[ParamRule], every: int = 100, *, fallback: Fallback = None
) -> optax.GradientTransformation:
    """Measure what passes, every so many steps, and pass it on unchanged.

    At the end of a chain it measures updates, after `momentum` momenta. The numbers of a role are
    means over its matrices; with the singular values s of an m x n matrix U and k = min(m, n):

    - `rms`: root mean square of the entries.
    - `spectral_norm`: the largest s, by power iteration.
    - `effective_rank`: `(sum s^2)^2 / sum s^4`, between 1 and k; 0 for a zero matrix.
    - `orthogonality_error`: root mean square of `s^2 / mean(s^2) - 1`; 0 for a polar factor.
    - `row_norm_spread`: standard deviation of the norms of the rows that are not zero, by their
      mean; 0 after a row norm.
    - `zero_rows`: share of the rows that are zero.
    - `shared_shift`: share of the size that lies in the mean row, `sqrt(m) |mean row| / |U|`;
      0 for a centered update.
    - `to_weight`: root mean square of U by that of the parameter.

    For "other" there are `rms` and `to_weight` alone. Weight decay that was added before is
    measured with the rest: it leaves no row zero, and no update quite centered.

    Args:
      rules: what each parameter is; see `route`.
      every: measure this step and its multiples, counted from 1; before that all numbers are 0.
      fallback: as in `route`.

    Returns:
      A transformation whose state holds the numbers; `monitored(state)` finds them.

    Raises:
      ValueError: in `init`, as `route`.
    """
    if every < 1:
        raise ValueError(f"every={every}: need at least 1.")

    def init(params: optax.Params) -> MonitorState:
        shapes = jax.eval_shape(lambda p: measure(p, p, rules, fallback=fallback), params)
        return MonitorState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(shapes))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MonitorState]:
        beside = updates if params is None else params
        step = jnp.asarray(optax.safe_increment(state.step))
        values = jax.lax.cond(
            step % every == 0,
            lambda: measure(updates, beside, rules, fallback=fallback),
            lambda: state.values,
        )
        return _after(values, updates), MonitorState(step, values)

    return optax.GradientTransformation(init, update)


def monitored(state: optax.OptState) -> dict[str, float]:
    """Return the numbers of every `monitor` in an optimizer state, as `role/name`.

    Several monitors in one state are numbered in the order in which they stand, `0/role/name`.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, MonitorState))
    found = [node for node in nodes if isinstance(node, MonitorState)]
    result = {}
    for number, node in enumerate(found):
        prefix = f"{number}/" if len(found) > 1 else ""
        for name, value in named_leaves(jax.device_get(node.values))[0]:
            result[f"{prefix}{name}"] = float(value)
    return result


def measure(
    updates: optax.Updates,
    params: optax.Params,
    rules: Sequence[ParamRule],
    *,
    fallback: Fallback = None,
) -> dict[str, dict[str, jax.Array]]:
    """Return what `monitor` measures, by role and name, for any tree like the parameters.

    Gradients, momenta out of an optimizer state, updates; a pure function, to be jitted. A part of
    the leaves will do, of both trees the same, also as a dictionary of leaves by path:

    >>> updates = {"mlp/up/kernel": jnp.ones((4, 6)), "mlp/up/bias": jnp.ones(6)}
    >>> rules = [ParamRule("**/kernel", "mlp_in", "d out -> out d"), ParamRule("**/bias", "other")]
    >>> float(measure(updates, updates, rules)["mlp_in"]["effective_rank"])
    1.0

    Args:
      updates: what is measured.
      params: the parameters, of which `to_weight` alone depends.
      rules: what each leaf is; see `route`.
      fallback: as in `route`.

    Raises:
      ValueError: as `route`, and for trees that differ.
    """
    routing = route(updates, rules, fallback=fallback)
    numbers: dict[Role, list[dict[str, jax.Array]]] = {}
    triples = paired_leaves(updates, params, "The parameters")
    for leaf, (_, update, param) in zip(routing.leaves, triples, strict=True):
        numbers.setdefault(leaf.role, []).extend(_numbers(leaf, update, param))
    return {
        str(role): {
            name: jnp.mean(jnp.concatenate([each[name].ravel() for each in measured]))
            for name in measured[0]
        }
        for role, measured in numbers.items()
    }


def _after(values: dict[str, dict[str, jax.Array]], updates: optax.Updates) -> optax.Updates:
    """Return the updates as they are, but not before they are measured.

    A size is never negative, which XLA does not know. Parameters that are updated in place thus
    wait for the measurement that reads them; otherwise XLA copies them all for it, in every step.
    """
    if not values:
        return updates
    never = next(iter(values.values()))["rms"] < 0
    return jax.tree.map(lambda u: jnp.where(never, jnp.zeros_like(u), u), updates)


def _numbers(leaf: RoutedLeaf, update: Array, param: Array) -> list[dict[str, jax.Array]]:
    if leaf.view is None:
        rms, weight = (jnp.sqrt(jnp.mean(_square(x))) for x in (update, param))
        return [{"rms": rms, "to_weight": rms / nonzero(weight)}]
    pairs = zip(leaf.view.open(update), leaf.view.open(param), strict=True)
    return [_of_matrices(u, p) for u, p in pairs]


def _of_matrices(
    update: Float[Array, "*batch m n"], param: Float[Array, "*batch m n"]
) -> dict[str, Float[Array, " *batch"]]:
    # In units of the largest entry, so that no square leaves the range of float32.
    u, unit = unit_scale(update.astype(jnp.float32))
    unit = unit[..., 0, 0]
    m, n = u.shape[-2:]
    gram = u @ u.mT if m < n else u.mT @ u
    total = jnp.sum(_square(u), axis=(-2, -1))
    moment = jnp.sum(_square(gram), axis=(-2, -1))
    rank = jnp.square(total) / nonzero(moment)
    norms = jnp.linalg.norm(u, axis=-1)
    seen = norms > 0
    mean = jnp.sum(norms, -1) / jnp.maximum(jnp.sum(seen, -1), 1)
    off = jnp.where(seen, norms - mean[..., None], 0)
    spread = jnp.sqrt(jnp.sum(_square(off), -1) / jnp.maximum(jnp.sum(seen, -1), 1))
    rms = jnp.sqrt(total / (m * n)) * unit
    weight = jnp.sqrt(jnp.mean(_square(param), axis=(-2, -1)))
    shift = jnp.sqrt(m * jnp.sum(_square(jnp.mean(u, axis=-2)), -1) / nonzero(total))
    return {
        "rms": rms,
        "spectral_norm": jnp.sqrt(_largest_eigenvalue(gram)) * unit,
        "effective_rank": rank,
        "orthogonality_error": jnp.sqrt(jnp.maximum(min(m, n) / nonzero(rank) - 1, 0)),
        "row_norm_spread": spread / nonzero(mean),
        "zero_rows": jnp.mean(~seen, axis=-1, dtype=jnp.float32),
        "shared_shift": shift,
        "to_weight": rms / nonzero(weight),
    }


def _largest_eigenvalue(gram: Float[Array, "*batch k k"]) -> Float[Array, " *batch"]:
    """Estimate from below, by power iteration from the largest column."""
    largest = jnp.argmax(jnp.linalg.norm(gram, axis=-2), axis=-1)[..., None, None]
    vector = jnp.take_along_axis(gram, largest, axis=-1)
    for _ in range(_POWER_STEPS):
        vector = gram @ (vector / nonzero(jnp.linalg.norm(vector, axis=-2, keepdims=True)))
    return jnp.linalg.norm(vector[..., 0], axis=-1)


def _square(x: Array) -> Array:
    return jnp.square(x.astype(jnp.float32))
