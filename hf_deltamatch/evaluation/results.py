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
        logged = self.data.get("samples") or {}
        if task in logged:
            return logged[task]
        date = _DATE.search(self.path.name)
        file = self.path.with_name(f"samples_{task}_{date[1]}.jsonl") if date else None
        if file is None or not file.is_file():
            return None
        try:
            with file.open(encoding="utf-8") as lines:
                samples = [json.loads(line) for line in lines]
            for number, sample in enumerate(samples, 1):
                _check_sample(sample, f"line {number}")
            return samples
        except (ValueError, RecursionError) as error:
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
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a results file of lm-eval: not JSON ({error}).") from error
    lacking = [k for k in _NEEDED if not isinstance(data, dict) or k not in data]
    if lacking:
        raise ValueError(f"{file} is not a results file of lm-eval: it has no {lacking[0]!r}.")
    try:
        _check(data)
    except ValueError as error:
        raise ValueError(
            f"{file} is not a results file of lm-eval, or damaged: {error}. Evaluate again."
        ) from error
    return Results(label, file, data)


def _check(data: dict) -> None:
    """What is read of a results file has the types that are read."""
    mapping = lambda name, value: _require(name, value, dict, "a mapping")
    optional = lambda name, of=data: {} if of.get(name) is None else of[name]
    for name in _NEEDED:
        mapping(name, data[name])
    sections = {n: optional(n) for n in ("groups", "higher_is_better", "samples")}
    sections |= {n: data[n] for n in ("results", "configs")}
    for name, section in sections.items():
        mapping(name, section)
        for task, value in section.items():
            if name == "samples":
                _require(f"{name} of {task}", value, list, "a list")
                for at, sample in enumerate(value):
                    _check_sample(sample, f"sample {at} of {task}")
            else:
                mapping(f"{name} of {task}", value)
    for task, scores in data["results"].items():
        _check_sizes(scores, task)
        size = scores.get("sample_len")
        if size is not None and not (is_number(size) and size >= 0):
            raise ValueError(f"sample_len of {task} is {size!r}, which is no number of documents")
    if lacking := [t for t in data["configs"] if t not in data["results"]]:
        raise ValueError(f"it has the task {lacking[0]!r} without results")
    mapping("config", optional("config"))
    ours = optional("deltamatch", optional("config"))
    mapping("config.deltamatch", ours)
    for name in ("attention", "linear"):
        mapping(f"config.deltamatch.{name}", optional(name, ours))
    mapping("group_subtasks", optional("group_subtasks"))
    for group, inside in optional("group_subtasks").items():
        _require(f"group_subtasks of {group}", inside, list, "a list")
        for task in inside:
            _require(f"a task of {group}", task, str, "a name")


def _check_sample(sample, where: str) -> None:
    _require(where, sample, dict, "a mapping")
    if type(sample.get("doc_id")) not in (int, str):
        raise ValueError(f"doc_id in {where} is {sample.get('doc_id')!r}, which is no number")
    if not isinstance(sample.get("filter"), str | None):
        raise ValueError(f"filter in {where} is {sample['filter']!r}, which is no name")
    _check_sizes(sample, where)


def _check_sizes(numbers: dict, where: str) -> None:
    """JSON has integers that no float holds."""
    for key, value in numbers.items():
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"{key} of {where} is a number of {value.bit_length()} bits")


def _require(what: str, value, kind: type, words: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{what} is {str(value)[:40]!r}, which is not {words}")
