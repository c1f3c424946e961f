"""Print how a model's parameters would be routed: `python -m symoptax.report TARGET`.

TARGET is the folder of an Orbax checkpoint, of which only the metadata is read, or a model given as
`package.module:factory`, called without arguments and never run: it returns an `nnx.Module` or a
tree of parameters, `lambda: module.init(jax.random.key(0), tokens)["params"]` for linen.

    python -m symoptax.report runs/default/checkpoints --subtree=params
    python -m symoptax.report my_package.model:build --rules=my_package.model:RULES --format=json
"""

import argparse
import importlib
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax

from symoptax._report import routing_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report and return the exit code: 0, or 2 for a target or rules that do not fit."""
    parser = argparse.ArgumentParser(
        "symoptax.report", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("target", help="an Orbax checkpoint, or package.module:factory")
    parser.add_argument("--rules", default="auto", help="package.module:RULES; found by default")
    parser.add_argument("--subtree", default="", help="where the parameters are: state/params")
    parser.add_argument("--format", choices=["text", "json", "markdown"], default="text")
    options = parser.parse_args(arguments)
    try:
        params = _parameters(options.target)
        for key in filter(None, options.subtree.split("/")):
            params = params[key]
        rules = "auto" if options.rules == "auto" else _load(options.rules)
        report = routing_report(params, rules)
    except (ImportError, AttributeError, FileNotFoundError, KeyError, ValueError) as error:
        print(f"symoptax.report: {error}", file=sys.stderr)
        return 2
    form = {"text": str, "json": type(report).to_json, "markdown": type(report).to_markdown}
    print(form[options.format](report))
    return 0


def _parameters(target: str) -> Any:
    """Return the shapes of the parameters of a checkpoint or a model."""
    if os.path.isdir(target):
        return _checkpoint(pathlib.Path(target).resolve())
    if ":" not in target:
        raise FileNotFoundError(f"{target} is no folder, and no package.module:factory.")
    factory = _load(target)
    if "flax" not in sys.modules:
        return jax.eval_shape(factory)
    from flax import nnx

    made = nnx.eval_shape(factory)
    return nnx.state(made, nnx.Param) if isinstance(made, nnx.Module) else made


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), attribute)


def _checkpoint(folder: pathlib.Path) -> Any:
    """Return the shapes in a checkpoint: of its last step, of its parameters if saved apart."""
    import orbax.checkpoint as ocp

    while not (folder / "_METADATA").exists():
        inside = {path.name: path for path in folder.iterdir() if path.is_dir()}
        steps = [name for name in inside if name.isdecimal()]
        items = [
            name for name in ("params", "model", "items", "default", "state") if name in inside
        ]
        if not steps and not items:
            raise FileNotFoundError(f"{folder} holds no Orbax checkpoint.")
        folder = inside[max(steps, key=int) if steps else items[0]]
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(folder).item_metadata
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        getattr(metadata, "tree", metadata),
    )


if __name__ == "__main__":
    sys.exit(main())
