"""Weights of gpt-oss in four bits: blocks of 32 numbers that share a power of two.

Open Compute Project, *OCP Microscaling Formats (MX) Specification* (2023), version 1.0: MXFP4.
"""

import numpy as np

# E2M1: a sign, two bits of exponent, one of mantissa.
_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
# Both numbers of a byte, that of the low half first.
_PAIRS = np.stack([_VALUES[np.arange(256) % 16], _VALUES[np.arange(256) // 16]], axis=-1)


def shape_of(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of `dequantized` from that of its blocks."""
    *batch, rows, groups, size = blocks
    return (*batch, groups * size * 2, rows)


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the numbers as float32 `(..., columns, rows)`, exactly.

    Args:
      blocks: bytes `(..., rows, columns / 32, 16)`, two numbers in each.
      scales: bytes `(..., rows, columns / 32)`; `s` stands for `2^(s - 127)`, 255 for NaN.
    """
    powers = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
    numbers = _PAIRS[blocks].reshape(*scales.shape, -1)
    numbers *= powers[scales][..., None]
    return numbers.reshape(*blocks.shape[:-2], -1).swapaxes(-1, -2)
