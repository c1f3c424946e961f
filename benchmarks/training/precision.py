"""bfloat16 parameters and momenta against float32, the same seeds."""

import dataclasses

from comparison import report
from comparison.sweep import Sweep
from pretraining.report import markdown_table
from runs import arm, with_seeds

_DTYPES = [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]


def run() -> str:
    """Compare final losses at the rates that are best in float32."""
    rows = []
    for optimizer in ("layerwise", "adamw"):
        single = arm("qwen3", optimizer)
        loss, error = report.final_loss(single)
        rows.append([optimizer, "float32", "float32", f"{loss:.3f} ± {error:.3f}", ""])
        for params, momenta in _DTYPES:
            config = dataclasses.replace(
                single.best[0].config, param_dtype=params, mu_dtype=momenta
            )
            found = Sweep(optimizer, single.by_rate, with_seeds(config))
            mean, error = report.final_loss(found)
            behind, uncertain = report.lead(single, found)
            gap = f"{behind:+.4f} ± {uncertain:.4f}"
            rows.append([optimizer, params, momenta, f"{mean:.3f} ± {error:.3f}", gap])
    header = ["optimizer", "parameters", "momenta", "validation loss", "behind float32"]
    return markdown_table(header, rows)
