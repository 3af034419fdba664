"""What a line of ``runs.jsonl`` must have to count as the result of a run."""

from __future__ import annotations

import math
from typing import Any

_RAN = ("done", "diverged")


def is_row(row: Any) -> bool:
    """Whole, with the types that a report reads; of a failed run only what it was."""
    if not isinstance(row, dict) or not isinstance(row.get("key"), str):
        return False
    if row.get("status") == "failed":
        return isinstance(row.get("error"), str)
    corpus, environment = row.get("corpus"), row.get("environment")
    if not isinstance(corpus, dict) or not isinstance(environment, dict):
        return False
    words = ("source", "train_sha256")
    facts = all(isinstance(corpus.get(w), str) for w in words)
    facts = facts and all(_number(corpus.get(n)) for n in ("documents", "train_bytes"))
    facts = facts and isinstance(environment.get("packages"), dict) and "device" in environment
    config, second = row.get("config"), row.get("then")
    # None: it diverged before.
    if not isinstance(config, dict) or ("then" in config) != ("then" in row):
        return False
    return facts and _is_stage(row) and (second is None or _is_stage(second))


def _is_stage(row: Any) -> bool:
    if not isinstance(row, dict) or row.get("status") not in _RAN:
        return False
    for name in ("final_loss", "best_loss", "held_out_loss", "grad_norm_last"):
        if name not in row or not (row[name] is None or _number(row[name])):
            return False
    if not (row.get("held_out_before") is None or _number(row["held_out_before"])):
        return False
    if not all(_number(row.get(n)) for n in ("skipped_steps", "seconds", "tokens_per_second")):
        return False
    if not _number(row.get("parameters")) or not isinstance(row.get("precision"), str):
        return False
    residual = row.get("residual")
    measured = residual.get("values") if isinstance(residual, dict) else None
    return _numbers(row.get("loss")) and _numbers(measured) and _are_scores(row.get("scores", {}))


def _are_scores(scores: Any) -> bool:
    """``{task: {metric: [value, standard error]}}``"""
    return isinstance(scores, dict) and all(
        isinstance(metrics, dict)
        and all(_numbers(pair) and len(pair) == 2 for pair in metrics.values())
        for metrics in scores.values()
    )


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(v is None or _number(v) for v in values)


def _number(x: Any) -> bool:
    fine = isinstance(x, int | float) and not isinstance(x, bool)
    return fine and abs(x) < 1e300 and math.isfinite(x)
