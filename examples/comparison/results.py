"""What is kept of a finished run: one small JSON file, named by its settings."""

import dataclasses
import hashlib
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax

from pretraining.config import Config, from_json
from pretraining.progress import read_metrics

_STEPS_PER_POINT = 10  # Of the curve of training losses.


@dataclasses.dataclass(frozen=True)
class Result:
    """The figures and curves of a run; losses in nats per token.

    Attributes:
      config: the settings.
      figures: those of the run's summary.json.
      train_curve: (step, mean training loss of the steps up to it).
      val_curve: (step, validation loss).
      expert_curve: (step, statistics of the routing to experts), for a mixture that was monitored.
      made_with: version of JAX, and platform.
    """

    config: Config
    figures: Mapping[str, Any]
    train_curve: Sequence[tuple[int, float]]
    val_curve: Sequence[tuple[int, float]]
    expert_curve: Sequence[tuple[int, Mapping[str, float]]]
    made_with: Mapping[str, str]

    @property
    def val_loss(self) -> float:
        """Return the validation loss after the last step."""
        return self.val_curve[-1][1]

    @classmethod
    def of_run(cls, config: Config) -> Self:
        """Read the result of the finished run in `config.out_dir`."""
        folder = Path(config.out_dir)
        figures = json.loads((folder / "summary.json").read_text())
        del figures["config"]
        rows = read_metrics(folder / "metrics.jsonl")
        train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
        parts = [train[i : i + _STEPS_PER_POINT] for i in range(0, len(train), _STEPS_PER_POINT)]
        return cls(
            config,
            figures,
            [(part[-1][0], statistics.fmean(loss for _, loss in part)) for part in parts],
            [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row],
            [(row["step"], _of_experts(row)) for row in rows if _of_experts(row)],
            {"jax": jax.__version__, "platform": jax.default_backend()},
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        content = json.loads(path.read_text())
        return cls(**{**content, "config": from_json(content["config"])})

    def save(self, folder: Path) -> None:
        """Write the file, which appears whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / file_name(self.config)
        settings = {**_that_count(self.config), "out_dir": ""}
        content = {**dataclasses.asdict(self), "config": settings}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(_rounded(content), indent=1) + "\n")
        os.replace(partial, path)


def find(config: Config, folder: Path) -> Result | None:
    """Return the result of a run with these settings, if there is one."""
    path = folder / file_name(config)
    return Result.load(path) if path.exists() else None


def file_name(config: Config) -> str:
    """Name a run by what is asked of it most, and a hash of all settings that count."""
    settings = json.dumps(_that_count(config), sort_keys=True)
    digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
    rate = "default" if config.learning_rate is None else f"{config.learning_rate:g}"
    return f"{config.model}-{config.optimizer}-{rate}-seed{config.seed}-{digest}.json"


def _that_count(config: Config) -> dict[str, Any]:
    """Return the settings that differ from the defaults and change a run or what it measures."""
    measured = ("eval_every", "eval_batches")
    fields = [f for f in dataclasses.fields(Config) if not f.metadata["may_change"]]
    fields += [f for f in dataclasses.fields(Config) if f.name in measured]
    values = {field.name: getattr(config, field.name) for field in fields}
    defaults = {field.name: field.default for field in fields}
    return {name: value for name, value in values.items() if value != defaults[name]}


def _of_experts(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in row.items()
        if name.startswith("experts/") and isinstance(value, float)
    }


def _rounded(content: Any) -> Any:
    match content:
        case float():
            return float(f"{content:.6g}")
        case dict():
            return {key: _rounded(value) for key, value in content.items()}
        case list() | tuple():
            return [_rounded(value) for value in content]
    return content
