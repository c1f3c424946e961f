"""What the mixtures of experts share: experts applied to the tokens that chose them, and losses."""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

Form = Literal["dense", "ragged"]


class Routing(NamedTuple):
    """What a router has decided for tokens.

    Attributes:
      logits: (tokens, experts).
      chosen: (tokens, k), which experts each token goes to.
      auxiliary: the losses of the router, weighted and added up.
    """

    logits: jax.Array
    chosen: jax.Array
    auxiliary: jax.Array


class ExpertMLP(Protocol):
    """An MLP with the weights of all experts, written for one.

    Args:
      x: tokens, features last.
      dot: multiplies tokens by a stack of kernels `(expert, in, out)`.
      each: lays out a stack of biases `(expert, out)` beside the tokens.
    """

    def __call__(
        self,
        x: jax.Array,
        dot: Callable[[jax.Array, jax.Array], jax.Array],
        each: Callable[[jax.Array], jax.Array],
    ) -> jax.Array: ...


def mixture(
    mlp: ExpertMLP,
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    *,
    num_experts: int,
    form: Form,
) -> jax.Array:
    """Return `sum_k weights[n, k] mlp_{chosen[n, k]}(x[n])` for tokens `x` (n, d).

    Args:
      mlp: the experts.
      x: (tokens, d).
      chosen: (tokens, k), which experts each token goes to.
      weights: (tokens, k), what their outputs count.
      num_experts: how many there are.
      form: "ragged" sorts tokens by expert and computes the chosen ones alone, with
        `jax.lax.ragged_dot`; "dense" computes every expert of every token. On a CPU, where
        `ragged_dot` has no kernel of its own, dense is faster: the small OLMoE takes 0.55 of the
        time, although three quarters of what it computes count nothing.
    """
    weights = weights.astype(x.dtype)
    if form == "dense":
        everywhere = jnp.broadcast_to(x, (num_experts, *x.shape))
        outputs = mlp(
            everywhere,
            dot=lambda x, kernel: jnp.einsum("eni,eio->eno", x, kernel),
            each=lambda bias: bias[:, None, :],
        )
        one_hot = jax.nn.one_hot(chosen, num_experts, dtype=x.dtype)
        return jnp.einsum("end,nke,nk->nd", outputs, one_hot, weights)
    order = jnp.argsort(chosen.ravel(), stable=True)
    expert, token = chosen.ravel()[order], order // chosen.shape[1]
    sizes = jnp.bincount(expert, length=num_experts)
    outputs = mlp(
        x[token],
        dot=lambda x, kernel: jax.lax.ragged_dot(x, kernel, sizes),
        each=lambda bias: bias[expert],
    )
    return jnp.zeros_like(x).at[token].add(outputs * weights.ravel()[order][:, None])


def load_balance(probabilities: jax.Array, chosen: jax.Array) -> jax.Array:
    """Return `E sum_e f_e p_e`, share of the choices times mean probability: 1 for an even load.

    A function of the router's softmax, so that the shared shift of its logits stays a symmetry.
    Fedus et al. (2021), arXiv 2101.03961. The loss in transformers is k times as large.

    Args:
      probabilities: (tokens, experts), the softmax over all experts.
      chosen: (tokens, k).
    """
    experts = probabilities.shape[-1]
    share = jnp.bincount(chosen.ravel(), length=experts) / chosen.size
    return experts * jnp.sum(share * jnp.mean(probabilities, axis=0))


def z_loss(logits: jax.Array) -> jax.Array:
    """Return `mean(logsumexp(logits)^2)`, which keeps logits small and sees their shared shift.

    Zoph et al. (2022), arXiv 2202.08906.
    """
    return jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)))
