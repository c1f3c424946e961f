"""Orbax saves and restores the optimizer state; what it does when the routing has changed."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import StandardCheckpointer

import symoptax
from small_models import RULES, grads_like, linen_params, nnx_model
from symoptax import ParamRule

RATE = optax.linear_schedule(0.1, 0.0, 10)


def save(path, state):
    with StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def restore(path, target=None):
    with StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path) if target is None else checkpointer.restore(path, target)


def steps(tx, params, state, seeds):
    for seed in seeds:
        updates, state = tx.update(grads_like(params, seed), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def with_shardings(abstract):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract
    )


CONTAINERS = {
    "linen": linen_params,
    "nnx": lambda: nnx.state(nnx_model(linen_params()), nnx.Param),
    "nnx, pure": lambda: nnx.as_pure(nnx.state(nnx_model(linen_params()), nnx.Param)),
}


@pytest.mark.parametrize("build", CONTAINERS.values(), ids=CONTAINERS.keys())
@pytest.mark.parametrize("placed", [False, True], ids=["shapes", "shardings"])
def test_training_goes_on_bit_for_bit(tmp_path, build, placed):
    tx = symoptax.layerwise(RATE, RULES, weight_decay=0.1, mu_dtype=jnp.bfloat16)
    params, state = steps(tx, build(), tx.init(build()), range(2))
    save(tmp_path / "state", state)
    target = jax.eval_shape(tx.init, params)
    restored = restore(tmp_path / "state", with_shardings(target) if placed else target)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    chex.assert_trees_all_equal(restored, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(restored, state)
    chex.assert_trees_all_equal(
        steps(tx, params, restored, range(2, 5)), steps(tx, params, state, range(2, 5))
    )


def test_an_nnx_optimizer_goes_on_bit_for_bit(tmp_path):
    def build():
        tx = symoptax.layerwise(RATE, RULES)
        model = nnx_model(linen_params())
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def train(model, optimizer, seeds):
        for seed in seeds:
            optimizer.update(model, grads_like(nnx.state(model, nnx.Param), seed))

    model, optimizer = build()
    train(model, optimizer, range(2))
    save(tmp_path / "state", nnx.state((model, optimizer)))

    other_model, other = build()
    abstract = nnx.state(nnx.eval_shape(build))
    restored = restore(tmp_path / "state", abstract)
    nnx.update((other_model, other), restored)
    train(model, optimizer, range(2, 4))
    train(other_model, other, range(2, 4))
    chex.assert_trees_all_equal(
        nnx.as_pure(nnx.state((other_model, other))), nnx.as_pure(nnx.state((model, optimizer)))
    )


SMALL = {"a": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}, "b": {"kernel": jnp.ones((3, 4))}}
DENSE = "d out -> out d"
SMALL_RULES = [
    ParamRule("a/kernel", "attention", DENSE),
    ParamRule("b/kernel", "mlp_in", DENSE),
    ParamRule("**/bias", "other"),
]


@pytest.fixture
def saved(tmp_path):
    """Return where the state of one step with `SMALL_RULES` is saved, and the state."""
    tx = symoptax.layerwise(RATE, SMALL_RULES)
    _, state = steps(tx, SMALL, tx.init(SMALL), [0])
    save(tmp_path / "state", state)
    return tmp_path / "state", state


def test_without_a_target_plain_dictionaries_come_back(saved):
    # Named tuples are dictionaries of their fields, and None stands for what has no arrays: masked
    # leaves and empty states. Every momentum is there under the name of its role and its path.
    path, state = saved
    raw = restore(path)
    assert type(raw) is dict
    assert raw["learning_rate"] == {"count": 1}
    assert raw["maps"] is None
    roles = raw["updates"]["inner_states"]
    assert set(roles) == {"attention", "mlp_in", "other"}
    attention = roles["attention"]["inner_state"]
    assert attention["momentum"]["mu"]["b"]["kernel"] is None
    np.testing.assert_array_equal(
        attention["momentum"]["mu"]["a"]["kernel"],
        state["updates"].inner_states["attention"].inner_state["momentum"].mu["a"]["kernel"],
    )
    assert len(jax.tree.leaves(raw)) == len(jax.tree.leaves(state))


def relabelled(role):
    """Return the rules in which the kernel of `b` has another role."""
    return [SMALL_RULES[0], ParamRule("b/kernel", role, DENSE), SMALL_RULES[2]]


@pytest.mark.parametrize("role", ["mlp_down", "attention"], ids=["new role", "present role"])
def test_a_changed_label_is_an_error_that_names_the_leaf(saved, role):
    path, _ = saved
    tx = symoptax.layerwise(RATE, relabelled(role))
    with pytest.raises(ValueError, match=rf"'{role}'.*'b', 'kernel'.*not found"):
        restore(path, jax.eval_shape(tx.init, SMALL))


def test_a_new_role_is_an_error_that_names_it_also_with_shardings(saved):
    path, _ = saved
    tx = symoptax.layerwise(RATE, relabelled("mlp_down"))
    with pytest.raises(ValueError, match="mlp_down"):
        restore(path, with_shardings(jax.eval_shape(tx.init, SMALL)))


def test_a_leaf_that_changed_to_a_present_role_comes_back_empty_and_cannot_be_used(tmp_path):
    # With shardings in the target, Orbax does not miss an array: it fills the place with None, and
    # drops what was saved elsewhere. The first update refuses such a state.
    both = {"a": SMALL["a"], "b": SMALL["b"], "c": {"kernel": jnp.ones((3, 4))}}
    before = [
        ParamRule("{a,b}/kernel", "attention", DENSE),
        ParamRule("c/kernel", "mlp_in", DENSE),
        SMALL_RULES[2],
    ]
    after = [
        ParamRule("a/kernel", "attention", DENSE),
        ParamRule("{b,c}/kernel", "mlp_in", DENSE),
        SMALL_RULES[2],
    ]
    old, new = symoptax.layerwise(RATE, before), symoptax.layerwise(RATE, after)
    _, state = steps(old, both, old.init(both), [0])
    save(tmp_path / "state", state)
    restored = restore(tmp_path / "state", with_shardings(jax.eval_shape(new.init, both)))
    mu = restored["updates"].inner_states["mlp_in"].inner_state["momentum"].mu
    assert mu["b"]["kernel"] is None
    with pytest.raises(ValueError, match="b/kernel"):
        new.update(grads_like(both), restored, both)


def test_the_fingerprint_names_what_orbax_would_leave_empty():
    tx = symoptax.layerwise(RATE, SMALL_RULES)
    saved = json.loads(json.dumps(symoptax.fingerprint(tx, SMALL)))
    assert len(saved) == len(jax.tree.leaves(tx.init(SMALL)))
    symoptax.check_fingerprint(saved, symoptax.layerwise(RATE, SMALL_RULES, beta=0.9), SMALL)
    with pytest.raises(ValueError, match=r"learning_rate/count: saved int32\[\]; needed nothing"):
        symoptax.check_fingerprint(saved, symoptax.layerwise(0.5, SMALL_RULES), SMALL)
    changed = symoptax.layerwise(RATE, relabelled("attention"))
    with pytest.raises(ValueError, match="1 parameters or counters") as error:
        symoptax.check_fingerprint(saved, changed, SMALL)
    (line,) = str(error.value).splitlines()[1:]
    roles = "updates/inner_states/{}/inner_state/momentum/mu float32[3, 4]"
    assert line == (
        f"  b/kernel: saved {roles.format('mlp_in')}; needed {roles.format('attention')}"
    )
    halved = symoptax.layerwise(RATE, SMALL_RULES, mu_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"3 parameters or counters.*\n.*needed .* bfloat16"):
        symoptax.check_fingerprint(saved, halved, SMALL)


def test_an_added_leaf_is_an_error_that_names_it(saved):
    path, _ = saved
    grown = {**SMALL, "c": {"kernel": jnp.ones((3, 4))}}
    tx = symoptax.layerwise(RATE, [*SMALL_RULES, ParamRule("c/kernel", "attention", DENSE)])
    with pytest.raises(ValueError, match="'c', 'kernel'"):
        restore(path, jax.eval_shape(tx.init, grown))


def mesh_of(kind=AxisType.Auto, **sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    axes = (kind,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axes, devices=devices)


MESH_RULES = [
    ParamRule("embed", "embedding", "vocab d -> vocab d"),
    ParamRule("attn", "attention", "layer d out -> layer out d"),
    ParamRule("scale", "other"),
]
MESHES = {
    "the same": (mesh_of(x=8), {"embed": P("x"), "attn": P(None, "x")}),
    "2 x 4": (mesh_of(x=2, y=4), {"embed": P("x", "y"), "attn": P(None, "y", "x")}),
    "explicit": (mesh_of(AxisType.Explicit, x=4, y=2), {"embed": P("y"), "attn": P(None, "x")}),
    "one": (mesh_of(x=1), {}),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_state_goes_on_on_another_mesh(tmp_path, name):
    # Polar steps that converge do not amplify the rounding of another order of sums.
    updates = {"embedding": symoptax.hybrid_map(steps=8), "attention": symoptax.polar_map(steps=8)}
    tx = symoptax.layerwise(RATE, MESH_RULES, updates=updates)
    host = np.random.default_rng(0)
    shapes = {"embed": (256, 64), "attn": (4, 64, 128), "scale": (64,)}

    def place(tree, mesh, specs):
        return {
            n: jax.device_put(x, NamedSharding(mesh, specs.get(n, P()))) for n, x in tree.items()
        }

    def numbers():
        return {n: np.asarray(host.normal(size=s), np.float32) for n, s in shapes.items()}

    def step(params, state, grads, mesh):
        # Told nothing, the compiler may leave a state elsewhere than it was, with other roundings.
        kept = jax.tree.map(lambda x: x.sharding, (params, state))
        with jax.set_mesh(mesh):
            return jax.jit(tx.update, out_shardings=kept)(grads, state, params)

    values, first, second = numbers(), numbers(), numbers()
    old = MESHES["the same"]
    params = place(values, *old)
    init = jax.jit(tx.init, out_shardings=symoptax.state_shardings(tx, params))
    _, state = step(params, init(params), place(first, *old), old[0])
    expected, _ = step(params, state, place(second, *old), old[0])
    save(tmp_path / "state", state)

    mesh, specs = MESHES[name]
    params = place(values, mesh, specs)
    target = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(tx.init, params),
        symoptax.state_shardings(tx, params),
    )
    restored = restore(tmp_path / "state", target)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
    found, _ = step(params, restored, place(second, mesh, specs), mesh)
    if name == "the same":
        chex.assert_trees_all_equal(found, expected)
    else:
        chex.assert_trees_all_close(*map(jax.device_get, (found, expected)), atol=1e-5)
