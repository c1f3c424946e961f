"""How evenly routers spread tokens, by optimizer, with and without the load-balancing loss."""

import dataclasses
import math
import statistics

from comparison import report
from comparison.results import Result
from pretraining.report import markdown_table
from runs import arm, with_seeds

_ROUTERS = {
    "row_norm": "AdamW",
    "row_norm_router": "centered row norm",
    "left_polar_router": "centered left polar",
}


def _last(results: list[Result], name: str) -> str:
    values = [result.expert_curve[-1][1][f"experts/{name}"] for result in results]
    return f"{statistics.fmean(values):.2f}"


def run() -> str:
    """Compare the routers of otherwise equal stacks at the rates that are best with the loss."""
    rows = []
    for model in ("olmoe", "gpt_oss"):
        for optimizer, router in _ROUTERS.items():
            found = arm(model, optimizer)
            config = dataclasses.replace(found.best[0].config, model_override=("balance_coef:0",))
            for balanced, results in (("yes", found.best), ("no", with_seeds(config))):
                mean, error = report.mean_and_error([result.val_loss for result in results])
                spikes = sum(result.figures["loss_spikes"] for result in results)
                names = ("load_entropy", "load_entropy_worst", "load_max_worst", "idle_worst")
                measured = [_last(results, name) for name in names]
                logits = _last(results, "logit_rms")
                loss = f"{mean:.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")
                rows.append([model, router, balanced, loss, *measured, logits, str(spikes)])
    header = ["model", "router", "balancing loss", "validation loss", "evenness"]
    header += ["worst layer", "largest load", "idle", "rms of logits", "spikes"]
    return markdown_table(header, rows)
