"""Every optimizer on every model: final losses, steps to AdamW's, signs of what the paper found."""

from comparison import report
from pretraining.report import markdown_table
from runs import HERE, arm, arms


def run(model: str) -> str:
    """Compare the optimizers on one model."""
    sweeps = {name: arm(model, name) for name in arms(model)}
    report.write(sweeps, HERE / model)
    return markdown_table(*report.table(sweeps))


# (model, what the paper found lower, than what, by how much), losses read off its figures.
_PAPER = [
    ("qwen3", "row_norm", "muon", 0.01),
    ("qwen3", "hybrid", "muon", 0.005),
    ("qwen3", "row_norm", "hybrid", 0.005),
    ("gemma3", "hybrid", "muon", 0.039),
    ("gemma3", "row_norm", "muon", 0.035),
    ("gemma3", "hybrid", "row_norm", 0.004),
    ("olmoe", "row_norm", "muon", 0.005),
    ("olmoe", "row_norm_router", "row_norm", 0.025),
    ("olmoe", "left_polar_router", "row_norm_router", 0.015),
    ("gpt_oss", "row_norm", "muon", 0.03),
    ("gpt_oss", "row_norm_router", "row_norm", 0.03),
    ("gpt_oss", "row_norm_router", "left_polar_router", 0.005),
]


def _sign(mean: float, error: float) -> str:
    if abs(mean) <= 2 * error:
        return "within two standard errors"
    return "agrees" if mean > 0 else "disagrees"


def signs() -> str:
    """Compare the signs of the paper's differences with those found here."""
    rows = []
    for model, lower, than, gap in _PAPER:
        mean, error = report.lead(arm(model, lower), arm(model, than))
        found = f"{mean:+.3f} ± {error:.3f}"
        rows.append([model, lower, than, f"{gap:.3f}", found, _sign(mean, error)])
    header = ["model", "lower in the paper", "than", "by", "by, here", "sign"]
    return markdown_table(header, rows)
