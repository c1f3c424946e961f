"""A byte-level BPE tokenizer, trained on the spot and cached."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pretraining.corpus import VALIDATION_FRACTION, Documents
from pretraining.errors import InputError

DELIMITER = "<|endoftext|>"
SMALLEST_VOCABULARY = 256 + 1  # Every byte, and the delimiter.

# More text hardly changes a vocabulary of some thousand entries, but costs time and memory.
_TRAINING_CHARACTERS = 64 << 20
_BATCH_CHARACTERS = 1 << 20
# Raised whenever the same files would give other tokens.
_CACHE_VERSION = 1


def fingerprint(documents: Documents, vocab_size: int) -> str:
    """Name a tokenised corpus: 16 hex digits of its files, vocabulary size and library version."""
    files = []
    for path in documents.files:
        status = path.stat()
        files.append((str(path.resolve()), status.st_size, status.st_mtime_ns))
    rules = (_CACHE_VERSION, VALIDATION_FRACTION, vocab_size, tokenizers.__version__)
    return hashlib.sha256(json.dumps((rules, files)).encode()).hexdigest()[:16]


def load_or_train(documents: Documents, vocab_size: int, cache_dir: Path) -> Tokenizer:
    """Return the tokenizer of a corpus, from the cache if it is there.

    A small corpus may give fewer entries than `vocab_size`; ask `get_vocab_size()`.

    Raises:
        InputError: `vocab_size` is too small, or the corpus holds no training text.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise InputError(
            f"--vocab_size={vocab_size}: a byte-level vocabulary needs at least "
            f"{SMALLEST_VOCABULARY}; give a larger one"
        )
    path = cache_dir / f"tokenizer-{fingerprint(documents, vocab_size)}.json"
    tokenizer = _load(path)
    if tokenizer is None:
        tokenizer = train(documents.train(), vocab_size)
        _save(tokenizer, path)
    # Not stored in the JSON. A text that spells the delimiter must not become the delimiter.
    tokenizer.encode_special_tokens = True
    return tokenizer


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` entries on the first 64 MB of texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[DELIMITER],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts), trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield the tokens of each text, followed by the delimiter, as uint32 arrays."""
    delimiter = np.array([tokenizer.token_to_id(DELIMITER)], np.uint32)
    for batch in _batches(texts):
        for encoding in tokenizer.encode_batch_fast(batch):
            yield np.concatenate([np.array(encoding.ids, np.uint32), delimiter])


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Spell every token id as the bytes it stands for; the delimiter stands for none."""
    byte_of = _byte_of_character()
    spellings = [b""] * tokenizer.get_vocab_size()
    for token, index in tokenizer.get_vocab().items():
        if token != DELIMITER:
            spellings[index] = bytes(byte_of[character] for character in token)
    return spellings


def _byte_of_character() -> dict[str, int]:
    # The byte-level alphabet: printable Latin-1 bytes stand for themselves, the rest moves to 256+.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    moved = {chr(256 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | moved


def _first(texts: Iterable[str]) -> Iterator[str]:
    seen = 0
    for text in texts:
        yield text
        seen += len(text)
        if seen >= _TRAINING_CHARACTERS:
            return


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _load(path: Path) -> Tokenizer | None:
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # Nothing narrower is raised; a broken cache entry is trained again.
        return None


def _save(tokenizer: Tokenizer, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        tokenizer.save(str(temporary))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
