"""The Gemma 3-style decoder: its layers, sizes and routes; audited and trained."""

import dataclasses
import functools

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import gemma3
from models.gemma3 import TINY, Gemma3
from models.layers import RMSNorm, attention

TWO_LAYERS = dataclasses.replace(TINY, num_layers=2, global_every=2)
UNTIED = dataclasses.replace(TWO_LAYERS, tied=False)


def test_presets():
    decoders.check_presets(gemma3, Gemma3)
    # The sums of all shapes in the safetensors of google/gemma-3-1b-pt and google/gemma-3-270m.
    assert decoders.count(Gemma3, gemma3.GEMMA3_1B) == 999_885_952
    assert decoders.count(Gemma3, gemma3.GEMMA3_270M) == 268_098_176
    # The head of the untied model comes on top, and its layers are eight fewer.
    layer = (999_885_952 - 1152 * (262144 + 1)) // 26
    untied = 1152 * (2 * 262144 + 1) + 18 * layer
    assert decoders.count(Gemma3, gemma3.PAPER) == untied


def test_five_layers_see_a_window_and_one_sees_all():
    model = nnx.eval_shape(lambda: Gemma3(gemma3.GEMMA3_1B, nnx.Rngs(0)))
    seen = "".join("L" if layer.attn.local else "G" for layer in model.layers)
    assert seen == "LLLLLGLLLLLGLLLLLGLLLLLGLL"


def test_causal():
    decoders.check_causality(Gemma3, TINY)


def test_what_a_local_layer_does_not_see():
    x = jax.random.normal(jax.random.key(0), (1, 9, 2, 4))
    changed = x.at[:, 2].add(1.0)
    for window, first_unmoved in ((4, 6), (None, 9)):
        attend = jax.jit(functools.partial(attention, window=window))
        before, after = attend(x, x, x), attend(x, x, changed)
        moved = np.asarray(jnp.any(before != after, axis=(0, 2, 3)))
        # Position 2 is seen from itself and from the `window - 1` after it.
        np.testing.assert_array_equal(moved, [2 <= t < first_unmoved for t in range(9)])


def test_the_scale_of_a_norm_counts_from_one():
    x = jax.random.normal(jax.random.key(0), (3, 8))
    rngs = nnx.Rngs(0)
    plain, offset = RMSNorm(8, 1e-6, rngs=rngs), RMSNorm(8, 1e-6, offset=1.0, rngs=rngs)
    assert not np.any(offset.scale[...])
    np.testing.assert_array_equal(offset(x), plain(x))
    offset.scale[...] = jnp.full(8, 0.5)
    np.testing.assert_allclose(offset(x), 1.5 * plain(x), rtol=1e-6)


@pytest.mark.parametrize(
    "config",
    [TWO_LAYERS, *(pytest.param(config, marks=pytest.mark.slow) for config in (TINY, UNTIED))],
    ids=["two layers", "tiny", "untied"],
)
def test_its_rules_pass_the_audit(config):
    held = decoders.claims_that_hold(Gemma3, config, gemma3.rules_for(config))
    ends = {"also the head"} if config.tied else {"only looked up", "lm_head: shift"}
    assert held == {"P(token)", "P(neuron)", "P(head)", "sides of the product", *ends}


def test_a_tiny_model_learns():
    decoders.check_learning(Gemma3, TWO_LAYERS, gemma3.TIED_RULES)
