"""Read the texts of one file: plain text, JSON lines, or Parquet, a bounded piece at a time."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from pretraining.errors import InputError

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")
PARQUET_SUFFIX = ".parquet"

_SNIFF_BYTES = 8192
_PIECE_CHARACTERS = 1 << 20
_PARQUET_ROWS = 256


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


def read_texts(path: Path) -> Iterator[str]:
    """Yield the documents of one file in order.

    Raises:
        InputError: A row file is broken or lacks its `text` field.
    """
    name = path.name.lower()
    if name.endswith(JSONL_SUFFIXES):
        return _read_jsonl(path)
    if name.endswith(PARQUET_SUFFIX):
        return _read_parquet(path)
    return _read_plain(path)


def _read_plain(path: Path) -> Iterator[str]:
    # A long file becomes several documents cut at line ends, so that memory stays flat.
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while piece := file.read(_PIECE_CHARACTERS):
                yield piece + file.readline()
    except (OSError, UnicodeDecodeError):
        return  # One unreadable file must not stop a run over thousands.


def _read_jsonl(path: Path) -> Iterator[str]:
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text_of_line(line, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error}); replace or remove the file") from error


def _text_of_line(line: bytes, place: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{place}: not valid JSON ({error}); write one JSON object per line"
        ) from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise InputError(f'{place}: no "text" string in this line; write {{"text": "..."}}')
    return _without_surrogates(text)


def _without_surrogates(text: str) -> str:
    # JSON escapes can spell half a surrogate pair, which no encoder accepts.
    return text.encode("utf-8", "replace").decode("utf-8")


def _read_parquet(path: Path) -> Iterator[str]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise InputError(f"{path}: Parquet needs pyarrow; run 'pip install pyarrow'") from error
    try:
        with pq.ParquetFile(path) as file:
            _check_text_column(path, file.schema_arrow)
            for group in range(file.num_row_groups):
                batches = file.iter_batches(_PARQUET_ROWS, row_groups=[group], columns=["text"])
                for batch in batches:
                    # A null stays a row, so that row numbers mean the same in every pass.
                    yield from (text or "" for text in batch.column(0).to_pylist())
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: not readable as Parquet ({error}); write it again") from error


def _check_text_column(path: Path, schema: object) -> None:
    if "text" not in schema.names:
        columns = ", ".join(schema.names) or "none"
        raise InputError(f'{path}: no "text" column (columns: {columns}); rename the text column')
    kind = str(schema.field("text").type)
    if kind not in ("string", "large_string", "string_view"):
        raise InputError(f'{path}: column "text" is {kind}, not string; convert the column')
