"""A whole step: `layerwise` against `optax.contrib.muon`, in time, bytes and compiling."""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import symoptax
from symoptax import MatrixView, ParamRule, layerwise
from timing import paired, table

FAST = {"steps": 3, "coefficients": "minimax_9_l3e-3"}


def parameters(
    layers: int, d: int = 512, ff: int = 1536, heads: int = 1024, kv: int = 512, vocab: int = 16384
) -> dict[str, Any]:
    """Return the parameters of an unscanned, untied decoder."""
    shapes = {"embed": (vocab, d), "head": (d, vocab), "norm": (d,)}
    layer = {"q": (d, heads), "k": (d, kv), "v": (d, kv), "o": (heads, d)}
    layer |= {"gate": (d, ff), "up": (d, ff), "down": (ff, d), "norm_1": (d,), "norm_2": (d,)}
    tree = shapes | {f"layer_{i}": layer for i in range(layers)}
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return structure.unflatten([jax.random.normal(k, s) for k, s in zip(keys, leaves, strict=True)])


ENDS = [
    ParamRule("embed", "embedding", "vocab d -> vocab d"),
    ParamRule("head", "lm_head", "d vocab -> vocab d"),
    ParamRule("*/{gate,up}", "mlp_in", "d neuron -> neuron d"),
    ParamRule("*/down", "mlp_down", "neuron d -> neuron d"),
    ParamRule("**/norm*", "other"),
]
WHOLE = [
    *ENDS,
    ParamRule("*/{q,k,v}", "attention", "d out -> out d"),
    ParamRule("*/o", "attention", "heads d -> d heads"),
]
PER_HEAD = [
    *ENDS,
    ParamRule("*/{q,k,v}", "attention", MatrixView("d (head k) -> head k d", sizes={"k": 64})),
    ParamRule("*/o", "attention", MatrixView("(head k) d -> head d k", sizes={"k": 64})),
]


def muon() -> optax.GradientTransformation:
    """Build optax's Muon for hidden matrices and AdamW for the rest."""

    def dimensions(params: Any) -> Any:
        def of(path: Any, x: jax.Array) -> Any:
            hidden = x.ndim == 2 and path[0].key not in ("embed", "head")
            return optax.contrib.MuonDimensionNumbers() if hidden else None

        return jax.tree_util.tree_map_with_path(of, params)

    return optax.contrib.muon(1e-3, weight_decay=0.1, muon_weight_dimension_numbers=dimensions)


def ours(rules: list[ParamRule], **options: Any) -> optax.GradientTransformation:
    """Build `layerwise`, with options for its polar steps."""
    hybrid = functools.partial(symoptax.hybrid_map, **options)
    roles = dict.fromkeys(("embedding", "mlp_in", "mlp_down"), hybrid())
    roles |= {"lm_head": symoptax.centered(hybrid()), "attention": symoptax.polar_map(**options)}
    return layerwise(1e-3, rules, weight_decay=0.1, updates=roles if options else None)


OPTIMIZERS = {
    "optax.contrib.muon + AdamW": muon,
    "layerwise": lambda: ours(WHOLE),
    "layerwise, heads apart": lambda: ours(PER_HEAD),
    "layerwise, heads apart, fast": lambda: ours(PER_HEAD, **FAST),
    "AdamW": lambda: optax.adamw(1e-3, weight_decay=0.1),
}


def run() -> str:
    params = parameters(4)
    steps, sizes = {}, {}
    for name, build in OPTIMIZERS.items():
        tx = build()
        state = tx.init(params)
        sizes[name] = sum(x.nbytes for x in jax.tree.leaves(state))
        steps[name] = Stepper(tx, jax.tree.map(jnp.copy, params), state, params)
    times = paired(steps, rounds=7)
    baseline = next(iter(sizes.values()))
    rows = [
        [
            name,
            f"{1e3 * times[name].seconds:.0f} ms",
            f"**{times[name].ratio:.2f}**",
            f"{size / 2**20:.0f} MiB",
            f"{size / baseline:.2f}",
        ]
        for name, size in sizes.items()
    ]
    return table(["optimizer", "step", "ratio", "state", "ratio"], rows)


class Stepper:
    """An optimizer that steps in place, parameters and state donated."""

    def __init__(self, tx: Any, params: Any, state: Any, grads: Any) -> None:
        self.params, self.state, self.grads = params, state, grads
        self.step = jax.jit(functools.partial(step, tx), donate_argnums=(0, 1))

    def __call__(self) -> Any:
        self.params, self.state = self.step(self.params, self.state, self.grads)
        return self.params


def step(tx: Any, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def run_compile() -> str:
    """Time tracing, lowering and compiling for models of 2 and of 28 layers."""
    rows, baseline = [], None
    for name in ("optax.contrib.muon + AdamW", "layerwise"):
        taken = {}
        for layers in (2, 28):
            params = jax.eval_shape(functools.partial(parameters, layers))
            tx = OPTIMIZERS[name]()
            state = jax.eval_shape(tx.init, params)
            jax.clear_caches()
            start = time.perf_counter()
            jax.jit(functools.partial(step, tx)).lower(params, state, params).compile()
            taken[layers] = time.perf_counter() - start
        baseline = baseline or taken[28]
        rows.append(
            [
                name,
                *(f"{taken[layers]:.1f} s" for layers in (2, 28)),
                f"{taken[28] / taken[2]:.2f}",
                f"**{taken[28] / baseline:.2f}**",
            ]
        )
    return table(["optimizer", "2 layers", "28 layers", "28 / 2", "28 layers / optax"], rows)
