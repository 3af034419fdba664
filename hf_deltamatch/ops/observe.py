"""Counts of the ops that really ran, and a recorder of the row-sum residual.

Both live below ``torch.compile`` and autograd, inside the op bodies, so they see what was executed
rather than what was traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from hf_deltamatch.testing import row_sum_parts

_counters: list[Counter[str]] = []


class _Calls(Counter):
    """Hands every increment on to the counters of open :func:`count_calls` blocks, so that those
    are plain counters, whichever way they are read."""

    def __setitem__(self, op: str, n: int) -> None:
        if _counters:
            more = n - self[op]
            for counter in _counters:
                counter[op] += more
        super().__setitem__(op, n)


CALLS: Counter[str] = _Calls()
"""Executions since import, by op: ``attention_fwd``, ``attention_bwd``, ``linear_fwd``, …"""


@contextmanager
def count_calls() -> Iterator[Counter[str]]:
    """Executions of our ops inside the block, by op (``attention_fwd``, ``attention_bwd``,
    ``linear_fwd``, ``linear_bwd_input``, ``linear_bwd_weight``).

    Counted in the op bodies: compiled and checkpointed code counts what it executes. The counter is
    live while the block runs and stays as it is after it.
    """
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        # Not `remove`, which compares: nested blocks may hold equal counts.
        _counters[:] = [c for c in _counters if c is not counter]


@dataclass(eq=False)
class RowSumResidual:
    """Row-sum residual over every attention backward that ran while recording."""

    rows: float = 0.0
    total: float = 0.0
    per_call: list[float] = field(default_factory=list)

    @property
    def value(self) -> float:
        """``Σ|Σ_j dS_ij| / Σ|dS_ij|`` over all calls; 0 where all dS are 0, NaN if no backward ran."""
        if not self.per_call:
            return float("nan")
        return self.rows / self.total if self.total else 0.0

    def add(self, parts: list[tuple[float, float]]) -> None:
        rows, total = sum(p[0] for p in parts), sum(p[1] for p in parts)
        self.rows += rows
        self.total += total
        self.per_call.append(rows / total if total else 0.0)


_recorders: list[RowSumResidual] = []


@contextmanager
def record_row_sum() -> Iterator[RowSumResidual]:
    """Measure the row-sum residual of attention backwards inside the block (it costs FP64 sums)."""
    recorder = RowSumResidual()
    _recorders.append(recorder)
    try:
        yield recorder
    finally:
        _recorders.remove(recorder)


class DsCollector:
    """``ds_hook`` of one backward; inactive (``hook`` is None) when nobody records."""

    def __init__(self) -> None:
        self.parts: list[tuple[float, float]] = []
        self.hook = self._add if _recorders else None

    def _add(self, ds: Tensor, ds_sink: Tensor | None) -> None:
        self.parts.append(row_sum_parts(ds, ds_sink))

    def finish(self) -> None:
        if self.hook is not None:
            for recorder in _recorders:
                recorder.add(self.parts)
