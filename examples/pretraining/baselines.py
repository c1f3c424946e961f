"""What a model must beat: cross-entropies that need no model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from pretraining.shards import Shard
from pretraining.tokenizer import token_bytes

_TRAIN_TOKENS = 64 << 20
_VALIDATION_TOKENS = 8 << 20
_BLOCK_TOKENS = 4 << 20


@dataclass(frozen=True)
class Baselines:
    """Validation losses in nats per token; the byte figures are None without a tokenizer."""

    uniform: float
    unigram: float
    byte_unigram: float | None = None
    bytes_per_token: float | None = None


def baselines(
    train_shards: Sequence[Shard],
    val_shards: Sequence[Shard],
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
) -> Baselines:
    """Measure what token and byte frequencies alone predict.

    `unigram` scores the validation tokens with add-one smoothed training frequencies.
    `byte_unigram` is the entropy of the validation bytes times the bytes per token. Both count a
    bounded number of tokens from the start of each split.
    """
    train = count_tokens(train_shards, vocab_size, _TRAIN_TOKENS)
    validation = count_tokens(val_shards, vocab_size, _VALIDATION_TOKENS)
    log_probabilities = np.log((train + 1) / (train.sum() + vocab_size))
    unigram = -float(validation @ log_probabilities) / int(validation.sum())
    if tokenizer is None:
        return Baselines(math.log(vocab_size), unigram)
    byte_counts = _count_bytes(validation, tokenizer)
    bytes_per_token = int(byte_counts.sum()) / int(validation.sum())
    byte_unigram = _entropy(byte_counts) * bytes_per_token
    return Baselines(math.log(vocab_size), unigram, byte_unigram, bytes_per_token)


def count_tokens(shards: Sequence[Shard], vocab_size: int, most: int) -> np.ndarray:
    """Count the token ids among the first `most` tokens, int64 (vocab_size,)."""
    counts = np.zeros(vocab_size, np.int64)
    for shard in shards:
        tokens = shard.tokens[:most]
        most -= len(tokens)
        for start in range(0, len(tokens), _BLOCK_TOKENS):
            block = tokens[start : start + _BLOCK_TOKENS]
            counts += np.bincount(block, minlength=vocab_size)
    return counts


def _count_bytes(token_counts: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    counts = np.zeros(256, np.int64)
    for spelling, count in zip(token_bytes(tokenizer), token_counts, strict=True):
        for byte in spelling:
            counts[byte] += count
    return counts


def _entropy(counts: np.ndarray) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
