"""What the tests of every decoder do with it."""

import math

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import symoptax


def shapes(build, config):
    return nnx.as_pure(nnx.state(nnx.eval_shape(lambda: build(config, nnx.Rngs(0))), nnx.Param))


def count(build, config):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes(build, config)))


def check_presets(module, build):
    """Every preset has the sizes that its name promises, and rules of which none is idle."""
    assert {"tiny", "small", "paper"} < set(module.PRESETS)
    assert count(build, module.PRESETS["tiny"]) < 1e5
    assert 1.5e6 < count(build, module.PRESETS["small"]) < 4e6
    assert module.PRESETS["small"].vocab_size == 4096
    for name in ("tiny", "small", "paper"):
        config = module.PRESETS[name]
        report = symoptax.routing_report(shapes(build, config), module.rules_for(config))
        assert not report.unused_rules


def _start(build, config):
    """Return parameters, a loss, and tokens."""
    graphdef, params = nnx.split(build(config, nnx.Rngs(0)), nnx.Param)

    def loss_fn(params, tokens):
        output = nnx.merge(graphdef, params)(tokens[:, :-1])
        logits, auxiliary = output if isinstance(output, tuple) else (output, 0.0)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return loss.mean() + auxiliary

    tokens = jax.random.randint(jax.random.key(1), (2, 17), 0, config.vocab_size)
    return nnx.as_pure(params), loss_fn, tokens


def claims_that_hold(build, config, rules):
    """Audit; return the claims, after checking that none is false and none undecided."""
    params, loss_fn, tokens = _start(build, config)
    # Larger than at initialisation, so that every router and head matters to the loss.
    params = jax.tree.map(lambda x: 5 * x if x.ndim > 1 else x, params)
    report = symoptax.audit(loss_fn, params, tokens, rules)
    assert {row.verdict for row in report.rows} - {"note"} == {"holds"}, str(report)
    held = [row for row in report.rows if row.verdict == "holds"]
    named = {f"{row.role}: {row.claim}" for row in held if "shift" in row.claim}
    return named | {row.claim.split(",")[0] for row in held if "shift" not in row.claim}


def check_learning(build, config, rules):
    """From the loss of the uniform distribution, 30 steps on one batch go far below it."""
    params, loss_fn, tokens = _start(build, config)
    tx, traces = symoptax.layerwise(4e-3, rules), []

    @jax.jit
    def step(params, state):
        traces.append(1)
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = jax.jit(tx.init)(params), []
    for _ in range(30):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert len(traces) == 1
    uniform = math.log(config.vocab_size)
    assert abs(losses[0] - uniform) < 0.1
    assert losses[-1] < uniform - 1.5


def check_causality(build, config):
    """A changed token changes the logits at its place and at all later ones, and no earlier."""
    model = build(config, nnx.Rngs(0))
    forward = jax.jit(lambda tokens: jax.tree.leaves(model(tokens))[0])
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, config.vocab_size)
    before, after = forward(tokens), forward(tokens.at[:, 7].add(1) % config.vocab_size)
    assert before.shape == (2, 12, config.vocab_size)
    assert before.dtype == jnp.float32
    assert bool(jnp.allclose(before[:, :7], after[:, :7], atol=1e-6))
    assert bool(jnp.all(jnp.any(before[:, 7:] != after[:, 7:], axis=-1)))
