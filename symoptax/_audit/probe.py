"""The user's loss as a measuring instrument: how much it changes with some of the parameters."""

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
      resolution: a change of the loss below this may be rounding.
    """

    def __init__(self, loss_fn: LossFn, params: Any, batch: Any, key: jax.Array) -> None:
        leaves, structure = jax.tree.flatten(params)
        self.leaves = [_generic(leaf, jax.random.fold_in(key, i)) for i, leaf in enumerate(leaves)]
        self.batch = batch

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

        self._loss, self._grad = jax.jit(loss), jax.jit(jax.grad(_of_floating(loss)))
        self.value = self.loss({})
        if not np.isfinite(self.value):
            raise ValueError(f"The loss is {self.value}: nothing can be compared with it.")
        if self.loss({}) != self.value:
            raise ValueError("Two calls of loss_fn differ: fix its random keys for the audit.")
        program = str(jax.make_jaxpr(loss)(self.leaves, batch))
        coarse = [t for t in (jnp.float16, jnp.bfloat16) if f"{_SHORT[t]}[" in program]
        eps = max(float(jnp.finfo(t).eps) for t in (self._dtype(), *coarse))
        self.resolution = _ROUNDINGS * eps * max(1.0, abs(self.value))

    def _dtype(self) -> Any:
        floating = [x.dtype for x in self.leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        return jnp.result_type(jnp.float32, *floating)

    def loss(self, changed: Mapping[int, Array], batch: Any = None) -> float:
        """Return the loss with some leaves, and perhaps the batch, replaced."""
        leaves = [changed.get(index, leaf) for index, leaf in enumerate(self.leaves)]
        return float(self._loss(leaves, self.batch if batch is None else batch))

    def change(self, changed: Mapping[int, Array], batch: Any = None) -> float:
        """Return by how much the loss then differs; infinity for one that is not finite."""
        difference = abs(self.loss(changed, batch) - self.value)
        return difference if np.isfinite(difference) else float("inf")

    def gradient(self, batch: Any = None) -> list[Any]:
        """Return the gradient of every leaf; None for integers."""
        floating, rest = _split(self.leaves)
        found = self._grad(floating, rest, self.batch if batch is None else batch)
        return [found.get(index) for index in range(len(self.leaves))]


_SHORT = {jnp.float16: "f16", jnp.bfloat16: "bf16"}


def _generic(leaf: Any, key: jax.Array) -> Array:
    leaf = jnp.asarray(leaf)
    constant = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size > 1
    if not constant or not jnp.all(leaf == leaf.ravel()[0]):
        return leaf
    noise = 0.2 * jax.random.normal(key, leaf.shape, leaf.dtype)
    fan = max(leaf.shape) if leaf.ndim > 1 else 1
    return jnp.where(leaf == 0, noise / fan**0.5, leaf * (1 + noise))


def _split(leaves: list[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
    numbered = dict(enumerate(leaves))
    floating = {i: x for i, x in numbered.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    return floating, {i: x for i, x in numbered.items() if i not in floating}


def _of_floating(loss: Callable[..., Array]) -> Callable[..., Array]:
    """Return the loss as a function of the leaves that have a gradient, then of the others."""

    def function(floating: dict[int, Any], rest: dict[int, Any], batch: Any) -> Array:
        both = floating | rest
        return loss([both[index] for index in range(len(both))], batch)

    return function
