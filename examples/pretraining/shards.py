"""Token shards: a header of 256 int32 and the tokens, little-endian, read by memory map.

Header: magic, version, number of tokens, bytes per token (2 or 4), id of the document delimiter,
delimiters before each document, delimiters after each document; the rest is zero.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pretraining.errors import InputError

MAGIC = 20260317
VERSION = 2
HEADER_ENTRIES = 256
HEADER_BYTES = 4 * HEADER_ENTRIES
MOST_TOKENS = 2**31 - 1  # The header counts in int32.

_DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_SCAN_TOKENS = 4 << 20


@dataclass(frozen=True, eq=False)
class Shard:
    """One memory-mapped shard; `tokens` is read-only, uint16 or uint32 of shape (count,)."""

    path: Path
    tokens: np.ndarray
    delimiter: int
    prepend: int
    append: int

    def __len__(self) -> int:
        return len(self.tokens)


def open_shard(path: str | Path) -> Shard:
    """Map a shard into memory after checking its header against its size.

    Raises:
        InputError: The file is missing, is no shard of this version, or has the wrong size.
    """
    path = Path(path)
    header, size = _read_header(path)
    magic, version, count, width, delimiter, prepend, append = (int(x) for x in header[:7])
    _expect(path, "magic number", magic, MAGIC, "give a token shard")
    _expect(path, "version", version, VERSION, "write the shard again in this version")
    if width not in _DTYPES:
        raise InputError(f"{path}: {width} bytes per token, not 2 or 4; write the shard again")
    if count < 1:
        raise InputError(f"{path}: the header counts {count} tokens, not 1 or more; leave it out")
    expected = HEADER_BYTES + count * width
    if size != expected:
        what = "cut short" if size < expected else "too long"
        raise InputError(
            f"{path}: the file is {what}: {size} bytes, but its header needs {expected}; "
            "copy or write the shard again"
        )
    tokens = np.memmap(path, _DTYPES[width], mode="r", offset=HEADER_BYTES, shape=(count,))
    return Shard(path, tokens, delimiter, prepend, append)


def write_shard(
    path: str | Path,
    chunks: Iterable[np.ndarray],
    *,
    delimiter: int,
    bytes_per_token: int = 2,
    prepend: int = 0,
    append: int = 1,
) -> Shard:
    """Write token arrays one after another as a shard, which appears whole or not at all.

    Raises:
        InputError: There are no tokens, or more than one shard can count.
        ValueError: A token does not fit into `bytes_per_token`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            file.write(bytes(HEADER_BYTES))
            count = _write_tokens(file, path, chunks, _DTYPES[bytes_per_token])
            header = np.zeros(HEADER_ENTRIES, "<i4")
            header[:7] = MAGIC, VERSION, count, bytes_per_token, delimiter, prepend, append
            file.seek(0)
            file.write(header.tobytes())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return open_shard(path)


def check_vocabulary(shard: Shard, vocab_size: int) -> None:
    """Check that every token id of a shard is below `vocab_size`, a block at a time.

    Reads the whole shard, unless the vocabulary holds all that its dtype can.

    Raises:
        InputError: A token id is beyond the vocabulary.
    """
    if vocab_size > np.iinfo(shard.tokens.dtype).max:
        return
    for start in range(0, len(shard), _SCAN_TOKENS):
        block = shard.tokens[start : start + _SCAN_TOKENS]
        if block.max() < vocab_size:
            continue
        position = int(np.argmax(block >= vocab_size))
        raise InputError(
            f"{shard.path}: token id {block[position]} at position {start + position} is beyond "
            f"the vocabulary of {vocab_size}; give --vocab_size as the shard was written with"
        )


def _read_header(path: Path) -> tuple[np.ndarray, int]:
    try:
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    if len(raw) < HEADER_BYTES:
        raise InputError(
            f"{path}: the file is cut short: {size} bytes, but the header alone is "
            f"{HEADER_BYTES}; copy or write the shard again"
        )
    return np.frombuffer(raw, "<i4"), size


def _expect(path: Path, what: str, found: int, expected: int, remedy: str) -> None:
    if found != expected:
        raise InputError(f"{path}: {what} is {found}, not {expected}; {remedy}")


def _write_tokens(file: BinaryIO, path: Path, chunks: Iterable[np.ndarray], dtype: np.dtype) -> int:
    count, limit = 0, np.iinfo(dtype).max
    for chunk in chunks:
        if len(chunk) and (chunk.max() > limit or chunk.min() < 0):
            raise ValueError(
                f"token ids up to {chunk.max()} do not fit into {dtype.itemsize} bytes"
            )
        count += len(chunk)
        if count > MOST_TOKENS:
            raise InputError(
                f"{path}: more than {MOST_TOKENS} tokens do not fit into one shard; give less text "
                "or several shards"
            )
        file.write(chunk.astype(dtype).tobytes())
    if not count:
        raise InputError(f"{path}: there are no tokens to write; give files that hold text")
    return count
