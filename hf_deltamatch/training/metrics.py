"""The numbers of a run, one JSON object a line, without those after the step it goes on from."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path


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
    """Rows of a metrics file; a last line cut short by a killed process is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows
