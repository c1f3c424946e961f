"""Which products a polar factor takes: how its steps are grouped, and what that costs."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from symoptax._coefficients import coefficient_rows
from symoptax._minimax import Row, apply_rows
from symoptax._numerics import FLOAT32, Numerics, check_numerics

Side = Literal["left", "right", "auto"]
Method = Literal["auto", "direct", "gram", "svd", "qdwh"]
Rows = tuple[tuple[float, ...], ...]

# A segment multiplies the rounding error of its Gram matrix by the square of the product of its
# slopes p'(0), and about a twentieth of that shows in the result. So slopes stay below
# 2.5 sqrt(tolerance / eps), the tolerance being what the polynomial itself leaves above 1e-3 (five
# default steps: all in one segment), but at least 256 eps (eight: slopes of 40, error 5e-6). The
# rounding error of a Gram matrix grows with its size like sqrt(k).
_FINEST_TOLERANCE = 256.0
_COARSEST_TOLERANCE = 0.15
_RESOLVED = 1e-3
_USUAL_SIZE = 1024


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the polar factor of one matrix costs; see `cost`.

    Attributes:
      method: "direct" if every step touches the long side, else "gram".
      segments: how many steps run on the Gram matrix between two visits to the long side.
      long_products: products of k x k by k x length matrices, or of two of the latter.
      small_products: products of two k x k matrices.
      multiplications: scalar multiplications (half the floating-point operations).
      bytes: bytes read and written if every product and every elementwise pass goes to memory.
      gram_size: k.
      summed_axis: the axis that the Gram matrices sum over, -1 or -2.
    """

    method: Literal["direct", "gram"]
    segments: tuple[int, ...]
    long_products: int
    small_products: int
    multiplications: int
    bytes: int
    gram_size: int
    summed_axis: int = dataclasses.field(compare=False)

    def __str__(self) -> str:
        return (
            f"{self.method}, steps {'+'.join(map(str, self.segments))}: {self.long_products} long "
            f"and {self.small_products} small products, {self.multiplications / 1e9:.3g} G "
            f"multiplications, {self.bytes / 2**20:.3g} MiB moved"
        )


def cost(
    shape: Sequence[int],
    *,
    side: Side = "auto",
    method: Method = "auto",
    steps: int = 5,
    coefficients: str | Sequence[Row] | None = None,
    numerics: Numerics = FLOAT32,
    dtype: DTypeLike = jnp.float32,
) -> Cost:
    """Count what `polar_factor` does for a stack of matrices, and say which method it takes.

    With k the size of the Gram matrix and `length` the other side, a segment of s steps makes two
    long products of `k^2 length` multiplications (its Gram matrix, and the final product), and
    small ones of `k^3`: three between steps, and in a step one for degree 5, two for degree 7 or 9,
    and none for degree 3, except in the first step, which bounds the spectral norm by a square.
    "direct" has one step per segment, "gram" as many as rounding allows, and "auto" the split with
    the fewest multiplications.

    Args:
      shape: shape `[..., m, n]` of the stack.
      side: as in `polar_factor`, like all that follow.
      method: "svd" and "qdwh" are not counted.
      steps: number of polynomial steps.
      coefficients: table or rows; None: the default for these numerics.
      numerics: dtypes and precision.
      dtype: dtype of the input.

    Returns:
      The cost of the whole stack.

    Raises:
      ValueError: unknown option, or method "svd" or "qdwh".

    >>> print(cost((4, 512, 1536)))
    gram, steps 5: 2 long and 18 small products, 12.9 G multiplications, 320 MiB moved
    """
    check_options(side, method, numerics)
    if method in ("svd", "qdwh"):
        raise ValueError(f"method={method!r} has no fixed number of products.")
    epsilon = numerics.epsilon(dtype)
    rows = coefficient_rows(coefficients, steps, epsilon)
    k, length = gram_sizes(shape[-2], shape[-1], side)
    parts = segments(rows, k, length, method, epsilon)
    small = sum(small_products(part) for part in parts) + (len(rows[0]) == 2)
    long = 2 * len(parts)
    count = math.prod(shape[:-2])
    # A product reads two matrices and writes one; a step makes one elementwise pass over three.
    entries = len(parts) * (3 * k * length + 2 * k * k) + 3 * k * k * (small + steps)
    return Cost(
        "direct" if len(parts) == steps else "gram",
        tuple(len(part) for part in parts),
        long,
        small,
        count * (long * k * k * length + small * k**3),
        count * entries * numerics.stored_as(dtype).itemsize,
        k,
        -2 if forms_right_gram(shape[-2], shape[-1], side) else -1,
    )


def check_options(side: str, method: str, numerics: Numerics) -> None:
    """Raise for a side or method that does not exist, or numerics that are none."""
    if side not in ("left", "right", "auto"):
        raise ValueError(f"side={side!r} is unknown; choose 'left', 'right' or 'auto'.")
    if method not in ("auto", "direct", "gram", "svd", "qdwh"):
        raise ValueError(f"method={method!r} is unknown; choose auto, direct, gram, svd or qdwh.")
    check_numerics(numerics)


def gram_sizes(m: int, n: int, side: Side) -> tuple[int, int]:
    """Return the size of the Gram matrix and the length of the side that it sums over."""
    return (n, m) if forms_right_gram(m, n, side) else (m, n)


def forms_right_gram(m: int, n: int, side: Side) -> bool:
    """Return whether the Gram matrix is that of the columns, `D^T D`."""
    return side == "right" or (side == "auto" and n < m)


def small_products(segment: Rows) -> int:
    """Count the k x k products of a segment: powers of R, then R <- P R P and Q <- P Q between."""
    return sum({2: 0, 3: 1}.get(len(row), 2) for row in segment) + 3 * (len(segment) - 1)


def segments(rows: Rows, k: int, length: int, method: Method, epsilon: float) -> tuple[Rows, ...]:
    """Split the steps into segments, each of which runs on one Gram matrix.

    Args:
      rows: one row per step.
      k: size of the Gram matrix.
      length: the other side.
      method: "direct", "gram" or "auto".
      epsilon: relative rounding error of the products.

    Returns:
      Consecutive rows, together all of them.
    """
    limit = _slope_limit(rows, epsilon, k)
    # best[end]: the cheapest split of the first `end` steps; by "gram" with the fewest segments.
    best: list[tuple[int, int, tuple[Rows, ...]]] = [(0, 0, ())]
    for end in range(1, len(rows) + 1):
        choices = []
        for start in range(end - 1, -1, -1):
            part = rows[start:end]
            if len(part) > 1 and (method == "direct" or math.prod(r[0] for r in part) > limit):
                break
            visits, price, parts = best[start]
            price += 2 * k * k * length + small_products(part) * k**3
            choices.append((visits + (method == "gram"), price, (*parts, part)))
        best.append(min(choices, key=lambda choice: choice[:2]))
    return best[-1][-1]


@functools.cache
def _slope_limit(rows: Rows, epsilon: float, k: int) -> float:
    residual = np.max(np.abs(1 - apply_rows(rows, np.geomspace(_RESOLVED, 1, 1000))))
    finest = min(_FINEST_TOLERANCE * epsilon, _COARSEST_TOLERANCE)
    tolerance = np.clip(residual, finest, _COARSEST_TOLERANCE).item()
    return 2.5 * math.sqrt(tolerance / epsilon) / max(1.0, k / _USUAL_SIZE) ** 0.25
