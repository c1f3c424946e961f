"""What a finished run was worth: report.md, loss.png and summary.json."""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib.figure
import optax

from pretraining.config import Config
from pretraining.progress import read_metrics
from pretraining.spikes import loss_spikes


@dataclasses.dataclass(frozen=True)
class Summary:
    """The figures of a finished run; losses in nats per token, the state in bytes."""

    train_loss: float
    val_loss: float
    loss_spikes: int
    tokens_per_second: float
    state_bytes: int
    adamw_state_bytes: int
    baselines: dict[str, float | None]
    data: str

    def save(self, folder: Path, config: Config) -> None:
        """Write summary.json, which marks the run in `folder` as finished."""
        content = {**dataclasses.asdict(self), "config": dataclasses.asdict(config)}
        (folder / "summary.json").write_text(json.dumps(content, indent=2) + "\n")


def tree_bytes(tree: Any) -> int:
    """Count the bytes of the arrays (or shapes) of `tree`."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def summarize(
    folder: Path, params: Any, opt_state: Any, baselines: dict[str, float | None], data: str
) -> Summary:
    """Sum up the run whose metrics lie in `folder`."""
    rows = read_metrics(folder / "metrics.jsonl")
    last = [row for row in rows if "loss" in row][-20:]
    return Summary(
        train_loss=statistics.fmean(row["loss"] for row in last),
        val_loss=[row["val_loss"] for row in rows if "val_loss" in row][-1],
        loss_spikes=len(loss_spikes([row["loss"] for row in rows if "loss" in row])),
        tokens_per_second=last[-1]["tokens_per_second"],
        state_bytes=tree_bytes(opt_state),
        adamw_state_bytes=tree_bytes(jax.eval_shape(optax.adamw(1e-3).init, params)),
        baselines=baselines,
        data=data,
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _loss_rows(summary: Summary) -> list[list[str]]:
    base = summary.baselines
    rows = [
        ("uniform over the vocabulary", base["uniform"]),
        ("byte frequencies", base["byte_unigram"]),
        ("token frequencies (unigram)", base["unigram"]),
        ("**model, training** (mean of the last 20 steps)", summary.train_loss),
        ("**model, validation**", summary.val_loss),
    ]
    return [[name, f"{loss:.4f}"] for name, loss in rows if loss is not None]


def _report(config: Config, summary: Summary, routing: str) -> str:
    beats = "beats" if summary.val_loss < summary.baselines["unigram"] else "DOES NOT beat"
    ratio = summary.state_bytes / summary.adamw_state_bytes
    folder = Path(config.out_dir)
    names = [
        "metrics.jsonl",
        "loss.png",
        "summary.json",
        "config.json",
        "checkpoints",
        "tensorboard",
    ]
    return "\n\n".join(
        [
            f"# {config.optimizer}, {config.model_name}, {config.steps} steps",
            f"Data: {summary.data}. The model {beats} the unigram baseline.",
            markdown_table(["validation loss", "nats per token"], _loss_rows(summary)),
            f"Loss spikes: {summary.loss_spikes}.",
            f"Speed: {summary.tokens_per_second:,.0f} tokens per second. Optimizer state: "
            f"{summary.state_bytes:,} bytes, {ratio:.2f} times AdamW's.",
            f"```\n{routing.rstrip()}\n```",
            "Files: " + ", ".join(str(folder / name) for name in names) + "\n",
        ]
    )


def write_report(config: Config, summary: Summary, routing: str) -> str:
    """Write report.md, loss.png and, last, summary.json; return the report."""
    folder = Path(config.out_dir)
    text = _report(config, summary, routing)
    (folder / "report.md").write_text(text)
    curves = {config.optimizer: read_metrics(folder / "metrics.jsonl")}
    plot_losses(curves, summary.baselines, folder / "loss.png")
    summary.save(folder, config)
    return text


def plot_losses(
    curves: Mapping[str, Sequence[dict[str, Any]]],
    baselines: Mapping[str, float | None],
    path: Path,
) -> None:
    """Draw training losses (thin), validation losses (marked) and the unigram baseline."""
    figure = matplotlib.figure.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for index, (name, rows) in enumerate(curves.items()):
        train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
        val = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
        axes.plot(*zip(*train, strict=True), color=f"C{index}", alpha=0.35, linewidth=1)
        axes.plot(*zip(*val, strict=True), color=f"C{index}", marker="o", label=name)
    axes.axhline(baselines["unigram"], color="grey", linestyle="--", label="unigram baseline")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title("thin: training; marked: validation", fontsize="medium")
    axes.legend()
    figure.savefig(path, dpi=120)
