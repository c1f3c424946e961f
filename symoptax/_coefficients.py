"""Polynomial tables of the Newton-Schulz iteration, each with its source.

A row (a, b, c, ...) is the odd polynomial `p(x) = a x + b x^3 + c x^5 + ...` that one step applies
to every singular value; a table is applied row by row and its last row repeats for ever.
"""

import functools
from collections.abc import Sequence

import numpy as np

from symoptax._minimax import Row, apply_rows

# One row of degree 9, then degree 5: `minimax_table(7e-4, 7, degree=(9, 5, 5, 5, 5, 5, 5))`.
# The long row costs one product more and makes room for a bound on the largest singular value that
# is 1.5 times too large: 1e-3 / 1.5 still ends at 0.87.
_MINIMAX_9_5_L7E_4: tuple[Row, ...] = (
    (
        14.068163546113318,
        -121.67283625308926,
        389.58321421937774,
        -491.4200921317156,
        211.43170294656522,
    ),
    (4.03493868292553, -2.8189491861460634, 0.5172704441646379),
    (3.8594032481914438, -2.779155814887566, 0.5256367769351549),
    (3.21958504004887, -2.41421626788144, 0.5015726778961476),
    (2.22154165864481, -1.5969021123623874, 0.4110200288228245),
    (1.8844390875390427, -1.2604403271768725, 0.3760384795713555),
)

# `minimax_table(3e-3, 5, degree=9)`.
_MINIMAX_9_L3E_3: tuple[Row, ...] = (
    (
        13.84420901082869,
        -119.73589662266028,
        383.3813437755772,
        -483.59705552838483,
        208.0658699703828,
    ),
    (
        6.280683496624864,
        -14.160758259061186,
        11.8199731667116,
        -3.8868030993762783,
        0.4359464206621645,
    ),
    (
        3.766049056747858,
        -7.4600618543370105,
        6.842973500992769,
        -2.645242202823047,
        0.3589826475431119,
    ),
    (
        2.489208935230014,
        -3.3685276764054413,
        3.044463896305183,
        -1.4407393735481588,
        0.2755867616771631,
    ),
)

# Amsel, Persson, Musco and Gower (2025), "The Polar Express", arXiv 2505.16932, algorithm 1:
# near-minimax quintics for singular values in [1e-3, 1]. As printed, before the safety factor.
_POLAR_EXPRESS_L1E_3: tuple[Row, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)

# The same paper, on finite precision: every row but the converged one is applied to x / 1.01, so
# that rounding cannot push a singular value out of the interval on which the next row contracts.
_SAFETY = 1.01

# Grishina, Smirnov and Rakhuba (2025), "Accelerating Newton-Schulz Iteration for Orthogonalization
# via Chebyshev-type Polynomials", arXiv 2506.10935: the best cubics for [1e-3, 1], which are
# `minimax_table(1e-3, 10, degree=3, cushion=0)`.
_CANS_CUBIC_L1E_3: tuple[Row, ...] = (
    (5.180102193484862, -5.1749220964662985),
    (2.583900135208049, -0.647583621496535),
    (2.561936195852286, -0.6447063987254843),
    (2.5075124503258235, -0.6375604352731139),
    (2.382007681026466, -0.6209879684902501),
    (2.1374930184694114, -0.5882968325004081),
    (1.8030972557554825, -0.5425987934818647),
    (1.5624314388534248, -0.508871671016037),
    (1.5025274880355357, -0.5003575614245757),
)

# Taylor rows of sign(x) at 1 (Higham, "Functions of Matrices", 2008, section 8.3): p(1) = 1 with
# the first one or two derivatives zero; they converge for singular values in (0, sqrt(3)), slowly.
_TAYLOR_CUBIC: Row = (1.5, -0.5)
_TAYLOR_QUINTIC: Row = (1.875, -1.25, 0.375)
_TAYLOR_9: Row = (2.4609375, -3.28125, 2.953125, -1.40625, 0.2734375)

TABLES: dict[str, tuple[Row, ...]] = {
    # Five rows map [7e-4, 1] into [0.90, 1.10], seven into 1 +- 1e-9.
    "minimax_9_5_l7e-4": (*_MINIMAX_9_5_L7E_4, _TAYLOR_QUINTIC),
    # Three rows map [3e-3, 1] into [0.85, 1.15], four into 1 +- 4e-5. Three take fewer products
    # than five of muon_quintic and leave less error on matrices of condition up to 300.
    "minimax_9_l3e-3": (*_MINIMAX_9_L3E_3, _TAYLOR_9),
    # Five rows map [1e-3, 1] into [0.84, 1.13]; eight rows into 1 +- 1e-15. For bfloat16 products.
    "polar_express_l1e-3_s1.01": (
        *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS_L1E_3),
        _TAYLOR_QUINTIC,
    ),
    # Ten rows map [1e-3, 1] into 1 +- 8e-6; two products a row instead of three.
    "cans_cubic_l1e-3": (*_CANS_CUBIC_L1E_3, _TAYLOR_CUBIC),
    # You Jiacheng (2025), as in microsoft/dion and in optax: five rows map [1e-2, 1] into
    # [0.97, 1.04] and less than that up to 1.15; many rows end at 0.989.
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Keller Jordan (2024), "Muon": tuned for a steep slope at 0. It never converges: singular
    # values above 1e-3 end anywhere in [0.47, 1.21] after five steps, in [0.68, 1.14] after many.
    "muon_quintic": ((3.4445, -4.7750, 2.0315),),
    "taylor_cubic": (_TAYLOR_CUBIC,),
    "taylor_quintic": (_TAYLOR_QUINTIC,),
}

# For products in float32 and in less: rows of degree 9 add up terms of which bfloat16 and TF32
# leave errors of a tenth, and without a safety factor the next row sends those off. The cubic table
# brings the largest singular values down to 0.005 on their way, less than what bfloat16 resolves.
_FINE, _COARSE = "minimax_9_5_l7e-4", "polar_express_l1e-3_s1.01"
_NEED_FLOAT32 = ("minimax_9_5_l7e-4", "minimax_9_l3e-3", "cans_cubic_l1e-3")
_COARSER_THAN_FLOAT32 = 2.0**-12

# A table cut short ends in the middle of its work, where singular values are up to 2. Coarse
# products add a few of their rounding errors.
_HIGHEST = 1.25
_ROUNDING = 5


def coefficient_rows(
    table: str | Sequence[Row] | None, steps: int, epsilon: float = 2.0**-23
) -> tuple[tuple[float, ...], ...]:
    """Return the rows of `steps` steps: the first rows of the table, then its last row repeated.

    A named table of which so few rows are taken that they lead above 1.25 has the last of them
    scaled down to that, rounding included; rows of your own are left as they are.

    Args:
      table: a name in `TABLES`, rows of your own of two to five coefficients, or None for the
        default: "minimax_9_5_l7e-4" where products are in float32, and otherwise
        "polar_express_l1e-3_s1.01".
      steps: number of steps, at least 1.
      epsilon: relative rounding error of the products.

    Raises:
      ValueError: unknown or empty table, one that needs finer products, a row of another length,
        or fewer than one step.

    >>> coefficient_rows("taylor_cubic", 2)
    ((1.5, -0.5), (1.5, -0.5))
    """
    if table is None:
        table = _COARSE if epsilon > _COARSER_THAN_FLOAT32 else _FINE
    if not np.iterable(table) or (isinstance(table, str) and table not in TABLES):
        raise ValueError(
            f"coefficients={table!r} is unknown; choose from {sorted(TABLES)}, or pass rows."
        )
    if isinstance(table, str) and table in _NEED_FLOAT32 and epsilon > _COARSER_THAN_FLOAT32:
        raise ValueError(
            f"coefficients={table!r} needs products in float32, not with a rounding error of "
            f"{epsilon:.1g}; leave coefficients out, or choose {_COARSE!r}."
        )
    rows = TABLES[table] if isinstance(table, str) else tuple(table)
    if not isinstance(steps, int | np.integer) or steps < 1 or not rows:
        raise ValueError(
            f"steps={steps!r} with {len(rows)} coefficient rows: need whole numbers, at least 1."
        )
    if wrong := [row for row in rows if np.ndim(row) != 1 or not 2 <= len(row) <= 5]:
        raise ValueError(f"Coefficient rows have two to five entries (degree 3 to 9), not {wrong}.")
    taken = tuple(tuple(float(c) for c in rows[min(step, len(rows) - 1)]) for step in range(steps))
    return _lowered(taken, epsilon) if isinstance(table, str) else taken


@functools.cache
def _lowered(rows: tuple[tuple[float, ...], ...], epsilon: float) -> tuple[tuple[float, ...], ...]:
    limit = _HIGHEST / (1 + _ROUNDING * epsilon)
    values = np.union1d(np.linspace(0, 1, 5001), np.geomspace(1e-6, 1, 5001))
    highest = np.max(apply_rows(rows, values))
    last = tuple(c * min(1.0, limit / float(highest)) for c in rows[-1])
    return (*rows[:-1], last)
