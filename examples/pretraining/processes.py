"""Several processes as one run: they find each other, begin together and stop together."""

import contextlib
import os
import signal
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import flags
from jax.experimental import multihost_utils

from pretraining.errors import InputError
from pretraining.train import catch_signals

Result = TypeVar("Result")

_DAY = 24 * 60 * 60


def define_flags(values: flags.FlagValues) -> None:
    """Define how this process meets the others; no setting of the run, which is theirs too."""
    flags.DEFINE_bool(
        "distributed",
        False,
        "Be one of several processes, each started with the same flags; see above.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "distributed_timeout",
        100,
        "Seconds that the others wait for a process that does not come, or is lost.",
        lower_bound=1,
        flag_values=values,
    )


def join(timeout: int) -> None:
    """Meet the other processes, before anything touches a device.

    JAX finds them on TPU pods, under Slurm and under Open MPI. Elsewhere JAX_COORDINATOR_ADDRESS,
    which it reads itself, JAX_NUM_PROCESSES and JAX_PROCESS_ID say where and who they are.

    A process that does not come, or is killed later, ends the others within `timeout` seconds or
    little more.

    Raises:
        InputError: The other processes cannot be found.
    """
    try:
        count, index = (
            int(os.environ[name]) if name in os.environ else None
            for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
        )
        jax.distributed.initialize(
            num_processes=count,
            process_id=index,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=timeout,
            shutdown_timeout_seconds=timeout,
        )
    except (ValueError, RuntimeError) as error:
        raise InputError(
            "--distributed: outside of TPU pods and Slurm, set JAX_COORDINATOR_ADDRESS=host:port, "
            f"JAX_NUM_PROCESSES and JAX_PROCESS_ID ({error})"
        ) from error


def begin_together(prepare: Callable[[], Result], identity: Callable[[Result], Any]) -> Result:
    """Return what `prepare` does once all processes are prepared, or raise in all of them.

    Args:
        prepare: Done by every process, however much longer one takes than the others.
        identity: What must be the same in all processes, as a value whose `repr` tells.

    Raises:
        InputError: From this process's `prepare`, or because of another process.
    """
    if jax.process_count() == 1:
        return prepare()
    try:
        result = prepare()
    except InputError:
        _marks(None)
        raise
    marks = _marks(identity(result))
    if (marks != marks[0]).any():
        raise InputError("another process failed, or has other flags, data or checkpoints")
    return result


def _marks(value: object) -> np.ndarray:
    """Wait for every process, and return a number that stands for the `value` of each."""
    # Unlike a collective over Gloo, this barrier waits longer than 30 seconds.
    everyone = set(range(jax.process_count()))
    ocp.multihost.sync_global_processes("prepared", timeout=_DAY, processes=everyone)
    return multihost_utils.process_allgather(np.uint32(zlib.crc32(repr(value).encode())))


@contextlib.contextmanager
def stop_together(start: int) -> Iterator[Callable[[int], bool]]:
    """Yield a function that tells, after each step from `start + 1` on, whether to stop there.

    SIGTERM or SIGINT to any process stops all of them after the same step, the first one if it
    comes before.
    """
    if jax.process_count() == 1:
        with catch_signals() as received:
            yield lambda _step: received()
        return

    # JAX itself catches SIGTERM, tells the other processes and agrees with them on a step.
    def note(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, previous)
        signal.raise_signal(signal.SIGTERM)

    previous = signal.signal(signal.SIGINT, note)
    try:
        # Counted from 1, which is the step JAX stops at when the signal comes before the first.
        yield lambda step: multihost_utils.reached_preemption_sync_point(step - start)
    finally:
        signal.signal(signal.SIGINT, previous)
