"""Rule tables for public JAX model libraries, one file each, and `auto`, which recognises them.

Every table is a function from a parameter tree to its rules. It reads from the tree what shows
there (a head or none, scanned layers, the widths of fused kernels) and takes what does not from
what the models of the library do (routers); `softcap=True` says that the logits of an untied head
are capped, or that the loss has a z-loss.
"""

from symoptax.routes import (
    big_vision,
    by_name,
    examples,
    flax_examples,
    gemma,
    hugging_face,
    jax_llm_examples,
    maxtext,
    tunix,
)
from symoptax.routes._auto import LIBRARIES, auto, suggestions

__all__ = [
    "LIBRARIES",
    "auto",
    "big_vision",
    "by_name",
    "examples",
    "flax_examples",
    "gemma",
    "hugging_face",
    "jax_llm_examples",
    "maxtext",
    "suggestions",
    "tunix",
]
