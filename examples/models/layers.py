"""What the decoders share: RMSNorm, rotary positions, the attention core, gated MLPs, both ends."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

INIT = nnx.initializers.normal(0.02)


def wide(dtype: Any) -> Any:
    """Return the dtype in which norms, softmaxes and logits are computed: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


class RMSNorm(nnx.Module):
    """Divide by the root mean square: `x / sqrt(mean(x^2) + eps) * (offset + scale)`.

    Zhang and Sennrich (2019), arXiv 1910.07467; Gemma has the offset 1, so that decay of the scale
    pulls towards the plain norm. The scale starts where all factors are 1. The mean is over the
    last axes, as many as `shape` has.
    """

    def __init__(
        self, shape: int | Sequence[int], eps: float, *, offset: float = 0.0, rngs: nnx.Rngs
    ) -> None:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        init = nnx.initializers.constant(1.0 - offset)
        self.scale = nnx.Param(init(rngs.params(), sizes, jnp.float32))
        self.eps = eps
        self.offset = offset

    def __call__(self, x: jax.Array) -> jax.Array:
        y, scale = x.astype(wide(x.dtype)), self.scale[...]
        axes = tuple(range(-scale.ndim, 0))
        y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=axes, keepdims=True) + self.eps)
        return (y * jnp.broadcast_to(self.offset + scale, y.shape)).astype(x.dtype)


def rope_frequencies(head_dim: int, base: float, factor: float = 1.0) -> np.ndarray:
    """Return `base^(-2 i / head_dim) / factor`, the angle per position of each pair of features.

    Su et al. (2021), arXiv 2104.09864; the factor stretches the context that was trained, Chen et
    al. (2023), arXiv 2306.15595.
    """
    return base ** (-np.arange(0, head_dim, 2) / head_dim) / factor


@dataclasses.dataclass(frozen=True)
class Yarn:
    """How far YaRN stretches a context, and between which numbers of turns it blends.

    Peng et al. (2023), arXiv 2309.00071. Pairs that turn more than `beta_fast` times within
    `original_length` positions keep their frequency, those that turn less than `beta_slow` times
    have it divided by `factor`.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @property
    def attention_factor(self) -> float:
        """By how much rotated queries and keys grow: `0.1 ln(factor) + 1`."""
        return 0.1 * math.log(self.factor) + 1.0

    def frequencies(self, head_dim: int, base: float) -> np.ndarray:
        """Return the blend of the two frequencies of each pair, linear in the number of the pair.

        The ends of the ramp are not rounded to whole pairs, as in gpt-oss (`truncate: false`).
        """
        plain = rope_frequencies(head_dim, base)

        def pair_that_turns(times: float) -> float:
            length = self.original_length / (2 * math.pi * times)
            return head_dim * math.log(length) / (2 * math.log(base))

        low = max(pair_that_turns(self.beta_fast), 0)
        high = min(pair_that_turns(self.beta_slow), head_dim - 1)
        stretched = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
        return plain * (1 - stretched) + plain / self.factor * stretched


def rotate(x: jax.Array, frequencies: np.ndarray, factor: float = 1.0) -> jax.Array:
    """Turn the pairs (i, i + half) of `x`, (batch, length, heads, head_dim), by their positions."""
    angle = jnp.outer(jnp.arange(x.shape[1]), jnp.asarray(frequencies))[None, :, None, :]
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    first, second = jnp.split(x, 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Mix values causally: `out_t = sum_s exp(scale q_t k_s) v_s / (exp(sink) + sum_s ...)`.

    Args:
      query: (batch, length, heads, head_dim).
      key: (batch, length, kv_heads, head_dim); each serves `heads / kv_heads` neighbouring queries.
      value: as `key`.
      scale: None is `head_dim^-1/2`.
      window: how many positions a query sees, its own the last; None is all.
      sinks: (heads,), logits of a key whose value is zero; None is no such key.

    Returns:
      An array like `query`.
    """
    batch, length, heads, size = query.shape
    groups = key.shape[2]
    query = query.reshape(batch, length, groups, heads // groups, size)
    logits = jnp.einsum("btgrk,bsgk->bgrts", query, key, preferred_element_type=wide(query.dtype))
    logits *= size**-0.5 if scale is None else scale
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    logits = jnp.where(seen[None, None, None], logits, -jnp.inf)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    if sinks is not None:
        total = jnp.logaddexp(total, sinks.reshape(1, groups, heads // groups, 1, 1))
    weights = jnp.exp(logits - total).astype(value.dtype)
    return jnp.einsum("bgrts,bsgk->btgrk", weights, value).reshape(batch, length, heads, size)


def to_heads(
    d_model: int, num_heads: int, head_dim: int, rngs: nnx.Rngs, *, bias: bool = False
) -> nnx.LinearGeneral:
    """Return a projection from features to (heads, head_dim)."""
    return nnx.LinearGeneral(d_model, (num_heads, head_dim), use_bias=bias, rngs=rngs)


def from_heads(
    num_heads: int, head_dim: int, d_model: int, rngs: nnx.Rngs, *, bias: bool = False
) -> nnx.LinearGeneral:
    """Return a projection from (heads, head_dim) to features."""
    heads = (num_heads, head_dim)
    return nnx.LinearGeneral(heads, d_model, axis=(-2, -1), use_bias=bias, rngs=rngs)


def linear(fan_in: int, fan_out: int, rngs: nnx.Rngs) -> nnx.Linear:
    """Return a projection without a bias."""
    return nnx.Linear(fan_in, fan_out, use_bias=False, rngs=rngs)


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`: SwiGLU, GeGLU; Shazeer (2020), arXiv 2002.05202."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: Callable[[jax.Array], jax.Array],
        rngs: nnx.Rngs,
    ) -> None:
        self.gate_proj = linear(d_model, d_ff, rngs)
        self.up_proj = linear(d_model, d_ff, rngs)
        self.down_proj = linear(d_ff, d_model, rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def token_table(vocab_size: int, d_model: int, rngs: nnx.Rngs) -> nnx.Embed:
    """Return the embedding."""
    return nnx.Embed(vocab_size, d_model, embedding_init=INIT, rngs=rngs)


def untied_head(d_model: int, vocab_size: int, rngs: nnx.Rngs) -> nnx.Linear:
    """Return the head of a model whose embedding is not used twice."""
    return nnx.Linear(d_model, vocab_size, use_bias=False, kernel_init=INIT, rngs=rngs)


def as_logits(x: jax.Array) -> jax.Array:
    """Return logits in which a softmax loses nothing."""
    return x.astype(wide(x.dtype))
