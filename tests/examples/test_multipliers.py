"""Factors of the learning rate: the library's, the model's, the user's, in rising order."""

import pytest

from models.catalog import MODELS
from pretraining.config import Config
from pretraining.optimizers import routing_options


def factors(config, preset="small"):
    architecture = MODELS[config.model]
    sizes = architecture.presets[preset]
    options = routing_options(
        config, architecture.rules_for(sizes), architecture.multipliers_for(sizes)
    )
    return options["lr_multipliers"]


def test_gemma_counts_the_embedding_by_the_rows_that_its_layers_see():
    width = MODELS["gemma3"].presets["small"].d_model
    for optimizer in ("layerwise", "row_norm", "right_polar", "hybrid"):
        given = factors(Config(model="gemma3", optimizer=optimizer))
        assert given == {"embedding": pytest.approx(20 / width**0.5)}


@pytest.mark.parametrize("model", ["qwen3", "olmoe", "gpt_oss"])
def test_others_read_the_embedding_as_it_is(model):
    assert factors(Config(model=model)) is None


def test_a_tied_embedding_is_the_head_too():
    tied = [name for name, sizes in MODELS["gemma3"].presets.items() if sizes.tied]
    assert tied
    assert all(factors(Config(model="gemma3"), name) is None for name in tied)


def test_what_is_given_comes_first():
    config = Config(model="gemma3", lr_multiplier=("embedding:7", "lm_head:2"))
    assert factors(config) == {"embedding": 7, "lm_head": 2}


def test_adamw_keeps_its_rate():
    assert factors(Config(model="gemma3", optimizer="muon")) is None
    assert factors(Config(model="gemma3", update=("embedding:adamw",))) is None
