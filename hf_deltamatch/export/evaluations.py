"""lm-eval's results for a card, and as the hub's ``.eval_results/*.yaml``.

The hub shows an entry where its data set is a registered benchmark:

    - dataset: {id: allenai/ai2_arc, task_id: arc_easy}
      value: 0.412
      date: 2026-01-15
      notes: acc, 0-shot, lm-eval 0.4.13
"""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime
from pathlib import Path

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LOADERS = ("json", "csv", "parquet", "text", "arrow")


def read_lm_eval(path: Path) -> dict:
    """What of an lm-eval results file a card quotes: per task its metrics with standard errors.

    Raises:
        ValueError: not such a file.
    """
    try:
        found = json.loads(path.read_text())
        results, configs = found["results"], found["configs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not a results file of lm-eval ({type(error).__name__}: {error}); name the "
            "results_….json of `hf-deltamatch eval … --output_path`."
        ) from error
    tasks = {}
    for name, numbers in results.items():
        if name not in configs:  # a group's mean
            continue
        config = configs[name]
        dataset = config.get("dataset_path")
        local = dataset in _LOADERS or not HUB_NAME.fullmatch(str(dataset))
        tasks[name] = {
            "dataset": "local files" if local else dataset,
            "benchmark": not local,
            "n_shot": found.get("n-shot", {}).get(name),
            "documents": found.get("n-samples", {}).get(name, {}).get("effective"),
            "metrics": _metrics(numbers),
        }
    date = found.get("date")
    return {
        "lm_eval_version": found.get("lm_eval_version"),
        "date": datetime.fromtimestamp(date, UTC).date().isoformat() if date else None,
        "limit": found.get("config", {}).get("limit"),
        "arithmetic": _arithmetic(found.get("config", {})),
        "tasks": tasks,
    }


def _metrics(numbers: dict) -> dict:
    out = {}
    for key, value in numbers.items():
        metric, _, how = key.partition(",")
        if not how or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            continue
        error = numbers.get(f"{metric}_stderr,{how}")
        known = isinstance(error, int | float) and math.isfinite(error)
        out[metric if how == "none" else f"{metric} ({how})"] = {
            "value": value,
            "stderr": error if known else None,
        }
    return out


def _arithmetic(config: dict) -> dict | None:
    """What our lm-eval model says that it ran; None for another model."""
    ran = config.get("deltamatch")
    if not isinstance(ran, dict):
        return None
    return {k: ran.get(k) for k in ("attention", "linear", "weights_sha256")}


def hub_entries(lm_eval: dict) -> dict[str, list[dict]]:
    """File name to entries of ``.eval_results/``: benchmarks of the hub that were run in full, the
    first metric of each task."""
    out: dict[str, list[dict]] = {}
    if lm_eval["limit"] is not None:
        return out
    for name, task in lm_eval["tasks"].items():
        if not task["benchmark"] or not task["metrics"]:
            continue
        metric, numbers = next(iter(task["metrics"].items()))
        notes = [metric]
        if task["n_shot"] is not None:
            notes.append(f"{task['n_shot']}-shot")
        if numbers["stderr"] is not None:
            notes.append(f"standard error {numbers['stderr']:.4f}")
        notes.append(f"lm-eval {lm_eval['lm_eval_version']}")
        entry = {
            "dataset": {"id": task["dataset"], "task_id": name},
            "value": numbers["value"],
            **({"date": lm_eval["date"]} if lm_eval["date"] else {}),
            "notes": ", ".join(notes),
        }
        out[f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.yaml"] = [entry]
    return out


def merge_lm_eval(files: list[Path]) -> dict | None:
    """Of several results files, tasks together; the newest number of a task counts.

    Raises:
        ValueError: files of different versions, limits or arithmetic, whose numbers do not belong into
            one table.
    """
    found = [read_lm_eval(path) for path in files]
    if not found:
        return None
    merged = found[0]
    for path, more in zip(files[1:], found[1:], strict=True):
        for key in ("lm_eval_version", "limit", "arithmetic"):
            if more[key] != merged[key]:
                raise ValueError(
                    f"{path}: {key} is {more[key]!r} and {merged[key]!r} in {files[0]}; evaluate all "
                    "tasks alike."
                )
        merged["tasks"] |= more["tasks"]
        merged["date"] = max(merged["date"] or "", more["date"] or "") or None
    return merged
