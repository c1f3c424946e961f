"""Polynomial tables of the Newton-Schulz iteration, each with its source.

A row (a, b, c) is the odd polynomial `p(x) = a x + b x^3 + c x^5` that one step applies to every
singular value; a table is applied row by row and its last row repeats for ever.
"""

from collections.abc import Sequence

Row = tuple[float, float, float]

# Amsel, Persson, Musco and Gower (2025), "The Polar Express", arXiv 2505.16932, algorithm 1:
# minimax odd quintics for singular values in [1e-3, 1]. As printed there, before the safety factor.
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

# Taylor rows of sign(x) at 1 (Higham, "Functions of Matrices", 2008, section 8.3): p(1) = 1 with
# the first one or two derivatives zero; they converge for singular values in (0, sqrt(3)), slowly.
_TAYLOR_CUBIC: Row = (1.5, -0.5, 0.0)
_TAYLOR_QUINTIC: Row = (1.875, -1.25, 0.375)

TABLES: dict[str, tuple[Row, ...]] = {
    # Five rows map [1e-3, 1] into [0.84, 1.13]; eight rows into 1 +- 1e-15.
    "polar_express_l1e-3_s1.01": (
        *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS_L1E_3),
        _TAYLOR_QUINTIC,
    ),
    # Keller Jordan (2024), "Muon": tuned for a steep slope at 0. It never converges: singular
    # values above 1e-3 end anywhere in [0.47, 1.21] after five steps, in [0.68, 1.14] after many.
    "muon_quintic": ((3.4445, -4.7750, 2.0315),),
    "taylor_cubic": (_TAYLOR_CUBIC,),
    "taylor_quintic": (_TAYLOR_QUINTIC,),
}

DEFAULT_TABLE = "polar_express_l1e-3_s1.01"


def coefficient_rows(table: str | Sequence[Row], steps: int) -> tuple[Row, ...]:
    """Return the rows of `steps` steps: the first rows of the table, then its last row repeated.

    Args:
      table: a name in `TABLES`, or rows (a, b, c) of your own.
      steps: number of steps, at least 1.

    Raises:
      ValueError: unknown table, empty table or fewer than one step.

    >>> coefficient_rows("taylor_cubic", 2)
    ((1.5, -0.5, 0.0), (1.5, -0.5, 0.0))
    """
    if isinstance(table, str):
        if table not in TABLES:
            raise ValueError(f"coefficients={table!r} is unknown; choose from {sorted(TABLES)}.")
        table = TABLES[table]
    if steps < 1 or not table:
        raise ValueError(
            f"steps={steps} with {len(table)} coefficient rows: need at least 1 of each."
        )
    rows = [(float(a), float(b), float(c)) for a, b, c in table]
    return tuple(rows[min(step, len(rows) - 1)] for step in range(steps))
