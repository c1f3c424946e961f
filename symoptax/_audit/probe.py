"""The user's loss as a measuring instrument: how much it changes with some of the parameters."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

LossFn = Callable[[Any, Any], Any]

# In roundings of the coarsest floating dtype on the way to the loss.
_ROUNDINGS = 64


class Probe:
    """A loss, jitted, at parameters in which no leaf is constant.

    Leaves of equal numbers (zeros, ones: biases, norm scales, zero-initialised kernels) get random
    ones, since a permutation of equal numbers, or of what is multiplied by zero, shows nothing.

    Attributes:
      leaves: the parameters.
      batch: the batch.
      value: the loss.
      gradient: the gradient of every leaf; None for integers.
      eps: the rounding of the coarsest floating dtype on the way to the loss.
      resolution: a change of the loss below this may be rounding.
    """

    def __init__(self, loss_fn: LossFn, params: Any, batch: Any, key: jax.Array) -> None:
        leaves, structure = jax.tree.flatten(params)
        self.leaves = [_generic(leaf, jax.random.fold_in(key, i)) for i, leaf in enumerate(leaves)]
        self.batch = jax.tree.map(jnp.asarray, batch)

        def loss(leaves: list[Any], batch: Any) -> Array:
            with jax.default_matmul_precision("highest"):
                result = loss_fn(structure.unflatten(leaves), batch)
            value = jnp.asarray(result[0] if isinstance(result, tuple) else result)
            if value.shape or not jnp.issubdtype(value.dtype, jnp.floating):
                raise ValueError(
                    "audit needs loss_fn(params, batch) -> a real scalar, or a tuple that begins "
                    f"with one; got {value.dtype}{list(value.shape)}."
                )
            return value.astype(jnp.promote_types(value.dtype, jnp.float32))

        self._loss = jax.jit(loss)
        self._value_and_grad = jax.jit(jax.value_and_grad(_of_floating(loss)))
        self.value = self.loss({})
        if not np.isfinite(self.value):
            raise ValueError(f"The loss is {self.value}: nothing can be compared with it.")
        self.eps = _coarsest_eps(jax.make_jaxpr(loss)(self.leaves, self.batch), self.leaves)
        self.resolution = _ROUNDINGS * self.eps * max(1.0, abs(self.value))
        again, self.gradient = self._with_gradient(self.batch)
        # Traced a second time: numbers that are drawn while tracing show too.
        if not abs(again - self.value) <= self.resolution:
            raise ValueError(
                f"Two calls of loss_fn differ, {self.value} and {again}: fix its random keys, and "
                "switch dropout off, for the audit."
            )

    def loss(self, changed: Mapping[int, Array], batch: Any = None) -> float:
        """Return the loss with some leaves, and perhaps the batch, replaced."""
        leaves = [changed.get(index, leaf) for index, leaf in enumerate(self.leaves)]
        return float(self._loss(leaves, self.batch if batch is None else batch))

    def change(self, changed: Mapping[int, Array], batch: Any = None) -> float:
        """Return by how much the loss then differs; infinity for one that is not finite."""
        difference = abs(self.loss(changed, batch) - self.value)
        return difference if np.isfinite(difference) else float("inf")

    @functools.cached_property
    def few_tokens(self) -> tuple[list[Any], Any] | None:
        """The gradient over one sequence of three tokens, and that batch.

        None if the loss does not take such a batch: whatever it raises, it is the user's code.
        """
        try:
            batch = _few_tokens(self.batch)
            gradient = self._with_gradient(batch)[1]
        except Exception:
            return None
        finite = all(g is None or bool(jnp.all(jnp.isfinite(g))) for g in gradient)
        return (gradient, batch) if finite else None

    def _with_gradient(self, batch: Any) -> tuple[float, list[Any]]:
        numbered = dict(enumerate(self.leaves))
        floating = {i: x for i, x in numbered.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        rest = {i: x for i, x in numbered.items() if i not in floating}
        value, found = self._value_and_grad(floating, rest, batch)
        return float(value), [found.get(index) for index in numbered]


def integers(batch: Any) -> list[int]:
    """Return which leaves of a batch may hold tokens."""
    leaves = jax.tree.leaves(batch)
    return [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.integer) and x.size]


def _generic(leaf: Any, key: jax.Array) -> Array:
    leaf = jnp.asarray(leaf)
    floating = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size > 1
    if not floating or not _is_constant(leaf):
        return leaf
    noise = 0.2 * jax.random.normal(key, leaf.shape, leaf.dtype)
    fan = max(leaf.shape) if leaf.ndim > 1 else 1
    return jnp.where(leaf == 0, noise / fan**0.5, leaf * (1 + noise))


@jax.jit
def _is_constant(leaf: Array) -> Array:
    return jnp.all(leaf == leaf.ravel()[0])


def _coarsest_eps(program: Any, leaves: list[Any]) -> float:
    floating = [x.dtype for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    short = {"f16[": jnp.float16, "bf16[": jnp.bfloat16}
    text = str(program)
    coarse = [dtype for name, dtype in short.items() if f":{name}" in text]
    return max(float(jnp.finfo(t).eps) for t in (jnp.result_type(jnp.float32, *floating), *coarse))


def _few_tokens(batch: Any) -> Any:
    """Cut a batch to one sequence of three tokens.

    As much is cut from all axes that are as long as a sequence, or one shorter or longer: labels
    and positions, and the two axes of a mask.
    """
    leaves = jax.tree.leaves(batch)
    tokens = max((leaves[i] for i in integers(batch)), key=lambda x: x.ndim)
    length = tokens.shape[min(1, tokens.ndim - 1)]

    def cut(x: Array) -> Array:
        ends = [size - max(length - 3, 0) if abs(size - length) <= 1 else size for size in x.shape]
        if tokens.ndim > 1:
            ends[:1] = [1] * min(1, x.ndim)
        return x[tuple(map(slice, ends))]

    return jax.tree.map(cut, batch)


def _of_floating(loss: Callable[..., Array]) -> Callable[..., Array]:
    """Return the loss as a function of the leaves that have a gradient, then of the others."""

    def function(floating: dict[int, Any], rest: dict[int, Any], batch: Any) -> Array:
        both = floating | rest
        return loss([both[index] for index in range(len(both))], batch)

    return function
