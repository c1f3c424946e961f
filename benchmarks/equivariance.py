"""How far optimizers are from commuting with each group, as a table and as a heat map."""

import pathlib

import jax
import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import optax

import symoptax
from timing import table

PLOT = pathlib.Path(__file__).parents[1] / "docs" / "equivariance.png"

OPTIMIZERS = {
    "optax.adamw": optax.adamw(0.1),
    "optax.lion": optax.lion(0.1),
    "optax.adafactor": optax.adafactor(0.1, min_dim_size_to_factor=1),
    "optax.sgd, momentum": optax.sgd(0.1, momentum=0.9),
    "optax.contrib.muon": optax.contrib.muon(0.1),
    "muon": symoptax.muon(0.1),
    "polar_grad_m": symoptax.polar_grad_m(0.1),
    "right_polar_grad_m": symoptax.right_polar_grad_m(0.1),
    "row_norm_m": symoptax.row_norm_m(0.1),
    "hybrid_polar_grad_m": symoptax.hybrid_polar_grad_m(0.1),
    "row_norm_m, centered": symoptax.row_norm_m(0.1, centered=True),
    "left_polar_grad_m, centered": symoptax.left_polar_grad_m(0.1, centered=True),
    "hybrid_polar_grad_m, centered": symoptax.hybrid_polar_grad_m(0.1, centered=True),
}


def run() -> str:
    with jax.enable_x64(True):
        measured = symoptax.equivariance_table(OPTIMIZERS, shape=(16, 10))
    figure, axis = plt.subplots(figsize=(7, 5.2), layout="constrained")
    shown = np.log10(np.maximum(measured.errors, 1e-16))
    image = axis.imshow(shown, cmap="RdYlGn_r", vmin=-16, vmax=0, aspect="auto")
    axis.set_xticks(range(len(measured.symmetries)), measured.symmetries)
    axis.set_yticks(range(len(measured.rules)), measured.rules)
    for (i, j), error in np.ndenumerate(measured.errors):
        axis.text(j, i, f"{error:.0e}", ha="center", va="center", fontsize=8)
    figure.colorbar(image, label="log10 of the error")
    figure.savefig(PLOT, dpi=110)
    plt.close(figure)
    rows = [
        [f"`{name}`", *(f"{error:.0e}" for error in errors)]
        for name, errors in zip(measured.rules, measured.errors, strict=True)
    ]
    return table(["optimizer", *measured.symmetries], rows)
