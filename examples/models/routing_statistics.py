"""How a router spreads tokens over its experts, as numbers for a plot."""

import math

import jax
import jax.numpy as jnp

from models.experts import Routing, z_loss

# Where the layer that is farthest from even says more than the mean over layers.
_WORST = {
    "load_max": jnp.max,
    "load_min": jnp.min,
    "load_cv": jnp.max,
    "load_entropy": jnp.min,
    "router_entropy": jnp.min,
    "idle": jnp.max,
    "dropped": jnp.max,
    "logit_max": jnp.max,
}


def expert_statistics(logits: jax.Array, chosen: jax.Array) -> dict[str, jax.Array]:
    """Return the statistics of one layer, computed in float32.

    With n_e of all c choices for expert e of E, and z the logits of a token:

    - `load`: `E n_e / c` of every expert, 1 where it is even; (experts,).
    - `load_max`, `load_min`: its extremes, between 0 and E / k.
    - `load_cv`: standard deviation of the n_e by their mean; 0 is even.
    - `load_entropy`: `-sum p log p / log E` with `p = n_e / sum n`; 1 is even, 0 is one expert.
    - `idle`: share of the experts with n_e = 0.
    - `dropped`: `1 - sum n / c`, the choices that no expert computes; a form with a limit on its
      load would name them `E`. 0 for both forms of `mixture`, which have no limit.
    - `router_entropy`: the entropy of `softmax(z)` over all experts by log E, mean over tokens,
      also where the model takes the top k first.
    - `chosen_entropy`: that of the softmax over the chosen by log k. Its weights are those of
      gpt-oss, and those of OLMoE divided by their sum: the order of top k and softmax does not
      matter to it.
    - `logit_rms`, `logit_max`: root mean square and largest magnitude of the logits.
    - `z`: `mean(logsumexp(z)^2)`.
    - `logit_shift`: root mean square over tokens of `mean_e z_e`, the part of the logits that a
      softmax does not see.

    Args:
      logits: (tokens, experts), of the router, its bias added.
      chosen: (tokens, k).
    """
    logits, experts = logits.astype(jnp.float32), logits.shape[-1]
    counts = jnp.bincount(chosen.ravel(), length=experts).astype(jnp.float32)
    computed = jnp.sum(counts)
    load = experts * counts / chosen.size
    # A choice that is dropped has the logit that `E`, beyond the end, is clipped to.
    of_chosen = jnp.take_along_axis(logits, jnp.minimum(chosen, experts - 1), axis=-1)
    return {
        "load": load,
        "load_max": jnp.max(load),
        "load_min": jnp.min(load),
        "load_cv": jnp.std(counts) / jnp.maximum(jnp.mean(counts), 1 / experts),
        "load_entropy": _evenness(counts / jnp.maximum(computed, 1)),
        "idle": jnp.mean(counts == 0, dtype=jnp.float32),
        "dropped": 1 - computed / chosen.size,
        "router_entropy": jnp.mean(_evenness(jax.nn.softmax(logits, axis=-1))),
        "chosen_entropy": jnp.mean(_evenness(jax.nn.softmax(of_chosen, axis=-1))),
        "logit_rms": jnp.sqrt(jnp.mean(jnp.square(logits))),
        "logit_max": jnp.max(jnp.abs(logits)),
        "z": z_loss(logits),
        "logit_shift": jnp.sqrt(jnp.mean(jnp.square(jnp.mean(logits, axis=-1)))),
    }


def model_statistics(routing: Routing) -> dict[str, jax.Array]:
    """Return the statistics of all layers: means, `..._worst` layers, and every load.

    Args:
      routing: layers along the first axis, as the models' `routing` returns it.

    Returns:
      Numbers by name, and the `load`, (layers, experts).
    """
    layers = jax.vmap(expert_statistics)(routing.logits, routing.chosen)
    load = layers.pop("load")
    means = {name: jnp.mean(values) for name, values in layers.items()}
    worst = {f"{name}_worst": pick(layers[name]) for name, pick in _WORST.items()}
    return {**means, **worst, "load": load}


def _evenness(p: jax.Array) -> jax.Array:
    """Return the entropy of probabilities by that of even ones; 0 for a single one."""
    return jnp.sum(jax.scipy.special.entr(p), axis=-1) / (math.log(p.shape[-1]) or 1.0)
