"""Train the same model under several optimizers and lay the results side by side.

    JAX_PLATFORMS=cpu python examples/compare.py --optimizers=adamw,muon,layerwise --steps=100

Every flag of pretrain.py works here too. `--learning_rates=1e-3,3e-3` tries each rate with each
optimizer, since a rate that suits one says nothing about another; the table has all runs, the plot
the best of each optimizer. Each run has its own folder in
`--out_dir`; called again, finished runs are kept and a stopped one is resumed.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from pretraining.config import Config, define_flags, differences, from_json, parse_flags, validate
from pretraining.errors import InputError
from pretraining.job import prepare_job
from pretraining.progress import read_metrics
from pretraining.report import markdown_table, plot_losses
from pretraining.run import INTERRUPTED, run

HEADER = ["run", "train loss", "validation loss", "tokens/s", "state / AdamW's"]


def _plan(config: Config, optimizers: Sequence[str], rates: Sequence[str]) -> list[Config]:
    """List one config per optimizer and rate, each with its own folder."""
    plan = []
    for name in optimizers:
        for rate in rates or [None]:
            folder = Path(config.out_dir) / (name if rate is None else f"{name}-lr{rate}")
            plan.append(
                dataclasses.replace(
                    config,
                    optimizer=name,
                    learning_rate=_number(rate, config.learning_rate),
                    out_dir=str(folder),
                    resume=(folder / "checkpoints").is_dir(),
                )
            )
    return plan


def _check(config: Config, optimizers: Sequence[str], rates: Sequence[str]) -> None:
    """Refuse what pretrain.py takes but a comparison cannot use."""
    if not optimizers:
        raise InputError("--optimizers= is empty: name at least one")
    for name, values in (("optimizers", optimizers), ("learning_rates", rates)):
        if len(set(values)) < len(values):
            raise InputError(f"--{name}={','.join(values)}: names one twice")
    if rates and config.learning_rate is not None:
        raise InputError("--learning_rate beside --learning_rates: give one of them")
    if config.stop_at_step:
        raise InputError(f"--stop_at_step={config.stop_at_step}: a comparison needs finished runs")


def _number(text: str | None, default: float | None) -> float | None:
    try:
        return default if text is None else float(text)
    except ValueError as error:
        raise InputError(f"--learning_rates: {text!r} is not a number") from error


def _finished(config: Config) -> bool:
    """Tell whether `config` has been run to its end; refuse the results of other settings."""
    path = Path(config.out_dir) / "summary.json"
    if not path.exists():
        return False
    saved = from_json(json.loads(path.read_text())["config"])
    if changed := differences(saved, config):
        raise InputError(f"{path.parent}: a run with other settings: {', '.join(changed)}")
    return True


def _summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def _row(folder: Path) -> list[str]:
    summary = _summary(folder)
    return [
        folder.name,
        f"{summary['train_loss']:.4f}",
        f"{summary['val_loss']:.4f}",
        f"{summary['tokens_per_second']:,.0f}",
        f"{summary['state_bytes'] / summary['adamw_state_bytes']:.2f}",
    ]


def _best(folders: Sequence[Path]) -> list[Path]:
    """Return the run with the lowest validation loss of each optimizer."""
    best: dict[str, Path] = {}
    for folder in sorted(folders, key=lambda folder: _summary(folder)["val_loss"]):
        best.setdefault(_summary(folder)["config"]["optimizer"], folder)
    return [folder for folder in folders if folder in best.values()]


def _report(folders: Sequence[Path], out_dir: Path, console: Console) -> None:
    rows = [_row(folder) for folder in folders]
    table = Table(*HEADER, title="Losses in nats per token")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    (out_dir / "comparison.md").write_text(markdown_table(HEADER, rows) + "\n")
    curves = {folder.name: read_metrics(folder / "metrics.jsonl") for folder in _best(folders)}
    plot_losses(curves, _summary(folders[0])["baselines"], out_dir / "comparison.png")
    console.print(f"written: {out_dir / 'comparison.md'} and {out_dir / 'comparison.png'}")


def compare(plan: Sequence[Config], out_dir: Path, console: Console) -> int:
    """Run what is not finished, then report; a stopped run stops the comparison."""
    todo = [config for config in plan if not _finished(config)]
    for config in todo:  # Every run is checked before the first one starts.
        validate(config)
        prepare_job(config).loader.close()
    for config in todo:
        console.rule(Path(config.out_dir).name)
        if code := run(config, console):
            return code
    _report([Path(config.out_dir) for config in plan], out_dir, console)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run what the flags say and return the exit code."""
    values = define_flags()
    flags.DEFINE_list(
        "optimizers", ["adamw", "muon", "layerwise"], "Optimizers to run.", flag_values=values
    )
    flags.DEFINE_list("learning_rates", [], "Peak rates to try with each.", flag_values=values)
    values["out_dir"].default = values["out_dir"].value = "runs/compare"
    try:
        config = parse_flags(values, argv)
        _check(config, values.optimizers, values.learning_rates)
        plan = _plan(config, values.optimizers, values.learning_rates)
        return compare(plan, Path(config.out_dir), Console())
    except KeyboardInterrupt:
        return INTERRUPTED
    except InputError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv))
