"""A Gemma 3-style decoder (text only) in Flax NNX, and what each of its parameters is.

An RMSNorm with factors `1 + scale` before and after each block, on queries and on keys; GeGLU;
five layers of attention within a sliding window, then one of attention to everything, with rotary
positions of other frequencies; embeddings that are scaled by `sqrt(d)` and also are the head.

Source: Gemma Team, *Gemma 3 Technical Report* (2025), arXiv 2503.19786.
"""

import dataclasses
import functools
import math
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
    from_heads,
    rope_frequencies,
    rotate,
    to_heads,
    token_table,
    untied_head,
)
from symoptax import ParamRule


@dataclasses.dataclass(frozen=True)
class Gemma3Config:
    """Sizes of the decoder.

    Attributes:
      query_scalar: scores are divided by its square root; `query_pre_attn_scalar` on the hub.
      window: how many positions a local layer sees.
      global_every: of so many layers, the last sees everything.
      rope_factor: by how much global positions are stretched: 8 from the 4B model on.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    d_ff: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_scalar: float
    window: int
    global_every: int = 6
    rope_base: float = 1e6
    rope_factor: float = 1.0
    local_rope_base: float = 1e4
    norm_eps: float = 1e-6
    tied: bool = True


TINY = Gemma3Config(
    vocab_size=320,
    d_model=32,
    num_layers=3,
    d_ff=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    query_scalar=8,
    window=4,
    global_every=3,
)
SMALL = Gemma3Config(
    vocab_size=4096,
    d_model=128,
    num_layers=6,
    d_ff=384,
    num_heads=4,
    num_kv_heads=1,
    head_dim=32,
    query_scalar=32,
    window=64,
    tied=False,
)
# google/gemma-3-1b-pt: 999,885,952 parameters.
GEMMA3_1B = Gemma3Config(
    vocab_size=262144,
    d_model=1152,
    num_layers=26,
    d_ff=6912,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    query_scalar=256,
    window=512,
)
# google/gemma-3-270m: 268,098,176 parameters.
GEMMA3_270M = dataclasses.replace(GEMMA3_1B, d_model=640, num_layers=18, d_ff=2048)
# Trained by Lau and Su (2026), arXiv 2605.18106.
PAPER = dataclasses.replace(GEMMA3_1B, num_layers=18, tied=False)
PRESETS = {
    "tiny": TINY,
    "small": SMALL,
    "paper": PAPER,
    "270m": GEMMA3_270M,
    "1b": GEMMA3_1B,
}

_BLOCK_RULES = [
    ParamRule("layers/*/attn/{q,k,v}_proj/kernel", "attention", "d head k -> (head k) d"),
    ParamRule("layers/*/attn/o_proj/kernel", "attention", "head k d -> d (head k)"),
    ParamRule("layers/*/mlp/{gate,up}_proj/kernel", "mlp_in", "d neuron -> neuron d"),
    ParamRule("layers/*/mlp/down_proj/kernel", "mlp_down", "neuron d -> neuron d"),
    ParamRule("**/scale", "other"),
]
RULES = [
    ParamRule("embed/embedding", "embedding", "vocab d -> vocab d"),
    ParamRule("lm_head/kernel", "lm_head", "d vocab -> vocab d"),
    *_BLOCK_RULES,
]
TIED_RULES = [
    ParamRule("embed/embedding", "tied_embedding", "vocab d -> vocab d"),
    *_BLOCK_RULES,
]


def rules_for(config: Gemma3Config) -> list[ParamRule]:
    """Return the routing rules of the model that `config` describes."""
    return TIED_RULES if config.tied else RULES


def multipliers_for(config: Gemma3Config) -> dict[str, float]:
    """Return the factor of the embedding's rate, the default of 20 over `sqrt(d)`.

    The model multiplies the rows that it looks up by `sqrt(d)`, and what they move too. In the
    authors' settings as well, the embedding has 100 times the rate of the head in models that read
    it as it is, and the same rate in this one.
    """
    return {} if config.tied else {"embedding": 20 / math.sqrt(config.d_model)}


def _norm(size: int, config: Gemma3Config, rngs: nnx.Rngs) -> RMSNorm:
    return RMSNorm(size, config.norm_eps, offset=1.0, rngs=rngs)


class Attention(nnx.Module):
    """Grouped-query attention, within a window or to everything before."""

    def __init__(self, config: Gemma3Config, *, local: bool, rngs: nnx.Rngs) -> None:
        self.config = config
        self.local = local
        self.q_proj = to_heads(config.d_model, config.num_heads, config.head_dim, rngs)
        self.k_proj = to_heads(config.d_model, config.num_kv_heads, config.head_dim, rngs)
        self.v_proj = to_heads(config.d_model, config.num_kv_heads, config.head_dim, rngs)
        self.o_proj = from_heads(config.num_heads, config.head_dim, config.d_model, rngs)
        self.q_norm = _norm(config.head_dim, config, rngs)
        self.k_norm = _norm(config.head_dim, config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        frequencies = (
            rope_frequencies(config.head_dim, config.local_rope_base)
            if self.local
            else rope_frequencies(config.head_dim, config.rope_base, config.rope_factor)
        )
        mixed = attention(
            rotate(self.q_norm(self.q_proj(x)), frequencies),
            rotate(self.k_norm(self.k_proj(x)), frequencies),
            self.v_proj(x),
            scale=config.query_scalar**-0.5,
            window=config.window if self.local else None,
        )
        return self.o_proj(mixed)


class Layer(nnx.Module):
    """Attention and MLP, each between two RMSNorms and beside a residual connection."""

    def __init__(self, config: Gemma3Config, *, local: bool, rngs: nnx.Rngs) -> None:
        self.attn_norm = _norm(config.d_model, config, rngs)
        self.attn = Attention(config, local=local, rngs=rngs)
        self.attn_post_norm = _norm(config.d_model, config, rngs)
        self.mlp_norm = _norm(config.d_model, config, rngs)
        gelu = functools.partial(jax.nn.gelu, approximate=True)
        self.mlp = GatedMLP(config.d_model, config.d_ff, gelu, rngs)
        self.mlp_post_norm = _norm(config.d_model, config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn_post_norm(self.attn(self.attn_norm(x)))
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))


class Gemma3(nnx.Module):
    """Map token ids (batch, length) to logits (batch, length, vocab), at least float32."""

    def __init__(self, config: Gemma3Config, rngs: nnx.Rngs) -> None:
        self.embed = token_table(config.vocab_size, config.d_model, rngs)
        self.layers = nnx.List(
            [
                Layer(config, local=bool((index + 1) % config.global_every), rngs=rngs)
                for index in range(config.num_layers)
            ]
        )
        self.norm = _norm(config.d_model, config, rngs)
        if not config.tied:
            self.lm_head = untied_head(config.d_model, config.vocab_size, rngs)
        self.tied = config.tied

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x * math.sqrt(x.shape[-1])
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return as_logits(self.embed.attend(x) if self.tied else self.lm_head(x))


# `Gemma3ForCausalLM` of transformers.
HUB = [
    *ENDS,
    *in_every_layer(
        {
            "input_layernorm.weight": ("attn_norm/scale",),
            "post_attention_layernorm.weight": ("attn_post_norm/scale",),
            "pre_feedforward_layernorm.weight": ("mlp_norm/scale",),
            "post_feedforward_layernorm.weight": ("mlp_post_norm/scale",),
            **{f"self_attn.{n}_norm.weight": (f"attn/{n}_norm/scale",) for n in "qk"},
            **{
                f"self_attn.{n}_proj.weight": (f"attn/{n}_proj/kernel", "d head k -> (head k) d")
                for n in "qkv"
            },
            "self_attn.o_proj.weight": ("attn/o_proj/kernel", "head k d -> d (head k)"),
            **{
                f"mlp.{n}_proj.weight": (f"mlp/{n}_proj/kernel", "input out -> out input")
                for n in ("gate", "up", "down")
            },
        }
    ),
]


def from_hugging_face(config: Gemma3Config, state_dict: Mapping[str, Any]) -> nnx.State:
    """Return the parameters of `Gemma3(config, ...)` from a state dict of the hub."""
    model = nnx.eval_shape(lambda: Gemma3(config, nnx.Rngs(0)))
    shapes = nnx.as_pure(nnx.state(model, nnx.Param))
    return from_hub(HUB, shapes, state_dict, tied=config.tied)


def to_hugging_face(params: nnx.State) -> dict[str, np.ndarray]:
    """Return the state dict of pure parameters: the inverse of `from_hugging_face`."""
    return to_hub(HUB, params)
