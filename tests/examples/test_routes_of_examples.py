"""The rules beside the example models and the table that recognises them say the same."""

import dataclasses

import pytest
from flax import nnx

import symoptax
from models import gemma3, gpt_oss, olmoe, qwen3

TIED = dataclasses.replace(qwen3.TINY, tied=True)
UNTIED = dataclasses.replace(gemma3.TINY, tied=False)
MODELS = {
    "qwen3": (lambda: qwen3.Qwen3(qwen3.TINY, nnx.Rngs(0)), qwen3.RULES),
    "qwen3, tied": (lambda: qwen3.Qwen3(TIED, nnx.Rngs(0)), qwen3.TIED_RULES),
    "gemma3": (lambda: gemma3.Gemma3(gemma3.TINY, nnx.Rngs(0)), gemma3.TIED_RULES),
    "gemma3, untied": (lambda: gemma3.Gemma3(UNTIED, nnx.Rngs(0)), gemma3.RULES),
    "olmoe": (lambda: olmoe.Olmoe(olmoe.TINY, nnx.Rngs(0)), olmoe.RULES),
    "gpt_oss": (lambda: gpt_oss.GptOss(gpt_oss.TINY, nnx.Rngs(0)), gpt_oss.RULES),
}


@pytest.mark.parametrize(("build", "rules"), MODELS.values(), ids=MODELS.keys())
def test_they_agree(build, rules):
    params = nnx.state(nnx.eval_shape(build), nnx.Param)
    library, found = symoptax.routes.auto(params)
    assert library == "symoptax's examples"
    assert symoptax.route(params, found).leaves == symoptax.route(params, rules).leaves
