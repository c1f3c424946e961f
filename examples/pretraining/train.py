"""The training step as a pure function, and the loop that calls it."""

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

Metrics = dict[str, jax.Array]
LossFn = Callable[[Any, jax.Array], jax.Array]


class TrainState(NamedTuple):
    """What a step changes."""

    params: Any
    opt_state: optax.OptState


def make_loss(graphdef: nnx.GraphDef, *, auxiliary: bool = True) -> LossFn:
    """Return the mean next-token cross-entropy of tokens (batch, seq_len + 1), in nats.

    `auxiliary` adds what a mixture of experts returns beside the logits.
    """

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        output = nnx.merge(graphdef, params)(tokens[:, :-1])
        logits, extra = output if isinstance(output, tuple) else (output, 0.0)
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return entropy + extra if auxiliary else entropy

    return loss


def _accumulated(loss: LossFn, params: Any, tokens: jax.Array, parts: int) -> tuple[jax.Array, Any]:
    """Average loss and gradient over `parts` micro-batches, one in memory at a time."""
    value_and_grad = jax.value_and_grad(loss)
    if parts == 1:
        return value_and_grad(params, tokens)
    # Strided parts: each device keeps the rows that it already holds.
    micro = tokens.reshape(-1, parts, tokens.shape[-1]).swapaxes(0, 1)

    def add(total: Any, part: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, value_and_grad(params, part)), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(add, zeros, micro)
    return jax.tree.map(lambda x: x / parts, total)


def make_train_step(
    loss: LossFn,
    tx: optax.GradientTransformation,
    schedule: optax.Schedule,
    accumulate: int,
    shardings: TrainState,
) -> Callable[[TrainState, jax.Array, int], tuple[TrainState, Metrics]]:
    """Return the jitted `(state, tokens, count) -> (state, metrics)`; it consumes `state`."""

    def step(state: TrainState, tokens: jax.Array, count: jax.Array) -> tuple[TrainState, Metrics]:
        value, grads = _accumulated(loss, state.params, tokens, accumulate)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        metrics = {
            "loss": value,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": schedule(count),
        }
        return TrainState(optax.apply_updates(state.params, updates), opt_state), metrics

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def evaluate(
    loss: Callable[[Any, jax.Array], jax.Array], params: Any, batches: Iterator[jax.Array]
) -> float:
    """Return the mean of `loss` over equally large batches."""
    return float(jnp.mean(jnp.stack([loss(params, batch) for batch in batches])))


class Hook(NamedTuple):
    """Something to do after every `every` steps."""

    every: int
    call: Callable[[int, TrainState], None]


def train(
    state: TrainState,
    train_step: Callable[[TrainState, jax.Array, int], tuple[TrainState, Metrics]],
    batches: Iterator[jax.Array],
    steps: range,
    record: Callable[[int, Metrics], None],
    hooks: Sequence[Hook],
    stopped: Callable[[int], bool],
) -> tuple[TrainState, int]:
    """Take the numbered `steps` (from 1) until one is `stopped`; return state and last step.

    `record` gets metrics that may still be computing: reading them at once would stall dispatch.
    """
    step = steps.start - 1
    for step in steps:
        state, metrics = train_step(state, next(batches), step - 1)
        record(step, metrics)
        for hook in hooks:
            if step % hook.every == 0:
                hook.call(step, state)
        if stopped(step):
            break
    return state, step


@contextlib.contextmanager
def catch_signals() -> Iterator[Callable[[], bool]]:
    """Turn the first SIGTERM or SIGINT into a flag; a second one acts as usual."""
    received: list[int] = []
    previous = {}

    def note(number: int, _frame: object) -> None:
        received.append(number)
        for each, handler in previous.items():
            signal.signal(each, handler)

    for each in (signal.SIGTERM, signal.SIGINT):
        previous[each] = signal.signal(each, note)
    try:
        yield lambda: bool(received)
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
