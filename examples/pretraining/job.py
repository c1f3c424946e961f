"""Check a run from its settings to its data before it writes anything."""

import dataclasses
from collections.abc import Sequence

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

import symoptax
from models.qwen3 import PRESETS, Qwen3, Qwen3Config, rules_for
from pretraining.checkpoint import find_resume_step
from pretraining.config import Config
from pretraining.dataset import Dataset, prepare
from pretraining.errors import InputError
from pretraining.loader import Loader, make_loader, validation_batches
from pretraining.optimizers import make_optimizer
from pretraining.sharding import batch_sharding, make_mesh, placed
from pretraining.train import TrainState


@dataclasses.dataclass(frozen=True)
class Job:
    """A run that has passed every check and has written nothing yet."""

    config: Config
    dataset: Dataset
    mesh: Mesh
    model: Qwen3Config
    tx: optax.GradientTransformation
    rules: Sequence[symoptax.ParamRule]
    graphdef: nnx.GraphDef
    target: TrainState  # Shapes, dtypes and shardings.
    loader: Loader
    resume_step: int | None

    @property
    def shardings(self) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.target)


def _model_config(config: Config) -> Qwen3Config:
    if config.preset not in PRESETS:
        raise InputError(f"--preset={config.preset}: choose from {', '.join(PRESETS)}")
    preset = PRESETS[config.preset]
    vocab_size = config.vocab_size or preset.vocab_size
    return dataclasses.replace(preset, vocab_size=vocab_size, tied=config.tied)


def _abstract_state(
    model: Qwen3Config, tx: optax.GradientTransformation, mesh: Mesh
) -> tuple[nnx.GraphDef, TrainState]:
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Qwen3(model, nnx.Rngs(0))))
    params = placed(mesh, nnx.as_pure(params))
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
    mesh, model = make_mesh(config.mesh), _model_config(config)
    rules = rules_for(model)
    tx = make_optimizer(config, rules)
    batch_sharding(mesh, config.batch_size // config.accumulate)  # raises where it does not fit
    resume_step = find_resume_step(config)
    dataset = prepare(config.data, vocab_size=model.vocab_size, cache_dir=config.cache_dir)
    model = dataclasses.replace(model, vocab_size=dataset.vocab_size)
    graphdef, target = _abstract_state(model, tx, mesh)
    loader = make_loader(
        dataset.train_shards,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        seed=config.seed,
    )
    # Raises where there is too little validation text for one batch.
    validation_batches(dataset.val_shards, config.batch_size, config.seq_len, 1)
    return Job(config, dataset, mesh, model, tx, rules, graphdef, target, loader, resume_step)
