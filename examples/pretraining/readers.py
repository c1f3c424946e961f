"""Read the texts of one file: plain text, JSON lines, or Parquet, a bounded piece at a time."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretraining.errors import InputError

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")
PARQUET_SUFFIX = ".parquet"

_SNIFF_BYTES = 8192
_PIECE_CHARACTERS = 1 << 20
_PARQUET_ROWS = 256
_SAMPLE_BYTES = 1 << 18


def has_rows(path: Path) -> bool:
    """Tell whether a file holds one document per row (JSON lines, Parquet)."""
    return path.name.lower().endswith((*JSONL_SUFFIXES, PARQUET_SUFFIX))


def looks_readable(path: Path) -> bool:
    """Tell whether a file is worth opening: a row format, or a start that is UTF-8 text."""
    try:
        with path.open("rb") as file:
            start = file.read(_SNIFF_BYTES)
        if not start or has_rows(path):
            return bool(start)
        # Not final: the last character may be cut by the sniff length.
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except (OSError, UnicodeDecodeError):
        return False
    return b"\0" not in start


def read_texts(path: Path, column: str = "text") -> Iterator[str]:
    """Yield the documents of one file in order, of row files those in `column`.

    Raises:
        InputError: A row file is broken or lacks its column.
    """
    name = path.name.lower()
    if name.endswith(JSONL_SUFFIXES):
        return _read_jsonl(path, column)
    if name.endswith(PARQUET_SUFFIX):
        return _read_parquet(path, column)
    return _read_plain(path)


def read_sample(path: Path, column: str = "text") -> tuple[list[str], float]:
    """Return documents from the start of a file, and which share of its bytes they are.

    Raises:
        InputError: A row file is broken or lacks its column.
    """
    if path.name.lower().endswith(PARQUET_SUFFIX):
        texts = list(itertools.islice(_read_parquet(path, column), _PARQUET_ROWS))
        return texts, len(texts) / max(1, _parquet_rows(path))
    with path.open("rb") as file:
        start = file.read(_SAMPLE_BYTES)
    share = len(start) / max(1, path.stat().st_size)
    if path.name.lower().endswith(".gz"):
        start = zlib.decompressobj(wbits=31).decompress(start)
    if not has_rows(path):
        return [start.decode("utf-8", "ignore")], share
    lines = [line for line in start.split(b"\n") if line.strip()]
    whole = lines if share == 1 else lines[:-1]
    if not whole:  # One long line: it stands for the bytes read of it.
        return list(itertools.islice(_read_jsonl(path, column), 1)), share
    return [_text_of_line(line, str(path), column) for line in whole], share


def _read_plain(path: Path) -> Iterator[str]:
    # A long file becomes several documents cut at line ends, so that memory stays flat.
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while piece := file.read(_PIECE_CHARACTERS):
                yield piece + file.readline()
    except (OSError, UnicodeDecodeError):
        return  # One unreadable file must not stop a run over thousands.


def _read_jsonl(path: Path, column: str) -> Iterator[str]:
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text_of_line(line, f"{path}:{number}", column)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error}); replace or remove the file") from error


def _text_of_line(line: bytes, place: str, column: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{place}: not valid JSON ({error}); write one JSON object per line"
        ) from error
    text = record.get(column) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise InputError(f'{place}: no "{column}" string in this line; write {{"{column}": "..."}}')
    return _without_surrogates(text)


def _without_surrogates(text: str) -> str:
    # JSON escapes can spell half a surrogate pair, which no encoder accepts.
    return text.encode("utf-8", "replace").decode("utf-8")


def _read_parquet(path: Path, column: str) -> Iterator[str]:
    with _parquet(path) as file:
        _check_text_column(path, file.schema_arrow, column)
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(_PARQUET_ROWS, row_groups=[group], columns=[column]):
                # A null stays a row, so that row numbers mean the same in every pass.
                yield from (text or "" for text in batch.column(0).to_pylist())


def _parquet_rows(path: Path) -> int:
    with _parquet(path) as file:
        return file.metadata.num_rows


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise InputError(f"{path}: Parquet needs pyarrow; run 'pip install pyarrow'") from error
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: not readable as Parquet ({error}); write it again") from error


def _check_text_column(path: Path, schema: Any, column: str) -> None:
    if column not in schema.names:
        columns = ", ".join(schema.names) or "none"
        raise InputError(
            f'{path}: no "{column}" column (columns: {columns}); rename the text column'
        )
    kind = str(schema.field(column).type)
    if kind not in ("string", "large_string", "string_view"):
        raise InputError(f'{path}: column "{column}" is {kind}, not string; convert the column')
