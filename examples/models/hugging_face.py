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

    def names(self, path: str, experts: int) -> list[str]:
        """Return the names on the hub of the leaf at `path`."""
        layer = next(iter(_LAYER.findall(path)), "")
        if "{expert}" not in self.hub:
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


def from_hub(
    weights: Iterable[Weight], shapes: Any, state_dict: Mapping[str, Any], *, tied: bool = False
) -> Any:
    """Return a tree like `shapes` with the weights of a state dict.

    Args:
      weights: the table of the architecture.
      shapes: the parameter tree, or its shapes.
      state_dict: name -> array, or what NumPy takes for one.
      tied: whether a head in the state dict is the embedding once more, and left aside.

    Raises:
      ValueError: for a weight that is missing, of another shape, or left over.
    """
    table = {weight.path: weight for weight in weights}
    rest = set(state_dict) - ({"lm_head.weight"} if tied else set())

    def leaf(keys: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        path = keystr(keys, simple=True, separator="/")
        weight = table[_LAYER.sub("*", path)]
        names = weight.names(path, shape.shape[0])
        if missing := [name for name in names if name not in state_dict]:
            raise ValueError(f"{path}: the state dict has no {missing[0]}.")
        rest.difference_update(names)
        values = [np.asarray(state_dict[name]) for name in names]
        stacked = "{expert}" in weight.hub
        part = shape.shape[1:] if stacked else shape.shape
        for name, value in zip(names, values, strict=True):
            if value.shape != weight.hub_shape(part):
                raise ValueError(f"{name}: shape {value.shape}; need {weight.hub_shape(part)}.")
        parts = [weight.from_hub(value, part) for value in values]
        return jnp.asarray(np.stack(parts) if stacked else parts[0])

    params = jax.tree_util.tree_map_with_path(leaf, shapes)
    if rest:
        raise ValueError(f"The state dict has weights that the model lacks: {sorted(rest)[:5]}")
    return params


def to_hub(weights: Iterable[Weight], params: Any) -> dict[str, np.ndarray]:
    """Return the state dict of a parameter tree: the inverse of `from_hub`."""
    table = {weight.path: weight for weight in weights}
    state_dict = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path, value = keystr(keys, simple=True, separator="/"), np.asarray(leaf)
        weight = table[_LAYER.sub("*", path)]
        names = weight.names(path, len(value))
        parts = value if "{expert}" in weight.hub else [value]
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
