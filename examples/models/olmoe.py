"""An OLMoE-style mixture of experts in Flax NNX, and what each of its parameters is.

Qwen3's decoder with two differences: the RMSNorms of queries and keys span all heads, and each MLP
is a stack of experts behind a router, `softmax` over all experts first, then the top k, whose
weights are not renormalised. `load_balance` is the auxiliary loss that goes with it; it depends on
the router through the softmax alone, so that the router keeps its shared shift.

Source: Muennighoff et al., *OLMoE: Open Mixture-of-Experts Language Models* (2024),
arXiv 2409.02060.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.qwen3 import rotate
from symoptax import ParamRule


@dataclasses.dataclass(frozen=True)
class OlmoeConfig:
    """Sizes of the decoder; `d_ff` is that of one expert."""

    vocab_size: int
    d_model: int
    num_layers: int
    d_ff: int
    num_heads: int
    num_experts: int
    num_active: int
    rope_base: float = 1e4
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Size of a head; queries, keys and values are as wide as the model."""
        return self.d_model // self.num_heads


TINY = OlmoeConfig(
    vocab_size=320, d_model=32, num_layers=2, d_ff=24, num_heads=4, num_experts=6, num_active=2
)

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


class Attention(nnx.Module):
    """Causal attention with an RMSNorm over all queries and one over all keys."""

    def __init__(self, config: OlmoeConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        heads = (config.num_heads, config.head_dim)
        self.q_proj, self.k_proj, self.v_proj = (
            nnx.LinearGeneral(config.d_model, heads, use_bias=False, rngs=rngs) for _ in range(3)
        )
        self.o_proj = nnx.LinearGeneral(
            heads, config.d_model, axis=(-2, -1), use_bias=False, rngs=rngs
        )
        self.q_norm = nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, rngs=rngs)
        self.k_norm = nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        query = self.q_norm(query.reshape(x.shape)).reshape(query.shape)
        key = self.k_norm(key.reshape(x.shape)).reshape(key.shape)
        base = self.config.rope_base
        mixed = jax.nn.dot_product_attention(
            rotate(query, base), rotate(key, base), value, is_causal=True
        )
        return self.o_proj(mixed)


class Experts(nnx.Module):
    """A router and its SwiGLU experts, all of them computed and the chosen ones added up."""

    def __init__(self, config: OlmoeConfig, rngs: nnx.Rngs) -> None:
        self.num_active = config.num_active
        init = nnx.initializers.lecun_normal(batch_axis=0)
        narrow = (config.num_experts, config.d_model, config.d_ff)
        wide = (config.num_experts, config.d_ff, config.d_model)
        self.router = nnx.Linear(config.d_model, config.num_experts, use_bias=False, rngs=rngs)
        self.gate = nnx.Param(init(rngs.params(), narrow))
        self.up = nnx.Param(init(rngs.params(), narrow))
        self.down = nnx.Param(init(rngs.params(), wide))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the output and the load-balancing loss, 1 for an even load."""
        probabilities = jax.nn.softmax(self.router(x), axis=-1)
        _, chosen = jax.lax.top_k(probabilities, self.num_active)
        active = jnp.sum(jax.nn.one_hot(chosen, probabilities.shape[-1], dtype=x.dtype), axis=-2)
        hidden = nnx.silu(jnp.einsum("btd,edf->btef", x, self.gate[...]))
        hidden *= jnp.einsum("btd,edf->btef", x, self.up[...])
        outputs = jnp.einsum("btef,efd->bted", hidden, self.down[...])
        mixed = jnp.einsum("bted,bte->btd", outputs, probabilities * active)
        load = jnp.mean(active, axis=(0, 1)) / self.num_active
        balance = probabilities.shape[-1] * jnp.sum(load * jnp.mean(probabilities, axis=(0, 1)))
        return mixed, balance


class Layer(nnx.Module):
    """Attention and experts, each behind an RMSNorm and a residual connection."""

    def __init__(self, config: OlmoeConfig, rngs: nnx.Rngs) -> None:
        self.attn_norm = nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, rngs=rngs)
        self.attn = Attention(config, rngs)
        self.moe_norm = nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, rngs=rngs)
        self.moe = Experts(config, rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + self.attn(self.attn_norm(x))
        mixed, balance = self.moe(self.moe_norm(x))
        return x + mixed, balance


class Olmoe(nnx.Module):
    """Map token ids (batch, length) to logits (batch, length, vocab) and the balancing loss."""

    def __init__(self, config: OlmoeConfig, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(config.vocab_size, config.d_model, embedding_init=init, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, rngs=rngs)
        self.lm_head = nnx.Linear(
            config.d_model, config.vocab_size, use_bias=False, kernel_init=init, rngs=rngs
        )

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, balances = self.embed(tokens), []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        logits = self.lm_head(self.norm(x))
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return logits, jnp.mean(jnp.stack(balances))
