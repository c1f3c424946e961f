"""Paired timings: on a noisy machine only ratios within one run mean anything."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np


class Timing(NamedTuple):
    """Median seconds, and the median of the ratios to the first function of the same round."""

    seconds: float
    ratio: float


def paired(functions: Mapping[str, Callable[[], Any]], rounds: int = 9) -> dict[str, Timing]:
    """Run every function once per round, in turn, after two rounds that compile and warm up."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 2):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            taken[name].append(time.perf_counter() - start)
    seconds = {name: np.array(times[2:]) for name, times in taken.items()}
    first = next(iter(seconds.values()))
    return {
        name: Timing(float(np.median(times)), float(np.median(times / first)))
        for name, times in seconds.items()
    }


def table(header: list[str], rows: list[list[str]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
