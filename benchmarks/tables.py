"""What every table of coefficients does to singular values, as numbers and as a plot."""

import math
import pathlib

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
import numpy as np

from symoptax import TABLES, cost
from symoptax._coefficients import coefficient_rows
from symoptax._minimax import apply_rows
from timing import table

PLOT = pathlib.Path(__file__).parents[1] / "docs" / "tables.png"
# As many steps as each is usually given.
STEPS = {"minimax_9_l3e-3": 3, "cans_cubic_l1e-3": 8, "taylor_cubic": 12, "taylor_quintic": 8}


def run() -> str:
    values = np.geomspace(1e-4, 1, 4000)
    columns = 2
    figure, axes = plt.subplots(
        math.ceil(len(TABLES) / columns), columns, figsize=(8, 7), sharex=True, sharey=True
    )
    rows = []
    for axis, name in zip(axes.flat, TABLES, strict=True):
        steps = STEPS.get(name, 5)
        result = apply_rows(coefficient_rows(name, steps), values)
        axis.axhspan(0.85, 1.15, color="0.9")
        axis.semilogx(values, result, color="C0")
        axis.set_title(f"{name}, {steps} steps", fontsize=9)
        axis.grid(alpha=0.3)
        seen = result[values >= 1e-3]
        square = cost((256, 256), steps=steps, coefficients=name)
        rows.append(
            [
                f"`{name}`",
                str(steps),
                str(square.long_products + square.small_products),
                f"{seen.min():.2f} to {seen.max():.2f}",
                f"{result.max():.2f}",
            ]
        )
    figure.supxlabel("singular value, as a fraction of the bound on the largest")
    figure.supylabel("after all steps")
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)
    plt.close(figure)
    return table(["table", "steps", "products, square", "[1e-3, 1] becomes", "largest"], rows)
