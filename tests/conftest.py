"""Strictness for all tests: typed shapes, no silent broadcasting, eight CPU devices."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Two thirds of the time goes into compiling programs that run once or twice: a third of it with
# these, for the same values, collectives and buffers.
HURRY = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
]
given = os.environ.get("XLA_FLAGS", "")
for flag in ["--xla_force_host_platform_device_count=8", *HURRY]:
    if flag.partition("=")[0] not in given:
        given += f" {flag}"
os.environ["XLA_FLAGS"] = given

import jaxtyping

# Shapes and dtypes in annotations are checked at every call while testing.
# An int is a float there, as PEP 484 has it.
jaxtyping.install_import_hook(
    "symoptax", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
)

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def x64():
    """Run a test in float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def untyped():
    """Let wrong values past the type checker, as in a user's program."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
