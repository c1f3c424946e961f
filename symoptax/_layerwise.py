"""The whole stack: every parameter updated by the rule of its role, under one learning rate."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import optax

from symoptax._hyperparams import check_numbers, injectable
from symoptax._lazy_momentum import lazy_momentum
from symoptax._map import scaled
from symoptax._matrixwise import matrixwise_by_leaf
from symoptax._mesh.layouts import on_mesh
from symoptax._momentum import momentum
from symoptax._recipes import Recipe, Update, recipes
from symoptax._routing import Fallback, ParamRule, Role, check_rules, label_fn, route, view_fn
from symoptax._scaling import ScaleRule
from symoptax._weight_decay import Mask, add_weight_decay
from symoptax.routes._auto import Rules, for_each_tree


@injectable("learning_rate", "rules", "beta")
def layerwise(
    learning_rate: optax.ScalarOrSchedule,
    rules: Rules,
    beta: float | jax.Array = 0.95,
    *,
    updates: Mapping[Any, Update] | None = None,
    lr_multipliers: Mapping[Any, float] | None = None,
    weight_decay: float | Mapping[Any, float] = 0.0,
    mask: Mask = None,
    cautious: bool = False,
    independent_decay: bool = False,
    nesterov: bool = False,
    scale: ScaleRule | None = "rms",
    mu_dtype: Any = None,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    lazy: bool = True,
    fallback: Fallback = None,
    strict: bool = True,
    verify: bool = False,
    mesh: Any = None,
) -> optax.GradientTransformation:
    """Build the optimizer of a whole model over `optax.partition`, one group per role.

    A matrix role does `P <- P - lr (c scale U(M) + weight_decay P)` with its map U, momentum M and
    multiplier c; the role "other" is AdamW's. With `scale="rms"` every update has AdamW's
    root-mean-square size, so one AdamW-like learning rate and schedule, counted once, serves all.

    Args:
      learning_rate: a number or a schedule.
      rules: what each parameter is; see `route`. "auto" finds them in `symoptax.routes` by the
        parameter tree, and `routing_report` says which it took; a function from the tree to rules,
        such as `routes.maxtext.rules`, is called with it.
      beta: decay rate of the momentum of the matrix roles.
      updates: role -> update, where it differs from the default: the name of a map ("row_norm",
        "centered_hybrid", ...), "adamw", "frozen", a `MatrixMap`, or a transformation without
        learning rate that brings its own momentum and weight decay, `optax.scale_by_lion()`. A
        complete optimizer such as `optax.adamw(1e-3)` has the sign of a step already and would
        climb; give it a label of its own in `optax.partition`.
      lr_multipliers: role -> multiple of the learning rate, where it differs from the default:
        20 for a map on "embedding", else 1. Divide it by what the model multiplies the rows with
        that it looks up: Gemma's `sqrt(d)`.
      weight_decay: decoupled decay of all matrix roles, or role -> decay (also for "other").
      mask: which leaves decay, as in `optax.adamw`.
      cautious: decay only where update and parameter have the same sign.
      independent_decay: take `weight_decay * P` off per step as it is, not times the learning rate.
      nesterov: look one step ahead with the momentum.
      scale: factor from the shape of a matrix, see `shape_scale`; a `MatrixMap` in `updates` that
        has a scale of its own keeps it.
      mu_dtype: dtype of the momenta; None keeps the parameter's.
      b1: AdamW's first decay rate, for "other" and wherever `updates` says "adamw".
      b2: its second.
      eps: its epsilon.
      lazy: rows of "embedding", of experts and of routers without a shared shift stand still when
        no data has picked them for 1 / (1 - beta) steps; see `lazy_momentum`.
      fallback: "adamw" sends leaves that no rule matches to AdamW; None raises for them.
      strict: refuse a map that does not respect the symmetry of its role.
      verify: measure the symmetry that each map declares instead of believing it, by
        `equivariance_error`; takes seconds. A transformation in `updates` declares none.
      mesh: a mesh or the tree of the parameters' shardings, as in `on_mesh`; None takes the mesh
        from the arrays or from `jax.set_mesh`.

    Returns:
      A named chain with the state of each role under `state["updates"].inner_states[role]`.

    Raises:
      ValueError: when built, for unknown roles or updates and, with `strict`, for a map that breaks
        its role's symmetry, with `verify` its own; in `init`, as `route`.
      TypeError: for a hyperparameter that is no number, or rules that are none.
    """
    check_numbers(learning_rate=learning_rate, beta=beta, b1=b1, b2=b2, eps=eps)
    chosen = recipes(updates, lr_multipliers, weight_decay, strict=strict, verify=verify)

    def before_the_map(recipe: Recipe, view: Callable[[Any], Any]) -> optax.GradientTransformation:
        if recipe.name == "frozen":
            return optax.set_to_zero()
        if recipe.transformation is not None:
            return optax.named_chain(("update", recipe.transformation))
        if recipe.map is None:
            return optax.named_chain(("adam", optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype)))
        options = {"nesterov": nesterov, "mu_dtype": mu_dtype}
        if lazy and recipe.picked_by_data:
            average = lazy_momentum(beta, view, **options)
        else:
            average = momentum(beta, **options)
        return optax.named_chain(("momentum", average))

    def after_the_map(recipe: Recipe) -> optax.GradientTransformation:
        if recipe.name == "frozen":
            return optax.identity()
        coefficient = 0.0 if independent_decay else recipe.weight_decay
        return optax.chain(
            optax.scale(recipe.lr_multiplier),
            add_weight_decay(coefficient, mask, cautious=cautious),
        )

    def late_decay(recipe: Recipe) -> optax.GradientTransformation:
        return add_weight_decay(-recipe.weight_decay, mask, cautious=cautious)

    maps = {
        role: scaled(recipe.map, None if recipe.map.scale else scale)
        for role, recipe in chosen.items()
        if recipe.map is not None
    }

    def build(rules: Sequence[ParamRule]) -> optax.GradientTransformation:
        check_rules(rules)
        present = [r for r in Role if r == Role.OTHER or any(rule.role == r for rule in rules)]
        view = view_fn(rules, fallback=fallback)

        def by_role(each: Callable[[Recipe], Any]) -> optax.GradientTransformation:
            transformations: dict[Hashable, Any] = {str(r): each(chosen[r]) for r in present}
            return optax.partition(transformations, label_fn(rules, fallback=fallback))

        def maps_of(params: Any) -> Any:
            routing = route(params, rules, fallback=fallback)
            return routing.structure.unflatten([maps.get(leaf.role) for leaf in routing.leaves])

        stages = [
            ("updates", by_role(lambda recipe: before_the_map(recipe, view))),
            # All roles at once: on a mesh, equal shapes travel together whatever their roles.
            ("maps", matrixwise_by_leaf(maps_of, view)),
            ("sizes", by_role(after_the_map)),
            ("learning_rate", optax.scale_by_learning_rate(learning_rate)),
        ]
        if independent_decay:
            stages.append(("independent_decay", by_role(late_decay)))
        chained = optax.named_chain(*stages)
        return chained if mesh is None else on_mesh(chained, mesh)

    return build(rules) if isinstance(rules, list | tuple) else for_each_tree(build, rules)
