"""What became of rarely seen tokens: their rows of the embedding, and the loss after them.

    PYTHONPATH=examples python benchmarks/training/rare_tokens.py RUN [RUN ...]

for finished runs of pretrain.py with their checkpoints.
"""

import itertools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from export import last_params
from pretraining.config import from_json
from pretraining.dataset import prepare
from pretraining.loader import make_loader, validation_batches
from pretraining.report import markdown_table

BUCKETS = [(0, 0), (1, 3), (4, 15), (16, 63), (64, 10**9)]  # Of times that a token was seen.


def rows_of(run: Path) -> list[list[str]]:
    """Return one row per bucket."""
    config = from_json(json.loads((run / "summary.json").read_text())["config"])
    architecture, model, params = last_params(run)
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
                run.name,
                str(low) if high == low else span,
                f"{tokens.sum():,}",
                f"{float(jnp.sqrt(jnp.mean(jnp.square(table[tokens])))):.3f}",
                f"{there.mean():.1%}",
                f"{after[there].mean():.3f}",
            ]
        )
    return rows


def main(runs: list[str]) -> None:
    header = ["run", "seen in training", "tokens", "rms of their rows"]
    header += ["share of the validation text", "loss of what follows them"]
    print(markdown_table(header, [row for run in runs for row in rows_of(Path(run))]))


if __name__ == "__main__":
    main(sys.argv[1:])
