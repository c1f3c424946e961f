"""What each parameter is: roles, rules that assign them by path, and the checked result."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal

from symoptax._paths import matches, named_leaves
from symoptax._symmetry import Group, Symmetry
from symoptax._view import MatrixView, as_view

Fallback = Literal["adamw"] | None


class RoutingError(ValueError):
    """A parameter tree that rules do not fit."""


class Role(enum.StrEnum):
    """What a parameter does in the network, which decides the group that acts on it.

    In every view the rows are the exchangeable units: tokens, neurons, experts, output features.
    The `_no_shift` forms are for logits or scores that do not pass through a softmax over all rows
    as they are: soft-capped heads, sigmoid routers, z-losses.
    """

    EMBEDDING = "embedding"
    TIED_EMBEDDING = "tied_embedding"
    LM_HEAD = "lm_head"
    LM_HEAD_NO_SHIFT = "lm_head_no_shift"
    ATTENTION = "attention"
    MLP_IN = "mlp_in"
    MLP_DOWN = "mlp_down"
    EXPERT_IN = "expert_in"
    EXPERT_DOWN = "expert_down"
    ROUTER = "router"
    ROUTER_NO_SHIFT = "router_no_shift"
    OTHER = "other"

    @property
    def symmetry(self) -> Symmetry | None:
        """The group that acts on blocks of this role; None for `other`, which has no matrices."""
        match self:
            case Role.OTHER:
                return None
            case Role.ATTENTION:
                return Symmetry(Group.ORTHOGONAL, Group.ORTHOGONAL)
            case Role.LM_HEAD | Role.ROUTER:
                return Symmetry(Group.PERMUTATION, Group.ORTHOGONAL, shift=True)
        return Symmetry(Group.PERMUTATION, Group.ORTHOGONAL)


@dataclasses.dataclass(frozen=True)
class ParamRule:
    """Say of all leaves whose path matches a pattern what they are and how they form matrices.

    >>> ParamRule("**/mlp/{gate,up}_proj/kernel", "mlp_in", "d neuron -> neuron d").view.rows
    'neuron'

    Args:
      pattern: whole path segments: `*` within one, `**` any number, `{a,b}` either.
      role: a `Role` or its name.
      view: a `MatrixView` or its pattern, naming every axis; none for the role "other". Several for
        leaves that a library stores with more or fewer axes, as with scanned layers: the one with
        as many axes as the leaf is taken.

    Raises:
      ValueError: unknown role, a matrix role without a view, a view with `...`, or two views with
        equally many axes.
    """

    pattern: str
    role: Role | str
    view: MatrixView | str | Sequence[MatrixView | str] | None = None

    def __post_init__(self) -> None:
        if self.role not in list(Role):
            raise ValueError(
                f"Rule {self.pattern!r}: role {self.role!r} is none of {', '.join(Role)}."
            )
        object.__setattr__(self, "role", Role(self.role))
        given: Any = self.view if isinstance(self.view, list | tuple) else [self.view]
        views = tuple(as_view(v) for v in given if v is not None)
        object.__setattr__(self, "view", views if len(views) > 1 else next(iter(views), None))
        if (self.role == Role.OTHER) != (not views):
            raise ValueError(
                f"Rule {self.pattern!r}: role {self.role!r} "
                + ("takes no view." if views else "needs a view, such as 'd out -> out d'.")
            )
        for view in views:
            if not view.names_every_axis:
                raise ValueError(
                    f"Rule {self.pattern!r}: name every axis of {view.pattern!r} instead of "
                    "'...'; an axis too many is then an error and not a silent batch axis."
                )
        if len({view.ndim for view in views}) < len(views):
            raise ValueError(f"Rule {self.pattern!r}: two views have equally many axes.")
        matches(self.pattern, "")  # raises for a pattern that does not parse

    @property
    def views(self) -> tuple[MatrixView, ...]:
        """All views of the rule, none for the role "other"."""
        views = self.view if isinstance(self.view, tuple) else (self.view,)
        return tuple(view for view in views if isinstance(view, MatrixView))

    def view_for(self, shape: Sequence[int] | None) -> MatrixView | None:
        """Return the view of a leaf of this shape: the only one, or that of as many axes."""
        fitting = [v for v in self.views if shape is not None and v.ndim == len(shape)]
        return next(iter(fitting or self.views), None)


@dataclasses.dataclass(frozen=True)
class RoutedLeaf:
    """One leaf with what a rule says of it; `shape` and `dtype` are None for placeholders."""

    path: str
    shape: tuple[int, ...] | None
    dtype: Any
    role: Role
    view: MatrixView | None

    def matrices(self) -> list[tuple[int, ...]]:
        """Return the shapes `(*batch, m, n)` of the leaf's stacks."""
        return [] if self.view is None or self.shape is None else self.view.shapes(self.shape)


@dataclasses.dataclass(frozen=True)
class Routing:
    """Every leaf of one parameter tree with its role and view, in the order of the tree."""

    leaves: tuple[RoutedLeaf, ...]
    structure: Any

    @property
    def labels(self) -> Any:
        """The tree of role names, for `optax.partition`."""
        return self.structure.unflatten([str(leaf.role) for leaf in self.leaves])

    @property
    def views(self) -> Any:
        """The tree of views; None for leaves without matrices."""
        return self.structure.unflatten([leaf.view for leaf in self.leaves])


def route(params: Any, rules: Sequence[ParamRule], *, fallback: Fallback = None) -> Routing:
    """Give every leaf of a parameter tree the role and view of the one rule that matches its path.

    Works on any pytree of arrays, shapes (`jax.eval_shape`) or placeholders: linen dicts,
    `nnx.State`, boxed or not. Nothing is guessed from names or shapes beyond what the rules say.

    Args:
      params: the parameter tree.
      rules: one rule must match each leaf, and only one.
      fallback: "adamw" gives leaves that no rule matches the role "other"; None raises for them.

    Raises:
      RoutingError: (a ValueError) leaves that no rule, or more than one, matches, or whose shape
        does not fit the view; the message lists each with path, shape and mend.
    """
    if fallback not in (None, "adamw"):
        raise ValueError(f"fallback={fallback!r} is unknown; choose 'adamw' or None.")
    check_rules(rules)
    named, structure = named_leaves(params)
    leaves, problems = [], []
    for name, leaf in named:
        result = _route_leaf(name, leaf, rules, fallback)
        if isinstance(result, str):
            problems.append(result)
        else:
            leaves.append(result)
    if problems:
        raise RoutingError("Cannot route the parameters:\n" + "\n".join(f"  {p}" for p in problems))
    return Routing(tuple(leaves), structure)


def check_rules(rules: Sequence[ParamRule]) -> None:
    """Raise TypeError for what is no sequence of rules."""
    if not isinstance(rules, Sequence) or not all(isinstance(rule, ParamRule) for rule in rules):
        raise TypeError(f"rules={rules!r}: need a list of ParamRule(pattern, role, view).")


def label_fn(rules: Sequence[ParamRule], *, fallback: Fallback = None) -> Callable[[Any], Any]:
    """Return the function from a parameter tree to its role names, for `optax.partition`."""
    return lambda params: route(params, rules, fallback=fallback).labels


def view_fn(rules: Sequence[ParamRule], *, fallback: Fallback = None) -> Callable[[Any], Any]:
    """Return the function from a parameter tree to its tree of views, for `view=`."""
    return lambda params: route(params, rules, fallback=fallback).views


def mask_fn(
    rules: Sequence[ParamRule], *roles: Role | str, fallback: Fallback = None
) -> Callable[[Any], Any]:
    """Return the function from a parameter tree to the mask of the leaves that have these roles.

    Without roles, of all leaves that are matrices: the usual mask of weight decay.
    """
    chosen = {Role(role) for role in roles} or set(Role) - {Role.OTHER}

    def mask(params: Any) -> Any:
        routing = route(params, rules, fallback=fallback)
        return routing.structure.unflatten([leaf.role in chosen for leaf in routing.leaves])

    return mask


def apart(rules: Sequence[ParamRule], name: str = "head") -> list[ParamRule]:
    """Return the rules with an axis that views pack into rows or columns as a batch axis.

    So attention is updated head by head, as the authors of the update rules do. Views that do not
    name the axis stay as they are.
    """
    return [
        dataclasses.replace(
            rule, view=[v.apart(name) if name in v.names else v for v in rule.views] or None
        )
        for rule in rules
    ]


def _route_leaf(
    name: str, leaf: Any, rules: Sequence[ParamRule], fallback: Fallback
) -> RoutedLeaf | str:
    """Return the routed leaf, or one line that says why there is none."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    found = [rule for rule in rules if matches(rule.pattern, name)]
    if len(found) > 1:
        patterns = ", ".join(repr(rule.pattern) for rule in found)
        return f"{name} {shape}: matched by {len(found)} rules ({patterns}); narrow them to one."
    if not found and fallback is None:
        return (
            f"{name} {shape}: no rule matches; add ParamRule({name!r}, role, view), "
            'or pass fallback="adamw" to give such leaves to AdamW.'
        )
    role, view = (Role(found[0].role), found[0].view_for(shape)) if found else (Role.OTHER, None)
    if view is not None and shape is not None:
        try:
            view.shapes(shape)
        except ValueError as error:
            return (
                f"{name} {shape}: rule {found[0].pattern!r} does not fit; give such leaves a view "
                f"of their own, or narrow the rule. {error}"
            )
    return RoutedLeaf(name, None if shape is None else tuple(shape), dtype, role, view)
