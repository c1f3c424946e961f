"""What tests of whole runs share: the settings of a tiny one, its data, and what it left."""

import contextlib
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.compilation_cache import compilation_cache

from pretraining.progress import read_metrics

SMALL = ["--preset=tiny", "--seq_len=16", "--batch_size=8", "--eval_every=4", "--eval_batches=2"]
SMALL += ["--warmup_steps=1", "--learning_rate=1e-2", "--log_every=1", "--steps=8"]


def write_texts(folder: Path) -> None:
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "wizards"]
    rng = np.random.default_rng(0)
    for index in range(20):
        text = " ".join(rng.choice(words, 400))
        (folder / f"{index}.txt").write_text(text)


@contextlib.contextmanager
def compile_once(folder: Path):
    """Share the compiled steps of the runs inside."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


def saved_arrays(out_dir: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by path, read without the example's own code."""
    arrays, here = {}, jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        for item in ("params", "opt_state"):
            tree = reader.restore(
                out_dir.resolve() / "checkpoints" / str(step) / item,
                args=ocp.args.StandardRestore(fallback_sharding=here),
            )
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
                arrays[item + jax.tree_util.keystr(path)] = np.asarray(leaf)
    return arrays


def logged_losses(out_dir: Path):
    rows = read_metrics(out_dir / "metrics.jsonl")
    return [(row["step"], row.get("loss"), row.get("val_loss")) for row in rows]
