"""The rules beside the example models and the table that recognises them say the same."""

import dataclasses

import pytest
from flax import nnx

import symoptax
from models import olmoe, qwen3

TIED = dataclasses.replace(qwen3.TINY, tied=True)
MODELS = {
    "qwen3": (lambda: qwen3.Qwen3(qwen3.TINY, nnx.Rngs(0)), qwen3.RULES),
    "qwen3, tied": (lambda: qwen3.Qwen3(TIED, nnx.Rngs(0)), qwen3.TIED_RULES),
    "olmoe": (lambda: olmoe.Olmoe(olmoe.TINY, nnx.Rngs(0)), olmoe.RULES),
}


@pytest.mark.parametrize(("build", "rules"), MODELS.values(), ids=MODELS.keys())
def test_they_agree(build, rules):
    params = nnx.state(nnx.eval_shape(build), nnx.Param)
    library, found = symoptax.routes.auto(params)
    assert library == "symoptax's examples"
    assert symoptax.route(params, found).leaves == symoptax.route(params, rules).leaves
