"""The settings that all runs share, and where their results are kept."""

import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from comparison.results import Result
from comparison.sweep import RunOne, Sweep, cached, sweep
from models.catalog import MODELS
from pretraining.config import Config
from pretraining.optimizers import LEARNING_RATES

HERE = Path(__file__).resolve().parent
SEEDS = (0, 1, 2)
_BASE = Config(
    seq_len=128,
    batch_size=8,
    steps=300,
    eval_every=30,
    eval_batches=12,
    checkpoint_every=1000,
)
_STACKS = ["adamw", "muon", "row_norm", "right_polar", "hybrid", "layerwise"]
_ROUTERS = ["row_norm_router", "left_polar_router"]


def settings(model: str, **changes: Any) -> Config:
    """Return the settings of a run; a mixture of experts is monitored."""
    monitor_every = 50 if MODELS[model].has_experts else 0
    return dataclasses.replace(_BASE, model=model, monitor_every=monitor_every, **changes)


def arms(model: str) -> list[str]:
    """Return the optimizers that are compared on `model`."""
    return _STACKS + (_ROUTERS if MODELS[model].has_experts else [])


@functools.cache
def run_one() -> RunOne:
    """Return the function that runs a config, or takes its result from `results`."""
    folder = Path(tempfile.gettempdir()) / "symoptax-training"
    return cached(folder, HERE / "results", Console(), verbose=False, keep_checkpoints=False)


@functools.cache
def arm(model: str, optimizer: str) -> Sweep:
    """Sweep the rates of an optimizer with the first seed; run the best with all seeds."""
    rates = [float(f"{f * LEARNING_RATES[optimizer]:.4g}") for f in (0.5, 1.0, 2.0)]
    return sweep(settings(model), optimizer, rates, SEEDS, run_one(), extend=True)


def with_seeds(config: Config, seeds: Sequence[int] = SEEDS) -> list[Result]:
    """Run a config with several seeds."""
    return [run_one()(dataclasses.replace(config, seed=seed)) for seed in seeds]
