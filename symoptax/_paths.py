"""Names of parameters: one normal form for the paths of all containers, and patterns over it."""

import functools
import re
from typing import Any

import jax
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
