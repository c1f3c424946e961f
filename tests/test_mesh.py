"""On a mesh: the same numbers as on one device, and no more bytes on the wire than they need."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import symoptax
from symoptax import ParamRule


def wire(compiled):
    """Return the MiB that one device sends, and the number of exchanges that move matrices."""
    found = symoptax.collectives(compiled)
    return sum(c.sent for c in found) / 2**20, sum(c.sent > 1000 for c in found)


def mesh_of(sizes, kind=AxisType.Auto):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def shapes_on(mesh, shapes, specs):
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, specs[name]))
        for name, shape in shapes.items()
    }


def compiled_update(tx, params):
    out = {name: x.sharding for name, x in params.items()}
    step = jax.jit(lambda g: tx.update(g, tx.init(g), g)[0], out_shardings=out)
    return step.lower(params).compile()


FSDP, TENSOR, DATA = {"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 4}
THREE, EXPERT = {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4, "expert": 2}
BIG = (16, 1024, 4096)
# mesh, shape, layout, MiB on the wire: two exchanges of what each device holds, and where matrices
# are shared, their Gram matrices.
STACKS = {
    "rows": (FSDP, BIG, P(None, "fsdp"), 56),
    "columns": (FSDP, BIG, P(None, None, "fsdp"), 56),
    "rows and columns": (TENSOR, BIG, P(None, "fsdp", "tensor"), 80),
    "columns and rows": (TENSOR, BIG, P(None, "tensor", "fsdp"), 80),
    "rows twice": (TENSOR, BIG, P(None, ("fsdp", "tensor")), 80),
    "columns twice": (TENSOR, BIG, P(None, None, ("fsdp", "tensor")), 80),
    "replicated": (DATA, BIG, P(None, "fsdp"), 80),
    "three axes": (THREE, BIG, P(None, "fsdp", "tensor"), 96),
    "uneven": (FSDP, (12, 1024, 4096), P(None, "fsdp"), 56),
    "on the layers already": (FSDP, BIG, P("fsdp"), 0),
    "few, rows": (FSDP, (4, 1024, 4096), P(None, "fsdp"), 18),
    "few, columns": (FSDP, (4, 1024, 4096), P(None, None, "fsdp"), 18),
    "three": (TENSOR, (3, 1024, 4096), P(None, "fsdp", "tensor"), 16),
    "one": (TENSOR, (1, 1024, 4096), P(None, "fsdp", "tensor"), 10),
    "experts": (EXPERT, (8, 4, 1024, 4096), P(None, "expert", "fsdp"), 96),
}
VIEWS = {3: "layer row col -> layer row col", 4: "layer expert row col -> layer expert row col"}


@pytest.mark.parametrize(
    "how", ["Auto", pytest.param("Auto, told", marks=pytest.mark.slow), "Explicit"]
)
@pytest.mark.parametrize(("sizes", "shape", "spec", "ideal"), STACKS.values(), ids=STACKS.keys())
def test_stacks_are_exchanged_once_each_way(sizes, shape, spec, ideal, how, capfd):
    kind = AxisType.Explicit if how == "Explicit" else AxisType.Auto
    params = shapes_on(mesh_of(sizes, kind), {"w": shape}, {"w": spec})
    tx = symoptax.polar(view=VIEWS[len(shape)])
    compiled = compiled_update(symoptax.on_mesh(tx, params) if "told" in how else tx, params)
    sent, count = wire(compiled)
    assert sent <= 1.001 * ideal + 1e-3
    assert count <= 6
    assert "rematerialization" not in capfd.readouterr().err
    # The plan says what the program does.
    plan = symoptax.plan(tx, params, strict=True)
    assert sent == pytest.approx(plan.sent / 2**20, rel=0.01, abs=1e-3)
    flops = compiled.cost_analysis()["flops"]
    assert flops == pytest.approx(plan.flops, rel=0.15)  # products, and sums beside them
    # Work is shared: that of five quintic steps on each matrix is the ideal.
    matrices = max(np.prod(shape[:-2]) / 8, 0.5)
    assert flops <= 1.05 * np.ceil(matrices) * 193e9 / 2
    share = np.ceil(matrices) * 1024 * 4096 * 4
    assert compiled.memory_analysis().temp_size_in_bytes <= 2.4 * share


@pytest.mark.parametrize(("sizes", "shape", "spec", "ideal"), STACKS.values(), ids=STACKS.keys())
def test_parameters_stay_where_they_are_without_being_told(sizes, shape, spec, ideal):
    # Nothing but the arguments says where parameters live: no `out_shardings`, no constraint.
    params = shapes_on(mesh_of(sizes), {"w": shape}, {"w": spec})
    tx = symoptax.polar(view=VIEWS[len(shape)])
    step = jax.jit(lambda g, p: optax.apply_updates(p, tx.update(g, tx.init(p), p)[0]))
    compiled = step.lower(params, params).compile()
    assert compiled.output_shardings["w"].is_equivalent_to(params["w"].sharding, len(shape))
    assert wire(compiled)[0] <= 1.001 * ideal + 1e-3


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_leaves_of_equal_shape_are_exchanged_together(kind):
    shapes = {f"w{i}": (1024, 4096) for i in range(16)}
    params = shapes_on(mesh_of(FSDP, kind), shapes, dict.fromkeys(shapes, P("fsdp")))
    sent, count = wire(compiled_update(symoptax.polar(), params))
    assert sent <= 1.05 * 56
    assert count == 2


def test_layers_in_the_middle_are_found_by_the_view():
    params = shapes_on(mesh_of(TENSOR), {"w": (1024, 16, 4096)}, {"w": P("fsdp", None, "tensor")})
    tx = symoptax.polar(view="row layer col -> layer row col")
    sent, _ = wire(compiled_update(tx, params))
    assert sent <= 1.05 * 80


BLOCK = {
    **{name: ((6, 256, 256), P(None, "fsdp", "tensor")) for name in ("q", "k", "v")},
    "o": ((6, 256, 256), P(None, "tensor", "fsdp")),
    **{name: ((6, 256, 1024), P(None, "fsdp", "tensor")) for name in ("gate", "up")},
    "down": ((6, 1024, 256), P(None, "tensor", "fsdp")),
}
BLOCK_RULES = [
    ParamRule("{q,k,v}", "attention", "layer d out -> layer out d"),
    ParamRule("o", "attention", "layer heads d -> layer d heads"),
    ParamRule("{gate,up}", "mlp_in", "layer d neuron -> layer neuron d"),
    ParamRule("down", "mlp_down", "layer neuron d -> layer neuron d"),
]


@pytest.mark.parametrize("told", [True, False])
def test_a_transformer_needs_two_exchanges_each_way(told):
    # One group for queries, keys, values and outputs, which travel transposed; one for the MLP.
    shapes, specs = ({n: x[i] for n, x in BLOCK.items()} for i in (0, 1))
    params = shapes_on(mesh_of(TENSOR), shapes, specs)
    updates = {"mlp_in": "polar", "mlp_down": "polar"}
    tx = symoptax.layerwise(0.1, BLOCK_RULES, updates=updates, mesh=params if told else None)
    sent, count = wire(compiled_update(tx, params))
    held = sum(4 * np.prod(shape) for shape in shapes.values()) / 8 / 2**20
    # Untold, outputs go by themselves, 6 matrices filled up to 8.
    assert sent <= (1.001 if told else 1.35) * 2 * (3 / 4 + 1 / 2) * held
    assert count <= (8 if told else 14)


def test_vocabulary_matrices_send_their_gram_matrix_alone():
    params = shapes_on(mesh_of(FSDP), {"w": (131072, 4096)}, {"w": P("fsdp")})
    for tx in (symoptax.hybrid(), symoptax.centered_hybrid()):
        sent, _ = wire(compiled_update(tx, params))
        assert sent <= 1.05 * 112  # one all-reduce of 4096 x 4096


def test_vocabulary_columns_are_exchanged_for_rows():
    params = shapes_on(mesh_of(FSDP), {"w": (131072, 4096)}, {"w": P(None, "fsdp")})
    sent, count = wire(compiled_update(symoptax.hybrid(), params))
    assert sent <= 1.05 * (448 + 112)  # there and back, and the Gram matrix
    assert count == 3


def test_row_norms_of_whole_rows_send_nothing():
    params = shapes_on(mesh_of(FSDP), {"w": (8192, 512)}, {"w": P("fsdp")})
    sent, _ = wire(compiled_update(symoptax.row_norm(), params))
    assert sent < 1e-3  # one bit: whether any row overflows


RULES = [
    ParamRule("embed", "embedding", "vocab d -> vocab d"),
    ParamRule("head", "lm_head", "d vocab -> vocab d"),
    ParamRule("attn", "attention", "layer d out -> layer out d"),
    ParamRule("single", "attention", "d out -> out d"),
    ParamRule("up", "mlp_in", "d layer neuron -> layer neuron d"),
    ParamRule("experts", "expert_in", "expert layer d neuron -> expert layer neuron d"),
    ParamRule("router", "router", "d expert -> expert d"),
    ParamRule("scale", "other"),
]
SHAPES = {
    "embed": (128, 64),
    "head": (64, 128),
    "attn": (6, 64, 64),
    "single": (64, 96),
    "up": (64, 6, 96),
    "experts": (4, 3, 64, 80),
    "router": (64, 4),
    "scale": (64,),
}
LAYOUTS = {
    "fsdp": (
        FSDP,
        {n: P(*([None] * (len(s) - 1)), "fsdp") for n, s in SHAPES.items()} | {"router": P("fsdp")},
    ),
    "rows": (
        FSDP,
        {n: P("fsdp") for n, s in SHAPES.items()}
        | {"attn": P(None, "fsdp"), "experts": P(None, None, "fsdp")},
    ),
    "fsdp and tensor": (
        TENSOR,
        {n: P(*([None] * (len(s) - 2)), "fsdp", "tensor") for n, s in SHAPES.items()}
        | {"scale": P("fsdp"), "up": P("fsdp", None, "tensor"), "router": P("fsdp")},
    ),
    "data and fsdp": (DATA, {n: P(*([None] * (len(s) - 1)), "fsdp") for n, s in SHAPES.items()}),
    "replicated": (FSDP, dict.fromkeys(SHAPES, P())),
    "experts": (
        {"expert": 4, "fsdp": 2},
        dict.fromkeys(SHAPES, P())
        | {"experts": P("expert", None, None, "fsdp"), "embed": P("fsdp")},
    ),
}


def numbers(seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()
    }


@pytest.fixture(scope="module")
def expected():
    tx = eight_steps()
    params = numbers()
    return tx.update(numbers(1), tx.init(params), params)[0]


def eight_steps():
    """Polar steps that converge do not amplify the rounding of another order of sums."""
    hybrid = symoptax.hybrid_map(steps=8)
    updates = dict.fromkeys(("embedding", "mlp_in", "expert_in"), hybrid)
    updates |= {"attention": symoptax.polar_map(steps=8), "lm_head": symoptax.centered(hybrid)}
    return symoptax.layerwise(0.1, RULES, updates=updates, weight_decay=0.1)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mesh_changes_no_number_and_no_layout(expected, layout, kind):
    sizes, specs = LAYOUTS[layout]
    mesh = mesh_of(sizes, kind)

    def place(tree):
        return {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in tree.items()}

    tx, params, grads = eight_steps(), place(numbers()), place(numbers(1))
    shardings = jax.tree.map(lambda x: x.sharding, params)
    with jax.set_mesh(mesh):
        step = jax.jit(tx.update, out_shardings=(shardings, None))
        updates, _ = step(grads, tx.init(params), params)
    for name, update in updates.items():
        assert update.sharding.is_equivalent_to(params[name].sharding, update.ndim), name
        scale = np.max(np.abs(expected[name]))
        np.testing.assert_allclose(
            np.asarray(update) / scale, np.asarray(expected[name]) / scale, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("layout", ["fsdp and tensor", "experts"])
def test_the_state_lives_beside_the_parameters(layout):
    sizes, specs = LAYOUTS[layout]
    mesh = mesh_of(sizes)
    params = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in numbers().items()}
    tx = symoptax.layerwise(optax.constant_schedule(0.1), RULES)
    shardings = symoptax.state_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    # Counters of rows have tests of their own.
    momenta = [x for x in jax.tree.leaves(state) if x.ndim and x.dtype == jnp.float32]
    assert len(momenta) == len(params) + 1  # Adam keeps two of the scale
    for leaf in momenta:
        (name,) = (n for n, shape in SHAPES.items() if shape == leaf.shape)
        assert leaf.sharding.is_equivalent_to(params[name].sharding, leaf.ndim)
    # A step changes neither types nor layouts, and is compiled once.
    places = (jax.tree.map(lambda x: x.sharding, params), shardings)
    step = jax.jit(tx.update, out_shardings=places)
    _, second = step(params, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(second, state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(second), strict=True):
        assert after.sharding.is_equivalent_to(before.sharding, before.ndim)
    step(params, second, params)
    assert step._cache_size() == 1


def test_a_parameter_without_a_sharding_is_named():
    params = {"w": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
    with pytest.raises(ValueError, match=r"No sharding of w: .*sharding="):
        symoptax.state_shardings(symoptax.row_norm_m(0.1), params)


class Block(nn.Module):
    """A layer of linen with logical axes."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        return nn.Dense(16, kernel_init=init, use_bias=False, name="up")(x)


DENSE = [ParamRule("**/up/kernel", "mlp_in", "d neuron -> neuron d")]


def test_linen_logical_axes_place_the_state():
    mesh = mesh_of(TENSOR)
    abstract = jax.eval_shape(Block().init, jax.random.key(0), jnp.ones((2, 8)))["params"]
    shardings = nn.logical_to_mesh_sharding(
        nn.get_partition_spec(abstract), mesh, [("embed", "fsdp"), ("mlp", "tensor")]
    )
    tx = symoptax.layerwise(0.1, DENSE)
    places = symoptax.state_shardings(tx, abstract, shardings)
    assert jax.tree.structure(places) == jax.tree.structure(jax.eval_shape(tx.init, abstract))
    (momentum,) = jax.tree.leaves(places["updates"].inner_states["mlp_in"])
    assert momentum == NamedSharding(mesh, P("fsdp", "tensor"))
    # Boxed or not, the state is the same, and it is created where it belongs.
    params = jax.jit(
        lambda: nn.meta.unbox(Block().init(jax.random.key(0), jnp.ones((2, 8)))["params"]),
        out_shardings=shardings,
    )()
    state = jax.jit(tx.init, out_shardings=symoptax.state_shardings(tx, params))(params)
    (momentum,) = jax.tree.leaves(state["updates"].inner_states["mlp_in"])
    assert momentum.sharding.is_equivalent_to(params["up"]["kernel"].sharding, 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_nnx_optimizer_keeps_parameters_and_state_in_place(kind):
    mesh = mesh_of(TENSOR, kind)
    sharding = NamedSharding(mesh, P("fsdp", "tensor"))
    with jax.set_mesh(mesh):
        model = nnx.Linear(128, 256, use_bias=False, rngs=nnx.Rngs(0))
        model.kernel.set_value(jax.device_put(model.kernel.get_value(), sharding))
        rules = [ParamRule("kernel", "mlp_in", "d neuron -> neuron d")]
        optimizer = nnx.Optimizer(model, symoptax.layerwise(0.1, rules), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            grads = nnx.grad(lambda model: jnp.sum(model(jnp.ones((4, 128))) ** 2))(model)
            optimizer.update(model, grads)

        for _ in range(2):
            step(model, optimizer)
    momenta = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.shape == (128, 256)]
    assert len(momenta) == 1
    for leaf in (*momenta, model.kernel.get_value()):
        assert leaf.sharding.is_equivalent_to(sharding, 2)


OPTIMIZERS = {
    "row_norm_m": symoptax.row_norm_m,
    "muon": symoptax.muon,
    "polar_grad_m": symoptax.polar_grad_m,
    "ssd": symoptax.ssd,
    "scion": functools.partial(symoptax.scion, norm="spectral"),
    **{
        f"{name}{'-centered' * centered}": functools.partial(
            getattr(symoptax, name), centered=centered
        )
        for name in ("right_polar_grad_m", "left_polar_grad_m", "hybrid_polar_grad_m")
        for centered in (False, True)
    },
    "layerwise": functools.partial(symoptax.layerwise, rules=RULES, weight_decay=0.1),
}


def updates_of(build, params, grads, how):
    """Return the updates of one step, compiled as `how` says."""
    tx = build()
    told = symoptax.on_mesh(tx, params) if how == "told" else tx
    step = jax.jit(lambda g, p: told.update(g, tx.init(p), p)[0])
    return step(grads, params)


EVERY = [
    pytest.param(*case, marks=[] if index % 17 == 0 else [pytest.mark.slow])
    for index, case in enumerate(
        itertools.product(LAYOUTS, OPTIMIZERS, ("Auto", "told", "Explicit"))
    )
]


@pytest.mark.parametrize(("layout", "optimizer", "how"), EVERY)
def test_every_optimizer_gives_the_same_on_every_layout(x64, layout, optimizer, how):
    sizes, specs = LAYOUTS[layout]
    mesh = mesh_of(sizes, AxisType.Explicit if how == "Explicit" else AxisType.Auto)
    routed = optimizer == "layerwise"

    def build():
        options = {} if routed else {"view": symoptax.view_fn(RULES)}
        return OPTIMIZERS[optimizer](0.1, **options)

    def double(seed):
        leaves = {n: x.astype(jnp.float64) for n, x in numbers(seed).items()}
        return {n: x for n, x in leaves.items() if routed or n != "scale"}

    def place(tree):
        return {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in tree.items()}

    expected = updates_of(build, double(0), double(1), "one device")
    with jax.set_mesh(mesh):
        found = updates_of(build, place(double(0)), place(double(1)), how)
    for name, update in found.items():
        scale = np.max(np.abs(expected[name]))
        np.testing.assert_allclose(
            np.asarray(update) / scale, np.asarray(expected[name]) / scale, atol=1e-12, err_msg=name
        )
