"""Tokenise a corpus once, to token shards, with a model's own tokenizer.

Shards are cut where documents end, so that a shard depends on the documents before it alone, not on
threads or on when the work was stopped. `preparation.json` beside them keeps where the next one
begins.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
from tokenizers import Tokenizer

from pretraining.corpus import list_files
from pretraining.errors import InputError
from pretraining.readers import looks_readable, read_sample, read_texts
from pretraining.shards import MOST_TOKENS, write_shard

# Ends of documents in the tokenizers of Qwen3, OLMoE and gpt-oss, of Llama 3, of Gemma, and others.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")

_BATCH_CHARACTERS = 4 << 20
_SAMPLED_FILES = 8


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a preparation depends on.

    Attributes:
      data: file, folder or glob of text, `.jsonl`, `.jsonl.gz` or `.parquet` files.
      tokenizer: a `tokenizer.json`, or the folder that holds it.
      column: of Parquet files and field of JSON lines that holds the text.
      start: token before each document, none if empty.
      end: token after each document; that of `ENDS` which the tokenizer has if empty.
      shard_tokens: of a shard, at least, unless it is the last.
      val_tokens: of the validation shard, at least; the first documents are held out for it.
      max_tokens: to stop after; 0 takes all.
    """

    data: str
    tokenizer: str
    column: str = "text"
    start: str = ""
    end: str = ""
    shard_tokens: int = 100_000_000
    val_tokens: int = 10_000_000
    max_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Source:
    """Files and a tokenizer that have passed every check."""

    settings: Settings
    files: list[Path]
    tokenizer: Tokenizer
    start: list[int]
    end: int

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @property
    def bytes_per_token(self) -> int:
        """Return 2 where that holds every token, else 4."""
        return 2 if self.vocab_size <= 2**16 else 4

    def identity(self) -> dict[str, Any]:
        """Return what the shards depend on, for JSON; paths may change, content may not."""
        settings = dataclasses.asdict(self.settings) | {"end": self.end, "start": self.start}
        tokenizer = _tokenizer_file(self.settings.tokenizer).read_bytes()
        settings["tokenizer"] = hashlib.sha256(tokenizer).hexdigest()
        settings["data"] = [[path.name, path.stat().st_size] for path in self.files]
        return settings


def open_source(settings: Settings) -> Source:
    """Find the files and load the tokenizer.

    Raises:
      InputError: nothing readable is there, the tokenizer cannot be read, or lacks a token.
    """
    if settings.shard_tokens > MOST_TOKENS // 2:
        raise InputError(
            f"--shard_tokens={settings.shard_tokens}: at most {MOST_TOKENS // 2} fit into a shard"
        )
    files = [path for path in list_files(settings.data)[1] if looks_readable(path)]
    if not files:
        raise InputError(f"--data={settings.data}: no text, .jsonl, .jsonl.gz or .parquet files")
    tokenizer = _load_tokenizer(settings.tokenizer)
    end = settings.end or next((n for n in ENDS if tokenizer.token_to_id(n) is not None), "")
    if not end:
        raise InputError(
            f"--tokenizer={settings.tokenizer}: has none of {', '.join(ENDS)}; "
            "give the token that ends a document as --end"
        )
    start = [_token(tokenizer, "start", settings.start)] if settings.start else []
    return Source(settings, files, tokenizer, start, _token(tokenizer, "end", end))


def _tokenizer_file(path: str) -> Path:
    file = Path(path).expanduser()
    return file / "tokenizer.json" if file.is_dir() else file


def _load_tokenizer(path: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(_tokenizer_file(path).read_text(encoding="utf-8"))
    except Exception as error:  # Nothing narrower is raised for a broken file.
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"--tokenizer={path}: cannot be read ({reason}); give a model's tokenizer.json"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A text that spells the end of a document must not end one.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _token(tokenizer: Tokenizer, flag: str, name: str) -> int:
    token = tokenizer.token_to_id(name)
    if token is None:
        raise InputError(f"--{flag}={name}: the tokenizer has no such token")
    return token


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a preparation will take, from the beginnings of some files."""

    files: int
    tokens: float
    seconds: float
    bytes: float


def estimate(source: Source) -> Estimate:
    """Tokenise a sample from up to eight files, spread evenly.

    Raises:
      InputError: a sampled file is broken, or none holds text.
    """
    files, column = source.files, source.settings.column
    chosen = [files[i * len(files) // _SAMPLED_FILES] for i in range(_SAMPLED_FILES)]
    tokens = stored = seconds = 0.0
    for path in dict.fromkeys(chosen):
        texts, share = read_sample(path, column)
        started = time.perf_counter()
        tokens += sum(map(len, _encode(source, texts)))
        seconds += time.perf_counter() - started
        stored += share * path.stat().st_size
    if not tokens:
        raise InputError(f"--data={source.settings.data}: the files hold no text")
    total = tokens / stored * sum(path.stat().st_size for path in files)
    kept = min(total, source.settings.max_tokens or total)
    return Estimate(len(files), kept, kept / tokens * seconds, kept * source.bytes_per_token)


def _encode(source: Source, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield the tokens of each text between its start and its end."""
    for found in source.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
        yield np.array([*source.start, *found.ids, source.end], np.uint32)


@dataclasses.dataclass
class Progress:
    """The shards written so far, (name, tokens), and the document (file, number) after them."""

    identity: dict[str, Any]
    shards: list[tuple[str, int]]
    place: tuple[int, int] = (0, 0)
    finished: bool = False

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(tokens for _, tokens in self.shards)

    @classmethod
    def find(cls, source: Source, folder: Path) -> Self:
        """Read what a stopped preparation has left in `folder`, or begin.

        Raises:
          InputError: the folder holds something else, or was prepared from something else.
        """
        identity, path = source.identity(), folder / "preparation.json"
        if not path.exists():
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise InputError(f"--out_dir={folder}: is not an empty folder; name another")
            return cls(identity, [])
        try:
            found = cls(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}: cannot be read ({error}); name another folder") from error
        if changed := [name for name in identity if found.identity.get(name) != identity[name]]:
            raise InputError(
                f"--out_dir={folder}: was begun with another {', '.join(changed)}; "
                "name another folder"
            )
        return found

    def save(self, folder: Path) -> None:
        """Write the file, which appears whole or not at all."""
        partial = folder / ".preparation.json"
        partial.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        os.replace(partial, folder / "preparation.json")


def write_shards(
    source: Source, folder: Path, progress: Progress, advance: Callable[[int], None]
) -> None:
    """Write the shards that `progress` lacks, first the one for validation.

    Args:
      source: what to tokenise.
      folder: of the shards, `val_00000.bin`, `train_00000.bin` and so on.
      progress: what is there; it is kept up to date, here and in the folder.
      advance: called with a number of tokens whenever so many more have been made.

    Raises:
      InputError: a file is broken, or holds too little for training and validation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for partial in folder.glob(".*.bin.*"):
        partial.unlink()  # Of a process that was killed.
    progress.save(folder)
    settings, most = source.settings, source.settings.max_tokens or float("inf")
    documents = _tokens(source, progress.place)
    while not progress.finished:
        index = len(progress.shards)
        name = f"train_{index - 1:05}.bin" if index else "val_00000.bin"
        wanted = min(
            settings.shard_tokens if index else settings.val_tokens, most - progress.tokens
        )
        first = next(documents, None) if wanted > 0 else None
        if first is None:
            progress.finished = True
        else:
            piece = _Piece(itertools.chain([first], documents), wanted, advance)
            shard = write_shard(
                folder / name,
                piece,
                delimiter=source.end,
                bytes_per_token=source.bytes_per_token,
                prepend=len(source.start),
            )
            progress.shards.append((name, len(shard)))
            progress.place = piece.place
        progress.save(folder)
    if len(progress.shards) < 2:
        raise InputError(
            f"--data={settings.data}: holds {progress.tokens} tokens, and --val_tokens="
            f"{settings.val_tokens} of them are for validation; give more text, or fewer"
        )


class _Piece:
    """The tokens of the next documents, up to the end of the one that makes it `wanted`."""

    def __init__(
        self,
        documents: Iterator[tuple[tuple[int, int], np.ndarray]],
        wanted: float,
        advance: Callable[[int], None],
    ) -> None:
        self._documents, self._wanted, self._advance = documents, wanted, advance

    def __iter__(self) -> Iterator[np.ndarray]:
        count = 0
        for (file, number), tokens in self._documents:
            self.place = (file, number + 1)
            self._advance(len(tokens))
            count += len(tokens)
            yield tokens
            if count >= self._wanted:
                return


def _tokens(source: Source, place: tuple[int, int]) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Yield the place and the tokens of each document from `place` on; empty ones have none."""
    for batch in _batches(_documents(source, place)):
        places, texts = zip(*batch, strict=True)
        yield from zip(places, _encode(source, texts), strict=True)


def _documents(source: Source, place: tuple[int, int]) -> Iterator[tuple[tuple[int, int], str]]:
    first, skipped = place
    for index, path in enumerate(source.files[first:], start=first):
        texts = enumerate(read_texts(path, source.settings.column))
        for number, text in itertools.islice(texts, skipped, None):
            if text:
                yield (index, number), text
        skipped = 0


def _batches(
    documents: Iterable[tuple[tuple[int, int], str]],
) -> Iterator[list[tuple[tuple[int, int], str]]]:
    batch, size = [], 0
    for place, text in documents:
        batch.append((place, text))
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
