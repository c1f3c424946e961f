"""Memory-bound work: `row_norm_m` against the time its bytes need."""

import jax
import jax.numpy as jnp

import symoptax
from step import Stepper
from timing import paired, table

SHAPES = [(16384, 512), (4, 2048, 1024)]


class Copy:
    """Read and write an array in place."""

    def __init__(self, size: int) -> None:
        self.array = jnp.ones(size)
        self.step = jax.jit(lambda x: x + 1, donate_argnums=0)

    def __call__(self) -> jax.Array:
        self.array = self.step(self.array)
        return self.array


def run() -> str:
    rows = []
    for shape in SHAPES:
        params = {"w": jax.random.normal(jax.random.key(0), shape)}
        size = params["w"].size
        tx = symoptax.row_norm_m(1e-3)
        row_norm = Stepper(tx, params, tx.init(params), {"w": jnp.ones(shape)})
        # Gradient, momentum and parameter are read, momentum and parameter written: 5 passes.
        times = paired({"copy": Copy(5 * size // 2), "row_norm_m": row_norm}, rounds=21)
        bandwidth = 5 * size * 4 / times["copy"].seconds
        rows.append(
            [
                " x ".join(map(str, shape)),
                f"{1e3 * times['row_norm_m'].seconds:.1f} ms",
                f"{1e-9 * bandwidth:.0f} GB/s",
                f"**{times['row_norm_m'].ratio:.2f}**",
            ]
        )
    return table(["stack", "step of row_norm_m", "copy bandwidth", "time / bytes alone"], rows)
