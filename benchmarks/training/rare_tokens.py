"""What became of rarely seen tokens: their rows of the embedding, and the loss after them."""

import dataclasses
import itertools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from export import last_params
from pretraining.config import from_json
from pretraining.dataset import prepare
from pretraining.loader import make_loader, validation_batches
from pretraining.report import markdown_table
from pretraining.run import run as train
from runs import arm

BUCKETS = [(0, 0), (1, 3), (4, 15), (16, 63), (64, 10**9)]  # Of times that a token was seen.


def _rows_of(folder: Path) -> list[list[str]]:
    """Return one row per bucket, for the folder of a run of pretrain.py."""
    config = from_json(json.loads((folder / "summary.json").read_text())["config"])
    architecture, model, params = last_params(folder)
    graphdef = nnx.split(nnx.eval_shape(lambda: architecture.build(model, nnx.Rngs(0))))[0]
    data = prepare(config.data, vocab_size=model.vocab_size, cache_dir=config.cache_dir)
    options = {"batch_size": config.batch_size, "seq_len": config.seq_len}
    loader = make_loader(data.train_shards, seed=config.seed, **options)
    seen = np.zeros(model.vocab_size, np.int64)
    for batch in itertools.islice(iter(loader), config.steps):
        np.add.at(seen, batch[:, :-1].ravel(), 1)
    loader.close()

    @jax.jit
    def losses(tokens: jax.Array) -> jax.Array:
        output = nnx.merge(graphdef, params)(tokens[:, :-1])
        logits = output[0] if isinstance(output, tuple) else output
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])

    batches = list(validation_batches(data.val_shards, max_batches=64, **options))
    after = np.concatenate([np.asarray(losses(batch)).ravel() for batch in batches])
    read = np.concatenate([batch[:, :-1].ravel() for batch in batches])
    table = np.asarray(params["embed"]["embedding"])
    rows = []
    for low, high in BUCKETS:
        tokens = (seen >= low) & (seen <= high)
        span = f"{low} to {high}" if high < 10**9 else f"{low} or more"
        there = tokens[read]
        rows.append(
            [
                folder.name,
                str(low) if high == low else span,
                f"{tokens.sum():,}",
                f"{float(jnp.sqrt(jnp.mean(jnp.square(table[tokens])))):.3f}",
                f"{there.mean():.1%}",
                f"{after[there].mean():.3f}",
            ]
        )
    return rows


def run() -> str:
    """Train with and without `lazy` at the best rate, one seed."""
    best = arm("qwen3", "layerwise").best[0].config
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for lazy in (True, False):
            out_dir = Path(folder) / f"lazy={lazy}"
            train(dataclasses.replace(best, lazy=lazy, out_dir=str(out_dir)), Console(quiet=True))
            rows += _rows_of(out_dir)
    header = ["run", "seen in training", "tokens", "rms of their rows"]
    header += ["share of the validation text", "loss of what follows them"]
    return markdown_table(header, rows)
