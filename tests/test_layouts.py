"""However a model stores its matrices, every one of them is updated as if it stood alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
import symoptax
from symoptax import MatrixView, ParamRule
from test_contracts import CASES

D, WIDTH = 6, 8
KERNEL = "d out -> out d"


def kernels(count, width=WIDTH, seed=0):
    """Return well-conditioned kernels, stored (in, out)."""
    return [
        oracle.conditioned(10, D, width, seed=seed + 10 * i).astype(np.float32)
        for i in range(count)
    ]


def view(pattern, **options):
    return MatrixView(pattern, **options)


# name: (how kernels are stored in one leaf, its view, how to get them back)
LAYOUTS = {
    "layers first": (
        lambda ms: np.stack(ms, 0),
        view("layer d out -> layer out d"),
        lambda x: [x[i] for i in range(3)],
    ),
    "layers second": (
        lambda ms: np.stack(ms, 1),
        view("d layer out -> layer out d"),
        lambda x: [x[:, i] for i in range(3)],
    ),
    "layers last": (
        lambda ms: np.stack(ms, 2),
        view("d out layer -> layer out d"),
        lambda x: [x[..., i] for i in range(3)],
    ),
    "experts and layers": (
        lambda ms: np.stack(ms, 0)[:, None],
        view("expert layer d out -> expert layer out d"),
        lambda x: [x[i, 0] for i in range(3)],
    ),
    "halves": (
        lambda ms: np.concatenate(ms, 1),
        view("d (part out) -> part out d", sizes={"part": 3}),
        lambda x: np.split(x, 3, 1),
    ),
    "stacked before": (
        lambda ms: np.stack(ms, 0),
        view("part d out -> part out d"),
        lambda x: [x[i] for i in range(3)],
    ),
    "stacked between": (
        lambda ms: np.stack(ms, 1),
        view("d part out -> part out d"),
        lambda x: [x[:, i] for i in range(3)],
    ),
    "interleaved": (
        lambda ms: np.stack(ms, 2).reshape(D, -1),
        view("d (out part) -> part out d", sizes={"part": 3}),
        lambda x: [x[:, i::3] for i in range(3)],
    ),
    "stored transposed": (
        lambda ms: np.concatenate(ms, 1).T,
        view("(part out) d -> part out d", sizes={"part": 3}),
        lambda x: np.split(x.T, 3, 1),
    ),
    "scanned halves": (
        lambda ms: np.stack([np.concatenate(ms, 1)] * 2, 1),
        view("d layer (part out) -> layer part out d", sizes={"part": 3}),
        lambda x: np.split(x[:, 1], 3, 1),
    ),
    "heads in one axis": (
        lambda ms: np.concatenate(ms, 1),
        view("d (head k) -> head k d", sizes={"k": WIDTH}),
        lambda x: np.split(x, 3, 1),
    ),
    "heads in an axis of their own": (
        lambda ms: np.stack(ms, 1),
        view("d head k -> head k d"),
        lambda x: [x[:, i] for i in range(3)],
    ),
}
UPDATES = {
    "attention": symoptax.polar_map(steps=8),
    "mlp_in": symoptax.hybrid_map(steps=8),
    "router": symoptax.centered(symoptax.left_polar_map()),
    "lm_head": symoptax.centered(symoptax.hybrid_map(steps=8)),
}


def trained(leaves_of, rules, role):
    """Return the parameters after three steps, from ones of the right shape."""
    tx = symoptax.layerwise(0.1, rules, updates={role: UPDATES[role]}, weight_decay=0.1)
    params = jax.tree.map(jnp.ones_like, leaves_of(0))
    state = tx.init(params)
    for seed in range(3):
        updates, state = tx.update(jax.tree.map(jnp.asarray, leaves_of(seed)), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params


@pytest.fixture(scope="module")
def alone():
    """Return role -> the kernels trained as leaves of their own."""
    rules = {role: [ParamRule("w*", role, KERNEL)] for role in UPDATES}

    def leaves(seed):
        return {f"w{i}": jnp.asarray(m) for i, m in enumerate(kernels(3, seed=seed))}

    return {role: list(trained(leaves, rules[role], role).values()) for role in UPDATES}


@pytest.mark.parametrize("role", UPDATES)
@pytest.mark.parametrize(("pack", "how", "unpack"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_gives_the_same_numbers(alone, pack, how, unpack, role):
    def leaves(seed):
        return {"w": jnp.asarray(pack(kernels(3, seed=seed)))}

    packed = trained(leaves, [ParamRule("w", role, how)], role)
    for got, want in zip(unpack(np.asarray(packed["w"])), alone[role], strict=True):
        # Converged polar steps err by 5e-6 in float32, each by its own order of sums.
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_parts_of_unequal_widths(transposed):
    widths = (8, 4, 4)

    def separate(seed):
        parts = [kernels(1, width, seed + width + i)[0] for i, width in enumerate(widths)]
        return {f"w{i}": jnp.asarray(part) for i, part in enumerate(parts)}

    def fused(seed):
        whole = jnp.concatenate(list(separate(seed).values()), 1)
        return {"w": whole.T if transposed else whole}

    stored = "(head k) d" if transposed else "d (head k)"
    how = view(f"{stored} -> (head k) d", sizes={"k": 4}, sections={"head": (2, 1, 1)})
    want = trained(separate, [ParamRule("w*", "attention", KERNEL)], "attention")
    got = trained(fused, [ParamRule("w", "attention", how)], "attention")["w"]
    got = np.split(np.asarray(got.T if transposed else got), np.cumsum(widths)[:-1], 1)
    for one, expected in zip(got, want.values(), strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-5)


@pytest.mark.parametrize("role", UPDATES)
def test_heads_packed_into_rows_are_one_matrix_in_two_ways_of_storing(role):
    """An axis of three for the heads, or one of them with the keys: the same fused matrix."""

    def apart(seed):
        return {"w": jnp.asarray(np.stack(kernels(3, seed=seed), 1))}

    def fused(seed):
        return {"w": jnp.asarray(np.concatenate(kernels(3, seed=seed), 1))}

    got = trained(apart, [ParamRule("w", role, "d head k -> (head k) d")], role)["w"]
    want = trained(fused, [ParamRule("w", role, KERNEL)], role)["w"]
    np.testing.assert_allclose(got.reshape(want.shape), want, atol=1e-5)
    # Not the heads by themselves, which are other matrices.
    by_head = trained(apart, [ParamRule("w", role, "d head k -> head k d")], role)["w"]
    assert np.max(np.abs(by_head.reshape(want.shape) - want)) > 1e-2


ON_A_MESH = {
    "attn": ParamRule("attn", "attention", "layer d out -> layer out d"),
    "head": ParamRule("head", "lm_head", "d vocab -> vocab d"),
    "router": ParamRule("router", "router", "layer d expert -> layer expert d"),
}
# Some are smaller than what is worth sending to one device, some are not.
SHAPES = {"attn": (8, 64, 72), "head": (64, 96), "router": (8, 16, 8)}
SHARDED = {
    "rows": {"attn": P(None, None, "x"), "head": P(None, "x")},
    "columns": {"attn": P(None, "x"), "head": P("x")},
    "stack": {"attn": P("x"), "head": P("x")},
}


def three_steps(place):
    """Train through one compiled step, on numbers that `place` puts where they belong."""
    tx = symoptax.layerwise(0.1, list(ON_A_MESH.values()), updates=UPDATES, weight_decay=0.1)
    params = place({name: np.ones(shape, np.float32) for name, shape in SHAPES.items()})
    state, places = tx.init(params), jax.tree.map(lambda x: x.sharding, params)
    step = jax.jit(tx.update, out_shardings=(places, None))
    for seed in range(3):
        # A smallest singular value of 0.1 at least lets the rounding of other orders of sums be.
        grads = {
            name: np.stack([oracle.conditioned(10, *shape[-2:], seed=seed + i) for i in range(8)])
            if len(shape) == 3
            else oracle.conditioned(10, *shape, seed=seed)
            for name, shape in SHAPES.items()
        }
        grads = place(jax.tree.map(np.float32, grads))
        updates, state = step(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params


@pytest.fixture(scope="module")
def on_one_device():
    return jax.device_get(three_steps(lambda tree: jax.tree.map(jnp.asarray, tree)))


@pytest.mark.parametrize("layout", SHARDED)
def test_eight_devices_give_the_numbers_of_one(on_one_device, layout):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    specs = SHARDED[layout] | {"router": SHARDED[layout]["attn"]}

    def place(tree):
        return {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in tree.items()}

    params = three_steps(place)
    for name, leaf in params.items():
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, specs[name]), leaf.ndim)
        np.testing.assert_allclose(jax.device_get(leaf), on_one_device[name], atol=1e-5)


OPTIMIZERS = {
    (name, alpha): (case, {"alpha": alpha} if graded else {})
    for name, case in CASES.items()
    for graded in ["polar_grad_m" in name and "alpha" not in case.options]
    for alpha in ((0.0, 0.5, 1.0) if graded else (None,))
}


@pytest.mark.parametrize(
    ("case", "options"), OPTIMIZERS.values(), ids=["-".join(map(str, key)) for key in OPTIMIZERS]
)
def test_no_optimizer_couples_the_matrices_of_a_stack(case, options):
    """Bit-equal, whatever the others are: zero, huge, or not numbers."""
    grads = [np.asarray(oracle.normal(8, 3, 5, seed=seed), np.float32) for seed in range(2)]
    # The twin is as large as the kernel, so that maps which gain from it compute them as one stack.
    params = {"kernel": jnp.ones((6, 4)), "stack": jnp.ones((8, 3, 5)), "twin": jnp.ones((6, 4))}
    tx = case.build(0.1, **options)
    if case.factory is symoptax.layerwise:
        rules = [*case.options["rules"], ParamRule("twin", "attention", "row col -> row col")]
        tx = symoptax.layerwise(0.1, rules)
    results, kernels_seen = [], []
    for others in (1.0, 0.0, 1e20, np.nan):
        state = tx.init(params)
        factor = np.full((8, 1, 1), others, np.float32)
        factor[2] = 1.0
        for grad in grads:
            kernel = jnp.asarray(grad.reshape(-1)[:24].reshape(6, 4))
            tree = {"kernel": kernel, "stack": jnp.asarray(grad * factor), "twin": kernel * others}
            updates, state = tx.update(tree, state, params)
        results.append(np.asarray(updates["stack"][2]))
        kernels_seen.append(np.asarray(updates["kernel"]))
    for seen in (results, kernels_seen):
        for other in seen[1:]:
            np.testing.assert_array_equal(other, seen[0])
    assert np.all(np.isfinite(results[0]))
