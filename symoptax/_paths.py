"""Names of parameters: one normal form for the paths of all containers, and patterns over it."""

import functools
import re
from typing import Any

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

KeyPath = tuple[Any, ...]

_SEGMENT_TOKEN = re.compile(r"\*|\?|\{[^{}]*\}|[^*?{}]+|[{}]")


def path_name(path: KeyPath) -> str:
    """Return the name of a leaf, `"layers/0/attn/q_proj/kernel"`, from its key path.

    Boxes leave no trace: `nnx.Param`, `nn.Partitioned` and the like add `.value` to the key path of
    a leaf in some places and not in others. Keys that contain slashes are several segments.

    >>> path_name((DictKey("layers"), DictKey(0), DictKey("kernel"), GetAttrKey("value")))
    'layers/0/kernel'
    """
    keys = [_key_name(key) for key in path]
    if path and isinstance(path[-1], GetAttrKey | FlattenedIndexKey) and _is_box(path[-1]):
        keys.pop()
    return "/".join(key.strip("/") for key in keys)


def matches(pattern: str, name: str) -> bool:
    """Return whether a whole path name matches a pattern.

    `*` and `?` stay inside one segment, `{a,b}` is either, `**` is any number of segments.

    >>> matches("**/mlp/{gate,up}_proj/kernel", "layers/0/mlp/up_proj/kernel")
    True
    >>> matches("**/gate", "layers/0/attn_gate")
    False
    """
    return _compiled(pattern).fullmatch(f"{name}/") is not None


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


def _is_box(key: Any) -> bool:
    return not isinstance(key, GetAttrKey) or key.name in ("value", "raw_value")
