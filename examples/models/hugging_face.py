"""Weights in the names and layouts of the Hugging Face hub, there and back without rounding.

A table says for each kind of leaf what it is called there and how its axes lie, in the notation of
einops: `"d head k -> (head k) d"` is a Flax kernel on the left, a weight of `torch.nn.Linear` on
the right. A hub name with `{expert}` stands for one weight per expert, the first axis of the leaf.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

_LAYER = re.compile(r"(?<=layers/)\d+")
_GROUP = re.compile(r"\([^)]*\)|\S+")


class Weight(NamedTuple):
    """A kind of leaf: its name on the hub, its path here, and its axes here and there."""

    hub: str
    path: str
    axes: str = ""

    @property
    def stacked(self) -> bool:
        """Whether the leaf is a stack of experts, each a weight of its own on the hub."""
        return "{expert}" in self.hub

    def names(self, path: str, experts: int) -> list[str]:
        """Return the names on the hub of the leaf at `path`."""
        layer = next(iter(_LAYER.findall(path)), "")
        if not self.stacked:
            return [self.hub.format(layer=layer)]
        return [self.hub.format(layer=layer, expert=expert) for expert in range(experts)]

    def hub_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that a leaf, or one expert of it, has on the hub."""
        if not self.axes:
            return tuple(shape)
        order, groups = self._parsed()
        return tuple(math.prod(shape[order[i]] for i in group) for group in groups)

    def to_hub(self, leaf: np.ndarray) -> np.ndarray:
        """Lay out a leaf, or one expert of it, as on the hub."""
        if not self.axes:
            return leaf
        order, _ = self._parsed()
        return leaf.transpose(order).reshape(self.hub_shape(leaf.shape))

    def from_hub(self, value: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Lay out what the hub has as a leaf of this shape."""
        if not self.axes:
            return value.reshape(shape)
        order, _ = self._parsed()
        return value.reshape([shape[i] for i in order]).transpose(np.argsort(order))

    def _parsed(self) -> tuple[list[int], list[list[int]]]:
        """Return the order of the axes on the hub, and which of those are packed into one."""
        left, right = self.axes.split("->")
        sides = [group.strip("()").split() for group in _GROUP.findall(right)]
        places = iter(range(len(left.split())))
        groups = [[next(places) for _ in side] for side in sides]
        return [left.split().index(name) for side in sides for name in side], groups


def check_hub(
    weights: Iterable[Weight], shapes: Any, found: Mapping[str, Any], *, tied: bool = False
) -> None:
    """Compare the names and shapes of a state dict with a parameter tree; see `from_hub`."""
    table = {weight.path: weight for weight in weights}
    rest = set(found) - ({"lm_head.weight"} if tied else set())
    for keys, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        path = keystr(keys, simple=True, separator="/")
        weight = table[_LAYER.sub("*", path)]
        need = weight.hub_shape(leaf.shape[1:] if weight.stacked else leaf.shape)
        for name in weight.names(path, leaf.shape[0]):
            if name not in found:
                raise ValueError(f"{path}: the state dict has no {name}.")
            if (shape := tuple(np.shape(found[name]))) != need:
                raise ValueError(f"{name}: shape {shape}; need {need}.")
            rest.remove(name)
    if rest:
        raise ValueError(f"The state dict has weights that the model lacks: {sorted(rest)[:5]}")


def from_hub(
    weights: Iterable[Weight], shapes: Any, state_dict: Mapping[str, Any], *, tied: bool = False
) -> Any:
    """Return a tree like `shapes` with the weights of a state dict, converted leaf by leaf.

    Args:
      weights: the table of the architecture.
      shapes: the parameter tree, or its shapes; where these have shardings, so do the leaves.
      state_dict: name -> array, or what NumPy takes for one.
      tied: whether a head in the state dict is the embedding once more, and left aside.

    Raises:
      ValueError: for a weight that is missing, of another shape, or left over.
    """
    check_hub(weights, shapes, state_dict, tied=tied)
    table = {weight.path: weight for weight in weights}

    def leaf(keys: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        path = keystr(keys, simple=True, separator="/")
        weight = table[_LAYER.sub("*", path)]
        part = shape.shape[1:] if weight.stacked else shape.shape
        names = weight.names(path, shape.shape[0])
        parts = [weight.from_hub(np.asarray(state_dict[name]), part) for name in names]
        value = np.stack(parts) if weight.stacked else parts[0]
        place = getattr(shape, "sharding", None)
        if place is None:
            return jnp.asarray(value)
        return jax.make_array_from_callback(value.shape, place, value.__getitem__)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def to_hub(weights: Iterable[Weight], params: Any) -> dict[str, np.ndarray]:
    """Return the state dict of a parameter tree: the inverse of `from_hub`."""
    table = {weight.path: weight for weight in weights}
    state_dict = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path, value = keystr(keys, simple=True, separator="/"), np.asarray(leaf)
        weight = table[_LAYER.sub("*", path)]
        names = weight.names(path, len(value))
        parts = value if weight.stacked else [value]
        for name, part in zip(names, parts, strict=True):
            state_dict[name] = weight.to_hub(part)
    return state_dict


def in_every_layer(names: Mapping[str, tuple[str, ...]]) -> list[Weight]:
    """Return a table from `hub name -> (path, axes)` within a layer."""
    return [
        Weight(f"model.layers.{{layer}}.{hub}", f"layers/*/{path}", *axes)
        for hub, (path, *axes) in names.items()
    ]


ENDS = [
    Weight("model.embed_tokens.weight", "embed/embedding"),
    Weight("model.norm.weight", "norm/scale"),
    Weight("lm_head.weight", "lm_head/kernel", "d vocab -> vocab d"),
]
