"""The optimizers by name, and the learning-rate schedule that they share."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

import symoptax
from pretraining import paper
from pretraining.config import Config, multipliers, split_entries
from pretraining.errors import InputError

_POLAR_HIDDEN = dict.fromkeys(
    ["attention", "mlp_in", "mlp_down", "expert_in", "expert_down"], "polar"
)
_ADAMW_ENDS = dict.fromkeys(["embedding", "tied_embedding", "lm_head", "lm_head_no_shift"], "adamw")
_ADAMW_ROUTER = dict.fromkeys(["router", "router_no_shift"], "adamw")


def _ends(name: str) -> dict[str, str]:
    return {
        "embedding": name,
        "tied_embedding": name,
        "lm_head": f"centered_{name}",
        "lm_head_no_shift": name,
    }


def _router(name: str) -> dict[str, str]:
    return {"router": f"centered_{name}", "router_no_shift": name}


# Updates by role, where they are not those of `symoptax.layerwise`. Muon as commonly run is polar
# for the hidden matrices, AdamW for both ends and for routers; the next ones change its ends, then
# the router too, and the default all of it.
STACKS = {
    "muon": _POLAR_HIDDEN | _ADAMW_ENDS | _ADAMW_ROUTER,
    "row_norm": _POLAR_HIDDEN | _ends("row_norm") | _ADAMW_ROUTER,
    "right_polar": _POLAR_HIDDEN | _ends("right_polar") | _ADAMW_ROUTER,
    "hybrid": _POLAR_HIDDEN | _ends("hybrid") | _ADAMW_ROUTER,
    "row_norm_router": _POLAR_HIDDEN | _ends("row_norm") | _router("row_norm"),
    "left_polar_router": _POLAR_HIDDEN | _ends("row_norm") | _router("left_polar"),
    "layerwise": {},
}
# What takes no factor of the model: factors are measured for updates of one size.
_NO_MAPS = ("adamw", "frozen")
# The best on the default run of 4e-3, 8e-3 and 1.6e-2 (AdamW: 2e-3, 4e-3, 8e-3).
LEARNING_RATES = {
    **dict.fromkeys(STACKS, 8e-3),
    "muon": 1.6e-2,
    "adamw": 4e-3,
    "optax_muon": 1.6e-2,
}


def make_schedule(config: Config) -> optax.Schedule:
    """Linear warm-up, constant, then linear to 0 over the last `decay_fraction` of the steps."""
    if config.optimizer in paper.OPTIMIZERS:
        return paper.falling(_paper_run(config).matrices, config.steps)
    peak = config.learning_rate or LEARNING_RATES[config.optimizer]
    warmup = max(1, config.warmup_steps)
    decay = max(1, round(config.decay_fraction * config.steps))

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        rising = jnp.minimum(1.0, (count + 1) / warmup)
        falling = jnp.clip((config.steps - count) / decay, 0.0, 1.0)
        return peak * jnp.minimum(rising, falling)

    return schedule


def routing_options(
    config: Config, rules: Sequence[symoptax.ParamRule], factors_of_model: Mapping[str, float]
) -> dict[str, Mapping[str, object] | None]:
    """Return the `updates` and `lr_multipliers` that `layerwise` and its report are given."""
    roles = {rule.role for rule in rules}
    given, factors = split_entries("update", config.update), multipliers(config)
    if idle := sorted((given.keys() | factors.keys()) - roles):
        raise InputError(
            f"no parameter of this model has the role {', '.join(idle)}; "
            f"its roles are {', '.join(sorted(roles))}"
        )
    updates = STACKS[config.optimizer].items()
    updates = {role: update for role, update in updates if role in roles} | given
    of_maps = {r: f for r, f in factors_of_model.items() if updates.get(r) not in _NO_MAPS}
    factors = of_maps | factors
    return {"updates": updates or None, "lr_multipliers": factors or None}


def _routed(
    config: Config,
    rules: Sequence[symoptax.ParamRule],
    factors_of_model: Mapping[str, float],
    schedule: optax.Schedule,
) -> optax.GradientTransformation:
    options = routing_options(config, rules, factors_of_model)
    try:
        return symoptax.layerwise(
            schedule,
            rules,
            weight_decay=config.weight_decay,
            mu_dtype=config.mu_dtype or None,
            lazy=config.lazy,
            strict=config.strict,
            **options,
        )
    except ValueError as error:
        mend = str(error).replace("strict=False", "--nostrict")
        raise InputError(f"--optimizer={config.optimizer}: {mend}") from error


def _hidden_matrices(params: optax.Params) -> optax.Params:
    """Mark for `optax.contrib.muon` the matrices between the two ends of the model."""

    def mark(path: tuple[object, ...], leaf: jax.Array) -> MuonDimensionNumbers | None:
        hidden = jax.tree_util.keystr(path, simple=True, separator="/").startswith("layers/")
        return MuonDimensionNumbers() if hidden and leaf.ndim == 2 else None

    return jax.tree_util.tree_map_with_path(mark, params)


def _optax_muon(config: Config, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.contrib.muon(
        schedule,
        weight_decay=config.weight_decay,
        adam_b2=0.95,
        mu_dtype=config.mu_dtype or None,
        adam_weight_decay=config.weight_decay,
        muon_weight_dimension_numbers=_hidden_matrices,
        consistent_rms=0.2,
    )


def _paper_run(config: Config) -> paper.PaperRun:
    run = paper.find(config.model, config.optimizer)
    if run is None:
        names = ", ".join(paper.PREFIX + name for name in paper.MODELS[config.model].runs)
        raise InputError(f"--optimizer={config.optimizer}: the runs of {config.model} are {names}")
    if config.learning_rate or config.mu_dtype or config.weight_decay:
        raise InputError(
            f"--optimizer={config.optimizer} has rates and dtypes of its own and no decay: leave "
            "--learning_rate and --mu_dtype out, and give --weight_decay=0 or --preset=paper"
        )
    return run


def describe(
    config: Config,
    params: optax.Params,
    rules: Sequence[symoptax.ParamRule],
    factors_of_model: Mapping[str, float],
) -> str:
    """Say what the optimizer does to each parameter."""
    if config.optimizer in paper.OPTIMIZERS:
        return paper.describe(_paper_run(config), rules)
    if config.optimizer not in STACKS:
        return f"{config.optimizer}: not routed by role"
    options = routing_options(config, rules, factors_of_model)
    settings = {"lazy": config.lazy, "mu_dtype": config.mu_dtype or None, "strict": config.strict}
    return str(symoptax.routing_report(params, rules, **settings, **options))


def make_optimizer(
    config: Config,
    rules: Sequence[symoptax.ParamRule],
    factors_of_model: Mapping[str, float],
) -> optax.GradientTransformation:
    """Build the optimizer named by `config`, with clipping before it and a monitor after it.

    Args:
      config: the settings.
      rules: what each parameter is.
      factors_of_model: see `multipliers_for` of `models.catalog.Architecture`.
    """
    if config.optimizer not in LEARNING_RATES and config.optimizer not in paper.OPTIMIZERS:
        names = ", ".join([*LEARNING_RATES, *paper.OPTIMIZERS])
        raise InputError(f"--optimizer={config.optimizer}: choose from {names}")
    if config.optimizer not in STACKS and (config.update or config.lr_multiplier):
        raise InputError(
            f"--optimizer={config.optimizer} has no roles: "
            f"--update and --lr_multiplier go with {', '.join(STACKS)}"
        )
    schedule = make_schedule(config)
    if config.optimizer == "adamw":
        tx = optax.adamw(
            schedule,
            b1=0.9,
            b2=0.95,
            mu_dtype=config.mu_dtype or None,
            weight_decay=config.weight_decay,
        )
    elif config.optimizer in paper.OPTIMIZERS:
        tx = paper.make_optimizer(_paper_run(config), rules, config.steps)
    elif config.optimizer == "optax_muon":
        tx = _optax_muon(config, schedule)
    else:
        tx = _routed(config, rules, factors_of_model, schedule)
    if config.monitor_every:
        tx = optax.chain(tx, symoptax.monitor(rules, config.monitor_every))
    # Outside the partition: one norm over all parameters, whatever their role.
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), tx) if config.clip_norm else tx
