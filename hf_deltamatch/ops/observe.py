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

CALLS: Counter[str] = Counter()
"""Executions since import, by op: ``attention_fwd``, ``attention_bwd``, ``linear_fwd``, …"""


@dataclass(eq=False)
class RowSumResidual:
    """Row-sum residual over every attention backward that ran while recording."""

    rows: float = 0.0
    total: float = 0.0
    per_call: list[float] = field(default_factory=list)

    @property
    def value(self) -> float:
        """``Σ|Σ_j dS_ij| / Σ|dS_ij|`` over all calls; NaN if no backward ran."""
        return self.rows / self.total if self.total else float("nan")

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
