"""A Qwen3-style decoder in Flax NNX, and what each of its parameters is.

Pre-norm RMSNorm, grouped-query attention with RMS-normalised queries and keys, rotary positions,
SwiGLU, no biases. `RULES` stands beside the model because whoever names the axes of a kernel is
the one who knows which of them are tokens, neurons or features.

Source: Qwen Team, *Qwen3 Technical Report* (2025), arXiv 2505.09388.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from symoptax import ParamRule


@dataclasses.dataclass(frozen=True)
class Qwen3Config:
    """Sizes of the decoder; `d_model` need not equal `num_heads * head_dim`."""

    vocab_size: int
    d_model: int
    num_layers: int
    d_ff: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_base: float = 1e6
    norm_eps: float = 1e-6
    tied: bool = False

    def num_params(self) -> int:
        """Count the parameters from the sizes alone."""
        attention = self.d_model * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        scales = 2 * self.d_model + 2 * self.head_dim
        layer = attention + 3 * self.d_model * self.d_ff + scales
        ends = self.vocab_size * self.d_model * (1 if self.tied else 2)
        return self.num_layers * layer + self.d_model + ends


TINY = Qwen3Config(
    vocab_size=320, d_model=32, num_layers=2, d_ff=64, num_heads=4, num_kv_heads=2, head_dim=8
)
SMALL = Qwen3Config(
    vocab_size=4096, d_model=128, num_layers=4, d_ff=384, num_heads=4, num_kv_heads=2, head_dim=32
)
PRESETS = {"tiny": TINY, "small": SMALL}

_BLOCK_RULES = [
    ParamRule("layers/*/attn/{q,k,v}_proj/kernel", "attention", "d out -> out d"),
    ParamRule("layers/*/attn/o_proj/kernel", "attention", "heads d -> d heads"),
    ParamRule("layers/*/mlp/{gate,up}_proj/kernel", "mlp_in", "d neuron -> neuron d"),
    ParamRule("layers/*/mlp/down_proj/kernel", "mlp_down", "neuron d -> neuron d"),
    ParamRule("**/scale", "other"),
]
RULES = [
    ParamRule("embed/embedding", "embedding", "vocab d -> vocab d"),
    ParamRule("lm_head/kernel", "lm_head", "d vocab -> vocab d"),
    *_BLOCK_RULES,
]
# A tied table also is the head, but the shared shift of the logits is no symmetry of its inputs.
TIED_RULES = [
    ParamRule("embed/embedding", "tied_embedding", "vocab d -> vocab d"),
    *_BLOCK_RULES,
]


def rules_for(config: Qwen3Config) -> list[ParamRule]:
    """Return the routing rules of the model that `config` describes."""
    return TIED_RULES if config.tied else RULES


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Apply rotary positions to `x` of shape (batch, length, heads, head_dim)."""
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.outer(jnp.arange(x.shape[1]), frequency)[None, :, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half], x[..., half:]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _linear(fan_in: int, fan_out: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(fan_in, fan_out, use_bias=False, rngs=rngs)


class Attention(nnx.Module):
    """Causal grouped-query attention with an RMSNorm on each head's queries and keys."""

    def __init__(self, config: Qwen3Config, rngs: nnx.Rngs) -> None:
        self.config = config
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = _linear(config.d_model, heads, rngs)
        self.k_proj = _linear(config.d_model, kv_heads, rngs)
        self.v_proj = _linear(config.d_model, kv_heads, rngs)
        self.o_proj = _linear(heads, config.d_model, rngs)
        self.q_norm = nnx.RMSNorm(config.head_dim, epsilon=config.norm_eps, rngs=rngs)
        self.k_norm = nnx.RMSNorm(config.head_dim, epsilon=config.norm_eps, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        split = (*x.shape[:-1], -1, self.config.head_dim)
        query = rotate(self.q_norm(self.q_proj(x).reshape(split)), self.config.rope_base)
        key = rotate(self.k_norm(self.k_proj(x).reshape(split)), self.config.rope_base)
        value = self.v_proj(x).reshape(split)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.reshape(*x.shape[:-1], -1))


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Qwen3Config, rngs: nnx.Rngs) -> None:
        self.gate_proj = _linear(config.d_model, config.d_ff, rngs)
        self.up_proj = _linear(config.d_model, config.d_ff, rngs)
        self.down_proj = _linear(config.d_ff, config.d_model, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """Attention and MLP, each behind an RMSNorm and a residual connection."""

    def __init__(self, config: Qwen3Config, rngs: nnx.Rngs) -> None:
        self.attn_norm = nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, rngs=rngs)
        self.attn = Attention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, rngs=rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Qwen3(nnx.Module):
    """Map token ids (batch, length) to logits (batch, length, vocab), at least float32."""

    def __init__(self, config: Qwen3Config, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(config.vocab_size, config.d_model, embedding_init=init, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, rngs=rngs)
        if not config.tied:
            self.lm_head = nnx.Linear(
                config.d_model, config.vocab_size, use_bias=False, kernel_init=init, rngs=rngs
            )
        self.tied = config.tied

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        logits = self.embed.attend(x) if self.tied else self.lm_head(x)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
