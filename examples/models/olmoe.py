"""An OLMoE-style mixture of experts in Flax NNX, and what each of its parameters is.

Qwen3's decoder with two differences: the RMSNorms of queries and keys span all heads, and each MLP
is a stack of experts behind a router, `softmax` over all experts first, then the top k, whose
weights are not renormalised. The load-balancing loss depends on the router through that softmax
alone, so that the router keeps its shared shift; a z-loss takes it away.

Source: Muennighoff et al., *OLMoE: Open Mixture-of-Experts Language Models* (2024),
arXiv 2409.02060.
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
    as_logits,
    attention,
    from_heads,
    linear,
    rope_frequencies,
    rotate,
    to_heads,
    token_table,
    untied_head,
    wide,
)
from symoptax import ParamRule


@dataclasses.dataclass(frozen=True)
class OlmoeConfig:
    """Sizes of the decoder; `d_ff` is that of one expert.

    Attributes:
      num_active: how many experts a token goes to.
      balance_coef: how much the load-balancing loss counts.
      z_coef: how much the z-loss of the router's logits counts.
      experts: how experts are computed; see `models.experts.mixture`.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    d_ff: int
    num_heads: int
    num_experts: int
    num_active: int
    rope_base: float = 1e4
    norm_eps: float = 1e-5
    balance_coef: float = 0.01
    z_coef: float = 0.0
    experts: Form = "dense"

    @property
    def head_dim(self) -> int:
        """Size of a head; queries, keys and values are as wide as the model."""
        return self.d_model // self.num_heads


TINY = OlmoeConfig(
    vocab_size=320, d_model=32, num_layers=2, d_ff=24, num_heads=4, num_experts=6, num_active=2
)
SMALL = OlmoeConfig(
    vocab_size=4096, d_model=128, num_layers=4, d_ff=64, num_heads=4, num_experts=16, num_active=4
)
# allenai/OLMoE-1B-7B-0924: 6,919,161,856 parameters; its losses are those of its paper.
OLMOE_1B_7B = OlmoeConfig(
    vocab_size=50304,
    d_model=2048,
    num_layers=16,
    d_ff=1024,
    num_heads=16,
    num_experts=64,
    num_active=8,
    z_coef=0.001,
    experts="ragged",
)
# Trained by Lau and Su (2026), arXiv 2605.18106.
PAPER = dataclasses.replace(OLMOE_1B_7B, num_layers=12, num_experts=32, z_coef=0.0)
PRESETS = {"tiny": TINY, "small": SMALL, "paper": PAPER, "1b-7b": OLMOE_1B_7B}

RULES = [
    ParamRule("embed/embedding", "embedding", "vocab d -> vocab d"),
    ParamRule("lm_head/kernel", "lm_head", "d vocab -> vocab d"),
    ParamRule("layers/*/attn/{q,k,v}_proj/kernel", "attention", "d head k -> (head k) d"),
    ParamRule("layers/*/attn/o_proj/kernel", "attention", "head k d -> d (head k)"),
    ParamRule("layers/*/moe/router/kernel", "router", "d expert -> expert d"),
    ParamRule("layers/*/moe/{gate,up}", "expert_in", "expert d neuron -> expert neuron d"),
    ParamRule("layers/*/moe/down", "expert_down", "expert neuron d -> expert neuron d"),
    ParamRule("**/scale", "other"),
]
Z_LOSS_RULES = [
    dataclasses.replace(rule, role="router_no_shift") if rule.role == "router" else rule
    for rule in RULES
]


def rules_for(config: OlmoeConfig) -> list[ParamRule]:
    """Return the routing rules of the model and the losses that `config` describes."""
    return Z_LOSS_RULES if config.z_coef else RULES


class Attention(nnx.Module):
    """Causal attention with an RMSNorm over all queries and one over all keys."""

    def __init__(self, config: OlmoeConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        d_model, num_heads, head_dim = config.d_model, config.num_heads, config.head_dim
        self.q_proj = to_heads(d_model, num_heads, head_dim, rngs)
        self.k_proj = to_heads(d_model, num_heads, head_dim, rngs)
        self.v_proj = to_heads(d_model, num_heads, head_dim, rngs)
        self.o_proj = from_heads(num_heads, head_dim, d_model, rngs)
        self.q_norm = RMSNorm((num_heads, head_dim), config.norm_eps, rngs=rngs)
        self.k_norm = RMSNorm((num_heads, head_dim), config.norm_eps, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        frequencies = rope_frequencies(self.config.head_dim, self.config.rope_base)
        query = rotate(self.q_norm(self.q_proj(x)), frequencies)
        key = rotate(self.k_norm(self.k_proj(x)), frequencies)
        return self.o_proj(attention(query, key, self.v_proj(x)))


class Experts(nnx.Module):
    """A router and its SwiGLU experts: `sum over top k of p_e down_e(silu(gate_e x) up_e x)`."""

    def __init__(self, config: OlmoeConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        init = nnx.initializers.lecun_normal(batch_axis=0)
        inwards = (config.num_experts, config.d_model, config.d_ff)
        outwards = (config.num_experts, config.d_ff, config.d_model)
        self.router = linear(config.d_model, config.num_experts, rngs)
        self.gate = nnx.Param(init(rngs.params(), inwards, jnp.float32))
        self.up = nnx.Param(init(rngs.params(), inwards, jnp.float32))
        self.down = nnx.Param(init(rngs.params(), outwards, jnp.float32))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        """Return the output, and what the router has decided."""
        config, tokens = self.config, x.reshape(-1, x.shape[-1])
        logits = self.router(tokens).astype(wide(x.dtype))
        probabilities = jax.nn.softmax(logits, axis=-1)
        weights, chosen = jax.lax.top_k(probabilities, config.num_active)
        mixed = mixture(
            self._swiglu,
            tokens,
            chosen,
            weights,
            num_experts=config.num_experts,
            form=config.experts,
        )
        balance = load_balance(probabilities, chosen)
        auxiliary = config.balance_coef * balance + config.z_coef * z_loss(logits)
        return mixed.reshape(x.shape), Routing(logits, chosen, auxiliary)

    def _swiglu(self, x: jax.Array, dot: Callable, each: Callable) -> jax.Array:
        return dot(nnx.silu(dot(x, self.gate[...])) * dot(x, self.up[...]), self.down[...])


class Layer(nnx.Module):
    """Attention and experts, each behind an RMSNorm and a residual connection."""

    def __init__(self, config: OlmoeConfig, rngs: nnx.Rngs) -> None:
        self.attn_norm = RMSNorm(config.d_model, config.norm_eps, rngs=rngs)
        self.attn = Attention(config, rngs)
        self.moe_norm = RMSNorm(config.d_model, config.norm_eps, rngs=rngs)
        self.moe = Experts(config, rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        x = x + self.attn(self.attn_norm(x))
        mixed, routing = self.moe(self.moe_norm(x))
        return x + mixed, routing


class Olmoe(nnx.Module):
    """Map token ids (batch, length) to logits (batch, length, vocab) and a loss to add.

    The second output is the mean over layers of `balance_coef * load_balance + z_coef * z_loss`.
    """

    def __init__(self, config: OlmoeConfig, rngs: nnx.Rngs) -> None:
        self.embed = token_table(config.vocab_size, config.d_model, rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
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


# `OlmoeForCausalLM` of transformers.
HUB = [
    *ENDS,
    *in_every_layer(
        {
            "input_layernorm.weight": ("attn_norm/scale",),
            "post_attention_layernorm.weight": ("moe_norm/scale",),
            **{
                f"self_attn.{n}_norm.weight": (f"attn/{n}_norm/scale", "head k -> (head k)")
                for n in "qk"
            },
            **{
                f"self_attn.{n}_proj.weight": (f"attn/{n}_proj/kernel", "d head k -> (head k) d")
                for n in "qkv"
            },
            "self_attn.o_proj.weight": ("attn/o_proj/kernel", "head k d -> d (head k)"),
            "mlp.gate.weight": ("moe/router/kernel", "d expert -> expert d"),
            **{
                f"mlp.experts.{{expert}}.{n}_proj.weight": (f"moe/{n}", "input out -> out input")
                for n in ("gate", "up", "down")
            },
        }
    ),
]


def from_hugging_face(config: OlmoeConfig, state_dict: Mapping[str, Any]) -> nnx.State:
    """Return the parameters of `Olmoe(config, ...)` from a state dict of the hub."""
    model = nnx.eval_shape(lambda: Olmoe(config, nnx.Rngs(0)))
    shapes = nnx.as_pure(nnx.state(model, nnx.Param))
    return from_hub(HUB, shapes, state_dict)


def to_hugging_face(params: nnx.State) -> dict[str, np.ndarray]:
    """Return the state dict of pure parameters: the inverse of `from_hugging_face`."""
    return to_hub(HUB, params)
