"""Batches of token windows: shuffled and resumable for training, fixed for validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from pretraining.errors import InputError
from pretraining.shards import Shard

# Reading is a copy from a memory map, so one thread a few batches ahead hides it.
_READ_OPTIONS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


class WindowSource:
    """Random access to the windows of some shards.

    Record i is window i: `seq_len + 1` int32 tokens, starting every `seq_len` tokens, so that each
    token but a shard's first is a target once. No window crosses from one shard to the next.
    """

    def __init__(self, shards: Sequence[Shard], seq_len: int) -> None:
        self._shards = tuple(shards)
        self._seq_len = seq_len
        counts = [(len(shard) - 1) // seq_len for shard in self._shards]
        self._ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> np.ndarray:
        which = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[which - 1]) if which else 0
        start = (index - first) * self._seq_len
        window = self._shards[which].tokens[start : start + self._seq_len + 1]
        return window.astype(np.int32)


class Loader:
    """An endless iterator of training batches whose place can be saved and restored."""

    def __init__(self, batches: grain.IterDataset, identity: dict[str, int], epoch: int) -> None:
        self._iterator = iter(batches)
        self._identity = identity
        self.batches_per_epoch = epoch

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> np.ndarray:
        """Return this process's part of the next batch, int32 (batch, seq_len + 1)."""
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Return the place in the stream as a JSON-able dict, equal for every process."""
        return {**self._identity, "iterator": self._iterator.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue exactly where `get_state` was called.

        Raises:
            InputError: The state belongs to other data, or to other batch settings.
        """
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise InputError(
                    f"the checkpoint's data stream has {name} {state.get(name)}, this run has "
                    f"{value}; resume with the same data and settings"
                )
        self._iterator.set_state(state["iterator"])

    def close(self) -> None:
        """Stop the reading thread."""
        self._iterator.close()


def make_loader(
    shards: Sequence[Shard],
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Loader:
    """Return endless shuffled batches; every epoch has its own order and drops its remainder.

    Of each batch of `batch_size` windows, process p of P gets rows p, p + P, p + 2P, ...

    Raises:
        InputError: There are too few windows for one batch, or the batch cannot be shared out.
    """
    part = _part_size(batch_size, process_count)
    _require("seed", seed, at_least=0)
    source = _windows(shards, seq_len)
    epoch = _require_batches(source, batch_size, seq_len, "training") // batch_size
    windows = grain.MapDataset.source(source).seed(seed).shuffle()
    # Cut to whole batches before sharing out, so that no process sees a longer epoch.
    mine = windows[: epoch * batch_size][process_index::process_count]
    batches = mine.batch(part).repeat().to_iter_dataset(_READ_OPTIONS)
    tokens = sum(len(shard) for shard in shards)
    identity = {"seed": seed, "batch_size": batch_size, "seq_len": seq_len, "tokens": tokens}
    return Loader(batches, identity, epoch)


def validation_batches(
    shards: Sequence[Shard],
    batch_size: int,
    seq_len: int,
    max_batches: int | None = None,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[np.ndarray]:
    """Return the first whole batches in order, int32 (batch, seq_len + 1): the same at every call.

    Processes share each batch as in `make_loader`.

    Raises:
        InputError: There are too few windows for one batch, or the batch cannot be shared out.
    """
    _part_size(batch_size, process_count)
    source = _windows(shards, seq_len)
    count = _require_batches(source, batch_size, seq_len, "validation") // batch_size
    count = count if max_batches is None else min(count, max_batches)
    rows = range(process_index, batch_size, process_count)
    return (np.stack([source[batch * batch_size + row] for row in rows]) for batch in range(count))


def _windows(shards: Sequence[Shard], seq_len: int) -> WindowSource:
    _require("sequence length", seq_len, at_least=1)
    return WindowSource(shards, seq_len)


def _require(name: str, value: int, at_least: int) -> None:
    if value < at_least:
        raise InputError(f"{name} {value} is too small; give {at_least} or more")


def _part_size(batch_size: int, process_count: int) -> int:
    if batch_size < 1 or batch_size % process_count:
        raise InputError(
            f"batch size {batch_size} cannot be shared by {process_count} processes; "
            f"give a positive multiple of {process_count}"
        )
    return batch_size // process_count


def _require_batches(source: WindowSource, batch_size: int, seq_len: int, role: str) -> int:
    if len(source) < batch_size:
        raise InputError(
            f"too little {role} text: {len(source)} windows of {seq_len} tokens, but one batch "
            f"needs {batch_size}; give more text, a smaller batch, or shorter sequences"
        )
    return len(source)
