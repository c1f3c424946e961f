"""One small model with every role, in linen and in nnx, and the rules for its parameters."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from symoptax import ParamRule

VOCAB, D, HEADS, HEAD, FF, EXPERTS, EXPERT_FF, LAYERS = 16, 8, 2, 4, 12, 4, 6, 2
TOKENS = jnp.arange(10).reshape(2, 5) % VOCAB

RULES = (
    ParamRule("**/embed/embedding", "embedding", "vocab d -> vocab d"),
    ParamRule("**/attn/{q,k,v}_proj/kernel", "attention", "d head k -> head k d"),
    ParamRule("**/attn/o_proj/kernel", "attention", "head k d -> head d k"),
    ParamRule("**/mlp/{gate,up}_proj/kernel", "mlp_in", "d neuron -> neuron d"),
    ParamRule("**/mlp/down_proj/kernel", "mlp_down", "neuron d -> neuron d"),
    ParamRule("**/router/kernel", "router", "d expert -> expert d"),
    ParamRule("**/experts/{gate,up}", "expert_in", "expert d neuron -> expert neuron d"),
    ParamRule("**/experts/down", "expert_down", "expert neuron d -> expert neuron d"),
    ParamRule("**/{norm,norm_f}/scale", "other"),
    ParamRule("**/lm_head/kernel", "lm_head", "d vocab -> vocab d"),
)
ROLES = tuple(dict.fromkeys(str(rule.role) for rule in RULES))


def attention(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    return jnp.einsum("bhts,bshk->bthk", weights, v)


def mixture(x, logits, gate, up, down):
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate)) * jnp.einsum("btd,edf->btef", x, up)
    outputs = jnp.einsum("btef,efd->bted", hidden, down)
    return jnp.sum(jax.nn.softmax(logits)[..., None] * outputs, axis=-2)


def cross_entropy(logits):
    """Predict each token from itself: enough to give every parameter a gradient."""
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(TOKENS, VOCAB), axis=-1))


class LinenAttention(nn.Module):
    @nn.compact
    def __call__(self, x):
        q, k, v = (
            nn.DenseGeneral((HEADS, HEAD), use_bias=False, name=f"{name}_proj")(x) for name in "qkv"
        )
        return nn.DenseGeneral(D, axis=(-2, -1), use_bias=False, name="o_proj")(attention(q, k, v))


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate = nn.Dense(FF, use_bias=False, name="gate_proj")(x)
        up = nn.Dense(FF, use_bias=False, name="up_proj")(x)
        return nn.Dense(D, use_bias=False, name="down_proj")(nn.silu(gate) * up)


class LinenExperts(nn.Module):
    @nn.compact
    def __call__(self, x, logits):
        init = nn.initializers.lecun_normal(batch_axis=0)
        gate = self.param("gate", init, (EXPERTS, D, EXPERT_FF))
        up = self.param("up", init, (EXPERTS, D, EXPERT_FF))
        down = self.param("down", init, (EXPERTS, EXPERT_FF, D))
        return mixture(x, logits, gate, up, down)


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + LinenAttention(name="attn")(nn.RMSNorm(name="norm")(x))
        x = x + LinenMlp(name="mlp")(x)
        logits = nn.Dense(EXPERTS, use_bias=False, name="router")(x)
        return x + LinenExperts(name="experts")(x, logits)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, D, name="embed")(tokens)
        for index in range(LAYERS):
            x = LinenLayer(name=f"layers_{index}")(x)
        x = nn.RMSNorm(name="norm_f")(x)
        return nn.Dense(VOCAB, use_bias=False, name="lm_head")(x)


class NnxAttention(nnx.Module):
    def __init__(self, rngs):
        def project():
            return nnx.LinearGeneral(D, (HEADS, HEAD), use_bias=False, rngs=rngs)

        self.q_proj, self.k_proj, self.v_proj = project(), project(), project()
        self.o_proj = nnx.LinearGeneral((HEADS, HEAD), D, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.o_proj(attention(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class NnxMlp(nnx.Module):
    def __init__(self, rngs):
        self.gate_proj = nnx.Linear(D, FF, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(D, FF, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(FF, D, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class NnxExperts(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.gate = nnx.Param(init(rngs.params(), (EXPERTS, D, EXPERT_FF)))
        self.up = nnx.Param(init(rngs.params(), (EXPERTS, D, EXPERT_FF)))
        self.down = nnx.Param(init(rngs.params(), (EXPERTS, EXPERT_FF, D)))

    def __call__(self, x, logits):
        return mixture(x, logits, self.gate[...], self.up[...], self.down[...])


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.attn = NnxAttention(rngs)
        self.mlp = NnxMlp(rngs)
        self.router = nnx.Linear(D, EXPERTS, use_bias=False, rngs=rngs)
        self.experts = NnxExperts(rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm(x))
        x = x + self.mlp(x)
        return x + self.experts(x, self.router(x))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, D, rngs=rngs)
        self.layers = nnx.List([NnxLayer(rngs) for _ in range(LAYERS)])
        self.norm_f = nnx.RMSNorm(D, rngs=rngs)
        self.lm_head = nnx.Linear(D, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm_f(x))


def linen_params(seed=0):
    """Return random parameters of a `LinenModel`, without the price of compiling its `init`."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(D), jnp.float32)

    def layer():
        project = {f"{name}_proj": {"kernel": normal(D, HEADS, HEAD)} for name in "qkv"}
        return {
            "attn": {**project, "o_proj": {"kernel": normal(HEADS, HEAD, D)}},
            "mlp": {
                "gate_proj": {"kernel": normal(D, FF)},
                "up_proj": {"kernel": normal(D, FF)},
                "down_proj": {"kernel": normal(FF, D)},
            },
            "router": {"kernel": normal(D, EXPERTS)},
            "experts": {
                "gate": normal(EXPERTS, D, EXPERT_FF),
                "up": normal(EXPERTS, D, EXPERT_FF),
                "down": normal(EXPERTS, EXPERT_FF, D),
            },
            "norm": {"scale": 1 + normal(D)},
        }

    return {
        "params": {
            "embed": {"embedding": normal(VOCAB, D)},
            **{f"layers_{index}": layer() for index in range(LAYERS)},
            "norm_f": {"scale": 1 + normal(D)},
            "lm_head": {"kernel": normal(D, VOCAB)},
        }
    }


def nnx_model(params):
    """Return an `NnxModel` with the weights of a `LinenModel`."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0))))
    weights = {"layers": {}, **params["params"]}
    for index in range(LAYERS):
        weights["layers"][index] = weights.pop(f"layers_{index}")

    def fill(path, variable):
        value = weights
        for key in path:
            value = value[key]
        return variable.replace(jnp.copy(value))

    return nnx.merge(graphdef, nnx.map_state(fill, state))


def as_linen(state):
    """Return an `nnx.State` of an `NnxModel`, pure or not, as the tree of a `LinenModel`."""

    def pure(tree):
        if isinstance(tree, Mapping):
            return {key: pure(value) for key, value in tree.items()}
        return tree[...] if isinstance(tree, nnx.Variable) else tree

    weights = pure(state)
    layers = weights.pop("layers")
    return {"params": {**weights, **{f"layers_{i}": layer for i, layer in layers.items()}}}


def grads_like(params, seed=1):
    """Return normal gradients; linen and nnx trees have one order of leaves, so they agree."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)


def linen_loss(params):
    return cross_entropy(LinenModel().apply(params, TOKENS))


def nnx_loss(model):
    return cross_entropy(model(TOKENS))
