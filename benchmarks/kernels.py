"""Orthogonalisation of stacks: `polar_factor` against optax's kernel and the machine's limit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from optax.contrib import _muon  # its kernel has no public name

from symoptax import cost, polar_factor
from timing import paired, table

SHAPES = [
    (4, 512, 512),
    (1024, 1024),
    (512, 1536),
    (4, 512, 1536),
    (8, 256, 1024),
    (1024, 4096),
    (64, 128, 512),
    (256, 16384),
    (512, 16384),
    (16384, 512),
]
MUON = (3.4445, -4.7750, 2.0315)
FAST = {"steps": 3, "coefficients": "minimax_9_l3e-3"}


def optax_kernel(x: jax.Array) -> jax.Array:
    kernel = _muon.orthogonalize_via_newton_schulz
    one = functools.partial(kernel, ns_coeffs=jnp.array(MUON), ns_steps=5)
    return jax.vmap(one)(x) if x.ndim == 3 else one(x)


def orthogonality_error(x: jax.Array) -> float:
    """Return the root mean square of `s^2 - 1` over the singular values s."""
    s = np.linalg.svd(np.asarray(x), compute_uv=False)
    return float(np.sqrt(np.mean((s**2 - 1) ** 2)))


def run() -> str:
    rows = []
    for shape in SHAPES:
        x = jax.random.normal(jax.random.key(0), shape)
        kernels = {
            "optax": jax.jit(optax_kernel),
            "default": polar_factor,
            "fast": functools.partial(polar_factor, **FAST),
        }
        rounds = 5 if x.size > 3e6 else 11
        times = paired({k: functools.partial(f, x) for k, f in kernels.items()}, rounds)
        errors = {k: orthogonality_error(f(x)) for k, f in kernels.items()}
        price = cost(shape)
        limit = 2 * price.multiplications / matmul_rate(shape)
        rows.append(
            [
                " x ".join(map(str, shape)),
                f"{1e3 * times['optax'].seconds:.0f} ms",
                *(f"**{times[k].ratio:.2f}**" for k in ("default", "fast")),
                *(f"{errors[k]:.2f}" for k in kernels),
                f"{price.method}, {'+'.join(map(str, price.segments))}",
                f"{times['default'].seconds / limit:.2f}",
            ]
        )
    header = ["stack", "optax", "default / optax", "fast / optax"]
    header += ["error: optax", "default", "fast", "default's method", "time / products alone"]
    return table(header, rows)


def matmul_rate(shape: tuple[int, ...]) -> float:
    """Measure floating-point operations per second of the larger product at that size."""
    k, length = sorted(shape[-2:])
    a, b = jnp.ones((k, k)), jnp.ones((k, length))
    product = jax.jit(functools.partial(jnp.matmul, precision="highest"))
    seconds = paired({"product": lambda: product(a, b)}, rounds=21)["product"].seconds
    return 2 * k * k * length / seconds
