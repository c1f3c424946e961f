"""Which runs a comparison needs: every rate with the first seed, the best rate with the others."""

import dataclasses
import gc
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from comparison.results import Result, file_name, find
from pretraining.config import Config, validate
from pretraining.job import prepare_job
from pretraining.run import run

RunOne = Callable[[Config], Result]

_MOST_EXTENSIONS = 4


class InterruptedRunError(Exception):
    """A run was stopped by a signal."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The runs of one optimizer, those at the best rate apart."""

    optimizer: str
    by_rate: dict[float, Result]  # All with the first seed.
    best: list[Result]  # All with the best rate, one per seed.

    @property
    def rate(self) -> float:
        """Return the best rate."""
        return min(self.by_rate, key=lambda rate: self.by_rate[rate].val_loss)

    @property
    def at_an_end(self) -> bool:
        """Tell whether a smaller or a larger rate might have been better."""
        return len(self.by_rate) > 1 and self.rate in (min(self.by_rate), max(self.by_rate))


def sweep(
    base: Config,
    optimizer: str,
    rates: Sequence[float],
    seeds: Sequence[int],
    run_one: RunOne,
    *,
    extend: bool,
) -> Sweep:
    """Run every rate with the first seed, then the best rate with the other seeds.

    `extend` goes on beyond an end of the grid, by its own ratio, while the best rate lies there.
    """

    def at(rate: float, seed: int) -> Result:
        return run_one(
            dataclasses.replace(base, optimizer=optimizer, learning_rate=rate, seed=seed)
        )

    found = Sweep(optimizer, {rate: at(rate, seeds[0]) for rate in rates}, [])
    for _ in range(_MOST_EXTENSIONS if extend else 0):
        if not found.at_an_end:
            break
        beyond = _beyond(sorted(found.by_rate), found.rate)
        found.by_rate[beyond] = at(beyond, seeds[0])
    others = [at(found.rate, seed) for seed in seeds[1:]]
    return dataclasses.replace(found, best=[found.by_rate[found.rate], *others])


def _beyond(rates: Sequence[float], end: float) -> float:
    low, below, above, high = rates[0], rates[1], rates[-2], rates[-1]
    rate = low * low / below if end == low else high * high / above
    return float(f"{rate:.4g}")


def check(configs: Sequence[Config]) -> None:
    """Check every run before the first one starts."""
    for config in configs:
        validate(config)
        prepare_job(dataclasses.replace(config, out_dir=f"{config.out_dir}/new")).loader.close()


def cached(
    out_dir: Path, results_dir: Path, console: Console, *, verbose: bool, keep_checkpoints: bool
) -> RunOne:
    """Return the function that runs a config, unless its result is there; it resumes a stopped run.

    Raises:
      InterruptedRunError: when called, if the run was stopped by a signal.
    """

    def run_one(config: Config) -> Result:
        if found := find(config, results_dir):
            return found
        folder = out_dir / file_name(config).removesuffix(".json")
        resume = (folder / "checkpoints").is_dir()
        if folder.exists() and not resume:
            shutil.rmtree(folder)  # It was stopped before its first checkpoint.
        config = dataclasses.replace(config, out_dir=str(folder), resume=resume)
        started = time.perf_counter()
        if run(config, console if verbose else Console(quiet=True)):
            raise InterruptedRunError
        result = Result.of_run(config)
        result.save(results_dir)
        if not keep_checkpoints:
            shutil.rmtree(folder / "checkpoints")
        gc.collect()
        seconds = time.perf_counter() - started
        if math.isnan(result.val_loss):
            console.print(f"{folder.name}: diverged")
        console.print(f"{folder.name}: {result.val_loss:.4f}  ({seconds:.0f} s)", highlight=False)
        return result

    return run_one
