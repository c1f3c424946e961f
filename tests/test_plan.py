"""`plan`, `on_mesh` and `collectives`: what will be sent is known, and said, before it is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import symoptax
from symoptax import ParamRule


def mesh_of(sizes, kind=AxisType.Auto):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def placed(mesh, spec, *shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


RULES = [
    ParamRule("embed", "embedding", "vocab d -> vocab d"),
    ParamRule("{q,o}", "attention", "layer row col -> layer row col"),
    ParamRule("scale", "other"),
]


def model(mesh):
    return {
        "embed": placed(mesh, P("fsdp"), 32768, 512),
        "q": placed(mesh, P(None, "fsdp", "tensor"), 12, 512, 512),
        "o": placed(mesh, P(None, "tensor", "fsdp"), 12, 512, 512),
        "scale": placed(mesh, P(), 512),
    }


def test_a_plan_prints_every_leaf():
    mesh = mesh_of({"fsdp": 4, "tensor": 2})
    tx = symoptax.layerwise(0.1, RULES, updates={"embedding": "row_norm"})
    plan = symoptax.plan(tx, model(mesh))
    assert str(plan).splitlines() == [
        "embed: row_norm, 32768 x 512",
        "    where it lies; 0 MiB sent, 0 GF, 0 MiB",
        "o, q: polar, 24 x 512 x 512",
        "    3 matrices on a device; 7.5 MiB sent, 12.9 GF, 12 MiB",
        "scale: elementwise, 512",
        "    where it lies; 0 MiB sent, 0 GF, 0 MiB",
        "One device sends 7.5 MiB and does 12.9 GF in matrix products.",
    ]
    assert [row.leaves for row in plan.rows] == [("embed",), ("o", "q"), ("scale",)]
    assert not plan.warnings


def test_a_plan_holds_for_any_chain_and_any_container():
    mesh = mesh_of({"fsdp": 8})
    params = {"layers": [{"w": placed(mesh, P("fsdp"), 512, 1024)} for _ in range(8)]}
    tx = optax.chain(optax.clip_by_global_norm(1.0), symoptax.muon(0.1), optax.scale(0.5))
    (row,) = symoptax.plan(tx, params).rows
    assert row.leaves == tuple(f"layers/{i}/w" for i in range(8))
    assert row.where == "1 matrix on a device"
    assert row.sent == 2 * 7 / 8 * 512 * 1024 * 4


def test_gradients_in_bfloat16_halve_what_is_sent():
    mesh = mesh_of({"fsdp": 8})
    params, grads = (
        {"w": placed(mesh, P(None, "fsdp"), 8, 512, 1024, dtype=dtype)}
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    tx = symoptax.muon(0.1, mu_dtype=jnp.bfloat16)
    assert symoptax.plan(tx, params, grads).sent == symoptax.plan(tx, params).sent / 2


def test_work_that_cannot_be_shared_is_said_loudly():
    # Singular value decompositions need whole matrices, and there are fewer than devices.
    mesh = mesh_of({"fsdp": 4, "tensor": 2})
    params = {"w": placed(mesh, P(None, "fsdp"), 2, 1024, 1024)}
    tx = symoptax.polar(method="svd")
    message = "w: 4 devices do the same .* GF each; use method='auto'"
    with pytest.warns(symoptax.MeshWarning, match=message):
        jax.jit(lambda g: symoptax.on_mesh(tx, params).update(g, tx.init(g))[0]).trace(params)
    plan = symoptax.plan(tx, params)
    assert "\nWarning: w: " in str(plan)
    with pytest.raises(ValueError, match=message):
        symoptax.plan(tx, params, strict=True)


def test_sections_of_a_spread_axis_are_said_loudly():
    mesh = mesh_of({"fsdp": 8})
    view = symoptax.MatrixView("d out -> out d", sections={"out": (512, 256, 256)})
    spread = {"qkv": placed(mesh, P(None, "fsdp"), 512, 1024)}
    plan = symoptax.plan(symoptax.polar(view=view), spread)
    assert len(plan.warnings) == 1
    assert plan.warnings[0].startswith(
        "qkv: axis 'out' is spread over 8 devices and cut into sections, so that 2 MiB"
    )
    other = {"qkv": placed(mesh, P("fsdp"), 512, 1024)}
    assert not symoptax.plan(symoptax.polar(view=view), other).warnings


def test_parameters_without_a_mesh_have_no_plan():
    with pytest.raises(ValueError, match=r"NamedSharding of every parameter; w has none"):
        symoptax.plan(symoptax.polar(), {"w": jax.ShapeDtypeStruct((2, 2), jnp.float32)})
    meshes = mesh_of({"a": 8}), mesh_of({"b": 8})
    params = {str(i): placed(mesh, P(), 8, 8) for i, mesh in enumerate(meshes)}
    with pytest.raises(ValueError, match="lie on 2 meshes"):
        symoptax.on_mesh(symoptax.polar(), params)


def updates_on(place, tx, gradient):
    step = jax.jit(lambda g: tx.update(g, tx.init(g))[0])
    return step(place(gradient))


@pytest.fixture(scope="module")
def gradient():
    return np.asarray(np.random.default_rng(0).normal(size=(8, 128, 256)), np.float32)


@pytest.fixture(scope="module")
def expected(gradient):
    return np.asarray(updates_on(jnp.asarray, symoptax.polar(steps=8), gradient))


def flops_of(tx, gradient):
    step = jax.jit(lambda g: tx.update(g, tx.init(g))[0])
    return step.lower(gradient).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_may_come_from_the_argument_or_from_the_context(gradient, expected, kind):
    # Arrays of one device say nothing: on Auto axes the work is shared all the same.
    mesh, tx = mesh_of({"fsdp": 8}, kind), symoptax.polar(steps=8)
    told = symoptax.on_mesh(tx, mesh)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(updates_on(lambda x: x, tx, gradient), expected, atol=1e-5)
        np.testing.assert_allclose(updates_on(lambda x: x, told, gradient), expected, atol=1e-5)
        if kind == AxisType.Auto:
            one_matrix = 2 * symoptax.cost(gradient.shape[1:], steps=8).multiplications
            assert flops_of(tx, gradient) == pytest.approx(one_matrix, rel=0.15)


def test_outside_of_jit_arrays_keep_their_place(gradient, expected):
    sharding = NamedSharding(mesh_of({"fsdp": 4, "tensor": 2}), P(None, "fsdp", "tensor"))
    tx = symoptax.polar(steps=8)
    x = jax.device_put(gradient, sharding)
    update, _ = tx.update(x, tx.init(x))
    np.testing.assert_allclose(update, expected, atol=1e-5)
    assert update.sharding.is_equivalent_to(sharding, 3)


def test_pmap_and_shard_map_compute_what_they_are_given(gradient, expected):
    tx = symoptax.polar(steps=8)

    def update(g):
        return tx.update(g, tx.init(g))[0]

    copies = np.broadcast_to(gradient, (8, *gradient.shape))
    np.testing.assert_allclose(jax.pmap(update)(copies)[3], expected, atol=1e-5)
    mesh = mesh_of({"layer": 8})
    mapped = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=P("layer"), out_specs=P("layer")))
    np.testing.assert_allclose(mapped(gradient), expected, atol=1e-5)
    half = mesh_of({"layer": 4, "fsdp": 2})
    mapped = jax.jit(
        jax.shard_map(
            update, mesh=half, in_specs=P("layer"), out_specs=P("layer"), axis_names={"layer"}
        )
    )
    placed_gradient = jax.device_put(gradient, NamedSharding(half, P("layer", "fsdp")))
    np.testing.assert_allclose(mapped(placed_gradient), expected, atol=1e-5)


def test_collectives_are_counted():
    mesh = mesh_of({"x": 4, "y": 2})
    x = placed(mesh, P("x", "y"), 512, 512)
    replicate = jax.jit(lambda x: x * 2, out_shardings=NamedSharding(mesh, P("x")))
    (gather,) = symoptax.collectives(replicate.lower(x).compile())
    assert gather == ("all-gather", 2, 128 * 512 * 4, 128 * 512 * 4 / 2)
    total = jax.jit(lambda x: jnp.sum(x, 0), out_shardings=NamedSharding(mesh, P("y")))
    (reduced,) = symoptax.collectives(total.lower(x).compile())
    assert reduced == ("all-reduce", 4, 256 * 4, 256 * 4 * 2 * 3 / 4)
