"""On a mesh: the same numbers as on one device, and no more bytes on the wire than they need."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import symoptax
from small_models import FAST_COMPILE
from symoptax import ParamRule

BYTES = {"f64": 8, "f32": 4, "bf16": 2, "s32": 4, "pred": 1}
# MiB that a device must send: what it keeps of its own does not count.
SENT = {
    "all-gather": lambda k: (k - 1) / k,
    "all-to-all": lambda k: (k - 1) / k,
    "all-reduce": lambda k: 2 * (k - 1) / k,
    "reduce-scatter": lambda k: k - 1,
    "collective-permute": lambda k: 1,
}


def group_size(line):
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found[1])
    if "source_target_pairs" in line:
        return 2
    found = re.search(r"replica_groups=mesh\[(.*?)\].*?\{('.*?)\}", line)
    sizes = dict(re.findall(r"'(axis_\d+)'=(\d+)", found[1]))
    return int(np.prod([int(sizes[axis]) for axis in re.findall(r"'(axis_\d+)'", found[2])]))


def wire(compiled):
    """Return the MiB that one device sends with ring collectives, and how many there are."""
    total = count = 0
    for line in compiled.as_text().splitlines():
        found = re.search(rf"= (.*?) ({'|'.join(SENT)})(-start)?\(", line)
        if found:
            arrays = re.findall(rf"({'|'.join(BYTES)})\[([\d,]*)\]", found[1])
            size = sum(
                BYTES[t] * int(np.prod([int(x) for x in d.split(",") if x])) for t, d in arrays
            )
            total += size * SENT[found[2]](group_size(line))
            count += 1
    return total / 2**20, count


def mesh_of(sizes, kind=AxisType.Auto):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def compiled_update(tx, shapes, mesh, specs):
    def place(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = {name: place(shapes[name], specs[name]) for name in shapes}
    out = {name: x.sharding for name, x in params.items()}
    step = jax.jit(lambda g: tx.update(g, tx.init(g))[0], out_shardings=out)
    return step.lower(params).compile()


FSDP, TENSOR, DATA = {"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 4}
# mesh, shape, layout, MiB on the wire: two exchanges of what each device holds, and no more.
STACKS = {
    "rows": (FSDP, (16, 1024, 4096), P(None, "fsdp"), 56),
    "columns": (FSDP, (16, 1024, 4096), P(None, None, "fsdp"), 56),
    "rows and columns": (TENSOR, (16, 1024, 4096), P(None, "fsdp", "tensor"), 80),
    "columns and rows": (TENSOR, (16, 1024, 4096), P(None, "tensor", "fsdp"), 80),
    "replicated": (DATA, (16, 1024, 4096), P(None, "fsdp"), 80),
    "uneven": (FSDP, (12, 1024, 4096), P(None, "fsdp"), 56),
    "on the layers already": (FSDP, (16, 1024, 4096), P("fsdp"), 0),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("sizes", "shape", "spec", "ideal"), STACKS.values(), ids=STACKS.keys())
def test_stacks_are_exchanged_once_each_way(sizes, shape, spec, ideal, kind):
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    compiled = compiled_update(symoptax.polar(), {"w": x}, mesh_of(sizes, kind), {"w": spec})
    sent, count = wire(compiled)
    assert sent <= 1.05 * ideal
    assert count <= 4
    matrices = -(-shape[0] // 8) * 8
    ideal_flops = matrices / 8 * 193e9 / 2  # that of five quintic steps on each matrix
    assert compiled.cost_analysis()["flops"] <= 1.05 * ideal_flops
    share = matrices / 8 * 1024 * 4096 * 4
    assert compiled.memory_analysis().temp_size_in_bytes <= 2.3 * share


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_leaves_of_equal_shape_are_exchanged_together(kind):
    shapes = {f"w{i}": jax.ShapeDtypeStruct((1024, 4096), jnp.float32) for i in range(16)}
    specs = dict.fromkeys(shapes, P("fsdp"))
    sent, count = wire(compiled_update(symoptax.polar(), shapes, mesh_of(FSDP, kind), specs))
    assert sent <= 1.05 * 56
    assert count == 2


def test_layers_in_the_middle_are_found_by_the_view():
    x = {"w": jax.ShapeDtypeStruct((1024, 16, 4096), jnp.float32)}
    tx = symoptax.polar(view="row layer col -> layer row col")
    sent, _ = wire(compiled_update(tx, x, mesh_of(TENSOR), {"w": P("fsdp", None, "tensor")}))
    assert sent <= 1.05 * 80


def test_vocabulary_matrices_send_their_gram_matrix_alone():
    x = {"w": jax.ShapeDtypeStruct((131072, 4096), jnp.float32)}
    for tx in (symoptax.hybrid(), symoptax.centered_hybrid()):
        sent, _ = wire(compiled_update(tx, x, mesh_of(FSDP), {"w": P("fsdp")}))
        assert sent <= 1.05 * 112  # one all-reduce of 4096 x 4096


def test_row_norms_of_whole_rows_send_nothing():
    x = {"w": jax.ShapeDtypeStruct((8192, 512), jnp.float32)}
    sent, _ = wire(compiled_update(symoptax.row_norm(), x, mesh_of(FSDP), {"w": P("fsdp")}))
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
        step = jax.jit(tx.update, out_shardings=(shardings, None), compiler_options=FAST_COMPILE)
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
    momenta = [x for x in jax.tree.leaves(state) if x.ndim]
    assert len(momenta) == len(params) + 1  # Adam keeps two of the scale
    for leaf in momenta:
        (name,) = (n for n, shape in SHAPES.items() if shape == leaf.shape)
        assert leaf.sharding.is_equivalent_to(params[name].sharding, leaf.ndim)
    # A step changes neither types nor layouts, and is compiled once.
    places = (jax.tree.map(lambda x: x.sharding, params), shardings)
    step = jax.jit(tx.update, out_shardings=places, compiler_options=FAST_COMPILE)
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
