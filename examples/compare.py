"""Train the same model under several optimizers, fairly, and lay the results side by side.

    JAX_PLATFORMS=cpu python examples/compare.py --optimizers=adamw,muon,layerwise --steps=100

Every flag of pretrain.py works here too. A rate that suits one optimizer says nothing about
another, so every optimizer is tried at several, and the best with more seeds:

    python examples/compare.py --optimizers=adamw,layerwise --rate_factors=0.5,1,2 --extend
        --seeds=0,1,2

takes a half, once and twice the rate that `pretrain.py` gives each optimizer, with the first seed;
goes on beyond an end of the grid while the best is there; and runs the best with the other seeds.
The table has means and their standard errors, and the share of the steps in which AdamW's final
loss is reached; the plot has the curves at the best rates.

Each run leaves one small JSON file in `--results_dir`, named by its settings, and is never
repeated while that is there. A stopped comparison goes on where it was.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.table import Table

from comparison import report
from comparison.sweep import InterruptedRunError, Sweep, cached, check, sweep
from pretraining.config import Config, define_flags, parse_flags
from pretraining.errors import InputError
from pretraining.optimizers import LEARNING_RATES
from pretraining.run import INTERRUPTED


def _define_flags() -> flags.FlagValues:
    values = define_flags()
    for name, default, text in (
        ("optimizers", ["adamw", "muon", "layerwise"], "Optimizers to run."),
        ("learning_rates", [], "Peak rates to try with each."),
        ("rate_factors", [], "Multiples to try of each optimizer's own rate."),
        ("seeds", [], "Seeds; all rates run with the first, the best with the others."),
    ):
        flags.DEFINE_list(name, default, text, flag_values=values)
    flags.DEFINE_bool("extend", False, "Try rates beyond an end that is best.", flag_values=values)
    flags.DEFINE_string(
        "results_dir", "", "Folder of results; out_dir/results.", flag_values=values
    )
    flags.DEFINE_string("report", "", "The report's path; out_dir/comparison.", flag_values=values)
    flags.DEFINE_bool("verbose", False, "Show what every run says.", flag_values=values)
    flags.DEFINE_bool("keep_checkpoints", True, "Keep those of finished runs.", flag_values=values)
    values["out_dir"].default = values["out_dir"].value = "runs/compare"
    return values


def _numbers(name: str, texts: Sequence[str], kind: type) -> list:
    try:
        numbers = [kind(text) for text in texts]
    except ValueError as error:
        raise InputError(f"--{name}={','.join(texts)}: not all are numbers ({error})") from error
    if len(set(numbers)) < len(numbers):
        raise InputError(f"--{name}={','.join(texts)}: names one twice")
    return numbers


def _rates(config: Config, values: flags.FlagValues) -> dict[str, list[float]]:
    """Return the rates to try with each optimizer."""
    names, factors = values.optimizers, _numbers("rate_factors", values.rate_factors, float)
    rates = _numbers("learning_rates", values.learning_rates, float)
    if not names:
        raise InputError("--optimizers= is empty: name at least one")
    if len(set(names)) < len(names):
        raise InputError(f"--optimizers={','.join(names)}: names one twice")
    if unknown := [name for name in names if name not in LEARNING_RATES]:
        raise InputError(f"--optimizers={unknown[0]}: choose from {', '.join(LEARNING_RATES)}")
    if sum(map(bool, (rates, factors, config.learning_rate))) > 1:
        raise InputError("give one of --learning_rate, --learning_rates and --rate_factors")
    if values.extend and len(rates) < 2 and len(factors) < 2:
        raise InputError("--extend: give two rates or more to go on from")
    if config.learning_rate:
        rates = [config.learning_rate]
    return {
        name: rates or [float(f"{f * LEARNING_RATES[name]:.4g}") for f in factors or [1.0]]
        for name in names
    }


def _show(sweeps: dict[str, Sweep], console: Console) -> None:
    header, rows = report.table(sweeps)
    shown = Table(*header, title="Losses in nats per token, mean ± standard error")
    for row in rows:
        shown.add_row(*row)
    console.print(shown)


def compare(values: flags.FlagValues, config: Config, console: Console) -> None:
    """Run what is not finished, then report."""
    if config.stop_at_step:
        raise InputError(f"--stop_at_step={config.stop_at_step}: a comparison needs finished runs")
    seeds = _numbers("seeds", values.seeds, int) or [config.seed]
    rates = _rates(config, values)
    check(
        [
            dataclasses.replace(config, optimizer=name, learning_rate=rate, resume=False)
            for name in rates
            for rate in rates[name]
        ]
    )
    out_dir = Path(config.out_dir)
    run_one = cached(
        out_dir,
        Path(values.results_dir or out_dir / "results"),
        console,
        verbose=values.verbose,
        keep_checkpoints=values.keep_checkpoints,
    )
    sweeps = {
        name: sweep(config, name, rates[name], seeds, run_one, extend=values.extend)
        for name in rates
    }
    stem = Path(values.report or out_dir / "comparison")
    report.write(sweeps, stem)
    _show(sweeps, console)
    console.print(f"written: {stem}.md and {stem}.png")


def main(argv: Sequence[str]) -> int:
    """Run what the flags say and return the exit code."""
    values = _define_flags()
    try:
        config = parse_flags(values, argv)
        compare(values, config, Console())
    except (KeyboardInterrupt, InterruptedRunError):
        return INTERRUPTED
    except InputError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
