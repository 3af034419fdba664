"""``runs.jsonl``, the results file of a study: one line a run. What a line must have to count."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_deltamatch.recipes import AttentionRecipe, LinearRecipe

RESULTS = "runs.jsonl"
_RAN = ("done", "diverged")


def key_of(config: dict) -> str:
    """Of a run: changes with anything that can change the result."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def recipes_of_config(config: dict) -> tuple[AttentionRecipe | None, LinearRecipe | None]:
    """Of a run's attention (None: SDPA in high precision) and linears (None: high precision)."""
    attention, linear = config["attention"], config["linear"]
    return (
        None if attention == "sdpa" else AttentionRecipe.from_dict(attention),
        None if linear is None else LinearRecipe.from_dict(linear),
    )


def read_rows(folder: Path, say: Callable[[str], None] = lambda text: None) -> dict[str, dict]:
    """Rows by key, the last of each. A line cut short by a kill is no row, nor is one that lacks what
    a report reads; ``say`` is told how many there are."""
    rows, no_rows = scan_rows(folder)
    if no_rows:
        say(f"{folder / RESULTS}: {len(no_rows)} lines are no whole results and do not count")
    return rows


def scan_rows(folder: Path) -> tuple[dict[str, dict], dict[int, bytes]]:
    """Rows by key, the last of each; and the lines that are none, by their number from 1."""
    rows, no_rows = {}, {}
    path = folder / RESULTS
    lines = path.read_bytes().split(b"\n") if path.exists() else ()
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line, parse_constant=_no_number)
        except (ValueError, RecursionError):
            row = None
        if is_row(row):
            rows[row["key"]] = row
        else:
            no_rows[number] = line
    return rows, no_rows


def _no_number(word: str) -> None:
    """
    Raises:
        ValueError: NaN or Infinity, which no row of ours has.
    """
    raise ValueError(word)


def append_row(folder: Path, row: dict) -> None:
    """One line, whole before this returns."""
    path = folder / RESULTS
    # After a kill the file may end within a line, which must not swallow this one.
    cut = path.exists() and _last_byte(path) not in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut else "") + json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        return file.read(1)


def second_stage(row: dict) -> dict:
    """The second stage of a run as if it were one. One that diverged before has none, and counts as
    diverged."""
    if row["status"] == "failed":
        return row
    nothing = dict.fromkeys(
        (
            "final_loss",
            "best_loss",
            "held_out_loss",
            "grad_norm_last",
            "seconds",
            "tokens_per_second",
        )
    )
    nothing |= {"status": "diverged", "skipped_steps": 0, "loss": [], "residual": {"values": []}}
    return row["then"] or nothing


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
