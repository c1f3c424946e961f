"""What a run measures of itself every `--monitor_every` steps: updates, momenta and experts."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import symoptax
from models.routing_statistics import model_statistics
from pretraining.job import Job
from pretraining.progress import Recorder
from pretraining.sharding import replicated
from pretraining.train import Hook, TrainState

# Of what `symoptax.measure` finds, what says more of a momentum than of the update made from it.
_OF_MOMENTA = ("rms", "effective_rank", "row_norm_spread", "shared_shift")


class Latest:
    """Batches as they come, and the latest of them once more."""

    def __init__(self, batches: Iterator[jax.Array]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[jax.Array]:
        return self

    def __next__(self) -> jax.Array:
        self.latest = next(self._batches)
        return self.latest


def diagnostics(job: Job, batches: Latest, recorder: Recorder) -> list[Hook]:
    """Return the hook that measures, none where the settings ask for none.

    What is measured lies on every device, so that each of several processes can read it.
    """
    every, everywhere = job.config.monitor_every, replicated(job.mesh)
    momenta = jax.jit(momentum_statistics(job.rules), out_shardings=everywhere)
    experts = jax.jit(routing_statistics(job.graphdef), out_shardings=everywhere)

    def write(step: int, state: TrainState) -> None:
        values = symoptax.monitored(state.opt_state) | _listed(momenta(state))
        if job.architecture.has_experts:
            values |= _listed(experts(state.params, batches.latest))
        recorder.measured(step, values)

    return [Hook(every, write)] if every else []


def momentum_statistics(
    rules: Sequence[symoptax.ParamRule],
) -> Callable[[TrainState], dict[str, jax.Array]]:
    """Return a function of the state that measures every `mu` in it, be it AdamW's or ours."""

    def measure(state: TrainState) -> dict[str, jax.Array]:
        momenta = {}
        for _, mu in optax.tree.get_all_with_path(state.opt_state, "mu"):
            momenta |= _by_path(mu)  # Each has the leaves of its own roles.
        params = {path: leaf for path, leaf in _by_path(state.params).items() if path in momenta}
        return {
            f"momentum/{role}/{name}": numbers[name]
            for role, numbers in symoptax.measure(momenta, params, rules).items()
            for name in _OF_MOMENTA
            if name in numbers
        }

    return measure


def routing_statistics(
    graphdef: nnx.GraphDef,
) -> Callable[[Any, jax.Array], dict[str, jax.Array]]:
    """Return a function of parameters and a batch: a forward pass to the last router."""

    def measure(params: Any, tokens: jax.Array) -> dict[str, jax.Array]:
        routing = nnx.merge(graphdef, params).routing(tokens[:, :-1])
        return {f"experts/{name}": value for name, value in model_statistics(routing).items()}

    return measure


def _by_path(tree: Any) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _listed(values: dict[str, jax.Array]) -> dict[str, Any]:
    """Return Python numbers, and arrays as lists of four digits after the point."""
    arrays = {name: np.asarray(x, np.float64) for name, x in jax.device_get(values).items()}
    return {n: np.round(x, 4).tolist() if x.ndim else float(x) for n, x in arrays.items()}
