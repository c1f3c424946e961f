"""One run, from its config to its report."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from models.hub_folder import from_safetensors, write_config
from pretraining.checkpoint import Checkpoints
from pretraining.config import Config
from pretraining.diagnostics import Latest, diagnostics
from pretraining.errors import InputError
from pretraining.job import Job, prepare_job
from pretraining.optimizers import describe, make_schedule
from pretraining.processes import begin_together, stop_together
from pretraining.progress import Recorder
from pretraining.report import summarize, write_report
from pretraining.sharding import batch_sharding
from pretraining.train import (
    Hook,
    LossFn,
    TrainState,
    evaluate,
    make_loss,
    make_train_step,
    train,
)

# What a shell reports for an interrupted program: all is saved, but the run is not finished.
INTERRUPTED = 130


def run(config: Config, console: Console) -> int:
    """Train as `config` says; return 0, or `INTERRUPTED` when a signal stopped the run."""
    job = begin_together(lambda: prepare_job(config), lambda job: job.identity)
    start = job.resume_step or 0
    with contextlib.ExitStack() as stack:
        stack.callback(job.loader.close)
        checkpoints = stack.enter_context(contextlib.closing(_open_folder(config)))
        state = _start(job, checkpoints)
        stopped = stack.enter_context(stop_together(start))
        recorder = stack.enter_context(Recorder(config, start, console))
        recorder.say(f"data: {job.dataset.description}")
        step = _train(job, state, start, checkpoints, recorder, stopped)
        if step < config.steps:
            recorder.say(
                f"stopped and saved at step {step}: go on with --resume and the same flags"
            )
            return 0 if 0 < config.stop_at_step <= step else INTERRUPTED
    if jax.process_index() == 0:
        console.print(_finish(job), highlight=False, markup=False, soft_wrap=True)
    return 0


def _open_folder(config: Config) -> Checkpoints:
    folder = Path(config.out_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out_dir={folder}: cannot be created ({error.strerror})") from error
    return Checkpoints(folder / "checkpoints")


def _published_params(job: Job) -> Any:
    folder = Path(job.config.init_from).expanduser()
    try:
        return from_safetensors(
            job.architecture,
            job.model,
            folder,
            dtype=jnp.dtype(job.config.param_dtype),
            shapes=job.target.params,
        )
    except ValueError as error:
        raise InputError(f"--init_from={folder}: {error}") from error


def _random_params(job: Job) -> Any:
    # Not compiled as a whole: XLA takes longer over the random numbers than the model to make them.
    params = nnx.as_pure(nnx.state(job.architecture.build(job.model, nnx.Rngs(job.config.seed))))
    # Every process has them all and keeps its shards; `device_put` would compare them first.
    return jax.tree.map(
        lambda leaf, target: jax.make_array_from_callback(
            leaf.shape, target.sharding, np.asarray(leaf, target.dtype).__getitem__
        ),
        params,
        job.target.params,
    )


def _initial_state(job: Job) -> TrainState:
    params = _published_params(job) if job.config.init_from else _random_params(job)
    # Compiled, since only `out_shardings` also places the counters on the whole mesh.
    init = jax.jit(job.tx.init, out_shardings=job.shardings.opt_state)
    return TrainState(params, init(params))


def _start(job: Job, checkpoints: Checkpoints) -> TrainState:
    if job.resume_step is None:
        if jax.process_index() == 0:
            write_config(job.model, Path(job.config.out_dir))
        return _initial_state(job)
    state, data_state = checkpoints.restore(job.resume_step, job.target)
    job.loader.set_state(data_state)
    return state


def _placed(job: Job, batches: Iterable[np.ndarray]) -> Iterator[jax.Array]:
    """Join the parts of each batch that the processes have loaded."""
    rows = batch_sharding(job.mesh, job.config.batch_size)
    shape = (job.config.batch_size, job.config.seq_len + 1)
    return (jax.make_array_from_process_local_data(rows, batch, shape) for batch in batches)


def _hooks(job: Job, checkpoints: Checkpoints, recorder: Recorder, loss: LossFn) -> list[Hook]:
    config = job.config

    def validate(step: int, state: TrainState) -> None:
        recorder.flush()
        batches = _placed(job, job.validation_batches())
        recorder.validation(step, evaluate(loss, state.params, batches))

    def save(step: int, state: TrainState) -> None:
        recorder.flush()
        checkpoints.save(step, state, job.loader.get_state(), config)

    return [Hook(config.eval_every, validate), Hook(config.checkpoint_every, save)]


def _train(
    job: Job,
    state: TrainState,
    start: int,
    checkpoints: Checkpoints,
    recorder: Recorder,
    stopped: Callable[[int], bool],
) -> int:
    config, loss = job.config, make_loss(job.graphdef)
    train_step = make_train_step(
        loss, job.tx, make_schedule(config), config.accumulate, job.shardings
    )
    hooks = _hooks(job, checkpoints, recorder, jax.jit(make_loss(job.graphdef, auxiliary=False)))
    steps = range(start + 1, (config.stop_at_step or config.steps) + 1)
    batches = Latest(_placed(job, job.loader))
    all_hooks = [*diagnostics(job, batches, recorder), *hooks]
    state, step = train(state, train_step, batches, steps, recorder.train, all_hooks, stopped)
    # The last step of a run is evaluated too; every way out of the loop is saved.
    for hook in hooks if step == config.steps else hooks[1:]:
        if steps and step % hook.every:
            hook.call(step, state)
    return step


def _finish(job: Job) -> str:
    summary = summarize(
        Path(job.config.out_dir),
        job.target.params,
        job.target.opt_state,
        dataclasses.asdict(job.dataset.baselines),
        job.dataset.description,
    )
    factors = job.architecture.multipliers_for(job.model)
    updates = describe(job.config, job.target.params, job.rules, factors)
    return write_report(job.config, summary, updates)
