"""Every optimizer commutes with its own group and with no more, through its state: in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import symoptax
from symoptax import (
    Group,
    ParamRule,
    Role,
    Symmetry,
    equivariance_error,
    equivariance_table,
    layerwise,
    random_element,
)
from test_contracts import CASES

PERMUTE, TURN, ONE = Group.PERMUTATION, Group.ORTHOGONAL, Group.TRIVIAL
GENERATORS = {
    "P(rows)": Symmetry(PERMUTE, ONE),
    "O(rows)": Symmetry(TURN, ONE),
    "P(cols)": Symmetry(ONE, PERMUTE),
    "O(cols)": Symmetry(ONE, TURN),
    "shift": Symmetry(ONE, ONE, shift=True),
}
ROWS, BOTH = Symmetry(PERMUTE, TURN), Symmetry(TURN, TURN)
SIGNS = Symmetry(PERMUTE, PERMUTE)
CENTERED = Symmetry(PERMUTE, TURN, shift=True)
KERNEL = "input output -> output input"


def own_symmetry(name):
    """Return what an optimizer of the table commutes with, and how it sees a leaf."""
    if name.startswith("scion"):
        ball = name.split("-")[1]
        symmetry = {"spectral": BOTH, "sign": SIGNS}.get(ball, ROWS)
        return symmetry, None if ball == "embedding" else KERNEL
    if name.endswith("-centered"):
        return CENTERED, None
    if name.startswith(("row_norm", "hybrid")):
        return ROWS, None
    return BOTH, KERNEL if name.startswith("muon") else None  # the user's map is linear


OPTIMIZERS = {
    name: (case.build(0.1), *own_symmetry(name))
    for name, case in CASES.items()
    if case.factory is not layerwise
}
OPTIMIZERS |= {
    f"layerwise-{role}": (layerwise(0.1, [ParamRule("w", role, KERNEL)]), symmetry, KERNEL)
    for role, symmetry in {
        "embedding": ROWS,
        "tied_embedding": ROWS,
        "lm_head": CENTERED,
        "lm_head_no_shift": ROWS,
        "attention": BOTH,
        "mlp_in": ROWS,
        "expert_in": None,
        "router": CENTERED,
        "router_no_shift": BOTH,
    }.items()
    if symmetry
}


def check(tx, own, view, shape=(10, 6), seed=0):
    """Try every generator: within the group the error is rounding, outside of it is not."""
    for number, (name, generator) in enumerate(GENERATORS.items()):
        key = jax.random.key(seed + number)
        error = equivariance_error(tx, generator, shape, key, view=view)
        if generator <= own:
            # 1e-16, times the slopes 3000 of polar steps, times three steps of momentum.
            assert error <= 1e-10, name
        else:
            assert error > 1e-2, name


@pytest.mark.parametrize(("tx", "own", "view"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_optimizers_commute_with_their_group_and_no_more(x64, tx, own, view):
    check(tx, own, view)
    assert equivariance_error(tx, own, (10, 6), jax.random.key(9), view=view) <= 1e-10


@pytest.mark.parametrize("shape", [(6, 10), (8, 8), (40, 4)])
@pytest.mark.parametrize("name", ["polar_grad_m", "hybrid_polar_grad_m-centered"])
def test_in_every_shape(x64, name, shape):
    check(*OPTIMIZERS[name], shape=shape)


SCHEDULE = optax.linear_schedule(0.1, 0.05, 3)
THROUGH = {
    "nesterov": symoptax.row_norm_m(0.1, nesterov=True),
    "decay": symoptax.row_norm_m(0.1, weight_decay=0.3),
    "independent decay": symoptax.row_norm_m(0.1, weight_decay=0.1, independent_decay=True),
    "schedule": symoptax.row_norm_m(SCHEDULE),
    "scale": symoptax.row_norm_m(0.1, scale="rms"),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), symoptax.row_norm_m(0.1)),
    "partition": optax.partition({"a": symoptax.row_norm_m(0.1)}, {"w": "a"}),
    "injected": optax.inject_hyperparams(symoptax.row_norm_m)(SCHEDULE),
    "accumulated": optax.MultiSteps(symoptax.row_norm_m(0.1), 1).gradient_transformation(),
}


@pytest.mark.parametrize("name", THROUGH)
def test_through_whatever_stands_around_a_map(x64, name):
    check(THROUGH[name], ROWS, None)


def test_through_jit(x64):
    tx = OPTIMIZERS["hybrid_polar_grad_m"][0]
    jitted = optax.GradientTransformation(tx.init, jax.jit(tx.update))
    check(jitted, ROWS, None)


def test_decay_keeps_the_shift_and_uncentered_maps_do_not(x64):
    """Decay shrinks the mean row, which the loss does not see; a step along it is another thing."""
    shift = GENERATORS["shift"]
    for centered, commutes in ((True, True), (False, False)):
        tx = symoptax.row_norm_m(0.1, weight_decay=0.5, centered=centered)
        assert (equivariance_error(tx, shift, (10, 6), jax.random.key(0)) <= 1e-10) == commutes


CONTROLS = {
    "sign": (symoptax.sign_map(), SIGNS),
    "adamw": (optax.adamw(0.1), SIGNS),
    "lion": (optax.lion(0.1), SIGNS),
    "sgd": (optax.sgd(0.1, momentum=0.9), BOTH),
    "optax's muon": (optax.contrib.muon(0.1), BOTH),
    "cautious decay": (symoptax.polar_grad_m(0.1, weight_decay=0.5, cautious=True), SIGNS),
}


@pytest.mark.parametrize(("tx", "own"), CONTROLS.values(), ids=CONTROLS.keys())
def test_what_does_not_commute_is_seen_not_to(x64, tx, own):
    check(tx, own, None)


@pytest.mark.parametrize("name", ["row_norm_m", "polar_grad_m-rms", "layerwise-lm_head"])
def test_in_float32_to_its_rounding(name):
    tx, own, view = OPTIMIZERS[name]
    # Five polar steps amplify 6e-8 by up to 1600 in directions that are small.
    for seed in range(3):
        key = jax.random.key(seed)
        assert equivariance_error(tx, own, (12, 8), key, view=view) <= 1e-3


def test_the_table_names_its_lines_and_columns(x64):
    rules = {"adamw": optax.adamw(0.1), "row_norm": symoptax.row_norm_map()}
    table = equivariance_table(rules, steps=2)
    assert table.rules == ("adamw", "row_norm")
    assert table.symmetries == tuple(GENERATORS)
    commute = table.errors < 1e-10
    np.testing.assert_array_equal(
        commute, [[True, False, True, False, False], [True, False, True, True, False]]
    )
    lines = str(table).splitlines()
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1
    own = equivariance_table(rules, symmetries={"mine": ROWS}, steps=1)
    assert own.errors.shape == (2, 1)


def test_an_update_that_does_nothing_commutes():
    frozen = optax.set_to_zero()
    assert equivariance_error(frozen, CENTERED, (4, 3), jax.random.key(0)) == 0.0


def test_a_view_must_open_two_axes_as_one_matrix():
    with pytest.raises(ValueError, match="names 3 axes"):
        equivariance_error(
            optax.sgd(0.1), ROWS, (4, 3), jax.random.key(0), view="a layer b -> layer a b"
        )


def test_elements_act_on_stacks():
    g = random_element(CENTERED, (4, 3), jax.random.key(0))
    stack = jax.random.normal(jax.random.key(1), (2, 4, 3))
    moved = g.act(stack)
    for matrix, image in zip(stack, moved, strict=True):
        want = np.asarray(g.left) @ np.asarray(matrix) @ np.asarray(g.right) + np.asarray(g.shift)
        np.testing.assert_allclose(image, want, atol=1e-6)


RULES = [ParamRule("w", "attention", "row col -> row col"), ParamRule("b", "other")]
LIAR = symoptax.MatrixMap("liar", BOTH, (jnp.sign,), rms=lambda m, n: 1.0)
HALF_CENTERED = symoptax.MatrixMap(
    "half", CENTERED, symoptax.centered(symoptax.row_norm_map()).stages[:-1], rms=lambda m, n: 1.0
)


@pytest.mark.parametrize(
    ("role", "update_map"), [("attention", LIAR), ("lm_head", HALF_CENTERED)], ids=["sign", "half"]
)
def test_verify_measures_what_a_map_declares(role, update_map):
    rules = [ParamRule("w", role, "row col -> row col")]
    layerwise(0.1, rules, updates={role: update_map})  # believed
    with pytest.raises(ValueError, match=rf"{role}.* declares the symmetry .* is [\d.]+ of its"):
        layerwise(0.1, rules, updates={role: update_map}, verify=True)


def test_verify_passes_what_is_true_also_while_jit_traces():
    updates = {Role.ATTENTION: symoptax.polar_map(steps=3), "router": optax.scale_by_lion()}

    @jax.jit
    def create(params):
        return layerwise(0.1, RULES, updates=updates, verify=True).init(params)

    create({"w": jnp.ones((4, 3)), "b": jnp.ones(3)})
