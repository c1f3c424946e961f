"""The one entry to the data: a path in, shards, tokenizer and baselines out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from pretraining.baselines import Baselines, baselines
from pretraining.corpus import Documents, list_files, read_documents
from pretraining.errors import InputError
from pretraining.shards import Shard, check_vocabulary, open_shard, write_shard
from pretraining.tokenizer import DELIMITER, encode, fingerprint, load_or_train

DEFAULT_VOCABULARY = 4096


@dataclass(frozen=True)
class Dataset:
    """Everything training needs to know about its data; no tokenizer when given shards."""

    train_shards: tuple[Shard, ...]
    val_shards: tuple[Shard, ...]
    tokenizer: Tokenizer | None
    vocab_size: int
    description: str
    baselines: Baselines

    @property
    def train_tokens(self) -> int:
        """The number of training tokens."""
        return sum(len(shard) for shard in self.train_shards)

    @property
    def val_tokens(self) -> int:
        """The number of validation tokens."""
        return sum(len(shard) for shard in self.val_shards)


def prepare(
    data: str | None,
    *,
    vocab_size: int = DEFAULT_VOCABULARY,
    cache_dir: str | Path,
) -> Dataset:
    """Prepare the data of a run: token shards as they are, or text tokenised into the cache.

    Args:
        data: A folder or glob of `.bin` token shards, a text corpus as in `read_documents`, or None
            for the sources of the Python standard library.
        vocab_size: The vocabulary of the shards, or the most entries the tokenizer may have.
        cache_dir: Where the tokenizer and the tokenised corpus are kept.

    Raises:
        InputError: The data or a setting cannot be used.
    """
    try:
        shard_paths = None if data is None else _shard_paths(data)
        if shard_paths is not None:
            return _from_shards(data, shard_paths, vocab_size)
        return _from_text(read_documents(data), vocab_size, Path(cache_dir).expanduser())
    except OSError as error:
        raise InputError(
            f"{error.filename or cache_dir}: cannot prepare the data ({error.strerror or error}); "
            "check the data, the disk and the cache folder"
        ) from error


def _shard_paths(data: str) -> list[Path] | None:
    _, files = list_files(data)
    shards = [path for path in files if path.suffix == ".bin"]
    if shards and len(shards) < len(files):
        raise InputError(
            f"{data}: {len(shards)} .bin shards are mixed with {len(files) - len(shards)} other "
            "files; give a glob that matches only one kind, such as 'folder/*.bin'"
        )
    return shards or None


def _from_shards(data: str, paths: list[Path], vocab_size: int) -> Dataset:
    train_paths, val_paths = _split_shards(data, paths)
    train, val = (tuple(map(open_shard, group)) for group in (train_paths, val_paths))
    for shard in (*train, *val):
        check_vocabulary(shard, vocab_size)
    description = f"{data} ({len(train)} training and {len(val)} validation shards)"
    return Dataset(train, val, None, vocab_size, description, baselines(train, val, vocab_size))


def _split_shards(data: str, paths: list[Path]) -> tuple[list[Path], list[Path]]:
    val = [path for path in paths if "val" in path.name] or paths[-1:]
    train = [path for path in paths if path not in val]
    if not train:
        raise InputError(
            f"{data}: {len(paths)} shard(s), but none is left for training after validation; give "
            "two or more shards, those for validation with 'val' in their names"
        )
    return train, val


def _from_text(documents: Documents, vocab_size: int, cache_dir: Path) -> Dataset:
    tokenizer = load_or_train(documents, vocab_size, cache_dir)
    name = f"{fingerprint(documents, vocab_size)}.bin"
    train = _cached_shard(cache_dir / f"train-{name}", tokenizer, documents.train())
    val = _cached_shard(cache_dir / f"val-{name}", tokenizer, documents.validation())
    size = tokenizer.get_vocab_size()
    description = f"{documents.description} ({len(documents.files)} files)"
    scores = baselines([train], [val], size, tokenizer)
    return Dataset((train,), (val,), tokenizer, size, description, scores)


def _cached_shard(path: Path, tokenizer: Tokenizer, texts: Iterable[str]) -> Shard:
    try:
        return open_shard(path)
    except InputError:  # Missing or damaged: a cache entry is simply written again.
        pass
    return write_shard(
        path,
        encode(tokenizer, texts),
        delimiter=tokenizer.token_to_id(DELIMITER),
        bytes_per_token=2 if tokenizer.get_vocab_size() <= 2**16 else 4,
    )
