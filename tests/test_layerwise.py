"""The whole stack: the same as its parts by hand, role by role; and the report on it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import symoptax
from small_models import ROLES, RULES, grads_like, linen_params
from symoptax import ParamRule

VIEW = symoptax.view_fn(RULES)
LABELS = symoptax.label_fn(RULES)


def train(tx, params, steps=1):
    state = tx.init(params)
    for seed in range(steps):
        updates, state = tx.update(grads_like(params, seed), state, params)
        params = optax.apply_updates(params, updates)
    return params


def by_role(params):
    """Return the leaves of every role, as one dictionary of lists."""
    labels, leaves = jax.tree.leaves(LABELS(params)), jax.tree.leaves(params)
    return {
        role: [x for x, label in zip(leaves, labels, strict=True) if label == role]
        for role in ROLES
    }


def changed_roles(one, other):
    one, other = by_role(one), by_role(other)
    return {
        role
        for role in ROLES
        if any(np.any(a != b) for a, b in zip(one[role], other[role], strict=True))
    }


@pytest.mark.parametrize("nesterov", [False, True])
def test_layerwise_is_a_multi_transform_of_the_named_optimizers(nesterov):
    rate = optax.linear_schedule(0.1, 0.0, 8)
    options = {"view": VIEW, "scale": "rms", "nesterov": nesterov}

    def times(multiplier):
        return lambda count: multiplier * rate(count)

    def hybrid(multiplier=1.0, **more):
        # The multiplier of a role does not multiply its decay.
        more |= {"weight_decay": 0.1 / multiplier, "alpha": 0.0}
        return symoptax.hybrid_polar_grad_m(times(multiplier), **more, **options)

    by_hand = optax.multi_transform(
        {
            "embedding": hybrid(3.0),
            "lm_head": hybrid(0.5, centered=True),
            "router": symoptax.left_polar_grad_m(
                rate, weight_decay=0.1, alpha=0.0, centered=True, **options
            ),
            "attention": symoptax.polar_grad_m(rate, weight_decay=0.1, alpha=0.0, **options),
            "mlp_in": hybrid(2.0),
            "mlp_down": hybrid(),
            "expert_in": hybrid(),
            "expert_down": hybrid(),
            "other": optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0),
        },
        LABELS,
    )
    stack = symoptax.layerwise(
        rate,
        RULES,
        weight_decay=0.1,
        nesterov=nesterov,
        lr_multipliers={"embedding": 3.0, "lm_head": 0.5, "mlp_in": 2.0},
    )
    params = linen_params()
    # The factors are multiplied in another order, which rounds to 1e-7 of updates of size 0.1.
    chex.assert_trees_all_close(train(stack, params, 5), train(by_hand, params, 5), atol=1e-6)


def test_an_update_is_a_name_or_a_map_or_a_transformation():
    params = linen_params()

    def result(update, **options):
        options = {"scale": None, "updates": {"attention": update}, **options}
        return train(symoptax.layerwise(0.1, RULES, **options), params, 3)

    by_name = result("polar")
    chex.assert_trees_all_equal(result(symoptax.polar_map()), by_name)
    chex.assert_trees_all_equal(
        result(optax.chain(symoptax.momentum(0.95), symoptax.polar(view=VIEW))), by_name
    )
    # A map of one's own is checked like any other, and used as it is.
    assert changed_roles(result(symoptax.polar_map(steps=2)), by_name) == {"attention"}
    with pytest.raises(ValueError, match="row_norm"):
        result(symoptax.row_norm_map())
    # A transformation brings its own momentum and decay.
    lion = result(optax.scale_by_lion(), weight_decay=0.1)
    plain = train(optax.lion(0.1, weight_decay=0.0), params, 3)
    chex.assert_trees_all_close(by_role(lion)["attention"], by_role(plain)["attention"], atol=1e-6)


def test_adamw_by_name_is_optax_adamw():
    params = linen_params()
    everything = dict.fromkeys(ROLES, "adamw")
    decays = dict.fromkeys(ROLES, 0.1)
    stack = symoptax.layerwise(
        0.01,
        RULES,
        updates=everything,
        weight_decay=decays,
        lr_multipliers=dict.fromkeys(ROLES, 1.0),
    )
    adamw = optax.adamw(0.01, b1=0.9, b2=0.95, weight_decay=0.1)
    chex.assert_trees_all_close(train(stack, params, 3), train(adamw, params, 3), atol=1e-6)


def test_a_multiplier_acts_on_its_role_alone():
    params = linen_params()
    one = train(symoptax.layerwise(0.1, RULES, lr_multipliers={"router": 1.0}), params)
    two = train(symoptax.layerwise(0.1, RULES, lr_multipliers={"router": 2.0}), params)
    assert changed_roles(one, two) == {"router"}
    for start, a, b in zip(*(by_role(tree)["router"] for tree in (params, one, two)), strict=True):
        np.testing.assert_allclose(b - start, 2 * (a - start), atol=1e-6)


def test_one_rate_moves_every_matrix_as_far_as_adamw_would():
    params = linen_params()
    multipliers = dict.fromkeys(ROLES, 1.0)
    tx = symoptax.layerwise(
        1.0, RULES, lr_multipliers=multipliers, updates={"router": "centered_row_norm"}
    )
    updates, _ = tx.update(grads_like(params), tx.init(params), params)
    for role, leaves in by_role(updates).items():
        for update in leaves:
            rms = float(jnp.sqrt(jnp.mean(update**2)))
            if role != "other":  # AdamW's own first step is a sign
                # Five polar steps leave singular values in [0.84, 1.13]; centering takes rank.
                assert 0.2 * 0.8 < rms < 0.2 * 1.15, role


# Hyperparameters while training.

SMALL_RULES = [
    ParamRule("embed", "embedding", "vocab d -> vocab d"),
    ParamRule("head", "lm_head_no_shift", "vocab d -> vocab d"),
    ParamRule("dense", "mlp_in", "neuron d -> neuron d"),
]


def test_every_role_follows_its_own_schedule():
    # Rows of unit length times the rate: the length of a row's step is the rate.
    schedules = {
        "embedding": optax.linear_schedule(1.0, 0.0, 4),
        "lm_head_no_shift": optax.exponential_decay(0.5, 1, 0.5),
        "mlp_in": 0.1,
    }
    row_norm = optax.inject_hyperparams(symoptax.row_norm_m)
    tx = optax.partition(
        {
            role: row_norm(rate, view=symoptax.view_fn(SMALL_RULES))
            for role, rate in schedules.items()
        },
        symoptax.label_fn(SMALL_RULES),
    )
    params = {"embed": jnp.ones((6, 4)), "head": jnp.ones((6, 4)), "dense": jnp.ones((5, 4))}
    state = tx.init(params)

    def rates_and_steps(state, seed):
        updates, state = tx.update(grads_like(params, seed), state, params)
        rates = {
            role: float(inner.inner_state.hyperparams["learning_rate"])
            for role, inner in state.inner_states.items()
        }
        lengths = {name: np.linalg.norm(update, axis=1) for name, update in updates.items()}
        return state, rates, lengths

    leaf_of = {"embedding": "embed", "lm_head_no_shift": "head", "mlp_in": "dense"}
    for step in range(3):
        state, rates, lengths = rates_and_steps(state, step)
        for role, schedule in schedules.items():
            expected = float(schedule(step)) if callable(schedule) else schedule
            assert rates[role] == pytest.approx(expected, rel=1e-6)
            np.testing.assert_allclose(lengths[leaf_of[role]], expected, rtol=1e-5)

    # Overwrite the constant one by hand.
    before, _, lengths = rates_and_steps(state, 3)
    state.inner_states["mlp_in"].inner_state.hyperparams["learning_rate"] = jnp.float32(7.0)
    after, _, overwritten = rates_and_steps(state, 3)
    np.testing.assert_allclose(overwritten["dense"], 7.0, rtol=1e-5)
    for name in ("embed", "head"):
        np.testing.assert_array_equal(overwritten[name], lengths[name])
    chex.assert_trees_all_equal_structs(before, after)


def test_the_rate_of_the_whole_stack_can_be_injected():
    params = linen_params()
    tx = optax.inject_hyperparams(symoptax.layerwise)(0.1, RULES)
    state = tx.init(params)
    plain, _ = tx.update(grads_like(params), state, params)
    state.hyperparams["learning_rate"] = jnp.float32(0.2)
    doubled, _ = tx.update(grads_like(params), state, params)
    chex.assert_trees_all_close(doubled, jax.tree.map(lambda u: 2 * u, plain), rtol=1e-6)


def test_one_schedule_is_counted_once():
    params = linen_params()
    tx = symoptax.layerwise(optax.constant_schedule(0.1), RULES)
    _, state = tx.update(params, tx.init(params), params)
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    counters = [jax.tree_util.keystr(path) for path, leaf in flat if not leaf.ndim]
    # AdamW needs a count of its own, for its bias correction.
    assert len(counters) == 2
    assert sum("'other'" in name for name in counters) == 1
    assert state["learning_rate"].count == 1


def test_clipping_before_the_stack_does_not_change_the_first_update():
    params = linen_params()
    grads = grads_like(params)
    grads["params"]["embed"]["embedding"] *= 1e11
    stack = symoptax.layerwise(0.1, RULES)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), stack)
    updates, _ = clipped.update(grads, clipped.init(params), params)
    expected, _ = stack.update(grads, stack.init(params), params)
    for role in ROLES:
        if role != "other":  # AdamW's epsilon does see that its gradients are now 1e-12
            chex.assert_trees_all_close(
                by_role(updates)[role], by_role(expected)[role], atol=0.1 * 1e-4
            )


def test_clipping_inside_a_role_is_another_thing():
    params = linen_params()
    own = [symoptax.momentum(0.95), symoptax.polar(view=VIEW)]
    inside = symoptax.layerwise(
        0.1,
        RULES,
        scale=None,
        updates={"attention": optax.chain(optax.clip_by_global_norm(1.0), *own)},
    )
    outside = optax.chain(
        optax.clip_by_global_norm(1.0),
        symoptax.layerwise(0.1, RULES, scale=None, updates={"attention": optax.chain(*own)}),
    )

    def two_steps(tx):
        state = tx.init(params)
        first = grads_like(params, 1)
        first["params"]["embed"]["embedding"] *= 1e11
        _, state = tx.update(first, state, params)
        return by_role(tx.update(grads_like(params, 2), state, params)[0])["attention"]

    # Outside, the spike in the embedding takes the whole first step out of every momentum; inside,
    # attention never hears of it.
    difference = jax.tree.map(
        lambda a, b: jnp.max(jnp.abs(a - b)), two_steps(inside), two_steps(outside)
    )
    assert min(difference) > 0.1 * 0.05


# The report.

STATES = {
    "default": {},
    "mu_dtype": {"mu_dtype": jnp.bfloat16},
    "frozen": {"updates": {"embedding": "frozen"}},
    "adamw": {"updates": {"lm_head": "adamw"}},
    "adamw and mu_dtype": {"updates": {"lm_head": "adamw"}, "mu_dtype": jnp.bfloat16},
    "lion": {"updates": {"attention": optax.scale_by_lion()}},
    "not lazy": {"lazy": False},
    "without state": {"updates": {"attention": optax.identity()}},
}


@pytest.mark.parametrize("options", STATES.values(), ids=STATES.keys())
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_report_counts_the_bytes_of_the_state(options, dtype):
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), linen_params())
    report = symoptax.routing_report(params, RULES, **options)
    state = jax.eval_shape(symoptax.layerwise(0.1, RULES, **options).init, params)
    real = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state) if x.ndim)
    assert report.state_bytes == sum(row.state_bytes for row in report.rows) == real
    adamw = jax.eval_shape(optax.adamw(0.1).init, params)
    assert report.adamw_bytes == sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(adamw) if x.ndim
    )


def test_the_report_says_what_will_happen_to_every_leaf():
    params = linen_params()
    rules = [*RULES, ParamRule("**/nothing/*", "other")]
    report = symoptax.routing_report(
        params, rules, updates={"mlp_in": "hybrid"}, lr_multipliers={"mlp_in": 2.0}
    )
    rows = {row.leaf: row for row in report.rows}
    assert len(rows) == len(jax.tree.leaves(params))
    gate = rows["params/layers_0/mlp/gate_proj/kernel"]
    assert gate.shape == (8, 12)
    assert gate.role == "mlp_in"
    assert gate.matrices == "12 x 8"
    assert gate.symmetry == "P(neuron) x O(d)"
    assert gate.update == "hybrid"
    assert gate.lr_multiplier == 2.0
    # The RMS of a 12 x 8 partial isometry is 1 / sqrt(12): 0.2 sqrt(12).
    assert gate.scale == "0.693"
    assert gate.state_bytes == 4 * 8 * 12
    experts = rows["params/layers_0/experts/down"]
    assert experts.matrices == "6 x 8 x 4"
    assert rows["params/lm_head/kernel"].symmetry == "P(vocab) x O(d) / shift"
    scale = rows["params/norm_f/scale"]
    assert (scale.update, scale.matrices, scale.symmetry) == ("adamw", "", "")

    assert report.unused_rules == ("**/nothing/*",)
    text = str(report)
    assert "rule '**/nothing/*' matches no leaf" in text
    assert f"{len(rows)} leaves" in text
    for name in rows:
        assert sum(line.split()[:1] == [name] for line in text.splitlines()) == 1


def test_the_report_and_the_stack_take_the_same_options_and_refuse_the_same():
    params = linen_params()
    for options in ({"updates": {"attention": "row_norm"}}, {"updates": {"attention": "none"}}):
        with pytest.raises(ValueError) as theirs:  # noqa: PT011 - the messages are compared
            symoptax.layerwise(0.1, RULES, **options)
        with pytest.raises(ValueError) as ours:  # noqa: PT011
            symoptax.routing_report(params, RULES, **options)
        assert str(ours.value) == str(theirs.value)
    extra = {**params, "extra": jnp.ones((2, 3, 4))}
    with pytest.raises(ValueError, match=r"extra \(2, 3, 4\)"):
        symoptax.routing_report(extra, RULES)
    report = symoptax.routing_report(extra, RULES, fallback="adamw")
    assert {row.leaf: row.update for row in report.rows}["extra"] == "adamw"
    state = symoptax.layerwise(0.1, RULES, fallback="adamw").init(extra)
    assert state["updates"].inner_states["other"].inner_state["adam"].mu["extra"].shape == (2, 3, 4)
