"""The optimizer does not care how parameters are boxed: linen, nnx, frozen, partitioned, masked.

Labels for `optax.partition`, by form and by what they are used with:

- a function such as `label_fn(rules)` works with everything;
- the labels of a linen dict or FrozenDict work with that container only; those of plain leaves
  also with boxed ones, those of boxed leaves not with plain ones;
- the labels of an `nnx.State` work in the pure form (`nnx.as_pure`), which is what
  `nnx.Optimizer.update` sees; those of the form with variables work outside `nnx.Optimizer` only;
- a pure dict of labels does not work with an `nnx.State`.

The forms that do not work raise from `init` or the first `update`.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict, freeze
from flax.training.train_state import TrainState

import symoptax
from small_models import (
    RULES,
    LinenModel,
    as_linen,
    grads_like,
    linen_loss,
    linen_params,
    nnx_loss,
    nnx_model,
)
from symoptax import ParamRule

RATE = 0.01
STEPS = 3
linen_gradient = jax.jit(jax.grad(linen_loss))
nnx_gradient = nnx.jit(nnx.grad(nnx_loss))


def layerwise():
    """Return the optimizer of these comparisons, with eight polar steps in every map.

    Five default steps on one Gram matrix amplify the rounding by which a jitted program differs.
    """
    hybrid, polar = symoptax.hybrid_map(steps=8), symoptax.polar_map(steps=8)
    roles = ("embedding", "mlp_in", "mlp_down", "expert_in", "expert_down")
    updates = {**dict.fromkeys(roles, hybrid), "attention": polar}
    updates["lm_head"] = symoptax.centered(hybrid)
    return symoptax.layerwise(RATE, RULES, weight_decay=0.1, updates=updates)


@pytest.fixture(scope="module")
def expected():
    """Return the parameters after three steps on the linen dict."""
    params, tx = linen_params(), layerwise()
    state = tx.init(params)
    for _ in range(STEPS):
        updates, state = tx.update(linen_gradient(params), state, params)
        params = optax.apply_updates(params, updates)
    return params


# Three steps in float32, compiled as one program or operation by operation: 1e-5 is a thousandth
# of one step of the size 0.01, and ten times what is observed.
TOLERANCE = 1e-5


def test_nnx_optimizer_in_jit_equals_the_linen_dict(expected):
    model = nnx_model(linen_params())
    tx = layerwise()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(nnx_loss)(model))

    for _ in range(STEPS):
        step(model, optimizer)
    result = as_linen(nnx.state(model, nnx.Param))
    chex.assert_trees_all_close(result, expected, atol=TOLERANCE)
    assert np.any(
        result["params"]["embed"]["embedding"] != linen_params()["params"]["embed"]["embedding"]
    )


@pytest.mark.parametrize("pure", [False, True], ids=["variables", "pure"])
def test_nnx_split_and_plain_optax_equal_the_linen_dict(expected, pure):
    graphdef, params = nnx.split(nnx_model(linen_params()))
    params = nnx.as_pure(params) if pure else params
    tx = layerwise()
    state = tx.init(params)
    for _ in range(STEPS):
        grads = nnx_gradient(nnx.merge(graphdef, params))
        updates, state = tx.update(nnx.as_pure(grads) if pure else grads, state, params)
        params = optax.apply_updates(params, updates)
    chex.assert_trees_all_close(as_linen(params), expected, atol=TOLERANCE)


def test_frozen_dicts_equal_the_linen_dict(expected):
    params = freeze(linen_params())
    tx = layerwise()
    state = tx.init(params)
    for _ in range(STEPS):
        updates, state = tx.update(freeze(linen_gradient(params.unfreeze())), state, params)
        assert isinstance(updates, FrozenDict)
        params = optax.apply_updates(params, updates)
    chex.assert_trees_all_close(params.unfreeze(), expected, atol=TOLERANCE)


def test_linen_train_state_equals_the_linen_dict(expected):
    state = TrainState.create(
        apply_fn=LinenModel().apply,
        params=linen_params(),
        tx=layerwise(),
    )
    for _ in range(STEPS):
        state = state.apply_gradients(grads=linen_gradient(state.params))
    assert int(state.step) == STEPS
    chex.assert_trees_all_close(state.params, expected, atol=TOLERANCE)


def test_partitioned_boxes_equal_plain_leaves():
    plain = linen_params()

    def box(leaf):
        return nn.Partitioned(leaf, (None,) * leaf.ndim) if leaf.ndim > 1 else leaf

    boxed = jax.tree.map(box, plain)
    tx = layerwise()
    grads = grads_like(plain)
    expected, _ = tx.update(grads, tx.init(plain), plain)
    updates, state = tx.update(jax.tree.map(box, grads), tx.init(boxed), boxed)
    chex.assert_trees_all_equal(nn.unbox(updates), expected)
    kernel = updates["params"]["lm_head"]["kernel"]
    assert isinstance(kernel, nn.Partitioned)
    # The state is boxed like the parameters, so it is partitioned like them.
    momentum = state["updates"].inner_states["lm_head"].inner_state["momentum"].mu
    assert momentum["params"]["lm_head"]["kernel"].names == kernel.names


# Labels.

SMALL = {
    "dense": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)},
    "norm": {"scale": jnp.ones(4)},
}
SMALL_RULES = [
    ParamRule("**/kernel", "attention", "d out -> out d"),
    ParamRule("**/{bias,scale}", "other"),
]
label = symoptax.label_fn(SMALL_RULES)
TRANSFORMATIONS = {"attention": symoptax.row_norm_m(0.1), "other": optax.adamw(0.1)}


class SmallModel(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        self.norm = nnx.RMSNorm(4, rngs=nnx.Rngs(0))


def boxed(tree):
    return jax.tree.map(lambda leaf: nn.Partitioned(leaf, (None,) * leaf.ndim), tree)


def state_of(model):
    return nnx.state(model, nnx.Param)


CONTAINERS = {
    "dict": lambda: SMALL,
    "frozen": lambda: freeze(SMALL),
    "boxed": lambda: boxed(SMALL),
    "variables": lambda: state_of(SmallModel()),
    "pure": lambda: nnx.as_pure(state_of(SmallModel())),
    "optimizer": lambda: nnx.as_pure(state_of(SmallModel())),
}
LABELS = {
    "function": lambda: label,
    "dict": lambda: label(SMALL),
    "frozen": lambda: label(freeze(SMALL)),
    "boxed": lambda: label(boxed(SMALL)),
    "variables": lambda: label(state_of(SmallModel())),
    "pure": lambda: label(nnx.as_pure(state_of(SmallModel()))),
}
WORKING = {
    *(("function", container) for container in CONTAINERS),
    ("dict", "dict"),
    ("dict", "boxed"),
    ("frozen", "frozen"),
    ("boxed", "boxed"),
    ("variables", "variables"),
    ("pure", "variables"),
    ("pure", "pure"),
    ("pure", "optimizer"),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("form", LABELS)
def test_labels_work_or_raise(form, container):
    tx = optax.partition(TRANSFORMATIONS, LABELS[form]())

    def step():
        if container == "optimizer":
            model = SmallModel()
            before = jax.tree.map(jnp.copy, nnx.as_pure(state_of(model)))
            grads = jax.tree.map(jnp.ones_like, state_of(model))
            nnx.Optimizer(model, tx, wrt=nnx.Param).update(model, grads)
            return jax.tree.map(jnp.subtract, nnx.as_pure(state_of(model)), before)
        params = CONTAINERS[container]()
        return tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)[0]

    if (form, container) not in WORKING:
        with pytest.raises(ValueError, match=r"pytree structure error|Expected (dict|named)"):
            step()
        return
    reference = optax.partition(TRANSFORMATIONS, label)
    params = CONTAINERS[container]()
    grads = jax.tree.map(jnp.ones_like, params)
    expected, _ = reference.update(grads, reference.init(params), params)
    # Decay sees random initial weights of SmallModel, which are the same in both.
    chex.assert_trees_all_close(jax.tree.leaves(step()), jax.tree.leaves(expected), atol=1e-6)


def test_labels_may_be_a_prefix_of_the_parameters():
    params = {"dense": {"a": jnp.ones((3, 4)), "b": jnp.ones((2, 5))}, "norm": SMALL["norm"]}
    tx = optax.partition(TRANSFORMATIONS, {"dense": "attention", "norm": "other"})
    rules = [
        ParamRule("dense/*", "attention", "rows cols -> rows cols"),
        ParamRule("norm/*", "other"),
    ]
    expected = optax.partition(TRANSFORMATIONS, symoptax.label_fn(rules))
    chex.assert_trees_all_equal(
        tx.update(params, tx.init(params), params)[0],
        expected.update(params, expected.init(params), params)[0],
    )


def test_a_model_of_vectors_alone():
    params = {"scale": jnp.ones(4), "bias": jnp.ones(3)}
    rules = [*SMALL_RULES, ParamRule("{scale,bias}", "other")][2:]
    tx = symoptax.layerwise(0.1, rules)
    adamw = optax.adamw(0.1, b1=0.9, b2=0.95, weight_decay=0.0)
    chex.assert_trees_all_close(
        tx.update(params, tx.init(params), params)[0],
        adamw.update(params, adamw.init(params), params)[0],
        atol=1e-6,
    )

    class Norms(nnx.Module):
        def __init__(self):
            self.first = nnx.RMSNorm(4, rngs=nnx.Rngs(0))

    model = Norms()
    optimizer = nnx.Optimizer(model, symoptax.layerwise(0.1, SMALL_RULES), wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, state_of(model)))
    np.testing.assert_allclose(model.first.scale[...], 1 - 0.1, atol=1e-6)


def test_no_parameters_at_all():
    tx = symoptax.layerwise(0.1, SMALL_RULES)
    assert tx.update({}, tx.init({}), {})[0] == {}


@jax.tree_util.register_pytree_with_keys_class
class Callable:
    """A module that is a pytree and a function, as in Equinox."""

    def __init__(self, kernel, bias):
        self.kernel, self.bias = kernel, bias

    def __call__(self, x):
        raise AssertionError("an optimizer has no business calling the model")

    def tree_flatten_with_keys(self):
        keys = map(jax.tree_util.GetAttrKey, ("kernel", "bias"))
        return tuple(zip(keys, (self.kernel, self.bias), strict=True)), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "cautious": True}], ids=str)
def test_a_callable_pytree_is_data(options):
    plain = SMALL["dense"]
    tx = symoptax.layerwise(0.1, SMALL_RULES, **options)
    expected, _ = tx.update(plain, tx.init(plain), plain)
    module = Callable(**plain)
    updates, _ = tx.update(module, tx.init(module), module)
    assert isinstance(updates, Callable)
    np.testing.assert_array_equal(updates.kernel, expected["kernel"])
    np.testing.assert_array_equal(updates.bias, expected["bias"])


def test_masked_around_ours_leaves_the_rest_alone():
    mask = {"dense": {"kernel": True, "bias": False}, "norm": {"scale": False}}
    tx = optax.masked(symoptax.layerwise(0.1, SMALL_RULES), mask)
    grads = jax.tree.map(lambda p: 2 * p, SMALL)
    updates, state = tx.update(grads, tx.init(SMALL), SMALL)
    stack = symoptax.layerwise(0.1, SMALL_RULES)
    expected, _ = stack.update(grads, stack.init(SMALL), SMALL)
    np.testing.assert_array_equal(updates["dense"]["kernel"], expected["dense"]["kernel"])
    np.testing.assert_array_equal(updates["dense"]["bias"], grads["dense"]["bias"])
    np.testing.assert_array_equal(updates["norm"]["scale"], grads["norm"]["scale"])
    assert {leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim} == {(3, 4)}
    single = optax.masked(symoptax.row_norm_m(0.1), mask)
    updates, _ = single.update(grads, single.init(SMALL), SMALL)
    np.testing.assert_allclose(updates["dense"]["kernel"], -0.1 / 2, atol=1e-6)


def test_a_partition_inside_a_partition():
    params = {"trained": SMALL, "base": SMALL}
    tx = optax.partition(
        {"train": symoptax.layerwise(0.1, SMALL_RULES), "freeze": optax.set_to_zero()},
        {"trained": "train", "base": "freeze"},
    )
    updates, _ = tx.update(params, tx.init(params), params)
    stack = symoptax.layerwise(0.1, SMALL_RULES)
    expected, _ = stack.update(SMALL, stack.init(SMALL), SMALL)
    chex.assert_trees_all_equal(updates["trained"], expected)
    chex.assert_trees_all_equal(updates["base"], optax.tree.zeros_like(SMALL))
