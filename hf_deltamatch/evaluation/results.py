"""lm-eval's results files: the scores and, where they were logged, the samples behind them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

_DATE = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")
_NEEDED = ("results", "configs", "versions", "n-shot")


@dataclass
class Results:
    """One evaluation, as lm-eval wrote it."""

    label: str
    path: Path
    data: dict
    _samples: dict[str, list[dict] | None] = field(default_factory=dict, repr=False)

    @property
    def tasks(self) -> list[str]:
        """Tasks that were run, without groups."""
        return list(self.data["configs"])

    def metrics(self, name: str) -> dict[str, float]:
        """``"metric,filter"`` to score, of a task or a group.

        RULER's -1 for a length that was not run is left out.
        """
        out = {}
        for key, value in self.data["results"].get(name, {}).items():
            metric, comma, _ = key.partition(",")
            if comma and not metric.endswith("_stderr") and is_number(value):
                if not (metric.isdigit() and value == -1):
                    out[key] = float(value)
        return out

    def stderr(self, name: str, key: str) -> float | None:
        """lm-eval's standard error of a score; None where it has none."""
        metric, _, kind = key.partition(",")
        value = self.data["results"][name].get(f"{metric}_stderr,{kind}")
        return float(value) if is_number(value) and math.isfinite(value) else None

    def samples(self, task: str) -> list[dict] | None:
        """The logged samples of a task; None if there are none.

        Raises:
            ValueError: a samples file that cannot be read.
        """
        if task not in self._samples:
            self._samples[task] = self._read_samples(task)
        return self._samples[task]

    def _read_samples(self, task: str) -> list[dict] | None:
        if task in self.data.get("samples", {}):
            return self.data["samples"][task]
        date = _DATE.search(self.path.name)
        file = self.path.with_name(f"samples_{task}_{date[1]}.jsonl") if date else None
        if file is None or not file.is_file():
            return None
        try:
            with file.open(encoding="utf-8") as lines:
                return [json.loads(line) for line in lines]
        except ValueError as error:
            raise ValueError(
                f"{file} is damaged ({error}). Evaluate again, or remove it for an unpaired comparison."
            ) from error


def is_number(value) -> bool:
    """Whether ``value`` is an int or float, not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def results_files(folder: Path) -> list[Path]:
    """lm-eval's results files anywhere in ``folder``, the newest last."""
    found = [p for p in folder.rglob("*.json") if _DATE.search(p.name)]
    return sorted(found, key=lambda p: (_DATE.search(p.name)[1], p))


def load(path: Path, label: str) -> Results:
    """A results file, or the newest one in a folder.

    Raises:
        FileNotFoundError: no such file, or none in the folder.
        ValueError: a file of another kind.
    """
    file = path
    if path.is_dir():
        files = results_files(path)
        if not files:
            raise FileNotFoundError(
                f"{path} has no results file of lm-eval (…_DATE.json, as --output_path writes it)."
            )
        file = files[-1]
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{file} does not exist.") from None
    except ValueError as error:
        raise ValueError(f"{file} is not a results file of lm-eval: not JSON ({error}).") from error
    lacking = [k for k in _NEEDED if not isinstance(data, dict) or k not in data]
    if lacking:
        raise ValueError(f"{file} is not a results file of lm-eval: it has no {lacking[0]!r}.")
    return Results(label, file, data)
