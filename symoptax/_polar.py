"""Polar updates: two-sided (Muon, PolarGrad) and one-sided, as maps."""

import functools
import math
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

from symoptax._coefficients import coefficient_rows
from symoptax._cost import Cost, Method, Side, check_options, cost
from symoptax._map import MatrixMap
from symoptax._minimax import Row
from symoptax._newton_schulz import polar_factor
from symoptax._numerics import FLOAT32, Numerics
from symoptax._symmetry import Group, Symmetry


class PolarOptions(TypedDict, total=False):
    """The numerics of a polar step; see `polar_factor`."""

    steps: int
    method: Method
    coefficients: str | Sequence[Row] | None
    numerics: Numerics


def polar_map(**options: Unpack[PolarOptions]) -> MatrixMap:
    """Build the polar factor `U V^T` of `D = U S V^T`; commutes with O(rows) x O(cols).

    Five steps by default: enough for training, where the singular values only have to come near 1.
    """
    return _polar_map("polar", "auto", **{"steps": 5, **options})


def right_polar_map(**options: Unpack[PolarOptions]) -> MatrixMap:
    """Build `D (D^T D)^(-1/2)`, formed from the n x n Gram matrix of the columns.

    Equal to `polar_map` mathematically, and commutes with the same group; the side says which Gram
    matrix is formed. Choose it for many rows and few columns, as in embeddings. Rows that are zero
    (tokens not seen) stay exactly zero. Eight steps by default, which converge.
    """
    return _polar_map("right_polar", "right", **{"steps": 8, **options})


def left_polar_map(**options: Unpack[PolarOptions]) -> MatrixMap:
    """Build `(D D^T)^(-1/2) D`, formed from the m x m Gram matrix of the rows.

    The mirror of `right_polar_map`, for few rows and many columns, as in routers.
    """
    return _polar_map("left_polar", "left", **{"steps": 8, **options})


def _polar_map(
    name: str,
    side: Side,
    *,
    steps: int,
    method: Method = "auto",
    coefficients: str | Sequence[Row] | None = None,
    numerics: Numerics = FLOAT32,
) -> MatrixMap:
    check_options(side, method, numerics)
    # Raises here rather than in the first update.
    coefficient_rows(coefficients, steps, numerics.epsilon("float32"))
    if coefficients is not None and not isinstance(coefficients, str):
        coefficients = tuple(tuple(float(x) for x in row) for row in coefficients)
    return _checked_polar_map(name, side, method, steps, coefficients, numerics)


@functools.cache
def _checked_polar_map(
    name: str,
    side: Side,
    method: Method,
    steps: int,
    coefficients: str | tuple[Row, ...] | None,
    numerics: Numerics,
) -> MatrixMap:
    """Build a map once, so that equal ones are seen to be equal."""
    options = {
        "side": side,
        "method": method,
        "steps": steps,
        "coefficients": coefficients,
        "numerics": numerics,
    }
    return MatrixMap(
        name,
        Symmetry(Group.ORTHOGONAL, Group.ORTHOGONAL),
        (functools.partial(polar_factor, **options),),
        rms=_rms,
        grouped=True,
        work=None if method in ("svd", "qdwh") else functools.partial(_work, **options),
    )


def _work(m: int, n: int, **options: Any) -> Cost:
    return cost((m, n), **options)


def _rms(m: int, n: int) -> float:
    return 1 / math.sqrt(max(m, n))
