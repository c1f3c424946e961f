"""A Qwen3-style decoder in Flax NNX, and what each of its parameters is.

Pre-norm RMSNorm, grouped-query attention with RMS-normalised queries and keys, rotary positions,
SwiGLU, no biases. `RULES` stands beside the model because whoever names the axes of a kernel is
the one who knows which of them are tokens, neurons or features.

Source: Qwen Team, *Qwen3 Technical Report* (2025), arXiv 2505.09388.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from models.hugging_face import ENDS, from_hub, in_every_layer, to_hub
from models.layers import (
    GatedMLP,
    RMSNorm,
    as_logits,
    attention,
    linear,
    rope_frequencies,
    rotate,
    token_table,
    untied_head,
)
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
# Qwen/Qwen3-0.6B: 596,049,920 parameters.
QWEN3_0_6B = Qwen3Config(
    vocab_size=151936,
    d_model=1024,
    num_layers=28,
    d_ff=3072,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    tied=True,
)
# Trained by Lau and Su (2026), arXiv 2605.18106.
PAPER = dataclasses.replace(QWEN3_0_6B, num_layers=20, tied=False)
PRESETS = {"tiny": TINY, "small": SMALL, "paper": PAPER, "0.6b": QWEN3_0_6B}

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


class Attention(nnx.Module):
    """Causal grouped-query attention with an RMSNorm on each head's queries and keys."""

    def __init__(self, config: Qwen3Config, rngs: nnx.Rngs) -> None:
        self.config = config
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = linear(config.d_model, heads, rngs)
        self.k_proj = linear(config.d_model, kv_heads, rngs)
        self.v_proj = linear(config.d_model, kv_heads, rngs)
        self.o_proj = linear(heads, config.d_model, rngs)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, rngs=rngs)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        split = (*x.shape[:-1], -1, self.config.head_dim)
        frequencies = rope_frequencies(self.config.head_dim, self.config.rope_base)
        query = rotate(self.q_norm(self.q_proj(x).reshape(split)), frequencies)
        key = rotate(self.k_norm(self.k_proj(x).reshape(split)), frequencies)
        mixed = attention(query, key, self.v_proj(x).reshape(split))
        return self.o_proj(mixed.reshape(*x.shape[:-1], -1))


class Layer(nnx.Module):
    """Attention and MLP, each behind an RMSNorm and a residual connection."""

    def __init__(self, config: Qwen3Config, rngs: nnx.Rngs) -> None:
        self.attn_norm = RMSNorm(config.d_model, config.norm_eps, rngs=rngs)
        self.attn = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps, rngs=rngs)
        self.mlp = GatedMLP(config.d_model, config.d_ff, nnx.silu, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Qwen3(nnx.Module):
    """Map token ids (batch, length) to logits (batch, length, vocab), at least float32."""

    def __init__(self, config: Qwen3Config, rngs: nnx.Rngs) -> None:
        self.embed = token_table(config.vocab_size, config.d_model, rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.d_model, config.norm_eps, rngs=rngs)
        if not config.tied:
            self.lm_head = untied_head(config.d_model, config.vocab_size, rngs)
        self.tied = config.tied

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return as_logits(self.embed.attend(x) if self.tied else self.lm_head(x))


# `Qwen3ForCausalLM` of transformers.
HUB = [
    *ENDS,
    *in_every_layer(
        {
            "input_layernorm.weight": ("attn_norm/scale",),
            "post_attention_layernorm.weight": ("mlp_norm/scale",),
            **{f"self_attn.{n}_norm.weight": (f"attn/{n}_norm/scale",) for n in "qk"},
            **{
                f"self_attn.{n}_proj.weight": (f"attn/{n}_proj/kernel", "input out -> out input")
                for n in "qkvo"
            },
            **{
                f"mlp.{n}_proj.weight": (f"mlp/{n}_proj/kernel", "input out -> out input")
                for n in ("gate", "up", "down")
            },
        }
    ),
]


def from_hugging_face(config: Qwen3Config, state_dict: Mapping[str, Any]) -> nnx.State:
    """Return the parameters of `Qwen3(config, ...)` from a state dict of the hub."""
    model = nnx.eval_shape(lambda: Qwen3(config, nnx.Rngs(0)))
    shapes = nnx.as_pure(nnx.state(model, nnx.Param))
    return from_hub(HUB, shapes, state_dict, tied=config.tied)


def to_hugging_face(params: nnx.State) -> dict[str, np.ndarray]:
    """Return the state dict of pure parameters: the inverse of `from_hugging_face`."""
    return to_hub(HUB, params)
