"""A checkpoint that ``hf-deltamatch study --save`` kept: its line of ``runs.jsonl``, and those beside it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hf_deltamatch.recipes import AttentionRecipe, LinearRecipe
from hf_deltamatch.training import CheckpointError
from hf_deltamatch.training.study_rows import (
    RESULTS,
    key_of,
    recipes_of_config,
    scan_rows,
    second_stage,
)

MODELS = "models"
_KEY = re.compile(r"[0-9a-f]{16}")
_PARTIAL = re.compile(r"[0-9a-f]{16}\.\d+\.partial")
_AGAIN = "`hf-deltamatch study FILE --output {} --save` does what is missing"


@dataclass(frozen=True)
class StudyRun:
    """A run that is done, as its study's results file has it."""

    row: dict
    rows: list[dict]
    """Of all runs of the file, this one too."""
    baseline: str | None
    """The arm that the study's report compares with; None without a report."""
    damaged: int
    """Lines of the file that are no whole results."""

    @property
    def config(self) -> dict:
        return self.row["config"]

    @property
    def last_train(self) -> dict:
        """The options of the last stage."""
        return self.config.get("then", self.config)["train"]

    @property
    def recipes(self) -> tuple[AttentionRecipe | None, LinearRecipe | None]:
        """Of attention (None: SDPA in high precision) and of linears (None: high precision)."""
        return recipes_of_config(self.config)


def last_stage(row: dict) -> dict:
    """The numbers of the stage that the saved weights are of."""
    return second_stage(row) if "then" in row else row


def find_study(folder: Path) -> StudyRun | None:
    """The run whose weights ``folder`` holds; None where it is no ``OUTPUT/models/KEY`` of a study.

    Raises:
        CheckpointError: a study without a whole result of this run, or with weights that are not whole.
        ValueError: a run that failed or diverged.
    """
    place = _place(folder)
    if place is None:
        return None
    output, key = place
    if _PARTIAL.fullmatch(key):
        raise CheckpointError(
            f"{folder}: left by a run that was killed while it saved; its weights may lack anything. "
            f"{_AGAIN.format(output)}."
        )
    found, no_rows = scan_rows(output)
    # A key is the hash of the configuration: whether that is what ran can be told.
    rows = {k: row for k, row in found.items() if _is_of_its_key(row)}
    _check_row(folder, output, key, rows, found, no_rows)
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: no config.json in it, so these are not the whole weights. Remove the folder; "
            f"{_AGAIN.format(output)}."
        )
    damaged = len(no_rows) + len(found) - len(rows)
    return StudyRun(rows[key], list(rows.values()), _baseline(output), damaged)


def saved_runs(folder: Path) -> str | None:
    """What to name instead of ``folder``, where it is a study's output folder or its ``models``."""
    output = folder.parent if folder.name == MODELS else folder
    if not (output / RESULTS).is_file():
        return None
    rows, _ = scan_rows(output)
    return f"the output folder of a study; name one of its runs: {_there(output, rows)}"


def _place(folder: Path) -> tuple[Path, str] | None:
    # `models` may be a link to a larger disk, and the folder be named by a link or as `.`.
    for path in (Path(os.path.abspath(folder)), folder.resolve()):
        named = _KEY.fullmatch(path.name) or _PARTIAL.fullmatch(path.name)
        if named and path.parent.name == MODELS and (path.parents[1] / RESULTS).is_file():
            return path.parents[1], path.name
    return None


def _check_row(
    folder: Path, output: Path, key: str, rows: dict, found: dict, no_rows: dict[int, bytes]
) -> None:
    file = output / RESULTS
    if key not in rows:
        lines = [str(number) for number, line in no_rows.items() if key.encode() in line]
        if key in found:
            why = f"the configuration in the line of run {key} is not the one of its key: it was changed"
        elif lines:
            why = f"line {', '.join(lines)}, of run {key}, is no whole result: cut short or changed"
        else:
            why = f"no line of run {key}: it did not end, or its line is lost"
        raise CheckpointError(
            f"{file}: {why}, so nothing is known of the weights in {folder}. {_AGAIN.format(output)}; "
            f"without what is known of it, copy the folder elsewhere and export the copy. There are: "
            f"{_there(output, rows)}."
        )
    row = rows[key]
    if row["status"] == "failed":
        raise ValueError(
            f"{folder}: the run {row['name']!r} failed ({row['error']}), so these weights are of "
            f"another try. {_AGAIN.format(output)}."
        )
    last = last_stage(row)
    if last["status"] == "diverged":
        loss, best = (
            "none" if x is None else f"{x:.3f}" for x in (last["final_loss"], last["best_loss"])
        )
        raise ValueError(
            f"{folder}: the run {row['name']!r} diverged (loss of its last steps {loss}, the lowest "
            f"such loss {best}); only runs that are done are exported. There are: "
            f"{_there(output, rows)}. As a saved model that nothing is known of: copy the folder "
            "elsewhere and export the copy."
        )


def _there(output: Path, rows: dict) -> str:
    """Runs that are done and have weights, by the name to export."""
    names = [
        f"{MODELS}/{key} ({row['name']})"
        for key, row in rows.items()
        if (output / MODELS / key / "config.json").is_file()
        and row["status"] == "done"
        and last_stage(row)["status"] == "done"
    ]
    if not names:
        return "none that is done and was saved (`--save`)"
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _baseline(output: Path) -> str | None:
    try:
        found = json.loads((output / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    baseline = found.get("baseline") if isinstance(found, dict) else None
    return baseline if isinstance(baseline, str) else None


def _is_of_its_key(row: dict) -> bool:
    config = row.get("config")
    if not _is_config(config) or key_of(config) != row["key"]:
        return False
    words = all(isinstance(row.get(w), str) and row[w] for w in ("name", "setting", "arm"))
    if not words or row.get("seed") != config["seed"]:
        return False
    if row["status"] == "failed":
        return True
    held_out = [row["corpus"].get(n) for n in ("held_out_bytes", "held_out_sha256")]
    return isinstance(held_out[0], int) and isinstance(held_out[1], str)


def _is_config(config: object) -> bool:
    """Has what is read of it here; the values are as the study checked them."""
    if not isinstance(config, dict) or not isinstance(config.get("seed"), int):
        return False
    attention, linear, corpus = (config.get(n) for n in ("attention", "linear", "corpus"))
    if not (attention == "sdpa" or isinstance(attention, dict)) or "linear" not in config:
        return False
    if not (linear is None or isinstance(linear, dict)):
        return False
    if not isinstance(config.get("leave", []), list):
        return False
    if not isinstance(corpus, dict) or not isinstance(corpus.get("source"), str):
        return False
    if not all(isinstance(corpus.get(n), int) for n in ("held_out_every", "limit_bytes")):
        return False
    stages = [config, config["then"]] if "then" in config else [config]
    return all(isinstance(stage, dict) and _is_stage(stage) for stage in stages) and isinstance(
        config.get("evaluate", {}), dict
    )


def _is_stage(stage: dict) -> bool:
    train = stage.get("train")
    if not isinstance(train, dict) or not isinstance(stage.get("model"), dict):
        return False
    return all(isinstance(train.get(n), int) for n in ("steps", "batch_size", "seq_len", "last"))
