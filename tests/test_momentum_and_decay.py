"""Momentum, its state and its memory; weight decay in all its forms."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import symoptax
from small_models import RULES, grads_like, linen_params

SHAPE = (3, 4)


def momenta(state):
    """Return the arrays of a state that have axes, by path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat if leaf.ndim}


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_momentum_of_a_constant_gradient(steps):
    tx, ones = symoptax.momentum(0.9), jnp.ones(SHAPE)
    state = tx.init(ones)
    for _ in range(steps):
        passed_on, state = tx.update(ones, state)
    # A geometric series; seven float32 additions of numbers below 1 err by less than 1e-6.
    np.testing.assert_allclose(state.mu, 1 - 0.9**steps, atol=1e-6)
    np.testing.assert_allclose(passed_on, state.mu, atol=0)


def test_nesterov_looks_one_step_ahead():
    tx = symoptax.momentum(0.9, nesterov=True)
    first, second = jnp.full(SHAPE, 2.0), jnp.full(SHAPE, -3.0)
    passed_on, state = tx.update(first, tx.init(first))
    np.testing.assert_allclose(state.mu, 0.2, atol=1e-6)
    np.testing.assert_allclose(passed_on, 0.9 * 0.2 + 0.1 * 2, atol=1e-6)
    passed_on, state = tx.update(second, state)
    mu = 0.9 * 0.2 - 0.1 * 3
    np.testing.assert_allclose(state.mu, mu, atol=1e-6)
    np.testing.assert_allclose(passed_on, 0.9 * mu - 0.1 * 3, atol=1e-6)


def test_optimizers_use_the_momentum_they_are_given():
    gradients = [jnp.array([[1.0, 0.0]]), jnp.array([[0.0, 1.0]])]
    for nesterov, expected in ((False, [0.09, 0.1]), (True, [0.081, 0.19])):
        tx = symoptax.row_norm_m(1.0, 0.9, nesterov=nesterov)
        state = tx.init(gradients[0])
        for gradient in gradients:
            updates, state = tx.update(gradient, state)
        direction = np.asarray(expected) / np.linalg.norm(expected)
        np.testing.assert_allclose(updates, -direction[None], atol=1e-6)


@pytest.mark.parametrize("mu_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_mu_dtype_is_the_dtype_of_the_state_alone(dtype, mu_dtype):
    params = jnp.ones(SHAPE, dtype)
    tx = symoptax.row_norm_m(0.1, mu_dtype=mu_dtype)
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(params, state, params)
        assert {leaf.dtype for leaf in momenta(state).values()} == {jnp.dtype(mu_dtype)}
        assert updates.dtype == dtype


def test_small_gradients_are_not_lost_to_a_narrow_gradient():
    # 1 - 0.999^n needs sums in float32: in bfloat16 0.001 is lost next to 0.5 and more.
    tx = symoptax.momentum(0.999, mu_dtype=jnp.float32)
    ones = jnp.ones(SHAPE, jnp.bfloat16)
    state = jax.lax.fori_loop(0, 1000, lambda _, s: tx.update(ones, s)[1], tx.init(ones))
    np.testing.assert_allclose(state.mu, 1 - 0.999**1000, rtol=1e-4)


def test_no_momentum_no_state():
    params = jnp.ones(SHAPE)
    assert not momenta(symoptax.row_norm_m(0.1, 0.0).init(params))
    assert not momenta(symoptax.ssd(0.1).init(params))
    assert momenta(symoptax.row_norm_m(0.1, 0.1).init(params))


OPTIMIZERS = {
    "row_norm_m": lambda: symoptax.row_norm_m(0.1, weight_decay=0.1),
    "momentum alone": lambda: optax.chain(symoptax.momentum(0.9), optax.scale(-0.1)),
    "ssd": lambda: symoptax.ssd(0.1),
    "muon": lambda: symoptax.muon(0.1, mu_dtype=jnp.float32),
    "layerwise": lambda: symoptax.layerwise(0.1, RULES, weight_decay=0.1),
}


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_every_buffer_can_be_donated(build):
    tx = build()
    params = linen_params() if build is OPTIMIZERS["layerwise"] else {"w": jnp.ones(SHAPE)}

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    def run(step, params):
        state = tx.init(params)
        for seed in range(3):
            # Nothing but the newest params and state is alive when the next step is called.
            params, state, updates = step(params, state, grads_like(params, seed))
            del updates
        return params, state

    # As XLA does by default: told to hurry, it fuses the two in different ways.
    options = {"keep_unused": True, "compiler_options": {"xla_cpu_use_fusion_emitters": True}}
    donated = jax.jit(step, donate_argnums=(0, 1, 2), **options)
    copy = jax.tree.map(jnp.copy, params)
    # The same program, so the same bits.
    chex.assert_trees_all_equal(run(donated, copy), run(jax.jit(step, **options), params))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    "build",
    [lambda: symoptax.momentum(0.9), lambda: symoptax.row_norm_m(0.1)],
    ids=["momentum alone", "row_norm_m"],
)
def test_momentum_is_never_the_gradient_or_the_update_itself(build, jitted):
    params, grads, tx = {"w": jnp.ones(SHAPE)}, {"w": jnp.full(SHAPE, 2.0)}, build()
    updates, state = (jax.jit(tx.update) if jitted else tx.update)(grads, tx.init(params))
    before = jax.tree.map(np.array, state)
    for tree in (updates, grads, params):  # as donating them would
        tree["w"].delete()
    chex.assert_trees_all_equal(state, before)


def test_one_role_begins_anew_while_the_others_go_on():
    tx = symoptax.layerwise(0.1, RULES)
    params = linen_params()

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1))

    def kept(tree):
        return jax.tree.map(jnp.copy, tree)

    trained, state = step(kept(params), tx.init(params), grads_like(params, 1))
    expected, _ = step(kept(trained), kept(state), grads_like(params, 2))

    fresh = tx.init(trained)
    inner = state["updates"].inner_states
    assert set(inner) >= {"embedding", "router"}
    inner = {**inner, "router": fresh["updates"].inner_states["router"]}
    remade = {**state, "updates": state["updates"]._replace(inner_states=inner)}
    result, _ = step(kept(trained), kept(remade), grads_like(params, 2))

    flat, _ = jax.tree_util.tree_flatten_with_path(result)
    for (path, leaf), other in zip(flat, jax.tree.leaves(expected), strict=True):
        is_router = "router" in jax.tree_util.keystr(path)
        assert np.array_equal(leaf, other) != is_router, path


# Decay.

DECAYING = {
    "row_norm_m": lambda lr, decay, **k: symoptax.row_norm_m(lr, weight_decay=decay, **k),
    "centered": lambda lr, decay, **k: symoptax.row_norm_m(
        lr, weight_decay=decay, centered=True, **k
    ),
    "left_polar_grad_m": lambda lr, decay, **k: symoptax.left_polar_grad_m(
        lr, weight_decay=decay, **k
    ),
    "muon": lambda lr, decay, **k: symoptax.muon(lr, weight_decay=decay, **k),
    "ssd": lambda lr, decay, **k: symoptax.ssd(lr, weight_decay=decay, **k),
    "layerwise": lambda lr, decay, **k: symoptax.layerwise(
        lr, [symoptax.ParamRule("w", "attention", "a b -> a b")], weight_decay=decay, **k
    ),
}
every_decaying = pytest.mark.parametrize("build", DECAYING.values(), ids=DECAYING.keys())


def one_step(tx, params, grads):
    updates, _ = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates)


@every_decaying
def test_decay_alone_is_exact(build):
    params = {"w": jnp.ones(SHAPE)}
    result = one_step(build(0.1, 0.5), params, {"w": jnp.zeros(SHAPE)})
    np.testing.assert_array_equal(result["w"], np.float32(0.95))


@every_decaying
def test_independent_decay_does_not_see_the_learning_rate(build):
    params = {"w": jnp.ones(SHAPE)}
    result = one_step(build(0.1, 0.5, independent_decay=True), params, {"w": jnp.zeros(SHAPE)})
    np.testing.assert_array_equal(result["w"], np.float32(0.5))
    moved = one_step(build(0.1, 0.5, independent_decay=True), params, {"w": jnp.eye(*SHAPE)})
    plain = one_step(build(0.1, 0.0), params, {"w": jnp.eye(*SHAPE)})
    np.testing.assert_allclose(moved["w"], plain["w"] - 0.5, atol=1e-6)


@every_decaying
@pytest.mark.parametrize("options", [{}, {"cautious": True}, {"independent_decay": True}], ids=str)
def test_decay_without_parameters_raises_what_optax_raises(build, options):
    params = {"w": jnp.ones(SHAPE)}
    with pytest.raises(ValueError) as theirs:  # noqa: PT011 - the message is compared below
        optax.add_decayed_weights(0.1).update(params, optax.EmptyState(), None)
    tx = build(0.1, 0.1, **options)
    with pytest.raises(ValueError) as ours:  # noqa: PT011
        tx.update(params, tx.init(params))
    assert str(ours.value) == str(theirs.value)


@every_decaying
def test_without_decay_parameters_are_not_needed(build):
    params = {"w": jnp.ones(SHAPE)}
    tx = build(0.1, 0.0)
    updates, _ = tx.update(params, tx.init(params))
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)


MASKS = {
    "tree": {"a": True, "b": False},
    "callable": lambda params: {name: name == "a" for name in params},
}
MASKED = {
    "row_norm_m": lambda **k: symoptax.row_norm_m(0.1, weight_decay=0.5, **k),
    "layerwise, two roles": lambda **k: symoptax.layerwise(
        0.1,
        [
            symoptax.ParamRule("a", "attention", "m n -> m n"),
            symoptax.ParamRule("b", "mlp_in", "m n -> m n"),
        ],
        weight_decay=0.5,
        **k,
    ),
    "layerwise, one role": lambda **k: symoptax.layerwise(
        0.1, [symoptax.ParamRule("{a,b}", "attention", "m n -> m n")], weight_decay=0.5, **k
    ),
}


@pytest.mark.parametrize("options", [{}, {"cautious": True}, {"independent_decay": True}], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("build", MASKED.values(), ids=MASKED.keys())
def test_a_mask_says_which_leaves_decay(build, mask, options):
    params = {"a": jnp.ones(SHAPE), "b": jnp.ones(SHAPE)}
    grads = jax.tree.map(jnp.ones_like, params)  # a positive update, so cautious decay decays
    tx, without = build(mask=mask, **options), build(mask={"a": False, "b": False}, **options)
    result, expected = one_step(tx, params, grads), one_step(without, params, grads)
    decay = 0.5 if options.get("independent_decay") else 0.05
    np.testing.assert_allclose(result["a"], expected["a"] - decay, atol=1e-6)
    np.testing.assert_array_equal(result["b"], expected["b"])


def test_cautious_decay_acts_where_the_update_shrinks_the_parameter():
    params = jnp.array([[1.0, -1.0, 1.0, -1.0, 1.0]])
    grads = jnp.array([[3.0, 3.0, -3.0, -3.0, 0.0]])
    plain = one_step(symoptax.row_norm_m(0.1), params, grads)
    cautious = one_step(symoptax.row_norm_m(0.1, weight_decay=0.5, cautious=True), params, grads)
    # Descent moves against the gradient: where both have one sign the step goes towards zero.
    expected = plain - 0.05 * params * jnp.array([[1.0, 0.0, 0.0, 1.0, 0.0]])
    np.testing.assert_allclose(cautious, expected, atol=1e-6)


@pytest.mark.parametrize("independent", [False, True])
def test_cautious_and_independent_decay_agree_on_where(independent):
    params = jnp.array([[1.0, -1.0, 1.0, -1.0]])
    grads = jnp.array([[3.0, 3.0, -3.0, -3.0]])
    options = {"cautious": True, "independent_decay": independent}
    plain = one_step(symoptax.row_norm_m(0.1), params, grads)
    result = one_step(symoptax.row_norm_m(0.1, weight_decay=0.5, **options), params, grads)
    decayed = np.abs(np.asarray(result - plain)) > 1e-3
    np.testing.assert_array_equal(decayed, [[True, False, False, True]])


UNUSED = [
    symoptax.ParamRule("embed", "embedding", "vocab d -> vocab d"),
    symoptax.ParamRule("experts", "expert_in", "expert d neuron -> expert neuron d"),
]


@pytest.mark.parametrize("cautious", [False, True])
def test_unseen_tokens_and_unused_experts(cautious):
    params = {"embed": jnp.ones((6, 4)), "experts": jnp.ones((3, 4, 5))}
    grads = grads_like(params)
    grads = {"embed": grads["embed"].at[2:].set(0), "experts": grads["experts"].at[1].set(0)}
    tx = symoptax.layerwise(
        0.1, UNUSED, weight_decay=0.1, cautious=cautious, lr_multipliers={"embedding": 1.0}
    )
    result = one_step(tx, params, grads)
    # Plain decay acts on what had no gradient; cautious decay leaves it exactly as it was.
    expected = np.float32(1.0) if cautious else np.float32(0.99)
    np.testing.assert_array_equal(result["embed"][2:], expected)
    np.testing.assert_array_equal(result["experts"][1], expected)
    assert np.all(result["embed"][:2] != expected)
    assert np.all(result["experts"][0] != expected)


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("decay", [0.1, {"embedding": 0.1, "router": 0.1}], ids=["all", "roles"])
def test_a_frozen_role_does_not_move_by_a_bit(decay, independent):
    params = linen_params()
    tx = symoptax.layerwise(
        0.1,
        RULES,
        updates={"embedding": "frozen"},
        weight_decay=decay,
        independent_decay=independent,
    )
    result = one_step(tx, params, grads_like(params))
    moved, _ = jax.tree_util.tree_flatten_with_path(
        jax.tree.map(lambda new, old: bool(np.any(new != old)), result, params)
    )
    assert {jax.tree_util.keystr(p) for p, m in moved if not m} == {
        "['params']['embed']['embedding']"
    }


def test_decay_of_a_role_by_itself():
    params = linen_params()
    build = lambda decay: symoptax.layerwise(0.1, RULES, weight_decay=decay)  # noqa: E731
    grads = grads_like(params)
    difference = jax.tree.map(
        jnp.subtract,
        one_step(build({"router": 0.5, "other": 0.5}), params, grads),
        one_step(build(0.0), params, grads),
    )
    flat, _ = jax.tree_util.tree_flatten_with_path(difference)
    for (path, change), value in zip(flat, jax.tree.leaves(params), strict=True):
        name = jax.tree_util.keystr(path)
        decays = "router" in name or "scale" in name
        np.testing.assert_allclose(change, -0.05 * value * decays, atol=1e-6, err_msg=name)


def test_the_state_is_one_momentum_per_matrix():
    def size(tree):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if leaf.ndim)

    params = linen_params()
    adamw = size(optax.adamw(0.1).init(params))
    assert adamw == 2 * size(params)
    scales = 2 * size([params["params"]["norm_f"]] * 3)  # AdamW keeps two moments of these
    routing = symoptax.route(params, RULES)
    picked = [
        leaf for leaf in routing.leaves if leaf.role in ("embedding", "expert_in", "expert_down")
    ]
    counters = sum(4 * math.prod(stack[:-1]) for leaf in picked for stack in leaf.matrices())
    for lazy in (False, True):
        beside = size(params) + lazy * counters
        tx = symoptax.layerwise(0.1, RULES, lazy=lazy)
        assert size(tx.init(params)) == beside + scales // 2
        tx = symoptax.layerwise(0.1, RULES, lazy=lazy, mu_dtype=jnp.bfloat16)
        assert size(tx.init(params)) == (
            (size(params) - scales // 2) // 2 + scales * 3 // 4 + lazy * counters
        )
    matrices = {"w": jnp.ones((4, 6)), "stack": jnp.ones((2, 4, 6))}
    assert size(symoptax.right_polar_grad_m(0.1).init(matrices)) == size(matrices)
    assert size(symoptax.muon(0.1, mu_dtype=jnp.bfloat16).init(matrices)) == size(matrices) // 2
