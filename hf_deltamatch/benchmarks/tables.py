"""Rows of a benchmark as text: a speed, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_deltamatch.benchmarks.baselines import Absent
from hf_deltamatch.benchmarks.process import ArmFailed
from hf_deltamatch.benchmarks.verify import WrongNumbers

Rows = dict[str, dict[str, Any]]


class BenchError(RuntimeError):
    """Nothing can be timed here."""


def reason(error: Exception) -> str:
    """Why a row has no speed, in a line."""
    lines = str(error).strip().splitlines() or [""]
    expected = isinstance(error, (Absent, WrongNumbers, ArmFailed))
    return lines[0] if expected else f"{type(error).__name__}: {lines[0]}".rstrip(": ")


def failures(result: dict[str, Any]) -> list[str]:
    """Our rows without a speed, as ``shape, recipe: reason``."""
    return [
        f"{s['name']}, {name}: {row['failed']}"
        for s in result["shapes"]
        for name, row in s["rows"].items()
        if row["ours"] and "failed" in row
    ]


def format_rows(title: str, rows: Rows, columns: Iterable[tuple[str, str, str]]) -> str:
    """One table; a column is a head, a key of the rows and a format."""
    columns = list(columns)
    lines = [f"{title:<36}" + "".join(f"{head:>{len(head) + 2}}" for head, _, _ in columns)]
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"  {name:<34}  not timed: {row['failed']}")
            continue
        cells = []
        for head, key, form in columns:
            value = row.get(key)
            cells.append(f"{'' if value is None else format(value, form):>{len(head) + 2}}")
        lines.append(f"  {name:<34}" + "".join(cells))
    return "\n".join(lines)
