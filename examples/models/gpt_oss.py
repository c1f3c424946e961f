"""A gpt-oss-style mixture of experts in Flax NNX, and what each of its parameters is.

Biases on every projection, on the router and on the experts; a learned sink in each head's softmax;
attention within a window and to everything in turn, with YaRN's rotary positions; a clamped SwiGLU
whose gate and up are interleaved in one leaf; the top k of the router's logits first, then a
softmax over these alone. That softmax does not see a shift of all logits, and the choice neither.

Source: OpenAI, *gpt-oss-120b & gpt-oss-20b Model Card* (2025), arXiv 2508.10925, and the reference
implementation that comes with it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.experts import Form, Routing, load_balance, mixture, z_loss
from models.hugging_face import ENDS, from_hub, in_every_layer, to_hub
from models.layers import (
    RMSNorm,
    Yarn,
    as_logits,
    attention,
    from_heads,
    rotate,
    to_heads,
    token_table,
    untied_head,
    wide,
)
from symoptax import MatrixView, ParamRule

YARN = Yarn(factor=32.0, original_length=4096)


@dataclasses.dataclass(frozen=True)
class GptOssConfig:
    """Sizes of the decoder; `d_ff` is that of one expert.

    Attributes:
      num_active: how many experts a token goes to.
      window: how many positions every other layer sees, the first one among them.
      swiglu_alpha: steepness of the gate's sigmoid.
      swiglu_limit: where gate (from above) and up (from both sides) are clamped.
      balance_coef: how much the load-balancing loss counts; of the training nothing is published.
      z_coef: how much the z-loss of the router's logits counts.
      experts: how experts are computed; see `models.experts.mixture`.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    d_ff: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_active: int
    window: int = 128
    rope_base: float = 150000.0
    yarn: Yarn = YARN
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    norm_eps: float = 1e-5
    balance_coef: float = 0.01
    z_coef: float = 0.0
    experts: Form = "dense"


TINY = GptOssConfig(
    vocab_size=320,
    d_model=32,
    num_layers=2,
    d_ff=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=6,
    num_active=2,
    window=4,
)
SMALL = GptOssConfig(
    vocab_size=4096,
    d_model=128,
    num_layers=4,
    d_ff=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    num_experts=8,
    num_active=2,
    window=64,
)
# openai/gpt-oss-20b: 20,914,757,184 parameters.
GPT_OSS_20B = GptOssConfig(
    vocab_size=201088,
    d_model=2880,
    num_layers=24,
    d_ff=2880,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    num_experts=32,
    num_active=4,
    experts="ragged",
)
# openai/gpt-oss-120b: 116,829,156,672 parameters.
GPT_OSS_120B = dataclasses.replace(GPT_OSS_20B, num_layers=36, num_experts=128)
# Trained by Lau and Su (2026), arXiv 2605.18106.
PAPER = dataclasses.replace(GPT_OSS_20B, num_layers=12, d_model=2048, d_ff=2048, num_experts=16)
PRESETS = {
    "tiny": TINY,
    "small": SMALL,
    "paper": PAPER,
    "20b": GPT_OSS_20B,
    "120b": GPT_OSS_120B,
}

# Gate and up of one neuron stand side by side: neurons may be renumbered in pairs only, and the two
# halves of the pairs are two matrices. Whatever renumbers them renumbers the rows of both.
_GATE_UP = MatrixView("expert d (neuron gate_up) -> expert gate_up neuron d", sizes={"gate_up": 2})
RULES = [
    ParamRule("embed/embedding", "embedding", "vocab d -> vocab d"),
    ParamRule("lm_head/kernel", "lm_head", "d vocab -> vocab d"),
    ParamRule("layers/*/attn/{q,k,v}_proj/kernel", "attention", "d head k -> (head k) d"),
    ParamRule("layers/*/attn/o_proj/kernel", "attention", "head k d -> d (head k)"),
    ParamRule("layers/*/moe/router/kernel", "router", "d expert -> expert d"),
    ParamRule("layers/*/moe/gate_up", "expert_in", _GATE_UP),
    ParamRule("layers/*/moe/down", "expert_down", "expert neuron d -> expert neuron d"),
    ParamRule("**/{scale,bias,sinks,gate_up_bias,down_bias}", "other"),
]
Z_LOSS_RULES = [
    dataclasses.replace(rule, role="router_no_shift") if rule.role == "router" else rule
    for rule in RULES
]


def rules_for(config: GptOssConfig) -> list[ParamRule]:
    """Return the routing rules of the model and the losses that `config` describes."""
    return Z_LOSS_RULES if config.z_coef else RULES


class Attention(nnx.Module):
    """Grouped-query attention with biases and sinks, within a window or to everything before."""

    def __init__(self, config: GptOssConfig, *, local: bool, rngs: nnx.Rngs) -> None:
        self.config = config
        self.local = local
        d_model, head_dim = config.d_model, config.head_dim
        self.q_proj = to_heads(d_model, config.num_heads, head_dim, rngs, bias=True)
        self.k_proj = to_heads(d_model, config.num_kv_heads, head_dim, rngs, bias=True)
        self.v_proj = to_heads(d_model, config.num_kv_heads, head_dim, rngs, bias=True)
        self.o_proj = from_heads(config.num_heads, head_dim, d_model, rngs, bias=True)
        self.sinks = nnx.Param(jnp.zeros(config.num_heads, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        frequencies = config.yarn.frequencies(config.head_dim, config.rope_base)
        mixed = attention(
            rotate(self.q_proj(x), frequencies, config.yarn.attention_factor),
            rotate(self.k_proj(x), frequencies, config.yarn.attention_factor),
            self.v_proj(x),
            window=config.window if self.local else None,
            sinks=self.sinks[...],
        )
        return self.o_proj(mixed)


class Experts(nnx.Module):
    """A router and its experts: `sum over the top k of softmax(top k logits)_e mlp_e(x)`."""

    def __init__(self, config: GptOssConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        experts, d_model, d_ff = config.num_experts, config.d_model, config.d_ff
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(d_model, experts, rngs=rngs)
        self.gate_up = nnx.Param(init(rngs.params(), (experts, d_model, 2 * d_ff), jnp.float32))
        self.gate_up_bias = nnx.Param(jnp.zeros((experts, 2 * d_ff), jnp.float32))
        self.down = nnx.Param(init(rngs.params(), (experts, d_ff, d_model), jnp.float32))
        self.down_bias = nnx.Param(jnp.zeros((experts, d_model), jnp.float32))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        """Return the output, and what the router has decided."""
        config, tokens = self.config, x.reshape(-1, x.shape[-1])
        logits = self.router(tokens).astype(wide(x.dtype))
        largest, chosen = jax.lax.top_k(logits, config.num_active)
        mixed = mixture(
            self._swiglu,
            tokens,
            chosen,
            jax.nn.softmax(largest, axis=-1),
            num_experts=config.num_experts,
            form=config.experts,
        )
        balance = load_balance(jax.nn.softmax(logits, axis=-1), chosen)
        auxiliary = config.balance_coef * balance + config.z_coef * z_loss(logits)
        return mixed.reshape(x.shape), Routing(logits, chosen, auxiliary)

    def _swiglu(self, x: jax.Array, dot: Callable, each: Callable) -> jax.Array:
        """Return `down((up + 1) * gate * sigmoid(alpha gate))` of clamped gate and up."""
        alpha, limit = self.config.swiglu_alpha, self.config.swiglu_limit
        hidden = dot(x, self.gate_up[...]) + each(self.gate_up_bias[...])
        gate = jnp.minimum(hidden[..., ::2], limit)
        up = jnp.clip(hidden[..., 1::2], -limit, limit)
        hidden = (up + 1) * gate * jax.nn.sigmoid(alpha * gate)
        return dot(hidden, self.down[...]) + each(self.down_bias[...])


class Layer(nnx.Module):
    """Attention and experts, each behind an RMSNorm and a residual connection."""

    def __init__(self, config: GptOssConfig, *, local: bool, rngs: nnx.Rngs) -> None:
        self.attn_norm = RMSNorm(config.d_model, config.norm_eps, rngs=rngs)
        self.attn = Attention(config, local=local, rngs=rngs)
        self.moe_norm = RMSNorm(config.d_model, config.norm_eps, rngs=rngs)
        self.moe = Experts(config, rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        x = x + self.attn(self.attn_norm(x))
        mixed, routing = self.moe(self.moe_norm(x))
        return x + mixed, routing


class GptOss(nnx.Module):
    """Map token ids (batch, length) to logits (batch, length, vocab) and a loss to add.

    The second output is the mean over layers of `balance_coef * load_balance + z_coef * z_loss`.
    """

    def __init__(self, config: GptOssConfig, rngs: nnx.Rngs) -> None:
        self.embed = token_table(config.vocab_size, config.d_model, rngs)
        self.layers = nnx.List(
            [Layer(config, local=i % 2 == 0, rngs=rngs) for i in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.d_model, config.norm_eps, rngs=rngs)
        self.lm_head = untied_head(config.d_model, config.vocab_size, rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, routing = self._hidden(tokens)
        return as_logits(self.lm_head(self.norm(x))), jnp.mean(routing.auxiliary)

    def routing(self, tokens: jax.Array) -> Routing:
        """Return what the router of every layer decides, the layers along the first axis."""
        return self._hidden(tokens)[1]

    def _hidden(self, tokens: jax.Array) -> tuple[jax.Array, Routing]:
        x, routings = self.embed(tokens), []
        for layer in self.layers:
            x, routing = layer(x)
            routings.append(routing)
        return x, jax.tree.map(lambda *each: jnp.stack(each), *routings)


# `GptOssForCausalLM` of transformers, with experts that are not quantised.
HUB = [
    *ENDS,
    *in_every_layer(
        {
            "input_layernorm.weight": ("attn_norm/scale",),
            "post_attention_layernorm.weight": ("moe_norm/scale",),
            **{
                f"self_attn.{n}_proj.weight": (f"attn/{n}_proj/kernel", "d head k -> (head k) d")
                for n in "qkv"
            },
            **{
                f"self_attn.{n}_proj.bias": (f"attn/{n}_proj/bias", "head k -> (head k)")
                for n in "qkv"
            },
            "self_attn.o_proj.weight": ("attn/o_proj/kernel", "head k d -> d (head k)"),
            "self_attn.o_proj.bias": ("attn/o_proj/bias",),
            "self_attn.sinks": ("attn/sinks",),
            "mlp.router.weight": ("moe/router/kernel", "d expert -> expert d"),
            "mlp.router.bias": ("moe/router/bias",),
            **{f"mlp.experts.{n}_proj": (f"moe/{n}",) for n in ("gate_up", "down")},
            **{f"mlp.experts.{n}_proj_bias": (f"moe/{n}_bias",) for n in ("gate_up", "down")},
        }
    ),
]


def from_hugging_face(config: GptOssConfig, state_dict: Mapping[str, Any]) -> nnx.State:
    """Return the parameters of `GptOss(config, ...)` from a state dict of the hub."""
    model = nnx.eval_shape(lambda: GptOss(config, nnx.Rngs(0)))
    shapes = nnx.as_pure(nnx.state(model, nnx.Param))
    return from_hub(HUB, shapes, state_dict)


def to_hugging_face(params: nnx.State) -> dict[str, np.ndarray]:
    """Return the state dict of pure parameters: the inverse of `from_hugging_face`."""
    return to_hub(HUB, params)
