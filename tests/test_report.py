"""`python -m symoptax.report`: of checkpoints, of modules, in every format, and its errors."""

import json

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from small_models import RULES, NnxModel, linen_params
from symoptax.report import main


def nnx_factory():
    return NnxModel(nnx.Rngs(0))


def known_factory():
    return {
        "embedder": {"input_embedding": jnp.zeros((50, 12))},
        "layers": {"0": {"mlp": {"router": {"kernel": jnp.zeros((12, 3))}}}},
    }


def linen_factory():
    return linen_params()


LINEN_RULES = RULES


def lines_of(text):
    return {line.split()[0]: line for line in text.splitlines() if "/" in line.split(" ")[0]}


@pytest.mark.parametrize("factory", ["nnx_factory", "linen_factory"])
def test_of_a_model(capsys, factory):
    assert main([f"test_report:{factory}", "--rules=test_report:LINEN_RULES"]) == 0
    lines = lines_of(capsys.readouterr().out)
    (head,) = (line for name, line in lines.items() if "lm_head" in name)
    assert "P(vocab) x O(d) / shift" in head
    assert "centered_hybrid" in head


def test_formats_and_rules_that_are_found(capsys):
    assert main(["test_report:known_factory", "--format=json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["library"] == "Tunix"
    assert [row["role"] for row in report["rows"]] == ["tied_embedding", "router"]
    assert main(["test_report:known_factory", "--format=markdown"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 4
    assert len({line.count("|") for line in table}) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the same parameters saved in three ways."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "alone", known_factory())
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(folder / "parts", options=options) as manager:
        for step in (2, 10):
            args = ocp.args.Composite(params=ocp.args.StandardSave(known_factory()))
            manager.save(step, args=args)
    with ocp.CheckpointManager(folder / "whole", options=options) as manager:
        state = {"params": known_factory(), "step": jnp.zeros(())}
        manager.save(3, args=ocp.args.StandardSave(state))
    return folder


@pytest.mark.parametrize("arguments", [["alone"], ["parts"], ["whole", "--subtree=params"]])
def test_of_a_checkpoint(capsys, folder, arguments):
    name, *rest = arguments
    assert main([str(folder / name), *rest]) == 0
    out = capsys.readouterr().out
    assert "embedder/input_embedding" in out
    assert "rules of Tunix; tied" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/folder"], "no folder"),
        (["test_report:missing"], "missing"),
        (["no_such_module:factory"], "no_such_module"),
        (["test_report:linen_factory"], "No table of symoptax.routes fits"),
        (["test_report:known_factory", "--subtree=params"], "params"),
    ],
)
def test_errors_are_one_message_and_exit_code_two(capsys, arguments, message):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


def test_an_empty_folder_is_no_checkpoint(capsys, tmp_path):
    assert main([str(tmp_path)]) == 2
    assert "no Orbax checkpoint" in capsys.readouterr().err
