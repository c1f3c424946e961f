"""Train one model twice, in two bases that mean the same, and see whether the runs stay the same.

    JAX_PLATFORMS=cpu python examples/symmetry.py

Renumber the tokens, the neurons, the experts; add a vector to all rows of the LM head or of a
router; turn the basis of values, of queries and keys, or of the whole residual stream: the network
computes the same function. An optimizer that respects this takes the image of a run to the image of
its result. `layerwise` does, up to rounding; AdamW, which treats every number by itself, does so
only where nothing is turned. Norm scales are frozen here: one per coordinate singles out a basis.
"""

import argparse
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from flax import nnx

import symoptax
from models import olmoe, qwen3
from symoptax import ParamRule, Role

mpl.use("agg")

import matplotlib.pyplot as plt

PLOT = pathlib.Path(__file__).parents[1] / "docs" / "symmetry.png"
STEPS = 20


class Case(NamedTuple):
    """A model with its routing rules."""

    model: Callable[[], nnx.Module]
    rules: Sequence[ParamRule]


QWEN3_RULES = [
    *(rule for rule in qwen3.RULES if rule.role != Role.ATTENTION),
    *(
        ParamRule(f"layers/*/attn/{name}_proj/kernel", "attention", view)
        for name, view in {
            "{q,k,v}": symoptax.MatrixView("d (head k) -> (head k) d", sizes={"k": 8}),
            "o": symoptax.MatrixView("(head k) d -> d (head k)", sizes={"k": 8}),
        }.items()
    ),
]
CASES = {
    "qwen3": Case(lambda: qwen3.Qwen3(qwen3.TINY, nnx.Rngs(0)), QWEN3_RULES),
    "olmoe": Case(lambda: olmoe.Olmoe(olmoe.TINY, nnx.Rngs(0)), olmoe.RULES),
}


class Move(NamedTuple):
    """An element of the symmetry of a model.

    Attributes:
      leaf: (path, leaf, rule) -> the leaf moved; linear, so that it moves differences too, but for
        a shift.
      tokens: what becomes of the batch.
    """

    leaf: Callable[[str, jax.Array, ParamRule], jax.Array]
    tokens: Callable[[jax.Array], jax.Array] = lambda tokens: tokens


def _along(rule: ParamRule, leaf: jax.Array, name: str, matrix: np.ndarray) -> jax.Array:
    """Multiply the axis `name` of a leaf, which may be packed with others, by a matrix."""
    axis = rule.view.locate(name, leaf.shape)
    split = (*leaf.shape[: axis.axis], axis.outer, -1, axis.inner, *leaf.shape[axis.axis + 1 :])
    turned = jnp.tensordot(
        leaf.reshape(split),
        jnp.asarray(matrix, leaf.dtype),
        ((axis.axis + 1,), (0,)),
        precision="highest",
    )
    return jnp.moveaxis(turned, -1, axis.axis + 1).reshape(leaf.shape)


def _renamed(name: str, matrix_of: Callable[[str, int], np.ndarray], paths: str = "") -> Callable:
    """Move the axis `name` of all leaves that have it and whose path contains one of `paths`."""

    def leaf(path: str, leaf: jax.Array, rule: ParamRule) -> jax.Array:
        if (
            rule.view is None
            or name not in rule.view.names
            or not any(part in path for part in paths.split("|"))
        ):
            return leaf
        scope = "/".join(path.split("/")[:2])
        size = sum(rule.view.locate(name, leaf.shape).sizes)
        return _along(rule, leaf, name, matrix_of(scope, size))

    return leaf


def _rng(scope: str) -> np.random.Generator:
    return np.random.default_rng(list(scope.encode()))


def permutation(scope: str, size: int) -> np.ndarray:
    """Return a random permutation matrix, the same for all leaves of a scope."""
    return np.eye(size)[_rng(scope).permutation(size)]


def rotation(scope: str, size: int) -> np.ndarray:
    """Return a random orthogonal matrix."""
    return np.linalg.qr(_rng(scope).normal(size=(size, size)))[0]


def plane_rotation(scope: str, size: int) -> np.ndarray:
    """Turn the pairs (i, i + half) of rotary positions, which commutes with them."""
    half = size // 2
    angle = _rng(scope).uniform(0, 2 * np.pi, half)
    cos, sin = np.diag(np.cos(angle)), np.diag(np.sin(angle))
    return np.block([[cos, sin], [-sin, cos]])


def _shift(role: Role) -> Callable[[str, jax.Array, ParamRule], jax.Array]:
    def leaf(path: str, leaf: jax.Array, rule: ParamRule) -> jax.Array:
        if rule.role != role:
            return leaf
        (stack,) = rule.view.open(leaf)
        vector = jnp.asarray(_rng(path).normal(size=stack.shape[-1]), leaf.dtype)
        return rule.view.close([stack + jnp.broadcast_to(vector, stack.shape)], leaf.shape)

    return leaf


def _new_ids(tokens: jax.Array) -> jax.Array:
    matrix = permutation("", qwen3.TINY.vocab_size)
    return jnp.asarray(np.argmax(matrix, axis=1))[tokens]


MOVES = {
    "tokens renumbered": Move(_renamed("vocab", lambda scope, n: permutation("", n)), _new_ids),
    "neurons renumbered": Move(_renamed("neuron", permutation)),
    "experts renumbered": Move(_renamed("expert", permutation)),
    "LM head shifted": Move(_shift(Role.LM_HEAD)),
    "router shifted": Move(_shift(Role.ROUTER)),
    "values turned": Move(_renamed("k", rotation, "v_proj|o_proj")),
    "queries and keys turned": Move(_renamed("k", plane_rotation, "q_proj|k_proj")),
    "residual stream turned": Move(_renamed("d", lambda scope, n: rotation("", n))),
}
OF_OLMOE = ("experts renumbered", "router shifted")


def optimizers(rules: Sequence[ParamRule]) -> dict[str, optax.GradientTransformation]:
    """Return the optimizers to compare; norm scales are frozen in all of them.

    Five polar steps, the default, leave the smallest directions of a matrix unfinished, and what
    rounding makes of those grows. Eight converge.
    """
    frozen = {"other": "frozen"}
    hybrid = symoptax.hybrid_map(steps=8)
    eight = {
        "attention": symoptax.polar_map(steps=8),
        "lm_head": symoptax.centered(hybrid),
        **dict.fromkeys(("embedding", "mlp_in", "mlp_down", "expert_in", "expert_down"), hybrid),
    }
    by_role = {str(r): optax.set_to_zero() if r == Role.OTHER else optax.adamw(2e-3) for r in Role}
    return {
        "layerwise": symoptax.layerwise(4e-3, rules, updates=frozen, weight_decay=0.1),
        "layerwise, 8 steps": symoptax.layerwise(
            4e-3, rules, updates=frozen | eight, weight_decay=0.1
        ),
        "adamw": optax.partition(by_role, symoptax.label_fn(rules)),
    }


def loss_fn(graphdef: nnx.GraphDef, params: Any, tokens: jax.Array) -> jax.Array:
    """Return the next-token cross-entropy, with OLMoE's load-balancing loss."""
    output = nnx.merge(graphdef, params)(tokens[:, :-1])
    logits, balance = output if isinstance(output, tuple) else (output, 0.0)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return loss + balance


def batches(steps: int) -> jax.Array:
    """Return bytes of a module of the standard library, (steps, 4, 33)."""
    text = pathlib.Path(argparse.__file__).read_bytes()
    return jnp.asarray(np.frombuffer(text[: steps * 4 * 33], np.uint8).astype(np.int32)).reshape(
        steps, 4, 33
    )


class Trainer:
    """One model and one optimizer, compiled once for all runs."""

    def __init__(self, case: Case, tx: optax.GradientTransformation, dtype: Any) -> None:
        self.rules = case.rules
        model = case.model()
        model.embed.dtype = dtype  # Flax computes lookups in the dtype in which the table was made
        graphdef, state = nnx.split(model)
        self.start = jax.tree.map(lambda x: x.astype(dtype), nnx.as_pure(state))
        self.init = tx.init

        def step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any]:
            grads = jax.grad(lambda p: loss_fn(graphdef, p, tokens))(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        self.step = jax.jit(step)

    def moved(self, params: Any, move: Move) -> Any:
        """Return the image of a parameter tree."""
        routing = symoptax.route(params, self.rules)
        leaves = [
            move.leaf(leaf.path, value, _rule(leaf))
            for leaf, value in zip(routing.leaves, jax.tree.leaves(params), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(params), leaves)

    def distances(self, move: Move, steps: int = STEPS) -> list[float]:
        """Train in both bases; return after each step how far apart the runs are.

        That is `|W' - g W| / |g W - g W_0|` over all parameters, heads and routers without the mean
        of their rows, which the loss does not see: 0 if the optimizer commutes with the move g.
        """
        here, there = self.start, self.moved(self.start, move)
        origin = there
        states = self.init(here), self.init(there)
        result = []
        for tokens in batches(steps):
            here, first = self.step(here, states[0], tokens)
            there, second = self.step(there, states[1], move.tokens(tokens))
            states, image = (first, second), self.moved(here, move)
            apart, travelled = (self._norm(a, b) for a, b in ((there, image), (image, origin)))
            result.append(apart / travelled)
        return result

    def _norm(self, a: Any, b: Any) -> float:
        difference = jax.tree.map(jnp.subtract, a, b)
        routing = symoptax.route(difference, self.rules)
        total = 0.0
        for leaf, value in zip(routing.leaves, jax.tree.leaves(difference), strict=True):
            if leaf.role in (Role.LM_HEAD, Role.ROUTER):
                (stack,) = leaf.view.open(value)
                value = stack - jnp.mean(stack, axis=-2, keepdims=True)
            total += float(jnp.sum(jnp.square(value)))
        return total**0.5


def _rule(leaf: symoptax.RoutedLeaf) -> ParamRule:
    return ParamRule(leaf.path, leaf.role, leaf.view)


def distances(
    dtype: Any = jnp.float32, names: Sequence[str] = (), steps: int = STEPS
) -> dict[str, dict[str, list[float]]]:
    """Return move -> optimizer -> how far apart the two runs are after each step."""
    result: dict[str, dict[str, list[float]]] = {move: {} for move in MOVES}
    for name, case in CASES.items():
        for optimizer, tx in optimizers(case.rules).items():
            if names and optimizer not in names:
                continue
            trainer = Trainer(case, tx, dtype)
            for move in MOVES:
                if (move in OF_OLMOE) == (name == "olmoe"):
                    result[move][optimizer] = trainer.distances(MOVES[move], steps)
    return result


def plot(result: dict[str, dict[str, list[float]]], path: pathlib.Path) -> None:
    """Draw one panel per move."""
    figure, axes = plt.subplots(2, 4, figsize=(11, 4.6), sharex=True, sharey=True)
    for axis, (move, lines) in zip(axes.flat, result.items(), strict=True):
        for color, (optimizer, values) in zip(("C0", "C2", "C3"), lines.items(), strict=True):
            steps = range(1, len(values) + 1)
            axis.semilogy(steps, np.maximum(values, 1e-8), color=color, label=optimizer)
        axis.set_title(move, fontsize=10)
        axis.grid(alpha=0.3)
    axes.flat[0].legend(frameon=False)
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("distance of the two runs / way travelled", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Print how far the runs are apart at the end, and draw them."""
    result = distances()
    print(f"{'':26}" + "".join(f"{name:>20}" for name in result["tokens renumbered"]))
    for move, lines in result.items():
        print(f"{move:26}" + "".join(f"{values[-1]:20.1e}" for values in lines.values()))
    plot(result, PLOT)
    print(f"plot: {PLOT}")


if __name__ == "__main__":
    main()
