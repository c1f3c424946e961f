"""What a compiled program sends between devices."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax

# What one of k devices sends per byte of the result, in a ring.
_SENT = {
    "all-gather": lambda k: (k - 1) / k,
    "all-to-all": lambda k: (k - 1) / k,
    "all-reduce": lambda k: 2 * (k - 1) / k,
    "reduce-scatter": lambda k: k - 1,
    "collective-permute": lambda k: 1,
    "ragged-all-to-all": lambda k: (k - 1) / k,
}
_BITS = {"pred": 8, "bf16": 16}
_CALL = re.compile(rf"= (.*?) ({'|'.join(_SENT)})(?:-start)?\(")
_ARRAY = re.compile(r"(pred|bf16|[fsu]\d+|f8\w+|c\d+)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One exchange between devices.

    Attributes:
      kind: "all-to-all", "all-gather", ...
      devices: how many take part in each group.
      bytes: the size of the result on one device.
      sent: bytes that one device sends, in a ring.
    """

    kind: str
    devices: int
    bytes: float
    sent: float


def collectives(compiled: jax.stages.Compiled) -> list[Collective]:
    """Return the exchanges between devices of a compiled program, in the order of its text.

    What stands in the body of a loop counts once.

    >>> collectives(jax.jit(lambda x: 2 * x).lower(1.0).compile())
    []

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returned, for CPU, GPU or TPU.
    """
    found: dict[str, Collective] = {}
    for line in (compiled.as_text() or "").splitlines():
        if call := _CALL.search(line):
            # A TPU program says the same exchange several times, under one channel.
            channel = re.search(r"channel_id=(\d+)", line)
            found.setdefault(channel[1] if channel else line, _collective(line, *call.groups()))
    return list(found.values())


def _collective(line: str, result: str, kind: str) -> Collective:
    sizes = [_bytes(dtype, shape) for dtype, shape in _ARRAY.findall(result)]
    # What has started without an end returns its operands too, before the results.
    if f"{kind}-start(" in line and result.startswith("(") and kind != "all-reduce":
        sizes = sizes[len(sizes) // 2 :]
    devices, size = _group_size(line), sum(sizes)
    return Collective(kind, devices, size, size * _SENT[kind](devices))


def _bytes(dtype: str, shape: str) -> float:
    bits = _BITS.get(dtype) or int(re.findall(r"\d+", dtype)[0])
    return math.prod(int(size) for size in shape.split(",") if size) * bits / 8


def _group_size(line: str) -> int:
    """Read a group from `{{0,1},...}`, `[groups,size]<=...` or `mesh['a'=4,'b'=2] {'a'}`."""
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[(.*?)\].*?\{(\'.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        axes: Sequence[str] = re.findall(r"'(\w+)'", found[2])
        return math.prod(int(sizes[axis]) for axis in axes)
    return 2  # a permutation, in pairs
