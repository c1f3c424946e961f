"""Check a run from its settings to its data before it writes anything."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import symoptax
from models.catalog import MODELS, Architecture, model_name
from models.hub_folder import check_safetensors, read_config
from pretraining.checkpoint import find_resume_step
from pretraining.config import Config, split_entries
from pretraining.dataset import Dataset, prepare
from pretraining.errors import InputError
from pretraining.loader import Loader, make_loader, validation_batches
from pretraining.optimizers import make_optimizer
from pretraining.sharding import batch_part, batch_sharding, make_mesh, placed
from pretraining.train import TrainState


@dataclasses.dataclass(frozen=True)
class Job:
    """A run that has passed every check and has written nothing yet."""

    config: Config
    dataset: Dataset
    mesh: Mesh
    architecture: Architecture
    model: Any  # The sizes that the architecture is built with.
    tx: optax.GradientTransformation
    rules: Sequence[symoptax.ParamRule]
    graphdef: nnx.GraphDef
    target: TrainState  # Shapes, dtypes and shardings.
    loader: Loader
    part: tuple[int, int]  # Of each batch: which one this process loads, of how many.
    resume_step: int | None

    @property
    def shardings(self) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.target)

    @property
    def identity(self) -> tuple[object, ...]:
        """What the processes of one run have in common."""
        config = dataclasses.replace(self.config, cache_dir="")
        entropy = f"{self.dataset.baselines.unigram:.6f}"
        data = (self.dataset.train_tokens, self.dataset.val_tokens, entropy)
        return config, data, self.model, self.resume_step

    def validation_batches(self) -> Iterator[np.ndarray]:
        """Return this process's part of the batches of one evaluation."""
        index, count = self.part
        return validation_batches(
            self.dataset.val_shards,
            self.config.batch_size,
            self.config.seq_len,
            self.config.eval_batches,
            process_index=index,
            process_count=count,
        )


def _model_config(config: Config) -> tuple[Architecture, Any]:
    if config.model not in MODELS:
        raise InputError(f"--model={config.model}: choose from {', '.join(MODELS)}")
    architecture = MODELS[config.model]
    if config.init_from:
        return architecture, _overridden(config, _published(config, architecture))
    if config.preset not in architecture.presets:
        names = ", ".join(architecture.presets)
        raise InputError(f"--preset={config.preset}: choose from {names}")
    preset = architecture.presets[config.preset]
    changes: dict[str, Any] = {"vocab_size": config.vocab_size or preset.vocab_size}
    if hasattr(preset, "tied"):
        changes["tied"] = config.tied
    elif config.tied:
        raise InputError(f"--tied: {config.model} has a head of its own")
    return architecture, _overridden(config, dataclasses.replace(preset, **changes))


def _overridden(config: Config, model: Any) -> Any:
    """Return the sizes with the numbers that `model_override` puts in their place."""
    changes = {}
    numbers = {
        name: value
        for name, value in dataclasses.asdict(model).items()
        if type(value) in (int, float) and name != "vocab_size"
    }
    for name, text in split_entries("model_override", config.model_override, "size").items():
        given = f"--model_override={name}:{text}"
        if name not in numbers:
            raise InputError(f"{given}: {config.model} has {', '.join(numbers)}")
        kind = type(numbers[name])
        try:
            changes[name] = kind(text)
        except ValueError as error:
            raise InputError(f"{given}: must be of type {kind.__name__}") from error
    return dataclasses.replace(model, **changes)


def _published(config: Config, architecture: Architecture) -> Any:
    """Return the sizes in `init_from`, or those that the resumed run has kept of it."""
    folder = Path(config.out_dir if config.resume else config.init_from).expanduser()
    try:
        model = read_config(folder)
        if model_name(model) != config.model:
            raise ValueError(f"it is not of that model; give --model={model_name(model)}")
        if not config.resume:
            check_safetensors(architecture, model, folder)
    except ValueError as error:
        raise InputError(f"--init_from={config.init_from}: {error}") from error
    return model


def _with_vocabulary(config: Config, model: Any, dataset: Dataset) -> Any:
    """Return the sizes for the vocabulary of the data; weights that are there must fit it."""
    if not config.init_from:
        return dataclasses.replace(model, vocab_size=dataset.vocab_size)
    if dataset.vocab_size != model.vocab_size:
        raise InputError(
            f"--init_from={config.init_from}: the model has {model.vocab_size} tokens, a tokenizer "
            f"of this text {dataset.vocab_size}; give .bin shards of the model's own tokens"
        )
    return model


def _abstract_state(
    architecture: Architecture,
    model: Any,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    dtype: str,
) -> tuple[nnx.GraphDef, TrainState]:
    graphdef, params = nnx.split(nnx.eval_shape(lambda: architecture.build(model, nnx.Rngs(0))))
    params = placed(mesh, nnx.as_pure(params), dtype)
    try:
        shardings = symoptax.state_shardings(tx, params)
        opt_state = jax.eval_shape(tx.init, params)
    except ValueError as error:
        raise InputError(f"the optimizer does not fit the model: {error}") from error
    opt_state = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        opt_state,
        shardings,
    )
    return graphdef, TrainState(params, opt_state)


def prepare_job(config: Config) -> Job:
    """Check the settings, cheap checks first, and prepare the data."""
    mesh = make_mesh(config.mesh)
    resume_step = find_resume_step(config)
    architecture, model = _model_config(config)
    rules = architecture.rules_for(model)
    tx = make_optimizer(config, rules, architecture.multipliers_for(model))
    # Raises where it does not fit.
    rows = batch_sharding(mesh, config.batch_size // config.accumulate)
    index, count = batch_part(rows, config.batch_size)
    dataset = prepare(config.data, vocab_size=model.vocab_size, cache_dir=config.cache_dir)
    model = _with_vocabulary(config, model, dataset)
    graphdef, target = _abstract_state(architecture, model, tx, mesh, config.param_dtype)
    tx = symoptax.on_mesh(tx, target.params)
    loader = make_loader(
        dataset.train_shards,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        seed=config.seed,
        process_index=index,
        process_count=count,
    )
    part = (index, count)
    job = Job(
        *(config, dataset, mesh, architecture, model, tx, rules, graphdef, target, loader),
        *(part, resume_step),
    )
    job.validation_batches()  # Raises where there is too little text for one batch.
    return job
