"""What a training run wants to see of the invariant: residuals and the calls that really ran.

>>> with record_row_sum() as residual, count_calls() as calls:
...     model(**batch).loss.backward()
>>> residual.value  # about 1e-7 with matched δ, 1e-3 and more with a stale one
>>> calls["attention_fwd"]  # one per attention layer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hf_deltamatch.ops.observe import CALLS, RowSumResidual, record_row_sum

__all__ = ["RowSumResidual", "count_calls", "record_row_sum"]


@contextmanager
def count_calls() -> Iterator[Counter[str]]:
    """Executions of our ops inside the block, by op (``attention_fwd``, ``attention_bwd``,
    ``linear_fwd``, ``linear_bwd_input``, ``linear_bwd_weight``).

    Counted in the op bodies: compiled and checkpointed code counts what it executes. The counter is
    filled while the block runs and stays as it is after it.
    """
    before = Counter(CALLS)
    calls = _Since(before)
    try:
        yield calls
    finally:
        calls.freeze()


class _Since(Counter):
    """Calls since ``before``; live until frozen."""

    def __init__(self, before: Counter[str]) -> None:
        super().__init__()
        self._before: Counter[str] | None = before

    def freeze(self) -> None:
        now = CALLS - self._before
        self._before = None
        self.update(now)

    def __getitem__(self, key: str) -> int:
        if self.__dict__.get("_before") is not None:
            return CALLS[key] - self._before[key]
        return super().__getitem__(key)
