"""In which dtypes and precision matrices are multiplied."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Dtypes and precision of the products of a Newton-Schulz iteration.

    The default is float32 throughout at the highest precision, on every platform: TPUs and GPUs
    would otherwise multiply float32 in bfloat16 or TF32, and a Gram matrix in bfloat16 resolves
    singular values only down to 1/16 of the largest. `BFLOAT16` and `BFLOAT16_X3` are safe for
    the direct iteration and for Gram segments, which become as short as the precision demands, with
    tables of coefficients that bear it (the default then is another one).

    Attributes:
      storage: dtype of the iterates between products; None: the input's, at least float32.
      products: dtype to which the factors of every product are rounded; None: as stored. CPUs,
        most of which cannot multiply in less than float32, round and multiply in float32.
      accumulate: dtype in which products are summed and added up; None: as stored, at least
        float32.
      precision: `jax.lax.Precision` of float32 products. HIGHEST is float32; HIGH is three
        bfloat16 products ("bf16x3") on TPUs and TF32 on GPUs, and is treated as TF32; DEFAULT is
        one bfloat16 product on TPUs. CPUs multiply in float32 whatever it says.
    """

    storage: DTypeLike | None = None
    products: DTypeLike | None = None
    accumulate: DTypeLike | None = None
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST

    def __post_init__(self) -> None:
        for name in ("storage", "products", "accumulate"):
            dtype = getattr(self, name)
            if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(f"Numerics.{name}={dtype}: need a floating dtype.")
        if self.storage is not None and jnp.finfo(self.storage).maxexp < jnp.finfo("f4").maxexp:
            raise ValueError(f"Numerics.storage={self.storage}: Gram matrices overflow there.")
        if not isinstance(self.precision, jax.lax.Precision):
            raise ValueError(f"Numerics.precision={self.precision!r}: need a jax.lax.Precision.")

    def stored_as(self, dtype: DTypeLike) -> jnp.dtype:
        """Return the dtype of the iterates for an input of the given dtype."""
        return jnp.dtype(self.storage or jnp.promote_types(dtype, jnp.float32))

    def matmul(self, a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
        """Multiply two stacks of stored matrices and return the product as accumulated."""
        factor = jnp.dtype(self.products or a.dtype)
        product = functools.partial(
            jnp.matmul,
            precision=self.precision,
            preferred_element_type=self.accumulate or jnp.promote_types(a.dtype, jnp.float32),
        )

        def rounded_in_float32(a: Array, b: Array) -> Array:
            bits = jnp.finfo(factor)
            a, b = (
                jax.lax.reduce_precision(x.astype(jnp.float32), bits.nexp, bits.nmant)
                for x in (a, b)
            )
            return product(a, b)

        def as_they_are(a: Array, b: Array) -> Array:
            return product(a.astype(factor), b.astype(factor))

        if factor.itemsize > 2:
            return as_they_are(a, b)
        return jax.lax.platform_dependent(a, b, cpu=rounded_in_float32, default=as_they_are)

    def epsilon(self, dtype: DTypeLike) -> float:
        """Return the relative spacing of the coarsest number on the way through a product."""
        stored = self.stored_as(dtype)
        coarsest = max(float(jnp.finfo(t or stored).eps) for t in (stored, self.products))
        if stored == jnp.float32:
            coarsest = max(coarsest, _PRECISION_EPSILON[self.precision])
        return coarsest


def check_numerics(numerics: Numerics) -> None:
    """Raise TypeError for what is no `Numerics`, such as the name of a dtype."""
    if not isinstance(numerics, Numerics):
        raise TypeError(f"numerics={numerics!r}: need a Numerics, such as symoptax.BFLOAT16.")


# float32, TF32, and bfloat16.
_PRECISION_EPSILON = {
    jax.lax.Precision.HIGHEST: 2.0**-23,
    jax.lax.Precision.HIGH: 2.0**-10,
    jax.lax.Precision.DEFAULT: 2.0**-7,
}

FLOAT32 = Numerics()
BFLOAT16 = Numerics(products=jnp.bfloat16, accumulate=jnp.float32)
BFLOAT16_X3 = Numerics(precision=jax.lax.Precision.HIGH)
