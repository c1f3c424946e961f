"""What accelerators are given to run: dtypes, precision and branches, read off the programs.

No accelerator is needed: `jax.export` lowers for every platform on a CPU, and the tests marked
`tpu` compile with libtpu for chips that are not there.
"""

import functools
import re
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import symoptax
from small_models import ROLES, RULES, grads_like, linen_params

ACCELERATORS = ("tpu", "cuda")
# By the numerics: dtype of both factors, of the product, and the precision, which says nothing
# about factors in bfloat16.
PRODUCTS = {
    "default": ("f32", "f32", "highest"),
    "BFLOAT16": ("bf16", "f32", None),
    "BFLOAT16_X3": ("f32", "f32", "high"),
}
OPTIONS = {
    "default": {},
    "BFLOAT16": {"numerics": symoptax.BFLOAT16},
    "BFLOAT16_X3": {"numerics": symoptax.BFLOAT16_X3},
}
FLOATS = {"float32": {"f32"}, "bfloat16": {"f32", "bf16"}}
by_dtype = pytest.mark.parametrize("dtype", FLOATS)
by_numerics = pytest.mark.parametrize("numerics", PRODUCTS)
by_platform = pytest.mark.parametrize("platform", ACCELERATORS)


def optimizer(**options):
    """Return `layerwise` as it comes, or with options for all its polar steps."""
    hybrid, left_polar = symoptax.hybrid_map(**options), symoptax.left_polar_map(**options)
    updates = {
        **dict.fromkeys(("embedding", "mlp_in", "mlp_down", "expert_in", "expert_down"), hybrid),
        "attention": symoptax.polar_map(**options),
        "lm_head": symoptax.centered(hybrid),
        "router": symoptax.centered(left_polar),
    }
    return symoptax.layerwise(
        optax.cosine_decay_schedule(4e-3, 1000),
        RULES,
        weight_decay=0.1,
        updates=updates if options else None,
    )


def small_params():
    """Return one layer and both ends of the small model: the price is in the number of leaves."""
    params = linen_params()["params"]
    del (
        params["layers_1"],
        params["layers_0"]["attn"]["k_proj"],
        params["layers_0"]["attn"]["v_proj"],
    )
    assert {leaf.role for leaf in symoptax.route(params, RULES).leaves} == set(ROLES)
    return params


def abstract_params(dtype, factor=16):
    """Return the same, by default so large that CPUs loop over the experts."""
    return jax.tree.map(
        lambda p: jax.ShapeDtypeStruct([factor * size for size in p.shape], dtype), small_params()
    )


def flat_step(tx, params, state):
    """Return a jitted step on lists of leaves, which can be serialized, and its arguments."""
    leaves, structure = jax.tree.flatten((params, state, params))

    def step(*leaves):
        params, state, grads = structure.unflatten(leaves)
        updates, state = tx.update(grads, state, params)
        return jax.tree.leaves((optax.apply_updates(params, updates), state))

    return jax.jit(step), leaves


@functools.cache
def abstract_step(dtype, numerics="default"):
    tx, params = optimizer(**OPTIONS[numerics]), abstract_params(dtype)
    return flat_step(tx, params, jax.eval_shape(tx.init, params))


def abstract_polar(shape, dtype="float32", **options):
    function = functools.partial(symoptax.polar_factor, **options)
    return jax.jit(function), [jax.ShapeDtypeStruct(shape, dtype)]


def lowered(function, arguments, *platforms):
    """Return the StableHLO of a function exported for some platforms."""
    return export.export(function, platforms=platforms)(*arguments).mlir_module()


def floats(text):
    """Return the floating dtypes of all tensors of a program in StableHLO."""
    return set(re.findall(r"[<x](b?f\d\w*)>", text))


def products(text):
    """Count the products of a program in StableHLO by their dtypes and precision."""
    precision = r"(?:precision = \[(\w+), (\w+)\] )?"
    tensor = r"tensor<(?:\d+x)*(\w+)>"
    operation = re.compile(rf"dot_general .*?{precision}: \({tensor}, {tensor}\) -> {tensor}")
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    return Counter(product(*operation.search(line).groups()) for line in lines)


def product(left_precision, right_precision, left, right, result):
    assert left_precision == right_precision
    assert left == right
    return left, result, None if left == "bf16" else (left_precision or "default").lower()


@by_platform
@by_numerics
@by_dtype
def test_every_product_of_a_step_is_in_the_dtypes_and_precision_asked_for(
    dtype, numerics, platform
):
    text = lowered(*abstract_step(dtype, numerics), platform)
    assert set(products(text)) == {PRODUCTS[numerics]}
    assert floats(text) == FLOATS[dtype] | {PRODUCTS[numerics][0]}
    assert "custom_call" not in text
    assert "stablehlo.while" not in text


@by_platform
@by_numerics
@by_dtype
def test_a_polar_factor_takes_the_products_that_are_counted(dtype, numerics, platform):
    shape, options = (4, 64, 128), OPTIONS[numerics]
    text = lowered(*abstract_polar(shape, dtype, **options), platform)
    cost = symoptax.cost(shape, dtype=dtype, **options)
    assert products(text) == {PRODUCTS[numerics]: cost.long_products + cost.small_products}
    assert floats(text) == FLOATS[dtype] | {PRODUCTS[numerics][0]}


def test_rounding_to_bfloat16_touches_the_factors_alone():
    text = lowered(*abstract_step("float32", "BFLOAT16"), "tpu")
    rounded = [line for line in text.splitlines() if re.search(r"[<x]bf16>", line)]
    operations = {re.search(r"stablehlo\.(\w+)", line)[1] for line in rounded}
    assert operations == {"convert", "dot_general"}


def test_the_default_precision_of_the_program_is_not_that_of_the_products():
    with jax.default_matmul_precision("bfloat16"):
        text = lowered(*abstract_polar((4, 64, 128)), "tpu")
    assert set(products(text)) == {PRODUCTS["default"]}


@pytest.mark.parametrize("kind", ["step", "polar_factor"])
def test_only_cpus_loop_over_matrices(kind):
    program = abstract_step("float32") if kind == "step" else abstract_polar((4, 64, 128))
    assert "stablehlo.while" in lowered(*program, "cpu")
    assert "stablehlo.while" not in lowered(*program, *ACCELERATORS)


@by_dtype
def test_x64_brings_no_float64_into_a_polar_factor(x64, dtype):
    assert floats(lowered(*abstract_polar((4, 64, 128), dtype), "tpu")) == FLOATS[dtype]


def test_x64_brings_scalars_in_float64_into_a_step_and_no_arrays(x64):
    # The scalars are the schedule and AdamW's bias correction, both Optax's.
    tx, params = optimizer(), abstract_params("float32")
    text = lowered(*flat_step(tx, params, jax.eval_shape(tx.init, params)), "tpu")
    assert [line for line in text.splitlines() if "xf64>" in line] == []
    assert set(products(text)) == {PRODUCTS["default"]}


@by_platform
@pytest.mark.parametrize("method", ["svd", "qdwh"])
def test_decompositions_lower_too(method, platform):
    text = lowered(*abstract_polar((4, 64, 128), method=method), platform)
    assert floats(text) == {"f32"}


def test_an_exported_step_computes_the_same():
    tx, params = optimizer(steps=1), small_params()  # all the time goes into compiling
    function, _ = flat_step(tx, params, tx.init(params))
    arguments = jax.tree.leaves((params, tx.init(params), grads_like(params)))
    exported = export.export(function, platforms=["cpu"])(*arguments)
    expected, result = (jax.jit(f)(*arguments) for f in (function, exported.call))
    chex.assert_trees_all_equal(result, expected)


def test_a_step_for_accelerators_goes_through_a_file():
    pytest.importorskip("flatbuffers")
    function, arguments = abstract_step("float32")
    exported = export.export(function, platforms=ACCELERATORS)(*arguments)
    loaded = export.deserialize(exported.serialize())
    assert loaded.mlir_module() == exported.mlir_module()
    assert list(loaded.in_avals) == list(exported.in_avals)


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "tpu")], ids="-".join)
def test_a_polar_factor_from_a_file_computes_the_same(platforms):
    pytest.importorskip("flatbuffers")
    d = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64, 128)), jnp.float32)
    function = jax.jit(functools.partial(symoptax.polar_factor, steps=1))
    exported = export.export(function, platforms=platforms)(d)
    loaded = export.deserialize(exported.serialize())
    chex.assert_trees_all_equal(loaded.call(d), function(d))


@pytest.fixture(scope="module")
def on_tpu():
    """Return a function that makes arguments on four TPU v5e, which nobody needs to have."""
    pytest.importorskip("libtpu")
    with pytest.MonkeyPatch.context() as patch:
        # Do not ask the network for a TPU, nor abort where another process compiles for one.
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
        mesh = Mesh(np.array(devices), "device")

        def place(x, *axes):
            sharding = NamedSharding(mesh, PartitionSpec(*axes))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        yield place


def optimised_floats(text):
    return set(re.findall(r"\b(b?f\d\w*)\[", text))


def optimised_products(text):
    """Count the products of a compiled program; the TPU compiler prints them as convolutions."""
    operation = re.compile(
        r"= (\w+)\[.* (?:convolution|dot)\((%[\w.-]+), (%[\w.-]+)\)"
        r".*?(?:operand_precision={(\w+),(\w+)}|$)"
    )
    counts = Counter()
    for computation in text.split("\n\n"):
        dtypes = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", computation))
        for line in computation.splitlines():
            if re.search(r" (convolution|dot)\(", line):
                result, left, right, *precision = operation.search(line).groups()
                counts[product(*precision, dtypes[left], dtypes[right], result)] += 1
    return counts


@pytest.mark.tpu
@by_numerics
@by_dtype
def test_a_tpu_multiplies_a_polar_factor_as_asked(on_tpu, dtype, numerics):
    shape, options = (4, 64, 128), OPTIONS[numerics]
    function, arguments = abstract_polar(shape, dtype, **options)
    text = function.lower(*map(on_tpu, arguments)).compile().as_text()
    cost = symoptax.cost(shape, dtype=dtype, **options)
    assert optimised_products(text) == {
        PRODUCTS[numerics]: cost.long_products + cost.small_products
    }
    assert optimised_floats(text) == FLOATS[dtype] | {PRODUCTS[numerics][0]}
    assert not re.search(r" (while|conditional)\(", text)


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("dtype", "numerics"),
    [("float32", n) for n in PRODUCTS] + [("bfloat16", "default"), ("bfloat16", "BFLOAT16")],
)
def test_four_tpus_multiply_in_a_step_as_asked(on_tpu, dtype, numerics):
    tx, params = optimizer(**OPTIONS[numerics]), abstract_params(dtype, factor=2)
    function, leaves = flat_step(tx, params, jax.eval_shape(tx.init, params))
    arguments = [on_tpu(x, *["device"] * bool(x.ndim)) for x in leaves]
    text = function.lower(*arguments).compile().as_text()
    assert set(optimised_products(text)) == {PRODUCTS[numerics]}
    assert optimised_floats(text) == FLOATS[dtype] | {PRODUCTS[numerics][0]}
    assert not re.search(r" (while|conditional)\(", text)


@pytest.mark.tpu
@by_numerics
def test_a_tpu_counts_the_operations_that_cost_counts(on_tpu, numerics):
    shape, options = (4, 128, 512), OPTIONS[numerics]
    function, arguments = abstract_polar(shape, **options)
    analysis = function.lower(*map(on_tpu, arguments)).compile().cost_analysis()
    counted = 2 * symoptax.cost(shape, **options).multiplications
    # What is left are elementwise passes: one in k operations.
    assert 1 < analysis["flops"] / counted < 1.02
