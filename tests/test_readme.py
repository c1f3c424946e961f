"""The README's code runs, and its commands are the ones that are tested."""

import pathlib
import re

import chex
import pytest

import symoptax

REPOSITORY = pathlib.Path(__file__).parent.parent
TEXT = (REPOSITORY / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_python_blocks_run_one_after_the_other(capsys):
    namespace = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert "embed/embedding" in capsys.readouterr().out
    by_hand, params = namespace["tx"], namespace["params"]
    whole = symoptax.layerwise(4e-3, namespace["RULES"])
    updates = [tx.update(params, tx.init(params), params)[0] for tx in (by_hand, whole)]
    chex.assert_trees_all_close(*updates, rtol=1e-5, atol=1e-6)


def test_the_test_command_is_what_ci_runs():
    command = blocks("sh")[1].strip()
    assert command.endswith("pytest")
    assert command in (REPOSITORY / ".ci" / "run").read_text()


@pytest.mark.parametrize("path", re.findall(r"\]\(((?!http)[^)]+)\)", TEXT))
def test_links_lead_somewhere(path):
    file, _, heading = path.partition("#")
    text = (REPOSITORY / file).read_text() if heading else ""
    assert (REPOSITORY / file).exists()
    assert not heading or heading.replace("-", " ") in text.lower()
