"""What every optimizer of the library promises to Optax and JAX, whatever its mathematics."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import symoptax
from symoptax import ParamRule

VIEWS = {"kernel": "row col -> row col", "stack": "layer row col -> layer row col"}
RULES = [
    ParamRule("kernel", "attention", VIEWS["kernel"]),
    ParamRule("stack", "router", VIEWS["stack"]),
]


class Case(NamedTuple):
    """An optimizer, and the options by which it differs from its default."""

    factory: object
    options: dict

    def build(self, learning_rate=0.1, **more):
        return self.factory(learning_rate, **self.options, **more)

    @property
    def has_momentum(self):
        return self.factory is not symoptax.ssd


USERS_MAP = symoptax.MatrixMap("negated", symoptax.row_norm_map().symmetry, (lambda d: -d,))
CASES = {
    "row_norm_m": Case(symoptax.row_norm_m, {}),
    "row_norm_m-centered": Case(symoptax.row_norm_m, {"centered": True}),
    "right_polar_grad_m": Case(symoptax.right_polar_grad_m, {}),
    "right_polar_grad_m-centered": Case(symoptax.right_polar_grad_m, {"centered": True}),
    "left_polar_grad_m": Case(symoptax.left_polar_grad_m, {}),
    "left_polar_grad_m-centered": Case(symoptax.left_polar_grad_m, {"centered": True}),
    "hybrid_polar_grad_m": Case(symoptax.hybrid_polar_grad_m, {}),
    "hybrid_polar_grad_m-centered": Case(symoptax.hybrid_polar_grad_m, {"centered": True}),
    "hybrid_polar_grad_m-polar_then_row": Case(
        symoptax.hybrid_polar_grad_m, {"alpha": 0.0, "order": "polar_then_row", "side": "left"}
    ),
    "polar_grad_m": Case(symoptax.polar_grad_m, {}),
    "polar_grad_m-rms": Case(symoptax.polar_grad_m, {"alpha": 0.0, "scale": "rms"}),
    "muon-spectral": Case(symoptax.muon, {}),
    "muon-moonlight": Case(symoptax.muon, {"scale": "moonlight"}),
    **{
        f"scion-{norm}{'-constrained' * constrained}": Case(
            symoptax.scion, {"norm": norm, "constrained": constrained}
        )
        for norm in ("spectral", "embedding", "row", "sign")
        for constrained in (False, True)
    },
    "ssd": Case(symoptax.ssd, {}),
    "matrix_optimizer": Case(symoptax.matrix_optimizer, {"update_map": USERS_MAP}),
    "layerwise": Case(symoptax.layerwise, {"rules": RULES}),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def params_of(kernel=jnp.float32, stack=jnp.float32):
    """Return a matrix, and a stack of one matrix for each of the eight devices."""
    rng = np.random.default_rng(0)
    return {
        "kernel": jnp.asarray(rng.normal(size=(6, 4)), kernel),
        "stack": jnp.asarray(rng.normal(size=(8, 3, 5)), stack),
    }


def grads_of(params, seed=1):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)


def train(tx, params, steps):
    """Return the parameters after so many steps, and the last state.

    Operation by operation: the small kernels are then compiled once for all cases, where `jax.jit`
    would compile every case anew. What has to hold while tracing has tests of its own.
    """
    state = tx.init(params)
    for seed in range(steps):
        updates, state = tx.update(grads_of(params, seed), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@every_case
def test_unknown_extra_arguments_are_ignored(case):
    tx, params = case.build(), params_of()
    grads, state = grads_of(params), tx.init(params)
    expected = tx.update(grads, state, params)
    chex.assert_trees_all_equal(tx.update(grads, state, params, value=1.0, loss=2.0), expected)


@every_case
def test_the_second_step_does_not_compile_again(case):
    tx, params = case.build(optax.constant_schedule(0.1)), params_of()
    traces = 0

    def step(params, state, grads):
        nonlocal traces
        traces += 1
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step)
    state, grads = tx.init(params), grads_of(params)
    for _ in range(2):
        params, state = step(params, state, grads)
    assert traces == 1


DTYPES = {
    "float32": (jnp.float32, jnp.float32, False),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16, False),
    "mixed": (jnp.bfloat16, jnp.float32, False),
    "mixed, x64": (jnp.float16, jnp.float32, True),
    "float64": (jnp.float64, jnp.bfloat16, True),
}


@every_case
@pytest.mark.parametrize(("kernel", "stack", "x64"), DTYPES.values(), ids=DTYPES.keys())
def test_updates_and_state_keep_the_dtypes_of_the_parameters(case, kernel, stack, x64):
    with jax.enable_x64(x64):
        tx, params = case.build(), params_of(kernel, stack)
        state = jax.eval_shape(tx.init, params)
        updates, new_state = jax.eval_shape(tx.update, params, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    floating = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floating} == (
        {jnp.dtype(kernel), jnp.dtype(stack)} if case.has_momentum else set()
    )


@every_case
def test_float64_and_float32_agree(case):
    # Five steps on one Gram matrix amplify its rounding by up to 1600^2 / 20; 1e-3 is five times
    # what is observed on these well conditioned matrices, and a sum in bfloat16 errs by 1e-2.
    single = params_of()
    expected, _ = train(case.build(), single, steps=3)
    with jax.enable_x64(True):
        double = params_of(jnp.float64, jnp.float64)
        double = jax.tree.map(lambda s, d: s.astype(d.dtype), single, double)
        result, _ = train(case.build(), double, steps=3)
        assert {x.dtype for x in jax.tree.leaves(result)} == {jnp.dtype(jnp.float64)}
        # The gradients of the two runs are the same numbers up to their own rounding, 6e-8.
        chex.assert_trees_all_close(result, jax.tree.map(np.float64, expected), atol=1e-3)


@pytest.mark.parametrize("name", ["row_norm_m", "scion-sign-constrained", "matrix_optimizer"])
def test_two_accumulated_halves_are_one_step(name):
    # That every optimizer can be traced under `MultiSteps` is tested below; here the numbers.
    case = CASES[name]
    tx, params, grads = case.build(), params_of(), grads_of(params_of())
    expected, _ = tx.update(grads, tx.init(params), params)
    multi = optax.MultiSteps(tx, every_k_schedule=2)
    state = multi.init(params)
    with jax.disable_jit():  # its `lax.cond` would compile both branches at every call
        nothing, state = multi.update(jax.tree.map(lambda g: 0.5 * g, grads), state, params)
        updates, _ = multi.update(jax.tree.map(lambda g: 1.5 * g, grads), state, params)
    chex.assert_trees_all_equal(nothing, optax.tree.zeros_like(params))
    # The mean of the halves is exact up to one rounding of 6e-8, amplified as above.
    chex.assert_trees_all_close(updates, expected, atol=1e-5)


def injectable_options(case):
    """Return the options that `inject_hyperparams` would take for schedules or for numbers."""
    options = {}
    if not case.options.get("constrained"):
        options["mask"] = lambda params: jax.tree.map(lambda p: p.ndim == 2, params)
        options["weight_decay"] = 0.1
    if case.factory is symoptax.layerwise:
        return options | {"weight_decay": {"attention": 0.1}}
    if case.factory not in (symoptax.row_norm_m, symoptax.matrix_optimizer):
        options["steps"] = 8
    return options


VIEW_OPTIONS = {
    "pattern": "... row col -> ... col row",
    "MatrixView": symoptax.MatrixView("... row col -> ... col row"),
    "function": lambda params: {k: symoptax.MatrixView(VIEWS[k]) for k in params},
}


@every_case
def test_injected_hyperparameters_equal_plain_ones(case):
    plain, params = case.build(), params_of()
    injected = optax.inject_hyperparams(case.factory)(0.1, **case.options)
    expected, _ = train(plain, params, steps=10)
    result, state = train(injected, params, steps=10)
    # Hyperparameters become float32 arrays: 1 - beta then differs by 1e-8, amplified as above.
    chex.assert_trees_all_close(result, expected, atol=1e-3)
    assert state.hyperparams["learning_rate"] == np.float32(0.1)


@every_case
def test_injection_leaves_steps_and_masks_alone(case):
    options = injectable_options(case)
    injected = optax.inject_hyperparams(case.factory)(0.1, **case.options, **options)
    expected, _ = train(case.build(**options), params_of(), steps=10)
    result, _ = train(injected, params_of(), steps=10)
    chex.assert_trees_all_close(result, expected, atol=1e-3)


@pytest.mark.parametrize("view", VIEW_OPTIONS.values(), ids=VIEW_OPTIONS.keys())
@pytest.mark.parametrize("name", ["row_norm_m", "left_polar_grad_m", "muon-spectral"])
def test_injection_leaves_views_alone(name, view):
    case = CASES[name]
    injected = optax.inject_hyperparams(case.factory)(0.1, view=view)
    expected, _ = train(case.build(view=view), params_of(), steps=10)
    result, _ = train(injected, params_of(), steps=10)
    chex.assert_trees_all_close(result, expected, atol=1e-3)


TRACED = {
    "schedule": lambda case: case.build(optax.constant_schedule(0.1)),
    "injected": lambda case: optax.inject_hyperparams(case.factory)(
        optax.constant_schedule(0.1), **case.options, **injectable_options(case)
    ),
    "MultiSteps": lambda case: optax.MultiSteps(case.build(0.1), 2).gradient_transformation(),
}


@every_case
@pytest.mark.parametrize("build", TRACED.values(), ids=TRACED.keys())
def test_works_in_cond_and_scan(case, build):
    # Both demand that the state comes back with the very types it went in with; tracing checks it.
    tx, params = build(case), params_of()

    def run(flag, params):
        state = tx.init(params)
        skip = optax.tree.zeros_like(params), state
        updates, state = jax.lax.cond(flag, lambda: tx.update(params, state, params), lambda: skip)

        def step(carry, _):
            return tx.update(*carry, params), None

        return jax.lax.scan(step, (updates, state), length=3)[0]

    updates, state = jax.eval_shape(run, True, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, jax.eval_shape(tx.init, params))


@every_case
def test_the_first_step_uses_the_schedule_at_zero(case):
    params = params_of()
    grads = grads_of(params)
    rates = [0.0, 0.1, 0.3]
    tx = case.build(lambda count: jnp.asarray(rates)[count])
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)
    chex.assert_trees_all_equal(updates, optax.tree.zeros_like(params))  # -0 == 0
    second, state = tx.update(grads, state, params)
    third, _ = tx.update(grads, state, params)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(second))
    if case.factory is symoptax.ssd:  # no momentum: the same gradient, three times the rate
        chex.assert_trees_all_close(third, jax.tree.map(lambda u: 3 * u, second), rtol=1e-6)


@every_case
def test_an_unknown_keyword_is_a_type_error(case):
    with pytest.raises(TypeError, match="momentun"):
        case.build(momentun=0.9)
    with pytest.raises(TypeError, match="momentun"):
        optax.inject_hyperparams(case.factory)(0.1, **case.options, momentun=0.9).init(params_of())


@every_case
def test_the_state_has_a_shape_before_it_has_memory(case):
    tx, params = case.build(optax.constant_schedule(0.1)), params_of()
    abstract = jax.eval_shape(tx.init, params)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(abstract))
    chex.assert_trees_all_equal_structs(abstract, tx.init(params))
    momenta = [x.shape for x in jax.tree.leaves(abstract) if x.shape]
    expected = [x.shape for x in jax.tree.leaves(params)] if case.has_momentum else []
    assert momenta == expected


def place(tree):
    """Put one matrix of the stack on each device, and all of the kernel on every one."""
    mesh = jax.make_mesh((8,), ("data",))
    specs = jax.tree.map(lambda x: PartitionSpec("data") if x.ndim == 3 else PartitionSpec(), tree)
    return jax.device_put(tree, jax.tree.map(lambda s: NamedSharding(mesh, s), specs)), specs


def sharded_step(tx, params, state):
    """Return a step in `shard_map` over eight devices, and its arguments."""
    (params, specs), (grads, _), (state, state_specs) = map(
        place, (params, grads_of(params), state)
    )
    step = jax.shard_map(
        lambda grads, state, params: tx.update(grads, state, params)[0],
        mesh=jax.make_mesh((8,), ("data",)),
        in_specs=(specs, state_specs, specs),
        out_specs=specs,
    )
    return jax.jit(step), (grads, state, params)


@every_case
def test_no_tracer_leaks_from_a_state_factory_into_shard_map(case):
    built = []

    @jax.jit
    def create(params):
        built.append(case.build(optax.constant_schedule(0.1)))
        return built[0].init(params)

    with jax.checking_leaks():
        state = create(params_of())
        step, arguments = sharded_step(built[0], params_of(), state)
        step.lower(*arguments)  # a tracer that has leaked is found while tracing


@pytest.mark.parametrize("name", ["row_norm_m-centered", "hybrid_polar_grad_m", "layerwise"])
def test_a_stack_on_eight_devices_is_updated_as_on_one(name):
    tx, params = CASES[name].build(), params_of()
    expected, _ = tx.update(grads_of(params), tx.init(params), params)
    step, arguments = sharded_step(tx, params, tx.init(params))
    # Another order of summation, amplified as above.
    chex.assert_trees_all_close(jax.device_get(step(*arguments)), expected, atol=1e-4)
