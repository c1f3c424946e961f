"""What a run says while it runs: a live line, metrics.jsonl and TensorBoard."""

import json
import os
import statistics
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

from pretraining.config import Config
from pretraining.train import Metrics


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl, without the half line that a killed run may leave at its end."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _truncate(path: Path, last: int) -> None:
    """Drop the lines of steps after `last`, which a resumed run takes again."""
    kept = [row for row in read_metrics(path) if row["step"] <= last]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
    os.replace(partial, path)


class _Files:
    """metrics.jsonl and TensorBoard, from the step after `start` on."""

    def __init__(self, folder: Path, start: int) -> None:
        _truncate(folder / "metrics.jsonl", start)
        self._lines = (folder / "metrics.jsonl").open("a", buffering=1)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            if isinstance(value, list):
                self._board.add_histogram(name, np.array(value), step)
            else:
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._lines.close()
        self._board.close()


class Recorder:
    """Write the metrics of a run everywhere, those of a step once the next one is dispatched.

    Of several processes the first one writes; the others keep step with it.
    """

    def __init__(self, config: Config, start: int, console: Console) -> None:
        self._config, self._console = config, console
        self._files = _Files(Path(config.out_dir), start) if jax.process_index() == 0 else None
        self._pending: tuple[int, Metrics] | None = None
        self._seconds: deque[float] = deque(maxlen=20)
        self._clock = time.perf_counter()
        self._live = _live_line(console, config.steps, start) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()
        if self._files:
            self._files.close()

    def train(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of `step`, and write those of the step before."""
        self.flush()
        self._pending = (step, metrics)

    def flush(self) -> None:
        """Write the metrics that wait; this blocks until their step is done."""
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        now = time.perf_counter()
        self._seconds.append(now - self._clock)
        self._clock = now
        # The median: a step that waits for an evaluation or a compilation is not typical.
        seconds = statistics.median(self._seconds)
        values["tokens_per_second"] = self._config.tokens_per_step / seconds
        self._write(step, values)
        # The first step is mostly compilation and says nothing about the others.
        left = (self._config.steps - step) * seconds if len(self._seconds) > 1 else None
        self._show(step, values, left)

    def validation(self, step: int, loss: float) -> None:
        """Write the validation loss of `step`."""
        self._write(step, {"val_loss": loss})
        self.say(f"step {step:>6}  validation loss {loss:.4f}")

    def measured(self, step: int, values: Mapping[str, Any]) -> None:
        """Write what was measured at `step`: numbers, and lists, which are histograms in a plot."""
        self.flush()
        self._write(step, values)

    def say(self, text: str) -> None:
        """Print a line above the live one."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        if self._files:
            self._files.write(step, values)

    def _show(self, step: int, values: dict[str, float], seconds_left: float | None) -> None:
        text = (
            f"loss {values['loss']:.4f}  rate {values['learning_rate']:.2e}  "
            f"{values['tokens_per_second']:,.0f} tokens/s"
        )
        if self._live:
            self._live.update(self._live.task_ids[0], completed=step, text=text)
        elif step % self._config.log_every == 0 or step == 1:
            left = "compiled" if seconds_left is None else f"{seconds_left / 60:.1f} min left"
            self.say(f"step {step:>6}/{self._config.steps}  {text}  {left}")


def _live_line(console: Console, steps: int, start: int) -> Progress:
    live = Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
        console=console,
    )
    live.add_task("train", total=steps, completed=start, text="compiling")
    return live
