"""Polynomial tables made to measure: the best odd polynomials for a range of singular values."""

import math
from collections.abc import Sequence

import numpy as np

Row = Sequence[float]

_GRID = 6000
# Nearer to 1 than this, Taylor rows are as good, and the linear system has no digits left.
_CONVERGED = 3e-3
# Where a row takes its largest value, the next one is steepest: rounding must stay inside.
_MARGIN = 1e-4


def minimax_table(
    lower: float,
    steps: int = 5,
    *,
    degree: int | Sequence[int] = 5,
    cushion: float = 0.04,
    safety: float = 1.0,
) -> tuple[tuple[float, ...], ...]:
    """Compute the rows that bring singular values in [lower, 1] close to 1.

    Row by row, the odd polynomial of the given degree whose largest distance from 1 on the current
    interval is least, scaled so that the interval's image [1 - e, 1 + e], where the next row
    starts, has its middle at 1. Without cushion no composition of such polynomials ends closer to 1
    (Amsel et al., theorem 3.1), but it sends some large singular values down to 1 - e on the way,
    and back up with their rounding errors. Degree 3 without cushion gives the Chebyshev-type table
    of Grishina et al. Once the interval is within 3e-3 of 1, rows are the Taylor polynomials of
    sign(x), which converge for ever after.

    Args:
      lower: smallest singular value to care for, as a fraction of the largest, in (0, 1).
      steps: number of rows.
      degree: degree 3, 5, 7 or 9 of every row, or one degree per row.
      cushion: a row is not made for values below this fraction of the largest, so that values
        above do not come down; with 0.04 the float32 error of eight steps is a fifth of what it
        is with 0.
      safety: rows that end farther than safety - 1 from 1 are applied to x / safety, so that
        rounding cannot push a singular value out of the interval; 1.01 suits bfloat16 products, 1
        float32.

    Returns:
      Rows of coefficients of x, x^3, x^5, ..., a table for `polar_factor`.

    Raises:
      ValueError: lower outside (0, 1), steps below 1, or a degree that is not 3, 5, 7 or 9.

    Source: Amsel, Persson, Musco and Gower (2025), arXiv 2505.16932; Grishina, Smirnov and Rakhuba
    (2025), arXiv 2506.10935.

    >>> [[round(c, 4) for c in row] for row in minimax_table(0.5, 2, degree=3)]
    [[2.1328, -1.2187], [1.5065, -0.5009]]
    """
    degrees = [degree] * steps if isinstance(degree, int) else list(degree)
    if not 0 < lower < 1:
        raise ValueError(f"lower={lower}: need a fraction of the largest singular value in (0, 1).")
    if steps < 1 or len(degrees) != steps or not {*degrees} <= {3, 5, 7, 9}:
        raise ValueError(f"steps={steps}, degree={degree}: need one of 3, 5, 7, 9 for each step.")
    low, high = float(lower), 1.0
    rows: list[tuple[float, ...]] = []
    for step_degree in degrees:
        if max(1 - low, high - 1) < _CONVERGED:
            rows.append(_taylor_row(step_degree))
            continue
        row, error = _remez(max(low, cushion * high), high, np.arange(1, step_degree + 1, 2))
        center = (apply_rows([row], np.array(low)).item() + 1 + error) / 2
        factors = [1.0] * len(row)
        if error > safety - 1:
            factors = [safety ** (2 * i + 1) for i in range(len(row))]
        row = [c / center / factor for c, factor in zip(row, factors, strict=True)]
        low = apply_rows([row], np.array(low)).item()
        high = 1 + (1 + _MARGIN) * ((1 + error) / center - 1)
        rows.append(tuple(row))
    return tuple(rows)


def apply_rows(rows: Sequence[Row], x: np.ndarray) -> np.ndarray:
    """Apply the polynomials of the rows one after the other to an array of singular values."""
    for row in rows:
        x = np.asarray(x * np.polynomial.polynomial.polyval(x**2, row))
    return x


def _remez(low: float, high: float, powers: np.ndarray) -> tuple[list[float], float]:
    """Exchange points until the error alternates: the best approximation of 1 on [low, high]."""
    signs = (-1.0) ** np.arange(len(powers) + 1)
    nodes = (1 - np.cos(np.pi * np.arange(len(signs)) / len(powers))) / 2
    points = low + (high - low) * nodes
    grid = np.union1d(np.geomspace(low, high, _GRID), np.linspace(low, high, _GRID))
    row, error = [0.0] * len(powers), 0.0
    for _ in range(100):
        system = np.column_stack([points[:, None] ** powers, signs])
        *row, error = np.linalg.solve(system, np.ones(len(signs))).tolist()
        distance = 1 - apply_rows([row], grid)
        runs = np.split(np.arange(len(grid)), np.flatnonzero(np.diff(np.sign(distance))) + 1)
        peaks = [run[np.argmax(np.abs(distance[run]))] for run in runs]
        if len(peaks) != len(signs) or np.array_equal(grid[peaks], points):
            break
        points = grid[peaks]
    return row, abs(error)


def _taylor_row(degree: int) -> tuple[float, ...]:
    """Expand `x sum_j binom(2j, j) (1 - x^2)^j / 4^j`, flat at x = 1."""
    total = np.polynomial.Polynomial([0.0])
    for j in range((degree + 1) // 2):
        total += math.comb(2 * j, j) / 4**j * np.polynomial.Polynomial([1.0, -1.0]) ** j
    return tuple(total.coef.tolist())
