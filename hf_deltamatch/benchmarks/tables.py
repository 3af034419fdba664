"""Rows of a benchmark as text: a speed, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hf_deltamatch import kernels
from hf_deltamatch.benchmarks.baselines import Absent
from hf_deltamatch.benchmarks.process import ArmFailed
from hf_deltamatch.benchmarks.verify import WrongNumbers

Rows = dict[str, dict[str, Any]]


class BenchError(RuntimeError):
    """Nothing can be timed here."""


def require_kernels(what: str, *ops: str) -> None:
    """BenchError, ``what timed``, where one of ``ops`` has no kernel on a CUDA device."""
    for op in ops:
        missing = kernels.missing(op, torch.device("cuda"))
        if missing is not None:
            raise BenchError(
                f"{what} timed on a CUDA device with kernels: {missing}. Run it on one; `hf-deltamatch "
                "env` says what this machine runs."
            )


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


def add_rates(rows: Rows, forward: float, both: float, peak: float) -> None:
    """TFLOP/s, speed-up over the best BF16 row and share of ``peak`` (TFLOP/s), of the rows that were
    timed.

    Args:
        forward, both: operations of a forward, and of one with its backward.
    """
    timed = [row for row in rows.values() if "failed" not in row]
    for part, operations in (("fwd", forward), ("fwd_bwd", both)):
        best = min((row[f"{part}_ms"] for row in timed if row["bf16"]), default=None)
        for row in timed:
            ms = row[f"{part}_ms"]
            row[f"{part}_tflops"] = operations / ms / 1e9
            row[f"{part}_speedup"] = None if best is None else best / ms
    for row in timed:
        row["share_of_fp8_peak"] = row["fwd_bwd_tflops"] / peak


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
