"""What an audit says: one line for each claim, what was measured, and what to change."""

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Literal

Verdict = Literal["holds", "fails", "partly", "unclear", "note"]

_HEADER = ("verdict", "block", "claim", "loss changes by", "control")


@dataclasses.dataclass(frozen=True)
class AuditRow:
    """One claim about one block.

    Attributes:
      block: the path of the leaf, or what all leaves of a family have in common.
      role: the role of the leaf, or the kind of the family.
      claim: what was tested.
      verdict: "holds"; "fails"; "partly": only a smaller group acts; "unclear": not measurable
        here; "note": no claim of the rules, but worth knowing.
      change: change of the loss under the symmetry, or what the claim says was measured.
      control: change of the loss when the symmetry is broken on purpose.
      advice: what to change.
    """

    block: str
    role: str
    claim: str
    verdict: Verdict
    change: float | None = None
    control: float | None = None
    advice: str = ""


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """The answer of `audit`; `str()` gives the table, `to_json()` the same for programs."""

    rows: tuple[AuditRow, ...]

    @property
    def failures(self) -> tuple[AuditRow, ...]:
        """The claims that are not true of this model and loss, in whole or in part."""
        return tuple(row for row in self.rows if row.verdict in ("fails", "partly"))

    @property
    def ok(self) -> bool:
        """Whether no claim was found false."""
        return not self.failures

    def to_json(self) -> str:
        """Return the report as JSON: `{"ok": ..., "rows": [{"block": ..., ...}, ...]}`."""
        rows = [
            {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in dataclasses.asdict(row).items()
            }
            for row in self.rows
        ]
        return json.dumps({"ok": self.ok, "rows": rows}, indent=1)

    def __str__(self) -> str:
        cells = [(line, _cells(line)) for line in _merged(self.rows)]
        widths = [max(map(len, c)) for c in zip(_HEADER, *(c for _, c in cells), strict=True)]
        lines = [_line(_HEADER, widths), "  ".join("-" * width for width in widths)]
        for row, line in cells:
            lines.append(_line(line, widths))
            if row.advice:
                lines.append(f"{'':{widths[0]}}  -> {row.advice}")
        claims = sum(row.verdict != "note" for row in self.rows)
        count = len(self.failures)
        lines.append(f"{claims} claims; " + (f"{count} not true" if count else "none false"))
        return "\n".join(lines)


def _merged(rows: Sequence[AuditRow]) -> list[AuditRow]:
    """Write rows that differ in the numbers of layers alone as one, with the worst measurement."""
    alike: dict[AuditRow, list[AuditRow]] = {}
    for row in rows:
        block = re.sub(r"\d+", "*", row.block)
        key = dataclasses.replace(row, block=block, change=None, control=None)
        alike.setdefault(key, []).append(row)
    return [
        dataclasses.replace(
            key if len(group) > 1 else group[0],
            claim=key.claim + (f" ({len(group)} times)" if len(group) > 1 else ""),
            change=max((row.change for row in group if row.change is not None), default=None),
            control=min((row.control for row in group if row.control is not None), default=None),
        )
        for key, group in alike.items()
    ]


def _cells(row: AuditRow) -> tuple[str, ...]:
    block = row.block or "(whole tree)"
    return row.verdict, block, row.claim, _number(row.change), _number(row.control)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join(padded).rstrip()
