"""What `symoptax.monitor` adds to the training step of the small models of `examples`."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from step import Stepper
from timing import paired, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from models.catalog import MODELS, Architecture
from pretraining.config import Config
from pretraining.optimizers import make_optimizer, make_schedule
from pretraining.train import TrainState, make_loss, make_train_step

EVERY = 100


class Model:
    """A small model with its optimizer, as `examples/pretrain.py` builds them."""

    def __init__(self, name: str) -> None:
        self.architecture: Architecture = MODELS[name]
        self.sizes = self.architecture.presets["small"]
        model = self.architecture.build(self.sizes, nnx.Rngs(0))
        self.graphdef, params = nnx.split(model)
        self.name, self.params = name, nnx.as_pure(params)

    def optimizer(self, every: int) -> optax.GradientTransformation:
        config = Config(model=self.name, monitor_every=every)
        rules = self.architecture.rules_for(self.sizes)
        return make_optimizer(config, rules, self.architecture.multipliers_for(self.sizes))

    def updates(self, every: int) -> Stepper:
        """Return the optimizer's part of a step, in place."""
        tx, params = self.optimizer(every), jax.tree.map(jnp.copy, self.params)
        return Stepper(tx, params, jax.jit(tx.init)(params), self.params)


class Measuring:
    """Steps that are all multiples of `EVERY` for the monitor."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper

    def __call__(self) -> Any:
        clipping, (rule, watch) = self.stepper.state
        watch = watch._replace(step=jnp.int32(EVERY - 1))
        self.stepper.state = (clipping, (rule, watch))
        return self.stepper()


class Training:
    """Whole steps without a monitor, in place."""

    def __init__(self, model: Model) -> None:
        config, tx = Config(model=model.name), model.optimizer(0)
        params = jax.tree.map(jnp.copy, model.params)
        self.state = TrainState(params, jax.jit(tx.init)(params))
        shape = (config.batch_size, config.seq_len + 1)
        self.tokens = jax.random.randint(jax.random.key(1), shape, 0, model.sizes.vocab_size)
        loss, schedule = make_loss(model.graphdef), make_schedule(config)
        self.step = make_train_step(loss, tx, schedule, 1, TrainState(None, None))

    def __call__(self) -> Any:
        self.state, metrics = self.step(self.state, self.tokens, 0)
        return self.state, metrics


def run(rounds: int = 61) -> str:
    """Time the optimizer's part, where alone the monitor changes anything, and the whole step."""
    assert rounds + 2 < EVERY  # else a step between would measure
    rows = []
    for name in ("qwen3", "olmoe"):
        model = Model(name)
        functions = {"without": model.updates(0), "between": model.updates(EVERY)}
        functions["measuring"] = Measuring(model.updates(EVERY))
        times = paired(functions, rounds)
        step, part = paired({"": Training(model)})[""].seconds, times["without"].seconds
        between, measuring = ((times[n].ratio - 1) * part / step for n in list(functions)[1:])
        rows.append(
            [
                f"{name}, small",
                f"{1e3 * step:.0f} ms",
                f"{1e3 * part:.0f} ms",
                f"{100 * between:+.1f} %",
                f"{100 * measuring:+.1f} %",
                f"**{100 * (between + (measuring - between) / EVERY):+.1f} %**",
            ]
        )
    header = ["model", "step", "of it the optimizer", "steps between", "a step that measures"]
    return table([*header, f"every {EVERY}"], rows)


if __name__ == "__main__":
    print(run())
