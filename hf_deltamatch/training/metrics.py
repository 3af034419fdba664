"""The numbers of a run, one JSON object a line, without those after the step it goes on from."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from hf_deltamatch.training.checkpoints import CheckpointError


class MetricsFile:
    """Appends to ``path`` after dropping lines beyond step ``after``."""

    def __init__(self, path: Path, after: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_metrics(path) if row["step"] <= after] if after else []
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        partial.replace(path)

    def add(self, step: int, numbers: dict[str, float]) -> None:
        row = {"step": step, **{k: v if math.isfinite(v) else None for k, v in numbers.items()}}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_metrics(path: Path) -> list[dict]:
    """Rows of a metrics file; a last line cut short by a killed process is left out.

    Raises:
        CheckpointError: a line that is no row, other than the last; names the file and the line.
    """
    if not path.is_file():
        return []
    rows, lines = [], path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        elif number < len(lines):
            raise CheckpointError(
                f"{path}: line {number} is no JSON object with a step: {bytes(line[:60])!r}. The rows "
                "behind it would be lost; take the line out, or name another output folder."
            )
    return rows
