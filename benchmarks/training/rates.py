"""Whether the best rate moves with the width or the model, and which multipliers are best."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from comparison.sweep import Sweep, sweep
from pretraining.config import Config
from pretraining.optimizers import STACKS
from pretraining.report import markdown_table
from runs import MODELS, SEEDS, arm, run_one, settings

# Heads stay 32 wide.
WIDTHS = {
    64: ("d_model:64", "d_ff:192", "num_heads:2", "num_kv_heads:1"),
    128: (),
    256: ("d_model:256", "d_ff:768", "num_heads:8", "num_kv_heads:4"),
}


@functools.cache
def _at_width(width: int, optimizer: str) -> Sweep:
    if not WIDTHS[width]:
        return arm("qwen3", optimizer)
    config = settings("qwen3", model_override=WIDTHS[width])
    rates = sorted(arm("qwen3", optimizer).by_rate)
    around = [rate for rate in rates if 0.4 < rate / arm("qwen3", optimizer).rate < 2.5]
    return sweep(config, optimizer, around, SEEDS[:1], run_one(), extend=True)


def _by_rate(sweeps: Mapping[tuple[str, str], Sweep], first: list[str]) -> str:
    rates = sorted({rate for sweep in sweeps.values() for rate in sweep.by_rate})
    rows = []
    for key, found in sweeps.items():
        losses = [
            f"{found.by_rate[rate].val_loss:.3f}" if rate in found.by_rate else "" for rate in rates
        ]
        best = rates.index(found.rate)
        losses[best] = f"**{losses[best]}**"
        rows.append([*key, *losses])
    return markdown_table([*first, *(f"{rate:g}" for rate in rates)], rows)


def transfer() -> str:
    """Lay out the losses by width and rate, then by model and rate, one seed."""
    optimizers = ("layerwise", "adamw")
    widths = {(name, str(w)): _at_width(w, name) for name in optimizers for w in WIDTHS}
    models = {(name, model): arm(model, name) for name in optimizers for model in MODELS}
    return "\n\n".join(
        [
            _by_rate(widths, ["optimizer", "width of qwen3"]),
            _by_rate(models, ["optimizer", "model"]),
        ]
    )


def of_adamw() -> str:
    """Compare `layerwise` at AdamW's best rate with `layerwise` at its own."""
    rows = []
    for model in MODELS:
        theirs, ours = arm(model, "adamw"), arm(model, "layerwise")
        config = settings(model, optimizer="layerwise", learning_rate=theirs.rate, seed=SEEDS[0])
        there, best = run_one()(config).val_loss, ours.by_rate[ours.rate].val_loss
        rows.append(
            [
                model,
                f"{theirs.rate:g}",
                f"{there:.3f}",
                f"{ours.rate:g}",
                f"{best:.3f}",
                f"{100 * (there / best - 1):+.1f} %",
            ]
        )
    header = ["model", "AdamW's rate", "loss there", "best rate", "loss there", "more"]
    return markdown_table(header, rows)


# Besides the default.
_FACTORS = {
    "qwen3": {
        ("embedding",): (5, 10, 40),
        ("lm_head",): (0.25, 0.5, 2, 4),
        ("attention",): (0.5, 2),
        ("mlp_in", "mlp_down"): (0.5, 2),
        ("other",): (0.5, 2, 4),
    },
    "gemma3": {("embedding",): (0.5, 5, 20)},
    "olmoe": {("router",): (0.5, 2), ("expert_in", "expert_down"): (0.5, 2)},
}


def _defaults(model: str) -> dict[str, float]:
    architecture = MODELS[model]
    return {"embedding": 20} | architecture.multipliers_for(architecture.presets["small"])


def multipliers() -> str:
    """Change the multiplier of one role at a time, at the best rate, one seed."""
    rows = []
    for model, by_roles in _FACTORS.items():
        found = arm(model, "layerwise")
        default = found.by_rate[found.rate]
        for roles, factors in by_roles.items():
            losses = {_defaults(model).get(roles[0], 1): f"**{default.val_loss:.3f}**"}
            for factor in factors:
                given = tuple(f"{role}:{factor:g}" for role in roles)
                config = dataclasses.replace(default.config, lr_multiplier=given)
                losses[factor] = f"{run_one()(config).val_loss:.3f}"
            by_factor = "; ".join(f"{factor:.2g}: {losses[factor]}" for factor in sorted(losses))
            rows.append([model, ", ".join(roles), by_factor])
    return markdown_table(["model", "role", "factor: validation loss, **default**"], rows)


# Whose rate is changed: all that AdamW updates in Muon, or the embedding alone.
_AT_ADAMW = (0.25, 0.5, 2)
_AT_EMBEDDING = (4, 16)


def _with_factor(config: Config, roles: Sequence[str], factor: float) -> Config:
    """Change the rate of some roles; AdamW alone has no roles, Muon with all matrices at it has."""
    if config.optimizer == "adamw":
        updates = STACKS["muon"]
        hidden = [role for role in _roles(config.model) if updates.get(role) == "polar"]
        update = tuple(f"{role}:adamw" for role in hidden)
        config = dataclasses.replace(config, optimizer="muon", update=update)
    given = tuple(f"{role}:{factor:g}" for role in roles)
    return dataclasses.replace(config, lr_multiplier=given)


def _roles(model: str) -> list[str]:
    architecture = MODELS[model]
    return sorted({str(r.role) for r in architecture.rules_for(architecture.presets["small"])})


def baselines() -> str:
    """Give parts of Muon and of AdamW rates of their own, at their best rate, one seed."""
    rows = []
    for model in MODELS:
        ours = arm(model, "layerwise")
        for optimizer in ("muon", "adamw"):
            found = arm(model, optimizer)
            default = found.by_rate[found.rate]
            by_adamw = [r for r in _roles(model) if STACKS["muon"].get(r, "adamw") == "adamw"]
            configs = [_with_factor(default.config, by_adamw, factor) for factor in _AT_ADAMW]
            configs = configs if optimizer == "muon" else []
            configs += [_with_factor(default.config, ["embedding"], f) for f in _AT_EMBEDDING]
            losses = [f"{run_one()(config).val_loss:.3f}" for config in configs]
            gaps = [""] * (len(_AT_ADAMW) + len(_AT_EMBEDDING) - len(losses))
            best = f"{ours.by_rate[ours.rate].val_loss:.3f}"
            rows.append([model, optimizer, f"{default.val_loss:.3f}", *gaps, *losses, best])
    header = ["model", "optimizer", "as above"]
    header += [f"its AdamW x {factor}" for factor in _AT_ADAMW]
    header += [f"embedding x {factor}" for factor in _AT_EMBEDDING]
    return markdown_table([*header, "`layerwise`"], rows)
