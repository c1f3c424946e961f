"""Every optimizer commutes with its own group and with no more, through its state: in float64."""

import re

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
# The default of a sigmoid router, the left polar factor, commutes with more than its role asks for.
OPTIMIZERS |= {
    f"layerwise-{role}": (
        layerwise(0.1, [ParamRule("w", role, KERNEL)]),
        BOTH if role == Role.ROUTER_NO_SHIFT else role.symmetry,
        KERNEL,
    )
    for role in Role
    if role.symmetry is not None
}
every_optimizer = pytest.mark.parametrize(
    ("tx", "own", "view"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys()
)


def check(tx, own, view, shape=(10, 6), seed=0):
    """Try every generator: within the group the error is rounding, outside of it is not."""
    for number, (name, generator) in enumerate(GENERATORS.items()):
        key = jax.random.key(seed + number)
        error = equivariance_error(tx, generator, shape, key, view=view)
        if generator <= own:
            # 1e-16, times the slopes 3000 of polar steps, times three steps of momentum.
            assert error <= 1e-10, name
        else:
            assert error > 1e-2, name  # 0.04 at least, where a constrained Scion shrinks W most


@every_optimizer
def test_optimizers_commute_with_their_group_and_no_more(x64, tx, own, view):
    check(tx, own, view)
    assert equivariance_error(tx, own, (10, 6), jax.random.key(9), view=view) <= 1e-10


@every_optimizer
@pytest.mark.parametrize("shape", [(6, 10), (8, 8)])
def test_in_every_shape(x64, tx, own, view, shape):
    assert equivariance_error(tx, own, shape, jax.random.key(0), view=view) <= 1e-10


@pytest.mark.slow
@every_optimizer
@pytest.mark.parametrize("shape", [(6, 10), (8, 8), (40, 4)])
def test_in_every_shape_with_no_more_than_their_group(x64, tx, own, view, shape):
    check(tx, own, view, shape)


def jitted(tx):
    """Compile once what would otherwise compile a loop or a branch at every call."""
    return optax.GradientTransformation(tx.init, jax.jit(tx.update))


SCHEDULE = optax.linear_schedule(0.1, 0.05, 3)
THROUGH = {
    "nesterov": symoptax.row_norm_m(0.1, nesterov=True),
    "decay": symoptax.row_norm_m(0.1, weight_decay=0.3),
    "independent decay": symoptax.row_norm_m(0.1, weight_decay=0.1, independent_decay=True),
    "schedule": symoptax.row_norm_m(SCHEDULE),
    "scale": symoptax.row_norm_m(0.1, scale="rms"),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), symoptax.row_norm_m(0.1)),
    "partition": optax.partition({"a": symoptax.row_norm_m(0.1)}, {"w": "a"}),
    "mask": optax.masked(symoptax.row_norm_m(0.1), {"w": True}),
    "by hand": optax.chain(optax.trace(0.9), symoptax.row_norm(), optax.scale(-0.1)),
    "injected": optax.inject_hyperparams(symoptax.row_norm_m)(SCHEDULE),
    "accumulated": jitted(optax.MultiSteps(symoptax.row_norm_m(0.1), 1).gradient_transformation()),
}


@pytest.mark.parametrize("name", THROUGH)
def test_through_whatever_stands_around_a_map(x64, name):
    check(THROUGH[name], ROWS, None)


def test_through_jit(x64):
    check(jitted(OPTIMIZERS["hybrid_polar_grad_m"][0]), ROWS, None)


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
    "optax's muon": (jitted(optax.contrib.muon(0.1)), BOTH),
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
    assert lines[0].split("  ")[-1].strip() == "shift"
    assert [line.split()[0] for line in lines[1:]] == ["adamw", "row_norm"]
    own = equivariance_table(rules, (6, 4), jax.random.key(1), symmetries={"mine": ROWS}, steps=1)
    assert own.symmetries == ("mine",)
    for (error,), rule in zip(own.errors, rules.values(), strict=True):
        assert error == equivariance_error(rule, ROWS, (6, 4), jax.random.key(1), steps=1)
    assert f"{own.errors[0, 0]:.0e}" in str(own)


def test_an_update_that_does_nothing_commutes():
    frozen = optax.set_to_zero()
    assert equivariance_error(frozen, CENTERED, (4, 3), jax.random.key(0)) == 0.0


def test_the_view_says_which_axis_the_rows_are(x64):
    stored, kernel = symoptax.row_norm_m(0.1), symoptax.row_norm_m(0.1, view=KERNEL)
    turn, key = GENERATORS["O(rows)"], jax.random.key(0)
    errors = [
        equivariance_error(stored, turn, (10, 6), key),
        equivariance_error(kernel, turn, (10, 6), key, view=KERNEL),
    ]
    # The same matrices, stored in two ways: the same number, which is none of rounding.
    np.testing.assert_allclose(*errors, rtol=1e-10)
    assert errors[0] > 1e-2
    # Seen by the wrong view, a row norm seems to commute with what it does not, and the reverse.
    assert equivariance_error(kernel, turn, (10, 6), key) <= 1e-10
    assert equivariance_error(kernel, ROWS, (10, 6), key) > 1e-2
    assert equivariance_error(kernel, ROWS, (10, 6), key, view=KERNEL) <= 1e-10
    assert equivariance_error(kernel, ROWS, (8, 8), key, view=KERNEL) <= 1e-10


def counting(break_at):
    """Return a transformation of a user's own, with a state of its own, and one wrong step."""

    def update(updates, state, params=None):
        count, seen = state
        wrong = jax.tree.map(jnp.sign, updates)
        updates = wrong if count == break_at else updates
        return updates, (count + 1, (*seen, updates))

    return optax.GradientTransformation(lambda params: (1, ()), update)


def test_one_wrong_step_of_any_state_is_seen(x64):
    for steps, wrong in ((1, False), (2, False), (3, True), (4, True)):
        error = equivariance_error(counting(3), BOTH, (6, 4), jax.random.key(0), steps=steps)
        assert (error > 1e-2) == wrong
        assert wrong or error <= 1e-10


def test_parameters_move_with_their_updates(x64):
    """A rule that goes wrong only where it has moved W is wrong from the second step on."""

    def update(updates, state, params):
        moved = not np.array_equal(params["w"], state["w"])
        return jax.tree.map(jnp.sign if moved else jnp.copy, updates), state

    tx = optax.GradientTransformation(lambda params: params, update)
    for steps, wrong in ((1, False), (2, True)):
        error = equivariance_error(tx, BOTH, (6, 4), jax.random.key(0), steps=steps)
        assert (error > 1e-2) == wrong


def test_the_error_is_relative_and_of_the_dtype(x64):
    key = jax.random.key(0)
    sizes = [
        equivariance_error(lambda d, c=c: c * jnp.sign(d), GENERATORS["O(rows)"], (6, 4), key)
        for c in (1e-9, 1e9)
    ]
    np.testing.assert_allclose(*sizes, rtol=1e-10)
    assert sizes[0] > 1e-2
    seen = []

    def polar(d):
        seen.append(d.dtype)
        return symoptax.polar_map()(d)

    double, single = (
        equivariance_error(polar, BOTH, (6, 4), key, dtype) for dtype in (None, jnp.float32)
    )
    assert isinstance(double, float)
    assert double <= 1e-12 < 1e-8 < single <= 1e-3
    assert seen == 6 * [jnp.float64] + 6 * [jnp.float32]


def test_what_is_no_number_does_not_commute():
    error = equivariance_error(lambda d: d / 0, BOTH, (4, 3), jax.random.key(0))
    assert not error <= 1e-2


NOT_TWO_AXES = {
    "names 3 axes": "a layer b -> layer a b",
    "does not open": symoptax.MatrixView("(part a) b -> part a b", sizes={"part": 2}),
    "does not open a": symoptax.MatrixView("a b -> a b", sections={"a": (2, 2)}),
}


@pytest.mark.parametrize("message", NOT_TWO_AXES)
def test_a_view_must_open_two_axes_as_one_matrix(message):
    with pytest.raises(ValueError, match=message):
        equivariance_error(
            optax.sgd(0.1), ROWS, (4, 4), jax.random.key(0), view=NOT_TWO_AXES[message]
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
    declared = re.escape(f"'{role}' declares the symmetry {update_map.symmetry}, but is ")
    with pytest.raises(ValueError, match=declared + r"\d\.\d+ of its size"):
        layerwise(0.1, rules, updates={role: update_map}, verify=True)


def test_verify_passes_what_is_true_also_while_jit_traces():
    # Every other role keeps its default; transformations and AdamW declare nothing.
    updates = {Role.EXPERT_DOWN: optax.scale_by_lion(), "embedding": "adamw"}

    @jax.jit
    def create(params):
        return layerwise(0.1, RULES, updates=updates, verify=True).init(params)

    create({"w": jnp.ones((4, 3)), "b": jnp.ones(3)})
