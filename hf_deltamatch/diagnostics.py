"""What a training run wants to see of the invariant: residuals, the calls that really ran, and a
monitor that looks at single layers now and then.

>>> with record_row_sum() as residual, count_calls() as calls:
...     model(**batch).loss.backward()
>>> residual.value  # about 1e-7 with matched δ, 1e-3 and more with a stale one
>>> calls["attention_fwd"]  # one per attention layer
"""

from hf_deltamatch.monitor import Monitor
from hf_deltamatch.ops.observe import RowSumResidual, count_calls, record_row_sum

__all__ = ["Monitor", "RowSumResidual", "count_calls", "record_row_sum"]
