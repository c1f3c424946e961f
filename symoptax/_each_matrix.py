"""Running a kernel over a stack of matrices in the way that suits the platform."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Stack = Float[Array, "*batch m n"]

# Measured on two CPU cores: products of smaller matrices are too short to pay for a loop.
_SMALLEST_LOOPED = 2**18
_SMALLEST_MIRRORED = 1024
_STRIP = 256


def each_matrix(kernel: Callable[..., Stack], x: Stack) -> Stack:
    """Apply `kernel`, which treats every matrix of a stack by itself, to the stack `x`.

    Accelerators multiply the whole stack at once. CPUs take large matrices one after another: XLA's
    batched products are slower there than 2-D ones, and one matrix with its temporaries stays in
    cache. A stack that may be spread over devices is never looped over, which would gather it.

    Args:
      kernel: called as `kernel(x, on_cpu=...)` with a stack, or on CPUs a single matrix.
      x: the stack.
    """
    m, n = x.shape[-2:]
    batched = functools.partial(kernel, on_cpu=False)
    looped = functools.partial(one_by_one, functools.partial(kernel, on_cpu=True))
    spread = not jax.typeof(x).sharding.mesh.empty
    if spread or m * n * min(m, n) < _SMALLEST_LOOPED:
        return batched(x)
    return jax.lax.platform_dependent(x, cpu=looped, default=batched)


def one_by_one(kernel: Callable[[Stack], Stack], x: Stack) -> Stack:
    """Apply `kernel` to one matrix of the stack after another, two of them at a time."""
    if x.ndim == 2:
        return kernel(x)
    matrices = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    _, results = jax.lax.scan(lambda _, matrix: (None, kernel(matrix)), None, matrices, unroll=2)
    return results.reshape(x.shape)


def unstack(x: Float[Array, "..."]) -> Sequence[Float[Array, "..."]]:
    """Split a stack along its first axis, in a way that compiles in no time.

    XLA compiles a kernel for every position of a slice on CPUs, 25 ms each, but only one for all
    slices whose positions are known at run time.
    """
    if not jax.typeof(x).sharding.mesh.empty:
        return jnp.unstack(x)
    return jax.lax.platform_dependent(x, cpu=_unstack_at_run_time, default=jnp.unstack)


def _unstack_at_run_time(x: Array) -> tuple[Array, ...]:
    pairs = jax.lax.optimization_barrier(tuple(np.full(2, i, np.int32) for i in range(len(x))))
    # A reduction of constants that the barrier hides: scalars that nothing can fold into a slice.
    positions = jax.lax.reduce(
        pairs, (np.int32(0),) * len(x), lambda a, b: tuple(map(jnp.maximum, a, b)), (0,)
    )
    return tuple(jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for i in positions)


def symmetric_product(matmul: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    """Multiply two matrices whose product is known to be symmetric, on a CPU.

    From 1024 rows on, strips of it are computed from the diagonal to the right and mirrored, which
    saves up to half the multiplications; on smaller matrices the copies cost what is saved.
    """
    n = a.shape[-2]
    if n < _SMALLEST_MIRRORED:
        return matmul(a, b)
    edges = [*range(0, n, _STRIP), n]
    strips = [matmul(a[i:j], b[:, i:]) for i, j in itertools.pairwise(edges)]
    product = jnp.zeros((n, n), strips[0].dtype)
    for i, strip in zip(edges, strips, strict=False):
        product = jax.lax.dynamic_update_slice(product, strip, (i, i))
        mirrored = strip[:, _STRIP:].T
        product = jax.lax.dynamic_update_slice(product, mirrored, (i + _STRIP, i))
    return product
