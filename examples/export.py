"""Write the parameters of a run as a folder of the Hugging Face hub.

    python examples/export.py --run=runs/pretrain --out_dir=exported

takes the last checkpoint, and `transformers` loads what it writes: `config.json` and the weights in
safetensors files. `pretrain.py --init_from=exported` starts from there too. The tokenizer of a
run on text stays in its cache folder, `tokenizer-*.json`. Wrong input exits with code 2.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from flax import nnx

from models.catalog import MODELS, Architecture, model_name
from models.hub_folder import read_config, to_safetensors
from pretraining.checkpoint import Checkpoints
from pretraining.errors import InputError
from pretraining.sharding import make_mesh, placed


def _define_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_bool("help", False, "Show this help.", short_name="h", flag_values=values)
    for name, default, text in (
        ("run", "runs/pretrain", "The run folder, the out_dir of pretrain.py."),
        ("out_dir", "exported", "The folder to write, new or empty."),
    ):
        flags.DEFINE_string(name, default, text, flag_values=values)
    dtypes = ["float32", "bfloat16", "float16"]
    flags.DEFINE_enum("dtype", dtypes[0], dtypes, "Of the weights.", flag_values=values)
    flags.DEFINE_float("max_gb", 5.0, "Of a file, at most.", lower_bound=0, flag_values=values)
    return values


def last_params(run: Path) -> tuple[Architecture, Any, Any]:
    """Return the architecture, the sizes and the parameters that a run has saved last."""
    if not (run / "checkpoints").is_dir():
        raise InputError(f"--run={run}: has no checkpoints")
    checkpoints = Checkpoints(run / "checkpoints")
    step = checkpoints.latest()
    if step is None:
        raise InputError(f"--run={run}: holds no finished checkpoint")
    try:
        model = read_config(run)
    except ValueError as error:
        raise InputError(f"--run={run}: {error}") from error
    architecture = MODELS[model_name(model)]
    shapes = nnx.eval_shape(lambda: architecture.build(model, nnx.Rngs(0)))
    target = placed(make_mesh(""), nnx.as_pure(nnx.state(shapes)))
    params = checkpoints.restore_params(step, target)
    checkpoints.close()
    return architecture, model, params


def export(run: Path, out_dir: Path, dtype: str, max_gb: float) -> str:
    """Write the folder; return what it holds, in words."""
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise InputError(f"--out_dir={out_dir}: is not an empty folder; name another")
    architecture, model, params = last_params(run)
    dtype, max_bytes = jnp.dtype(dtype), max_gb * 1e9
    to_safetensors(architecture, model, params, out_dir, dtype=dtype, max_bytes=max_bytes)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return f"{count:,} parameters of {run} in {dtype.name}, written to {out_dir}"


def main(argv: Sequence[str]) -> int:
    """Export what the flags say and return the exit code."""
    values = _define_flags()
    try:
        rest = values(argv)
        if values.help:
            print(f"{__doc__}\n{values.get_help()}")
            return 0
        if len(rest) > 1:
            raise InputError(f"unexpected argument {rest[1]!r}: settings are given as --name=value")
        run, out_dir = (Path(path).expanduser() for path in (values.run, values.out_dir))
        print(export(run, out_dir, values.dtype, values.max_gb))
    except (flags.Error, InputError) as error:
        print(f"export: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
