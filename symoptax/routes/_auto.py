"""Recognising the library that a parameter tree comes from."""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import jax
import optax

from symoptax._routing import ParamRule, Routing, RoutingError, route
from symoptax.routes import (
    big_vision,
    by_name,
    examples,
    flax_examples,
    gemma,
    hugging_face,
    jax_llm_examples,
    maxtext,
    tunix,
)
from symoptax.routes._tree import Tree

Rules = Sequence[ParamRule] | Callable[[Any], Sequence[ParamRule]] | Literal["auto"]

LIBRARIES: dict[str, Callable[..., list[ParamRule]]] = {
    "MaxText": maxtext.rules,
    "gemma": gemma.rules,
    "Tunix": tunix.rules,
    "Hugging Face Flax": hugging_face.rules,
    "Flax's examples": flax_examples.rules,
    "jax-llm-examples": jax_llm_examples.rules,
    "big_vision": big_vision.rules,
    "symoptax's examples": examples.rules,
}


def auto(params: Any, *, softcap: bool = False) -> tuple[str, list[ParamRule]]:
    """Return the library that a parameter tree comes from, and its rules.

    A table is taken if it has one rule for every leaf, all of the right number of axes, and the
    sizes of the axes that it names agree over the whole tree: an axis called `d` has one size. A
    tree of no library gets the rules of `by_name` if these are certain of every leaf.

    Args:
      params: the parameter tree, or its shapes.
      softcap: whether the logits of an untied head are capped, or the loss has a z-loss.

    Raises:
      RoutingError: no table fits, or two that differ; the message shows rules to begin with.
    """
    masked = [x for x in jax.tree.leaves(params, is_leaf=_is_masked) if _is_masked(x)]
    if masked:
        raise RoutingError(
            "The parameter tree is masked, and tells no more whether it has a head: find the rules "
            "with symoptax.routes.auto(params) from the whole tree, and pass them."
        )
    tree = Tree(params)
    fitting: dict[str, tuple[Routing, list[ParamRule]]] = {}
    problems = []
    for name, table in LIBRARIES.items():
        try:
            rules = table(tree, softcap=softcap)
        except ValueError as error:  # fused kernels that cannot be cut so
            problems.append(f"{name}: {error}")
            continue
        if any(tree.unmatched(rules)):
            continue
        try:
            routing = route(params, rules)
        except RoutingError:
            continue
        if problem := _contradiction(routing):
            problems.append(f"{name}: {problem}.")
        else:
            fitting[name] = routing, rules
    if not fitting:
        certain = by_name.rules(tree, softcap=softcap)
        unknown = set(tree.unmatched(certain))
        if unknown:
            raise RoutingError(
                "\n  ".join(["No table of symoptax.routes fits this parameter tree.", *problems])
                + f"\nCertain by name and shape: {len(certain)} leaves. Write rules for the "
                "others; to begin with, where kernels are stored (in, out):\n  "
                + "\n  ".join(suggestions(tree, unknown))
            )
        return "symoptax.routes.by_name", certain
    first, *rest = fitting
    for name in rest:
        if fitting[name][0].leaves != fitting[first][0].leaves:
            raise RoutingError(
                f"The tables of {first} and {name} both fit, and differ: choose one."
            )
    return first, fitting[first][1]


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def rules_for(params: Any, rules: Rules) -> tuple[str, Sequence[ParamRule]]:
    """Return the rules of a tree with what they are called; "" for a list of your own.

    Raises:
      RoutingError: as `auto`.
    """
    if isinstance(rules, str):
        if rules != "auto":
            raise ValueError(f"rules={rules!r}: pass a list of rules, a function, or 'auto'.")
        return auto(params)
    return (rules.__module__, rules(params)) if callable(rules) else ("", rules)


def for_each_tree(
    build: Callable[[Sequence[ParamRule]], optax.GradientTransformation], rules: Rules
) -> optax.GradientTransformation:
    """Return the transformation whose rules are found in the parameter tree that it is given."""
    built: dict[Any, optax.GradientTransformation] = {}

    def for_tree(tree: Any) -> optax.GradientTransformation:
        leaves, structure = jax.tree.flatten(tree)
        key = structure, tuple(getattr(leaf, "shape", None) for leaf in leaves)
        if key not in built:
            built[key] = build(rules_for(tree, rules)[1])
        return built[key]

    def init(params: optax.Params) -> optax.OptState:
        return for_tree(params).init(params)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        return for_tree(updates).update(updates, state, params)

    return optax.GradientTransformation(init, update)


# Axes that have one size in the whole tree, those that have one in a module (leaves whose paths
# differ in the last two names at most), and those whose size is known.
_IN_TREE = ("d", "vocab", "expert", "width")
_IN_MODULE = ("layer", "neuron")
_KNOWN = {"gate_up": (2,), "qkv": (3,), "part": (2, 3)}


def _contradiction(routing: Routing) -> str | None:
    """Return how the sizes of named axes contradict each other, if they do."""
    seen: dict[tuple[str, str], tuple[int, str]] = {}
    for leaf in routing.leaves:
        if leaf.view is None or leaf.shape is None:
            continue
        module = leaf.path.rsplit("/", 2)[0]
        axes = {name: leaf.view.locate(name, leaf.shape).sizes for name in leaf.view.names}
        for name, (size, *more) in axes.items():
            if more:
                continue
            if size not in _KNOWN.get(name, (size,)):
                return f"the axis {name!r} of {leaf.path} would have the size {size}"
            scopes = [""] * (name in _IN_TREE) + [module] * (name in _IN_MODULE)
            for scope in scopes:
                other, where = seen.setdefault((name, scope), (size, leaf.path))
                if other != size:
                    return (
                        f"the axis {name!r} would have several sizes: {other} in {where}, {size} "
                        f"in {leaf.path}"
                    )
        if "layer" in axes and axes["layer"] in (axes.get("d"), axes.get("width")):
            return "layers are as many as features, so that their axis cannot be told by its size"
    return None


_NUMBER = re.compile(r"(?<=/)\d+(?=/)|(?<=_)\d+(?=/)")
_GUESSES = {
    r".*(embed|wte).*": ("embedding", "vocab d -> vocab d"),
    r".*(head|logits).*": ("lm_head", "d vocab -> vocab d"),
    r".*router.*": ("router_no_shift", "d expert -> expert d"),
    r"w?o|out|(o|out|c)_proj": ("attention", "heads d -> d heads"),
    r"w?[qkv]|[qkv]_proj|query|key|value": ("attention", "d out -> out d"),
    r".*down.*|w2": ("mlp_down", "neuron d -> neuron d"),
    r".*(gate|up).*|w[13]|c_fc": ("mlp_in", "d neuron -> neuron d"),
}


def suggestions(params: Any, only: Collection[str] | None = None) -> list[str]:
    """Return lines of rules to look through and paste: one for each kind of leaf.

    They go by names, so they are for a person to judge.

    Args:
      params: the parameter tree, or its shapes.
      only: the names of the leaves that need a rule; None for all.
    """
    lines: dict[str, str] = {}
    for name, shape in Tree(params).shapes.items():
        if only is not None and name not in only:
            continue
        pattern = _NUMBER.sub("*", name)
        lines.setdefault(pattern, f"{_suggestion(pattern, shape)},  # {shape}")
    return list(lines.values())


def _suggestion(pattern: str, shape: Sequence[int]) -> str:
    names = [n for n in pattern.split("/") if n not in ("kernel", "w", "weight", "embedding")]
    name = names[-1] if names else pattern
    if len(shape) < 2 or re.search("scale|bias|norm", name):
        return f'ParamRule("{pattern}", "other")'
    for words, (role, view) in _GUESSES.items():
        if len(shape) == 2 and re.fullmatch(words, name):
            return f'ParamRule("{pattern}", "{role}", "{view}")'
    axes = " ".join("abcdefgh"[: len(shape)])
    return f'ParamRule("{pattern}", "?", "{axes} -> ?")'
