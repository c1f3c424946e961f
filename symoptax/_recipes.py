"""What each role gets: its update by name or as a map, checked against the role's symmetry."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from symoptax._centering import centered
from symoptax._equivariance import equivariance_error
from symoptax._hybrid import hybrid_map
from symoptax._hyperparams import check_numbers
from symoptax._map import MatrixMap
from symoptax._polar import left_polar_map, polar_map, right_polar_map
from symoptax._routing import Role
from symoptax._row_norm import column_norm_map, row_norm_map, sign_map
from symoptax._symmetry import Symmetry

Update = str | MatrixMap | optax.GradientTransformation

MAPS: dict[str, Callable[[], MatrixMap]] = {
    "row_norm": row_norm_map,
    "column_norm": column_norm_map,
    "polar": polar_map,
    "right_polar": right_polar_map,
    "left_polar": left_polar_map,
    "hybrid": hybrid_map,
    "sign": sign_map,
    "centered_row_norm": lambda: centered(row_norm_map()),
    "centered_right_polar": lambda: centered(right_polar_map()),
    "centered_left_polar": lambda: centered(left_polar_map()),
    "centered_hybrid": lambda: centered(hybrid_map()),
}

# A coordinate-wise baseline like AdamW, allowed everywhere by name although it breaks the symmetry.
_BASELINE = "sign"

# Rounding makes 1e-3 at most in float32; a row norm without its last projection is off by 0.05.
_COMMUTES = 0.01

DEFAULT_UPDATES: dict[Role, str] = {
    Role.EMBEDDING: "hybrid",
    Role.TIED_EMBEDDING: "hybrid",
    Role.LM_HEAD: "centered_hybrid",
    Role.LM_HEAD_NO_SHIFT: "hybrid",
    Role.ATTENTION: "polar",
    Role.MLP_IN: "hybrid",
    Role.MLP_DOWN: "hybrid",
    Role.EXPERT_IN: "hybrid",
    Role.EXPERT_DOWN: "hybrid",
    Role.ROUTER: "centered_left_polar",
    Role.ROUTER_NO_SHIFT: "left_polar",
    Role.OTHER: "adamw",
}

# Multiples of the learning rate for maps whose updates have root-mean-square size 0.2. Measured on
# the model and data of examples/pretrain.py, validation loss at rate 4e-3: 5 gives 4.39, 10 gives
# 4.34, 20 gives 4.31.
DEFAULT_LR_MULTIPLIERS: dict[Role, float] = {Role.EMBEDDING: 20.0}


# Where data picks which rows get a gradient at all: those of tokens and of experts. Not the routers
# behind a softmax, whose rows only move relative to each other: there is no standing still.
PICKED_BY_DATA = {Role.EMBEDDING, Role.EXPERT_IN, Role.EXPERT_DOWN, Role.ROUTER_NO_SHIFT}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The update of one role: a map, a transformation by itself, or "adamw" or "frozen" by name."""

    name: str
    map: MatrixMap | None = None
    transformation: optax.GradientTransformation | None = None
    lr_multiplier: float = 1.0
    weight_decay: float = 0.0
    picked_by_data: bool = False


def recipes(
    updates: Mapping[Any, Update] | None,
    lr_multipliers: Mapping[Any, float] | None,
    weight_decay: float | Mapping[Any, float],
    *,
    strict: bool,
    verify: bool = False,
) -> dict[Role, Recipe]:
    """Return the recipe of every role, the defaults overridden by what is given.

    Raises:
      ValueError: unknown role or update; with `strict` a map that the role's symmetry refuses; with
        `verify` a map that does not commute with the symmetry that it declares.
      TypeError: what is no mapping, or no number.
    """
    chosen: dict[Role, Update] = {**DEFAULT_UPDATES, **_by_role("updates", updates or {})}
    multipliers = _by_role("lr_multipliers", lr_multipliers or {})
    check_numbers(**{f"lr_multipliers[{str(role)!r}]": m for role, m in multipliers.items()})
    if isinstance(weight_decay, Mapping):
        decays = _by_role("weight_decay", weight_decay)
        check_numbers(**{f"weight_decay[{str(role)!r}]": w for role, w in decays.items()})
        if own := [str(r) for r in decays if isinstance(chosen[r], optax.GradientTransformation)]:
            raise ValueError(f"weight_decay for {own}: their transformations bring their own.")
    else:
        check_numbers(weight_decay=weight_decay)
        decays = {role: weight_decay for role in Role if role != Role.OTHER}
    result = {}
    for role, update in chosen.items():
        recipe = _recipe(role, update, decays.get(role, 0.0))
        default = DEFAULT_LR_MULTIPLIERS.get(role, 1.0) if recipe.map else 1.0
        result[role] = dataclasses.replace(
            recipe,
            lr_multiplier=multipliers.get(role, default),
            picked_by_data=role in PICKED_BY_DATA,
        )
        if strict:
            _check_symmetry(role, result[role])
        if verify:
            _measure_symmetry(role, result[role])
    return result


def _recipe(role: Role, update: Update, weight_decay: float) -> Recipe:
    if isinstance(update, MatrixMap):
        return Recipe(update.name, map=update, weight_decay=weight_decay)
    if isinstance(update, optax.GradientTransformation):
        return Recipe("custom", transformation=update)
    if update == "frozen":
        return Recipe(update)
    if update == "adamw":
        return Recipe(update, weight_decay=weight_decay)
    if update not in MAPS:
        raise ValueError(
            f"Update {update!r} for role {str(role)!r} is unknown; choose from "
            f"{', '.join([*MAPS, 'adamw', 'frozen'])}, or pass a MatrixMap or a transformation."
        )
    return Recipe(update, map=MAPS[update](), weight_decay=weight_decay)


def _check_symmetry(role: Role, recipe: Recipe) -> None:
    needed, update_map = role.symmetry, recipe.map
    if update_map is None or recipe.name == _BASELINE:
        return
    if needed is None:
        raise ValueError(
            f"Role {str(role)!r} holds leaves without a matrix view, so it cannot take the map "
            f"{recipe.name!r}; use 'adamw', 'frozen' or a transformation."
        )
    if not needed.is_respected_by(update_map.symmetry):
        fitting = [name for name in MAPS if needed.is_respected_by(MAPS[name]().symmetry)]
        raise ValueError(
            f"Update {recipe.name!r} respects {update_map.symmetry}, but blocks of role "
            f"{str(role)!r} have the symmetry {needed}{_hint(needed, update_map.symmetry)}. "
            f"Maps that fit: {', '.join(fitting)}. Pass strict=False to use it all the same."
        )


def _measure_symmetry(role: Role, recipe: Recipe) -> None:
    update_map = recipe.map
    if update_map is None:
        return
    with jax.ensure_compile_time_eval():
        error = max(
            equivariance_error(update_map, update_map.symmetry, shape, jax.random.key(0))
            for shape in ((12, 8), (8, 12))
        )
    if not error <= _COMMUTES:
        raise ValueError(
            f"Update {recipe.name!r} for role {str(role)!r} declares the symmetry "
            f"{update_map.symmetry}, but is {error:.2g} of its size away from commuting with it. "
            "(The rounding of bfloat16 products alone makes 0.1; verify with numerics=FLOAT32.)"
        )


def _hint(needed: Symmetry, offered: Symmetry) -> str:
    if needed.shift and not offered.shift:
        return ": adding one vector to all rows changes nothing, so the map must be centered"
    if offered.shift and not needed.shift:
        return ": no shared shift acts here, and a centered map would never train the mean row"
    return ""


def _by_role(option: str, values: Mapping[Any, Any]) -> dict[Role, Any]:
    if not isinstance(values, Mapping):
        raise TypeError(f"{option}={values!r}: need a mapping from roles.")
    unknown = [key for key in values if key not in list(Role)]
    if unknown:
        raise ValueError(f"{option} names unknown roles {unknown}; choose from {', '.join(Role)}.")
    return {Role(key): value for key, value in values.items()}
