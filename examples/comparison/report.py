"""The results of a comparison as tables and a plot."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.figure
import numpy as np

from comparison.sweep import Sweep
from pretraining.report import markdown_table

BASELINE = "adamw"
_HEADER = ["optimizer", "rates tried", "best", "validation loss", "behind the best"]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error, NaN for a single value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def final_loss(sweep: Sweep) -> tuple[float, float]:
    """Return the validation loss at the best rate, mean over seeds and standard error."""
    return mean_and_error([result.val_loss for result in sweep.best])


def lead(sweep: Sweep, over: Sweep) -> tuple[float, float]:
    """Return by how much the loss is less than that of `over`, mean over seeds and standard error.

    Seed by seed: runs with the same seed read the same batches from the same initial parameters.
    """
    theirs = {result.config.seed: result.val_loss for result in over.best}
    return mean_and_error([theirs[result.config.seed] - result.val_loss for result in sweep.best])


def mean_curve(sweep: Sweep) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and the validation losses there, of shape (seeds, steps)."""
    curves = [np.array(result.val_curve) for result in sweep.best]
    return curves[0][:, 0], np.stack([curve[:, 1] for curve in curves])


def steps_to(loss: float, sweep: Sweep) -> float:
    """Return the step at which the mean curve first falls to `loss`, infinity if it never does.

    Linear between evaluations. The schedule is that of the whole run, so its rate has not fallen
    yet: a run planned for so many steps would do better.
    """
    steps, losses = mean_curve(sweep)
    mean = losses.mean(axis=0)
    below = np.flatnonzero(mean <= loss)
    if not below.size:
        return math.inf
    first = int(below[0])
    if first == 0:
        return float(steps[0])
    share = (mean[first - 1] - loss) / (mean[first - 1] - mean[first])
    return float(steps[first - 1] + share * (steps[first] - steps[first - 1]))


def _cell(mean: float, error: float) -> str:
    return f"{mean:.3f}" if math.isnan(error) else f"{mean:.3f} ± {error:.3f}"


def table(sweeps: Mapping[str, Sweep]) -> tuple[list[str], list[list[str]]]:
    """Lay out one row per optimizer, the best first; a loss is a mean ± its standard error."""
    losses = {name: final_loss(sweep) for name, sweep in sweeps.items()}
    lowest = min(mean for mean, _ in losses.values())
    baseline = sweeps.get(BASELINE)
    columns = [f"better than {BASELINE} by", f"steps to {BASELINE}'s loss"]
    header = _HEADER + columns if baseline else _HEADER
    rows = []
    for name in sorted(sweeps, key=lambda name: losses[name][0]):
        sweep, (mean, error) = sweeps[name], losses[name]
        rates = [f"{rate:g}" for rate in sorted(sweep.by_rate)]
        best = f"{sweep.rate:g}" + (" (at an end)" if sweep.at_an_end else "")
        row = [name, ", ".join(rates), best, _cell(mean, error), f"{mean - lowest:.3f}"]
        if baseline:
            row.append("" if name == BASELINE else _cell(*lead(sweep, baseline)))
            share = steps_to(losses[BASELINE][0], sweep) / sweep.best[0].config.steps
            row.append(f"{share:.2f}" if math.isfinite(share) else "not reached")
        rows.append(row)
    return header, rows


def all_runs(sweeps: Mapping[str, Sweep]) -> tuple[list[str], list[list[str]]]:
    """Lay out one row per run."""
    header = ["optimizer", "rate", "seed", "validation loss", "training loss", "tokens/s"]
    rows = []
    for name, sweep in sweeps.items():
        first = sweep.best[0].config.seed
        results = [sweep.by_rate[rate] for rate in sorted(sweep.by_rate)]
        results += [result for result in sweep.best if result.config.seed != first]
        rows += [
            [
                name,
                f"{result.config.learning_rate:g}",
                str(result.config.seed),
                f"{result.val_loss:.4f}",
                f"{result.figures['train_loss']:.4f}",
                f"{result.figures['tokens_per_second']:,.0f}",
            ]
            for result in results
        ]
    return header, rows


def plot(sweeps: Mapping[str, Sweep], path: Path) -> None:
    """Draw the validation losses at the best rates, means over seeds in bands from least to most.

    A second panel begins where the curves are near their ends.
    """
    figure = matplotlib.figure.Figure(figsize=(11, 4.5), layout="constrained")
    whole, end = figure.subplots(1, 2)
    for index, name in enumerate(sorted(sweeps, key=lambda name: final_loss(sweeps[name])[0])):
        steps, losses = mean_curve(sweeps[name])
        label = f"{name}, {sweeps[name].rate:g}: {losses[:, -1].mean():.3f}"
        for axes in (whole, end):
            axes.plot(steps, losses.mean(axis=0), color=f"C{index}", label=label)
            band = (losses.min(axis=0), losses.max(axis=0))
            axes.fill_between(steps, *band, color=f"C{index}", alpha=0.2, linewidth=0)
    any_run = next(iter(sweeps.values())).best[0]
    unigram = any_run.figures["baselines"]["unigram"]
    whole.axhline(unigram, color="grey", linestyle="--", label="token frequencies")
    whole.set(xlabel="step", ylabel="validation loss (nats per token)")
    last = np.array([final_loss(sweep)[0] for sweep in sweeps.values()])
    margin = 0.1 * (last.max() - last.min() + 0.1)
    end.set(xlabel="step", ylim=(last.min() - margin, last.max() + margin))
    end.set_xlim(0.4 * any_run.config.steps, any_run.config.steps)
    whole.legend(fontsize="small")
    whole.set_title(f"{any_run.config.model_name}, best rates", fontsize="medium")
    end.set_title("the end, enlarged; bands: least to most of the seeds", fontsize="medium")
    figure.savefig(path, dpi=110)


def write(sweeps: Mapping[str, Sweep], stem: Path) -> str:
    """Write `stem`.md and `stem`.png; return the table of optimizers as Markdown."""
    text = markdown_table(*table(sweeps))
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".md").write_text(f"{text}\n\n{markdown_table(*all_runs(sweeps))}\n")
    plot(sweeps, stem.with_suffix(".png"))
    return text
