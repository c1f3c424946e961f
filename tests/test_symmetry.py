"""The symmetries themselves, and that every map commutes with its own: in float64, to rounding."""

import itertools

import jax
import numpy as np
import pytest

import symoptax
from symoptax import Group, Symmetry, centered, equivariance_error, random_element

TRIVIAL, PERMUTATION, ORTHOGONAL = Group
ALL = [Symmetry(*parts) for parts in itertools.product(Group, Group, (False, True))]
SHAPE = (10, 6)
OTHER_SHAPES = [(6, 10), (8, 8), (40, 4)]

MAPS = {
    "row_norm": symoptax.row_norm_map(),
    "column_norm": symoptax.column_norm_map(),
    "sign": symoptax.sign_map(),
    "center": symoptax.center_map(),
    "polar": symoptax.polar_map(),
    "polar_grad": symoptax.dual_norm_scaled(symoptax.polar_map(), 1.0),
    "right_polar": symoptax.right_polar_map(),
    "left_polar": symoptax.left_polar_map(),
    "hybrid": symoptax.hybrid_map(1.0),
    "polar_then_row": symoptax.hybrid_map(order="polar_then_row"),
    "hybrid_left": symoptax.hybrid_map(side="left"),
    "scaled": symoptax.scaled(symoptax.hybrid_map(), "rms"),
}
MAPS |= {
    f"centered_{name}": centered(MAPS[name])
    for name in MAPS
    if name not in ("center", "polar", "hybrid_left", "scaled")
}


def test_order_is_inclusion_of_groups():
    assert all(a <= a for a in ALL)
    for a, b in itertools.product(ALL, ALL):
        smaller = a.rows <= b.rows and a.cols <= b.cols and a.shift <= b.shift
        assert (a <= b) == smaller
        assert not (a <= b and b <= a and a != b)
    assert not Symmetry(ORTHOGONAL, PERMUTATION) <= Symmetry(PERMUTATION, ORTHOGONAL)


def test_print():
    vocabulary = Symmetry(PERMUTATION, ORTHOGONAL, shift=True)
    assert str(vocabulary) == "P(rows) x O(cols) / shift"
    assert vocabulary.describe("vocab", "d") == "P(vocab) x O(d) / shift"
    assert str(Symmetry(TRIVIAL, PERMUTATION)) == "1(rows) x P(cols)"


def test_respected_needs_at_least_the_group_and_exactly_the_shift():
    for block, offered in itertools.product(ALL, ALL):
        groups = block.rows <= offered.rows and block.cols <= offered.cols
        assert block.is_respected_by(offered) == (groups and block.shift == offered.shift)
    head, tied = (Symmetry(PERMUTATION, ORTHOGONAL, shift=s) for s in (True, False))
    assert not head.is_respected_by(MAPS["row_norm"].symmetry)
    assert not tied.is_respected_by(MAPS["centered_row_norm"].symmetry)
    assert tied.is_respected_by(MAPS["polar"].symmetry)


@pytest.mark.parametrize("name", MAPS)
def test_maps_commute_with_their_symmetry_and_every_smaller_one(x64, name):
    own = MAPS[name].symmetry
    assert own.shift == name.startswith("center")
    for number, smaller in enumerate(s for s in ALL if s <= own):
        # The polynomials commute whether they have converged or not: only rounding, 1e-16 times
        # the slopes 3000, is left.
        key = jax.random.key(number)
        error = equivariance_error(MAPS[name], smaller, SHAPE, key)
        assert error <= 1e-10, smaller


@pytest.mark.parametrize("shape", OTHER_SHAPES)
@pytest.mark.parametrize("name", MAPS)
def test_maps_commute_in_every_shape(x64, name, shape):
    assert equivariance_error(MAPS[name], MAPS[name].symmetry, shape, jax.random.key(0)) <= 1e-10


def test_no_public_map_is_forgotten():
    public = {name for name in dir(symoptax) if name.endswith("_map") and name[0] != "_"}
    assert len(public) == 8
    assert public <= {f"{name}_map" for name in MAPS}


CONTROLS = [
    ("sign", Symmetry(TRIVIAL, ORTHOGONAL)),
    ("sign", Symmetry(ORTHOGONAL, TRIVIAL)),
    ("row_norm", Symmetry(ORTHOGONAL, TRIVIAL)),
    ("column_norm", Symmetry(TRIVIAL, ORTHOGONAL)),
    ("hybrid", Symmetry(ORTHOGONAL, TRIVIAL)),
    ("polar_then_row", Symmetry(ORTHOGONAL, TRIVIAL)),
    ("centered_sign", Symmetry(TRIVIAL, ORTHOGONAL)),
    ("centered_column_norm", Symmetry(TRIVIAL, ORTHOGONAL)),
    ("center", Symmetry(ORTHOGONAL, TRIVIAL)),
    ("centered_right_polar", Symmetry(ORTHOGONAL, TRIVIAL)),
    *((name, Symmetry(TRIVIAL, TRIVIAL, shift=True)) for name in MAPS if "center" not in name),
]


@pytest.mark.parametrize(("name", "too_much"), CONTROLS)
def test_maps_do_not_commute_with_more(x64, name, too_much):
    assert not too_much <= MAPS[name].symmetry
    assert equivariance_error(MAPS[name], too_much, SHAPE, jax.random.key(0)) > 1e-2


def test_every_centered_map_needs_its_last_projection(x64):
    """Row normalisation leaves the centered subspace, so the mean row counts as an error."""
    stages = MAPS["centered_row_norm"].stages[:-1]
    unprojected = symoptax.MatrixMap("unprojected", ALL[0], stages)
    shift = Symmetry(TRIVIAL, TRIVIAL, shift=True)
    assert equivariance_error(unprojected, shift, SHAPE, jax.random.key(0)) > 1e-2


@pytest.mark.parametrize("symmetry", ALL, ids=str)
def test_random_elements_belong_to_the_group(x64, symmetry):
    left, right, shift = random_element(symmetry, SHAPE, jax.random.key(3))
    for matrix, group in ((left, symmetry.rows), (right, symmetry.cols)):
        size = len(matrix)
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-13)
        zeros_and_ones = np.all((matrix == 0) | (matrix == 1))
        assert zeros_and_ones == (group != ORTHOGONAL)
        assert np.array_equal(matrix, np.eye(size)) == (group == TRIVIAL)
    assert np.all(shift != 0) == symmetry.shift
    assert np.any(shift != 0) == symmetry.shift
