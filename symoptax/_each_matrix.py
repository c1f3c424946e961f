"""Running a kernel over a stack of matrices in the way that suits the platform."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Stack = Float[Array, "*batch m n"]

# Measured on two CPU cores: products of smaller matrices are too short to pay for a loop.
_SMALLEST_LOOPED = 2**18


def check_stack(d: Array) -> None:
    """Raise ValueError for what is no stack of real matrices."""
    if d.ndim < 2 or not jnp.issubdtype(d.dtype, jnp.floating):
        raise ValueError(f"Need real floating matrices [..., m, n], got {d.dtype}{list(d.shape)}.")


def each_matrix(kernel: Callable[[Stack], Stack], x: Stack) -> Stack:
    """Apply `kernel`, which treats every matrix of a stack by itself, to the stack `x`.

    Accelerators multiply the whole stack at once. CPUs take large matrices one after another: XLA's
    batched products are slower there than 2-D ones, and one matrix with its temporaries stays in
    cache. A stack that may be spread over devices is never looped over, which would gather it.

    Args:
      kernel: called with a stack, or on CPUs a single matrix.
      x: the stack.
    """
    m, n = x.shape[-2:]
    spread = not jax.typeof(x).sharding.mesh.empty
    if spread or m * n * min(m, n) < _SMALLEST_LOOPED:
        return kernel(x)
    looped = functools.partial(one_by_one, kernel)
    return jax.lax.platform_dependent(x, cpu=looped, default=kernel)


def one_by_one(kernel: Callable[[Stack], Stack], x: Stack) -> Stack:
    """Apply `kernel` to one matrix of the stack after another, two of them at a time."""
    if x.ndim == 2:
        return kernel(x)
    matrices = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    _, results = jax.lax.scan(lambda _, matrix: (None, kernel(matrix)), None, matrices, unroll=2)
    return results.reshape(x.shape)


@jax.jit
def written_out(x: Stack) -> Stack:
    """Have CPUs write a transposed stack to memory, where sums over rows are ten times faster."""
    if not jax.typeof(x).sharding.mesh.empty:
        return x
    return jax.lax.platform_dependent(x, cpu=_written_out, default=lambda x: x)


def _written_out(x: Stack) -> Stack:
    # What goes through a loop is a buffer to XLA, even if the loop is not run.
    (never,) = _at_run_time((0,))
    return jax.lax.fori_loop(0, never, lambda _, x: -x, x)


@jax.jit
def unstack(x: Float[Array, "..."]) -> Sequence[Float[Array, "..."]]:
    """Split a stack along its first axis, in a way that compiles in no time.

    XLA compiles a kernel for every position of a slice on CPUs, 25 ms each, but only one for all
    slices whose positions are known at run time.
    """
    if not jax.typeof(x).sharding.mesh.empty:
        return jnp.unstack(x)
    return jax.lax.platform_dependent(x, cpu=_unstack_at_run_time, default=jnp.unstack)


def _unstack_at_run_time(x: Array) -> tuple[Array, ...]:
    positions = _at_run_time(range(len(x)))
    return tuple(jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for i in positions)


def _at_run_time(numbers: Sequence[int]) -> Sequence[Array]:
    """Return integers as scalars that XLA does not know: a reduction of what a barrier hides."""
    pairs = jax.lax.optimization_barrier(tuple(np.full(2, i, np.int32) for i in numbers))
    return jax.lax.reduce(
        pairs, (np.int32(0),) * len(pairs), lambda a, b: tuple(map(jnp.maximum, a, b)), (0,)
    )
