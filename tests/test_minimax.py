"""Tables of polynomials: the stored ones, those that are made, and the rows that are taken."""

import numpy as np
import pytest

from symoptax import TABLES, _minimax, minimax_table
from symoptax._coefficients import coefficient_rows
from symoptax._minimax import apply_rows

MADE = {
    "minimax_9_5_l7e-4": {"lower": 7e-4, "steps": 7, "degree": (9, 5, 5, 5, 5, 5, 5)},
    "minimax_9_l3e-3": {"lower": 3e-3, "steps": 5, "degree": 9},
    "cans_cubic_l1e-3": {"lower": 1e-3, "steps": 10, "degree": 3, "cushion": 0.0},
}
# Amsel et al. (2025), algorithm 1, before the safety factor, and the cushion of their code.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
CUSHION = 0.02407327424182761


def singular_values(low, high=1.0):
    return np.union1d(np.geomspace(low, high, 20001), np.linspace(low, high, 20001))


@pytest.mark.parametrize("name", MADE)
def test_stored_rows_are_made_by_minimax_table(name):
    made = minimax_table(**MADE[name])
    assert len(made) == len(TABLES[name])
    for row, stored in zip(made, TABLES[name], strict=True):
        np.testing.assert_allclose(row, stored, rtol=1e-10)


def test_polar_express_is_a_minimax_table(monkeypatch):
    made = minimax_table(1e-3, 7, cushion=CUSHION)
    # From the second row on, the interval is 1e-4 wider here, against rounding.
    for row, printed in zip(made, POLAR_EXPRESS, strict=True):
        np.testing.assert_allclose(row, printed, rtol=3e-4)
    monkeypatch.setattr(_minimax, "_MARGIN", 0.0)
    made = minimax_table(1e-3, 7, cushion=CUSHION)
    for row, printed in zip(made[:6], POLAR_EXPRESS[:6], strict=True):
        np.testing.assert_allclose(row, printed, rtol=2e-8)
    # The paper still optimises on an interval of 1e-3 around 1, where Taylor's row is taken here.
    np.testing.assert_allclose(made[6], POLAR_EXPRESS[6], rtol=2e-6)
    stored = TABLES["polar_express_l1e-3_s1.01"]
    for row, printed in zip(stored[:7], POLAR_EXPRESS, strict=True):
        np.testing.assert_allclose(row * 1.01 ** np.array([1, 3, 5]), printed, rtol=1e-12)


@pytest.mark.parametrize(
    ("table", "steps", "lower", "least", "most"),
    [
        ("minimax_9_5_l7e-4", 5, 7e-4, 0.90, 1.10),
        ("minimax_9_5_l7e-4", 5, 1e-3 / 1.5, 0.87, 1.10),
        ("minimax_9_5_l7e-4", 7, 7e-4, 1 - 1e-9, 1 + 1e-9),
        ("minimax_9_l3e-3", 3, 3e-3, 0.85, 1.15),
        ("minimax_9_l3e-3", 4, 3e-3, 1 - 4e-5, 1 + 4e-5),
        ("polar_express_l1e-3_s1.01", 5, 1e-3, 0.84, 1.13),
        ("polar_express_l1e-3_s1.01", 8, 1e-3, 1 - 4e-15, 1 + 4e-15),
        ("cans_cubic_l1e-3", 10, 1e-3, 1 - 8e-6, 1 + 8e-6),
        ("dion", 5, 1e-2, 0.97, 1.04),
        ("dion", 5, 1e-9, 0, 1.15),
        ("dion", 50, 1e-6, 0.9885, 0.9895),
        ("muon_quintic", 5, 1e-3, 0.47, 1.21),
        ("muon_quintic", 50, 1e-3, 0.68, 1.14),
        ("muon_quintic", 51, 1e-3, 0.68, 1.14),
        ("taylor_cubic", 30, 1e-3, 1 - 1e-15, 1 + 1e-15),
        ("taylor_quintic", 20, 1e-3, 1 - 1e-15, 1 + 1e-15),
    ],
)
def test_ranges(table, steps, lower, least, most):
    result = apply_rows(coefficient_rows(table, steps), singular_values(lower))
    assert least <= result.min() <= result.max() <= most


def test_three_rows_of_degree_9_beat_five_of_muon():
    s = singular_values(1 / 300)
    three, five = (
        np.max(np.abs(1 - apply_rows(coefficient_rows(*table), s)))
        for table in (("minimax_9_l3e-3", 3), ("muon_quintic", 5))
    )
    assert three < five / 2


@pytest.mark.parametrize("degree", [3, 5, 7, 9])
@pytest.mark.parametrize("lower", [0.7, 0.1, 1e-3, 1e-6])
def test_the_error_of_a_row_equioscillates(degree, lower):
    """By Chebyshev's theorem no odd polynomial of the degree comes closer to 1 on [lower, 1]."""
    (row,) = minimax_table(lower, 1, degree=degree, cushion=0.0)
    s = singular_values(lower)
    error = 1 - apply_rows([row], s)
    largest = np.max(np.abs(error))
    # The grid misses peaks by its square at most; near 1 - lower = 0.3 errors of degree 9 are 1e-6.
    extrema = np.flatnonzero(np.abs(error) >= largest * (1 - 1e-4) - 1e-12)
    alternations = np.count_nonzero(np.diff(np.sign(error[extrema])))
    assert alternations == (degree + 1) // 2
    assert largest < 1 - lower


@pytest.mark.parametrize("cushion", [0.0, 0.04])
@pytest.mark.parametrize("safety", [1.0, 1.01])
def test_rows_map_onto_an_interval_around_one(cushion, safety):
    rows = minimax_table(1e-4, 4, degree=(9, 3, 5, 7), cushion=cushion, safety=safety)
    s = singular_values(1e-4)
    for row in rows:
        s = apply_rows([row], s)
        # Inside the interval for which the next row is made, which has a margin of 1e-4; values
        # at its ends are lowered by the safety factor, which lowers small ones most.
        np.testing.assert_allclose(
            s.max() - 1, 1 - s.min(), rtol=0, atol=5e-3 if safety > 1 else 1e-4
        )


def test_no_cushion_ends_closest_to_one():
    s = singular_values(1e-3)
    errors = [
        np.max(np.abs(1 - apply_rows(minimax_table(1e-3, 5, cushion=cushion), s)))
        for cushion in (0.0, 0.01, 0.04, 0.1)
    ]
    assert errors == sorted(errors)


@pytest.mark.parametrize("safety", [1.0, 1.01])
@pytest.mark.parametrize("cushion", [0.0, 0.04])
@pytest.mark.parametrize("degree", [3, 5, 7, 9])
def test_convergence(degree, cushion, safety):
    for lower in (0.999, 0.9, 0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        # Below 3e-3 of 1 rows double or more the number of digits; 20 cubics suffice for 1e-6.
        rows = minimax_table(lower, 22, degree=degree, cushion=cushion, safety=safety)
        s = np.union1d(singular_values(lower), np.linspace(0, lower, 2001))
        for row in rows:
            s = apply_rows([row], s)
            assert 0 <= s.min() <= s.max() < 2
        np.testing.assert_allclose(s[s.size - 20001 :], 1, rtol=0, atol=1e-15)


def test_converged_rows_are_taylor_rows():
    for degree, name in ((3, "taylor_cubic"), (5, "taylor_quintic")):
        assert minimax_table(0.999, 2, degree=degree) == TABLES[name] * 2
        assert minimax_table(1e-3, 20, degree=degree)[-1:] == TABLES[name]
    # sign(x) and its Taylor rows agree at 1 to the order of the row.
    (row,) = minimax_table(0.999, 1, degree=9)
    near = 1 - np.array([1e-2, 1e-3])
    error = 1 - apply_rows([row], near)
    np.testing.assert_allclose(error[0] / error[1], 1e5, rtol=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lower": 0.0}, "lower=0.0"),
        ({"lower": 1.0}, "lower=1.0"),
        ({"lower": -0.5}, "lower=-0.5"),
        ({"lower": float("nan")}, "lower=nan"),
        ({"lower": 0.1, "steps": 0}, "steps=0"),
        ({"lower": 0.1, "degree": 4}, "degree=4"),
        ({"lower": 0.1, "degree": 11}, "degree=11"),
        ({"lower": 0.1, "steps": 3, "degree": (9, 5)}, r"steps=3, degree=\(9, 5\)"),
    ],
)
def test_no_table_for_nonsense(options, message):
    with pytest.raises(ValueError, match=message):
        minimax_table(**options)


@pytest.mark.parametrize("steps", range(1, 13))
@pytest.mark.parametrize("table", TABLES)
def test_first_rows_are_taken_and_the_last_repeats(table, steps):
    stored = TABLES[table]
    taken = coefficient_rows(table, steps)
    assert taken[:-1] == (stored + stored[-1:] * steps)[: steps - 1]
    # Only the last row may have been lowered, as a whole, and no more than needed.
    ratios = np.array(taken[-1]) / (stored + stored[-1:] * steps)[steps - 1]
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-12)
    s = np.union1d(np.linspace(0, 1, 20001), np.geomspace(1e-9, 1, 20001))
    highest = np.max(apply_rows(taken, s))
    assert highest <= 1.25 + 1e-6  # peaks fall between the points of the grid
    assert ratios[0] == 1 if highest < 1.2499 else ratios[0] <= 1


def test_rows_of_your_own_are_taken_as_they_are():
    high = ((2.0, 0.0, 0.0), (3.0, 1.0))
    assert coefficient_rows(high, 1) == high[:1]
    assert coefficient_rows(high, 4) == (high[0], high[1], high[1], high[1])
    # From lists and integers too; rows are hashable floats.
    (row,) = coefficient_rows([[3, -1, 2]], 1)
    assert row == (3.0, -1.0, 2.0)
    assert all(type(c) is float for c in row)
    assert coefficient_rows(TABLES["muon_quintic"], 3) == TABLES["muon_quintic"] * 3


@pytest.mark.parametrize(
    ("table", "steps", "message"),
    [
        ("polar_express", 5, "'polar_express' is unknown.*minimax_9_5_l7e-4"),
        ((), 5, "0 coefficient rows"),
        ("dion", 0, "steps=0"),
        (((1.0,),), 5, "two to five"),
        (((1.0, 2.0), (1.0,) * 6), 5, "two to five"),
        (((1.0, 2.0), ()), 1, "two to five"),
    ],
)
def test_rows_that_do_not_exist(table, steps, message):
    with pytest.raises(ValueError, match=message):
        coefficient_rows(table, steps)


def test_coarse_products_leave_room_for_their_rounding():
    s = singular_values(1e-3)
    for steps in range(1, 13):
        taken = coefficient_rows("polar_express_l1e-3_s1.01", steps, 2.0**-7)
        assert np.max(apply_rows(taken, s)) <= 1.25 / (1 + 5 * 2.0**-7) + 1e-6
    # Muon's own overshoot is below that.
    assert coefficient_rows("muon_quintic", 5, 2.0**-7) == TABLES["muon_quintic"] * 5
