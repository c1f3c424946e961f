"""What a table may ask of a parameter tree."""

from collections.abc import Iterator, Sequence
from typing import Any

from symoptax._paths import matches, named_leaves
from symoptax._routing import ParamRule, RoutingError
from symoptax._view import MatrixView

Views = str | MatrixView | Sequence[str | MatrixView]


class Tree:
    """The names and shapes of the leaves of a parameter tree, or of another `Tree`."""

    def __init__(self, params: Any) -> None:
        if isinstance(params, Tree):
            self.shapes = params.shapes
            return
        named, _ = named_leaves(params)
        self.shapes = {name: tuple(getattr(leaf, "shape", ())) for name, leaf in named}

    def unmatched(self, rules: Sequence[ParamRule]) -> Iterator[str]:
        """Yield the leaves that no rule matches."""
        for name in self.shapes:
            if not any(matches(rule.pattern, name) for rule in rules):
                yield name

    def find(self, pattern: str) -> dict[str, tuple[int, ...]]:
        """Return the leaves that match a pattern."""
        return {name: shape for name, shape in self.shapes.items() if matches(pattern, name)}

    def has(self, pattern: str) -> bool:
        """Return whether a leaf matches a pattern."""
        return any(matches(pattern, name) for name in self.shapes)

    def beside(self, name: str, *path: str) -> tuple[int, ...]:
        """Return the shape of a leaf that stands beside another: `path` in place of its end."""
        other = "/".join([*name.split("/")[: -len(path)], *path])
        if other not in self.shapes:
            raise RoutingError(
                f"{name} {self.shapes[name]}: what it holds only {other} could tell."
            )
        return self.shapes[other]


def embedding_rules(
    tree: Tree, table: str, head: str, *, head_view: str = "d vocab -> vocab d", softcap: bool
) -> list[ParamRule]:
    """Return the rules of a token table and its head; tied if the tree has no head."""
    if not tree.has(head):
        return [ParamRule(table, "tied_embedding", "vocab d -> vocab d")]
    return [
        ParamRule(table, "embedding", "vocab d -> vocab d"),
        ParamRule(head, "lm_head_no_shift" if softcap else "lm_head", head_view),
    ]


def others(*patterns: str) -> list[ParamRule]:
    """Return rules for what has no matrices: AdamW's."""
    return [ParamRule(pattern, "other") for pattern in patterns]
