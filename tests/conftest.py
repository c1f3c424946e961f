"""Strictness for all tests: typed shapes, no silent broadcasting, eight CPU devices."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

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
