"""Where text comes from: find the files, split them by file, and read them lazily."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pretraining.errors import InputError
from pretraining.readers import has_rows, looks_readable, read_texts

VALIDATION_FRACTION = 0.05

# Generated tables and texts, near-duplicates of one another, would decide the validation loss.
_GENERATED = {"encodings", "pydoc_data"}
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"} | _GENERATED


@dataclass(frozen=True)
class Documents:
    """A text corpus as two lazy streams of documents that share no file.

    Files are taken for validation in the order of their path's hash, until they hold 5 % of the
    bytes; where every file is too large for that, the smallest one is taken.

    A corpus that is one JSON lines or Parquet file is split by the hash of the row number instead:
    row 0 trains, row 1 validates, the others fall by hash.
    """

    description: str
    train_files: tuple[Path, ...]
    validation_files: tuple[Path, ...]
    split_rows: bool = False

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file of the corpus once, sorted."""
        return tuple(sorted({*self.train_files, *self.validation_files}))

    def train(self) -> Iterator[str]:
        """Yield the training documents in file order.

        Raises:
            InputError: A file is broken, or there is no document.
        """
        return self._read(self.train_files, validation=False)

    def validation(self) -> Iterator[str]:
        """Yield the validation documents in file order.

        Raises:
            InputError: A file is broken, or there is no document.
        """
        return self._read(self.validation_files, validation=True)

    def _read(self, files: tuple[Path, ...], validation: bool) -> Iterator[str]:
        found = False
        for path in files:
            for row, text in enumerate(read_texts(path)):
                if text and (not self.split_rows or _row_validates(row) == validation):
                    found = True
                    yield text
        if not found:
            role = "validation" if validation else "training"
            raise InputError(
                f"{self.description}: no {role} text is left after the split; "
                "give more files or rows that hold UTF-8 text"
            )


def read_documents(source: str | None) -> Documents:
    """Open a corpus without reading it.

    Args:
        source: A folder, file or glob of text, `.jsonl`, `.jsonl.gz` or `.parquet` files, or None
            for the sources of the Python standard library.

    Raises:
        InputError: Nothing is there, nothing is readable, or one text file cannot be split.
    """
    if source is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [path for path in _standard_library(root) if looks_readable(path)]
        return _split(f"Python standard library ({root})", root, files)
    root, found = list_files(source)
    files = [path for path in found if looks_readable(path)]
    if not files:
        raise InputError(
            f"{source}: none of its {len(found)} files holds readable UTF-8 text; "
            "give text, .jsonl, .jsonl.gz or .parquet files"
        )
    return _split(source, root, files)


def list_files(source: str) -> tuple[Path, list[Path]]:
    """Find the files of a folder, glob or single path: their root and the sorted list.

    Hidden files and folders below the root are left out.

    Raises:
        InputError: The path does not exist, the folder is empty, or the glob matches no file.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        root, found = path, _walk(path)
    elif glob.has_magic(source):
        root, found = _glob_root(path), map(Path, glob.glob(str(path), recursive=True))
    else:
        raise InputError(f"{source}: no such file or folder; check the path")
    files = sorted(file for file in set(found) if file.is_file() and not _hidden(file, root))
    if not files:
        what = "the folder holds no files" if path.is_dir() else "the pattern matches no file"
        raise InputError(f"{source}: {what}; give a folder, file or glob with data")
    return root, files


def _walk(root: Path, skipped: frozenset[str] | set[str] = frozenset()) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - skipped)
        yield from (Path(folder, name) for name in names)


def _standard_library(root: Path) -> list[Path]:
    return sorted(path for path in _walk(root, _SKIPPED_FOLDERS) if path.suffix == ".py")


def _glob_root(pattern: Path) -> Path:
    plain = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        plain.append(part)
    return Path(*plain)


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _hash(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _row_validates(row: int) -> bool:
    # Rows 0 and 1 are fixed, so that two rows are enough for two splits.
    return row == 1 or (row > 1 and _hash(str(row)) < VALIDATION_FRACTION)


def _split(description: str, root: Path, files: list[Path]) -> Documents:
    if len(files) == 1:
        return _split_single(description, files[0])
    validation = _held_out(root, {path: path.stat().st_size for path in files})
    train_files = tuple(path for path in files if path not in validation)
    return Documents(description, train_files, tuple(sorted(validation)))


def _held_out(root: Path, sizes: dict[Path, int]) -> set[Path]:
    # In hash order until the share of bytes is reached; counting files would leave it to chance.
    wanted = VALIDATION_FRACTION * sum(sizes.values())
    held_out, held_bytes = set(), 0
    for path in sorted(sizes, key=lambda path: _hash(path.relative_to(root).as_posix())):
        if held_bytes + sizes[path] <= 2 * wanted:
            held_out.add(path)
            held_bytes += sizes[path]
        if held_bytes >= wanted:
            break
    return held_out or {min(sizes, key=sizes.__getitem__)}


def _split_single(description: str, path: Path) -> Documents:
    if not has_rows(path):
        raise InputError(
            f"{description}: only one readable text file ({path.name}), so none is left for "
            "validation; cut it into two or more files, or write one document per line as .jsonl"
        )
    return Documents(description, (path,), (path,), split_rows=True)
