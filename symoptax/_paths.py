"""Names of parameters: one normal form for the paths of all containers, and patterns over it.

Errors about leaves begin with their names, so they are made here.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

_SEGMENT_TOKEN = re.compile(r"\*|\?|\{[^{}]*\}|[^*?{}]+|[{}]")


def named_leaves(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Return the leaves of a tree with their names, and the tree's structure.

    A name is the path of keys, fields and indices, joined by slashes. Boxes (`nnx.Param`,
    `nn.Partitioned`) leave no trace in it, because Flax puts them around the same leaf in some
    places and not in others. A key that contains slashes is several segments.

    >>> named_leaves({"layers": [{"kernel": 1.0}]})[0]
    [('layers/0/kernel', 1.0)]
    """
    nodes, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_box)
    names = [
        "/".join(_key_name(key).strip("/") for key in path)
        for path, node in nodes
        for _ in jax.tree.leaves(node)
    ]
    leaves, structure = jax.tree.flatten(tree)
    return list(zip(names, leaves, strict=True)), structure


def suffixes(name: str) -> list[str]:
    """Return a name and what is left of it without its first segments, the longest first.

    >>> suffixes("mu/mlp/kernel")
    ['mu/mlp/kernel', 'mlp/kernel', 'kernel']
    """
    segments = name.split("/")
    return ["/".join(segments[start:]) for start in range(len(segments))]


def paired_leaves(tree: Any, other: Any, what: str) -> list[tuple[str, Any, Any]]:
    """Return name, leaf and counterpart for each leaf of a tree and of another one like it.

    Args:
      tree: the tree.
      other: a tree with something in the place of each leaf, be it None.
      what: how an error calls `other`.

    Raises:
      ValueError: for trees that differ, with the leaves that only one of them has.
    """
    named, structure = named_leaves(tree)
    try:
        others = structure.flatten_up_to(other)
    except ValueError as error:
        here, there = dict(named), dict(named_leaves(other)[0])
        alone = [f"{name} {in_print(({**here, **there})[name])}" for name in here.keys() ^ there]
        raise ValueError(
            f"{what} and the updates are different trees; only one has {', '.join(sorted(alone))}. "
            f"Call `update` with the tree that `init` was called with. ({error})"
        ) from error
    return [(name, leaf, found) for (name, leaf), found in zip(named, others, strict=True)]


def check_floating(name: str, leaf: Any) -> None:
    """Raise ValueError for a leaf that is no array of real floating numbers."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 16:
        raise ValueError(
            f"{name}: need an array of a real floating dtype of at least 16 bits, got "
            f"{in_print(leaf)}; cast it, or route it elsewhere."
        )


def in_print(leaf: Any) -> str:
    """Return dtype and shape of an array, `float32[2, 3]`, or the name of another type."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return type(leaf).__name__


def matches(pattern: str, name: str) -> bool:
    """Return whether a whole path name matches a pattern.

    `*` and `?` stay inside one segment, `{a,b}` is either, `**` is any number of segments.

    >>> matches("**/mlp/{gate,up}_proj/kernel", "layers/0/mlp/up_proj/kernel")
    True
    >>> matches("**/gate", "layers/0/attn_gate")
    False
    """
    return _compiled(pattern).fullmatch(f"{name}/" if name else "") is not None


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    segments = pattern.split("/")
    return re.compile("".join(_segment_regex(segment, pattern) for segment in segments))


def _segment_regex(segment: str, pattern: str) -> str:
    if segment == "**":
        return "(?:[^/]+/)*"
    if not segment or "**" in segment:
        raise ValueError(f"Pattern {pattern!r}: a segment is empty, or mixes '**' with text.")
    regex = ""
    for token in _SEGMENT_TOKEN.findall(segment):
        if token == "*":
            regex += "[^/]*"
        elif token == "?":
            regex += "[^/]"
        elif token.startswith("{") and token.endswith("}"):
            regex += "(?:" + "|".join(re.escape(part) for part in token[1:-1].split(",")) + ")"
        elif token in "{}":
            raise ValueError(f"Pattern {pattern!r}: a brace is not closed.")
        else:
            regex += re.escape(token)
    return regex + "/"


def _key_name(key: Any) -> str:
    match key:
        case DictKey(key=name) | FlattenedIndexKey(key=name):
            return str(name)
        case SequenceKey(idx=index):
            return str(index)
        case GetAttrKey(name=name):
            return name
    return str(key)


def _is_box(node: Any) -> bool:
    """Return whether a node is a box of Flax around one leaf: AxisMetadata or `nnx.Variable`."""
    return any(hasattr(type(node), name) for name in ("unbox", "raw_value", "get_raw_value"))
