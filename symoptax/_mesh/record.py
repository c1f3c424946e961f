"""What is decided while a step is traced: for `plan` to print, and to warn of what costs much."""

import contextlib
import contextvars
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from symoptax._mesh.placement import Placement


class MeshWarning(UserWarning):
    """A leaf is sent around or computed more often than it had to be."""


class Decision(NamedTuple):
    """Where the matrices of some leaves are computed.

    Attributes:
      leaves: their names.
      map: the name of the map.
      shape: the stack `(*kept, count, m, n)` that they make together, or that of the one leaf.
      placement: how it travels; None where it stays.
      sent: bytes that one device sends for it.
    """

    leaves: tuple[str, ...]
    map: str
    shape: tuple[int, ...]
    placement: Placement | None
    sent: float


_decisions: contextvars.ContextVar[list[Decision] | None] = contextvars.ContextVar(
    "decisions", default=None
)


@contextlib.contextmanager
def recording() -> Iterator[list[Decision]]:
    """Collect what is decided inside."""
    decisions: list[Decision] = []
    token = _decisions.set(decisions)
    try:
        yield decisions
    finally:
        _decisions.reset(token)


def record(decision: Decision) -> None:
    """Note a decision, if anybody listens."""
    decisions = _decisions.get()
    if decisions is not None:
        decisions.append(decision)


def warn(leaves: Sequence[str], problem: str, mend: str) -> None:
    """Warn that leaves cost more than they had to."""
    more = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
    warnings.warn(f"{', '.join(leaves[:3])}{more}: {problem}; {mend}.", MeshWarning, stacklevel=2)
