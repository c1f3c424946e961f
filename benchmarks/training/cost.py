"""What each optimizer costs: its share of a step, tokens per second, memory, time to a loss."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from comparison import report
from models.catalog import MODELS
from pretraining.config import Config
from pretraining.optimizers import make_optimizer, make_schedule
from pretraining.report import markdown_table, tree_bytes
from pretraining.train import TrainState, make_loss, make_train_step
from runs import arm, arms, settings
from step import Stepper
from timing import paired


class _Training:
    """Whole steps, in place."""

    def __init__(self, config: Config) -> None:
        architecture = MODELS[config.model]
        sizes = architecture.presets[config.preset]
        rules = architecture.rules_for(sizes)
        model = architecture.build(sizes, nnx.Rngs(0))
        graphdef, params = nnx.split(model)
        self.params = nnx.as_pure(params)
        self.tx = make_optimizer(config, rules, architecture.multipliers_for(sizes))
        self.state = TrainState(self.params, jax.jit(self.tx.init)(self.params))
        shape = (config.batch_size, config.seq_len + 1)
        self.tokens = jax.random.randint(jax.random.key(1), shape, 0, sizes.vocab_size)
        loss, schedule = make_loss(graphdef), make_schedule(config)
        self.step = make_train_step(loss, self.tx, schedule, 1, TrainState(None, None))

    def optimizer(self) -> Stepper:
        """Return the optimizer's part of a step, in place."""
        params = jax.tree.map(jnp.copy, self.params)
        return Stepper(self.tx, params, jax.jit(self.tx.init)(params), params_like(params))

    def __call__(self) -> Any:
        self.state, metrics = self.step(self.state, self.tokens, 0)
        return self.state, metrics


def params_like(params: Any) -> Any:
    """Return a tree of other arrays, as gradients."""
    return jax.tree.map(lambda leaf: 0.01 * leaf, params)


def run(rounds: int = 15) -> str:
    """Time the steps of every optimizer on two models, in turn."""
    rows = []
    for model in ("qwen3", "olmoe"):
        configs = {
            name: dataclasses.replace(settings(model), optimizer=name, monitor_every=0)
            for name in arms(model)
        }
        training = {name: _Training(config) for name, config in configs.items()}
        state = {name: tree_bytes(one.state.opt_state) for name, one in training.items()}
        parts = paired({name: one.optimizer() for name, one in training.items()}, rounds)
        steps = paired(training, rounds)
        goal = report.final_loss(arm(model, "adamw"))[0]
        for name, config in configs.items():
            step = steps[name].seconds
            share = report.steps_to(goal, arm(model, name)) / config.steps
            rows.append(
                [
                    model,
                    name,
                    f"{1e3 * step:.0f} ms",
                    f"{steps[name].ratio:.2f}",
                    f"{100 * parts[name].seconds / step:.0f} %",
                    f"{config.tokens_per_step / step:,.0f}",
                    f"{state[name] / 1e6:.1f} MB",
                    f"{share:.2f}",
                    f"**{share * steps[name].ratio:.2f}**",
                ]
            )
    header = ["model", "optimizer", "step", "by AdamW's", "of it the optimizer", "tokens/s"]
    header += ["state", "steps to AdamW's loss", "time to it, by AdamW's"]
    return markdown_table(header, rows)
