"""The runs of Lau and Su (2026), arXiv 2605.18106, by model and name: what their tables say.

`pretrain.py --model=qwen3 --preset=paper --optimizer=paper_hybrid --data=SHARDS` is one line of
them. Roles have rates of their own, on two schedules: constant, then linear to 0 over the last 40 %
of the steps for maps; 100 steps of warm-up, then a cosine to 0, for AdamW. Rows have unit length
times the rate and polar factors unit singular values; hidden matrices take Muon, attention head
by head, the gate and up branches of experts apart.

Where this is ours: momenta and five polar steps of symoptax in place of the authors' kernels;
heads behind a softmax are centered, as their symmetry asks.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax

import symoptax
from symoptax import ParamRule, Role

PREFIX = "paper_"
SETTINGS = {
    "seq_len": 1024,
    "weight_decay": 0.0,
    "decay_fraction": 0.4,
    "clip_norm": 0.0,
    "seed": 42,
    "eval_every": 500,
    "checkpoint_every": 1000,
    "log_every": 10,
}


@dataclasses.dataclass(frozen=True)
class PaperRun:
    """One line of the tables: (update, rate) of the ends and the router, rates of the rest."""

    embedding: tuple[str, float]
    lm_head: tuple[str, float]
    matrices: float
    other: float
    router: tuple[str, float] | None = None


@dataclasses.dataclass(frozen=True)
class PaperModel:
    """The budget of a model, sequences of 1,024 tokens, and its runs by name."""

    steps: int
    batch_size: int
    runs: Mapping[str, PaperRun]


def _dense(
    rates: Mapping[str, tuple[float, float]], matrices: float, other: float
) -> dict[str, PaperRun]:
    return {
        name: PaperRun((name, embedding), (name, head), matrices, other)
        for name, (embedding, head) in rates.items()
    }


def _experts(
    row_norm: tuple[float, float], adamw: float, router: float, matrices: float, other: float
) -> dict[str, PaperRun]:
    ends = ("row_norm", row_norm[0]), ("row_norm", row_norm[1])
    return {
        "adamw": PaperRun(("adamw", adamw), ("adamw", adamw), matrices, other, ("adamw", router)),
        "row_norm": PaperRun(*ends, matrices, other, ("row_norm", router)),
        "row_norm_adamw_router": PaperRun(*ends, matrices, other, ("adamw", router)),
        "row_norm_left_polar_router": PaperRun(*ends, matrices, other, ("left_polar", router)),
    }


MODELS = {
    "qwen3": PaperModel(
        30_000,
        8 * 28,
        _dense(
            {"row_norm": (5e-1, 5e-3), "hybrid": (1.0, 1e-2), "adamw": (1e-1, 1e-3)}, 2e-2, 5e-2
        ),
    ),
    "gemma3": PaperModel(
        50_000,
        8 * 18,
        _dense(
            {"row_norm": (2.5e-3, 2.5e-3), "hybrid": (2.5e-3, 2.5e-3), "adamw": (5e-4, 5e-4)},
            2e-2,
            5e-2,
        ),
    ),
    "olmoe": PaperModel(30_000, 8 * 20, _experts((5e-1, 5e-3), 5e-4, 7.5e-4, 5e-3, 1e-2)),
    "gpt_oss": PaperModel(60_000, 8 * 8, _experts((1e-1, 1e-3), 5e-4, 7.5e-4, 1e-3, 5e-3)),
}
OPTIMIZERS = sorted({PREFIX + name for model in MODELS.values() for name in model.runs})


def settings(model: str) -> dict[str, Any]:
    """Return the settings of `--preset=paper`, where the command line does not give them."""
    return {**SETTINGS, "steps": MODELS[model].steps, "batch_size": MODELS[model].batch_size}


def find(model: str, optimizer: str) -> PaperRun | None:
    """Return the run that `--optimizer=paper_...` names, if the paper has it for this model."""
    return MODELS[model].runs.get(optimizer.removeprefix(PREFIX))


def falling(rate: float, steps: int) -> optax.Schedule:
    """Return the schedule of maps: constant, then linear to 0 over the last 40 % of the steps."""
    flat = steps - round(0.4 * steps)
    return optax.join_schedules(
        [optax.constant_schedule(rate), optax.linear_schedule(rate, 0.0, steps - flat)], [flat]
    )


def _cosine(rate: float, steps: int) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, rate, min(100, steps // 2), steps)


def _build(
    update: str, rate: float, steps: int, centered: bool, view: Callable[[Any], Any]
) -> optax.GradientTransformation:
    if update == "adamw":
        return optax.adamw(_cosine(rate, steps), b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0)
    schedule = falling(rate, steps)
    match update:
        case "row_norm":
            return symoptax.row_norm_m(schedule, view=view, centered=centered)
        case "hybrid":
            return symoptax.hybrid_polar_grad_m(schedule, alpha=0.0, view=view, centered=centered)
        case "left_polar":
            return symoptax.left_polar_grad_m(schedule, alpha=0.0, view=view, centered=centered)
        case "muon":
            return symoptax.muon(schedule, view=view)
    raise ValueError(update)


def by_role(run: PaperRun) -> dict[Role, tuple[str, float]]:
    """Return the update and the rate of every role."""
    chosen = dict.fromkeys(Role, ("muon", run.matrices))
    chosen |= dict.fromkeys((Role.EMBEDDING, Role.TIED_EMBEDDING), run.embedding)
    chosen |= dict.fromkeys((Role.LM_HEAD, Role.LM_HEAD_NO_SHIFT), run.lm_head)
    if run.router:
        chosen |= dict.fromkeys((Role.ROUTER, Role.ROUTER_NO_SHIFT), run.router)
    return chosen | {Role.OTHER: ("adamw", run.other)}


def make_optimizer(
    run: PaperRun, rules: Sequence[ParamRule], steps: int
) -> optax.GradientTransformation:
    """Build the optimizer of a run for a model with these rules."""
    rules = symoptax.apart(rules)
    view = symoptax.view_fn(rules)
    transformations = {
        str(role): _build(update, rate, steps, bool(role.symmetry and role.symmetry.shift), view)
        for role, (update, rate) in by_role(run).items()
        if any(rule.role == role for rule in rules)
    }
    return optax.partition(transformations, symoptax.label_fn(rules))


def describe(run: PaperRun, rules: Sequence[ParamRule]) -> str:
    """Lay out what each role of a model gets, for the report."""
    roles = {rule.role for rule in rules}
    lines = [
        f"{role:18} {update:12} {rate:g}"
        for role, (update, rate) in by_role(run).items()
        if role in roles
    ]
    return "\n".join([f"{'role':18} {'update':12} rate", *lines])
