"""Differences between evaluations, with their standard errors.

Two models scored on the same documents make correlated errors, so the standard error of a difference
is taken over the documents' own differences ("paired") wherever both sides logged their samples, and
from the two standard errors ("unpaired", larger as a rule) otherwise.
"""

from __future__ import annotations

import math
import re
import statistics

from hf_deltamatch.evaluation.results import Results, is_number

# What has to agree for scores to be of the same thing: (section of the results file, key).
_SETTINGS = (
    ("config", "limit"),
    ("config", "gen_kwargs"),
    (None, "system_instruction_sha"),
    (None, "chat_template_sha"),
    (None, "fewshot_as_multiturn"),
)
_TASK_KEYS = (
    "dataset_path",
    "dataset_name",
    "test_split",
    "validation_split",
    "output_type",
    "description",
    "doc_to_text",
    "doc_to_target",
    "doc_to_choice",
    "target_delimiter",
    "fewshot_delimiter",
    "generation_kwargs",
    "repeats",
)


def compare(runs: list[Results], tasks: list[str] | None = None) -> dict:
    """Scores of all runs and differences to the first one, JSON types.

    Args:
        tasks: tasks and groups to compare; all if left out, and then the runs must have the same.

    Raises:
        ValueError: runs that are not of the same tasks, versions, documents or settings; says which.
    """
    base, *others = runs
    for other in others:
        if wrong := _mismatches(base, other, tasks):
            raise ValueError(
                f"{base.label} and {other.label} cannot be compared: {'; '.join(wrong)}. Evaluate "
                "both with the same options, or choose what they share with --tasks."
            )
    groups = [g for g in _groups(base) if all(g in r.data["results"] for r in runs)]
    rows = []
    for name in [*base.tasks, *groups]:
        if tasks and name not in tasks:
            continue
        for key in base.metrics(name):
            rows.append(_row(runs, name, key, group=name in groups))
    if not rows:
        raise ValueError(
            f"{base.label} has no scores{' of ' + ', '.join(tasks) if tasks else ''} to compare; "
            f"it has {', '.join(base.tasks) or 'no tasks'}."
        )
    return {
        "baseline": base.label,
        "runs": {run.label: _facts(run) for run in runs},
        "rows": rows,
        "notes": _notes(runs),
    }


def _groups(run: Results) -> dict:
    return run.data.get("groups") or {}


def _row(runs: list[Results], name: str, key: str, *, group: bool) -> dict:
    base, *others = runs
    metric, _, kind = key.partition(",")
    scores, differences = {}, {}
    for run in runs:
        scores[run.label] = {"value": run.metrics(name)[key], "stderr": _stderr(run, name, key)}
    for run in others:
        stderr, how = (_group_difference if group else _difference)(base, run, name, key)
        value = scores[run.label]["value"] - scores[base.label]["value"]
        differences[run.label] = {"value": value, "stderr": stderr, "how": how}
    return {
        "task": name,
        "metric": metric,
        "filter": kind,
        "group": group,
        "higher_is_better": (base.data.get("higher_is_better") or {}).get(name, {}).get(metric),
        "version": base.data["versions"].get(name),
        "n_shot": base.data["n-shot"].get(name),
        "documents": base.data["results"][name].get("sample_len"),
        "scores": scores,
        "differences": differences,
    }


def _influence(run: Results, task: str, key: str) -> dict[int, float] | None:
    """By document, what it adds to the score's deviation (times n); None where that is unknown.

    A score is understood if it is the mean of the logged values, or exp(-mean) of them (a perplexity).
    """
    samples = run.samples(task)
    metric, _, kind = key.partition(",")
    values = {}
    for sample in samples or ():
        if sample.get("filter", kind) != kind:
            continue
        value = sample.get(metric)
        if not isinstance(value, (int, float)) or sample["doc_id"] in values:
            return None
        if not (metric.isdigit() and value == -1):  # RULER: a document of another length
            values[sample["doc_id"]] = float(value)
    if not values:
        return None
    score, mean = run.metrics(task)[key], statistics.fmean(values.values())
    close = lambda x: math.isclose(x, score, rel_tol=1e-9, abs_tol=1e-12)
    if close(mean):
        return {i: v - mean for i, v in values.items()}
    if -700 < mean < 700 and close(math.exp(-mean)):
        return {i: score * (mean - v) for i, v in values.items()}
    return None


def _spread(deviations: list[float]) -> float | None:
    """Standard error of a mean from deviations about it; None of fewer than two."""
    n = len(deviations)
    return math.sqrt(math.fsum(d * d for d in deviations) / (n - 1) / n) if n > 1 else None


def _stderr(run: Results, name: str, key: str) -> float | None:
    """lm-eval's, else from the samples (lm-eval has none for RULER)."""
    stderr = run.stderr(name, key)
    if stderr is None and (influence := _influence(run, name, key)):
        stderr = _spread(list(influence.values()))
    return stderr


def _difference(a: Results, b: Results, task: str, key: str) -> tuple[float | None, str]:
    """Standard error of b - a, and how it was had."""
    of_a, of_b = _influence(a, task, key), _influence(b, task, key)
    if of_a and of_b and of_a.keys() == of_b.keys():
        return _spread([of_b[i] - of_a[i] for i in of_a]), "paired"
    return _unpaired(_stderr(a, task, key), _stderr(b, task, key)), "unpaired"


def _unpaired(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else math.hypot(a, b)


def _group_difference(a: Results, b: Results, group: str, key: str) -> tuple[float | None, str]:
    """From the group's tasks, whose documents are different ones, by the weights of its mean."""
    tasks = [t for t in _leaves(a, group) if key in a.metrics(t)]
    sizes = [a.data["results"][t].get("sample_len") or 0 for t in tasks]
    for weights in ([1.0] * len(tasks), sizes):
        total = sum(weights)
        means = [
            sum(w * run.metrics(t).get(key, math.nan) for w, t in zip(weights, tasks, strict=True))
            / (total or math.nan)
            for run in (a, b)
        ]
        if all(
            math.isclose(m, run.metrics(group)[key], rel_tol=1e-9, abs_tol=1e-12)
            for m, run in zip(means, (a, b), strict=True)
        ):
            parts = [_difference(a, b, t, key) for t in tasks]
            if all(stderr is not None for stderr, _ in parts):
                hows = {how for _, how in parts}
                stderr = math.hypot(
                    *(w / total * s for w, (s, _) in zip(weights, parts, strict=True))
                )
                return stderr, hows.pop() if len(hows) == 1 else "partly paired"
    return _unpaired(a.stderr(group, key), b.stderr(group, key)), "unpaired"


def _leaves(run: Results, group: str, above: tuple[str, ...] = ()) -> list[str]:
    """Tasks of a group, or the task itself.

    Raises:
        ValueError: a group within itself.
    """
    if group in above:
        raise ValueError(f"{run.path} is damaged: the group {group!r} is within itself.")
    children = (run.data.get("group_subtasks") or {}).get(group)
    if not children:
        return [group]
    return [t for c in children for t in _leaves(run, c, (*above, group))]


def _mismatches(a: Results, b: Results, chosen: list[str] | None) -> list[str]:
    wrong = []
    if a.path.resolve() == b.path.resolve():
        return [f"both are {a.path}"]
    if chosen:
        for run in (a, b):
            if unknown := [t for t in chosen if t not in run.data["results"]]:
                has = ", ".join(run.data["results"])
                return [f"{run.label} has no {', '.join(unknown)}, only {has}"]
        tasks = sorted({t for c in chosen for t in _leaves(a, c)})
    else:
        tasks = a.tasks
        for one, other in ((a, b), (b, a)):
            if only := [t for t in one.tasks if t not in other.tasks]:
                wrong.append(f"only {one.label} has {', '.join(only)}")
    for section, key in _SETTINGS:
        of = lambda run, s=section: run.data.get(s) or {} if s else run.data
        if of(a).get(key) != of(b).get(key):
            wrong.append(f"{key} {of(a).get(key)!r} and {of(b).get(key)!r}")
    for task in (t for t in tasks if t in a.tasks and t in b.tasks):
        wrong += _task_mismatches(a, b, task)
    for group in _groups(a):
        if group in b.data["results"] and (not chosen or group in chosen):
            if only := a.metrics(group).keys() ^ b.metrics(group).keys():
                wrong.append(f"{group}: only one has the metric {', '.join(sorted(only))}")
            if sorted(_leaves(a, group)) != sorted(_leaves(b, group)):
                wrong.append(f"{group}: other tasks in the group")
    return wrong


def _task_mismatches(a: Results, b: Results, task: str) -> list[str]:
    wrong = []
    for what in ("versions", "n-shot"):
        x, y = a.data[what].get(task), b.data[what].get(task)
        if x != y:
            wrong.append(f"{task}: {what} {x!r} and {y!r}")
    x, y = (r.data["results"][task].get("sample_len") for r in (a, b))
    if x != y:
        wrong.append(f"{task}: {x} and {y} documents")
    for key in _TASK_KEYS:
        x, y = (_plain(r.data["configs"][task].get(key)) for r in (a, b))
        if x != y:
            wrong.append(f"{task}: different {key}")
    if a.data["n-shot"].get(task) and _seed(a) != _seed(b):
        wrong.append(f"{task}: few-shot seeds {_seed(a)!r} and {_seed(b)!r}")
    if only := a.metrics(task).keys() ^ b.metrics(task).keys():
        wrong.append(f"{task}: only one has the metric {', '.join(sorted(only))}")
    return wrong or _document_mismatches(a, b, task)


def _document_mismatches(a: Results, b: Results, task: str) -> list[str]:
    samples = a.samples(task), b.samples(task)
    if None in samples:
        return []
    marks = ("doc_hash", "prompt_hash", "target_hash")
    first, second = (
        {(s["doc_id"], s.get("filter")): [s.get(m) for m in marks] for s in side}
        for side in samples
    )
    differ = [k[0] for k in first.keys() | second.keys() if first.get(k) != second.get(k)]
    differ.sort(key=lambda i: (isinstance(i, str), i))
    return (
        [f"{task}: other documents or prompts (the first is number {differ[0]})"] if differ else []
    )


def _seed(run: Results):
    return (run.data.get("config") or {}).get("fewshot_seed")


def _plain(value):
    # Functions are written with their address.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _facts(run: Results) -> dict:
    config = run.data.get("config") or {}
    ours = config.get("deltamatch") or {}
    return {
        "file": str(run.path),
        "model": run.data.get("model_name"),
        "model_args": config.get("model_args"),
        "dtype": config.get("model_dtype"),
        "attention": ours.get("attention"),
        "linear": ours.get("linear"),
        "stored_as": ours.get("stored_as"),
        "weights_sha256": ours.get("weights_sha256"),
        "batch_size": config.get("batch_size"),
        "limit": config.get("limit"),
        "lm_eval_version": run.data.get("lm_eval_version"),
        "transformers_version": run.data.get("transformers_version"),
    }


def _notes(runs: list[Results]) -> list[str]:
    """What differs or matters and does not forbid a comparison."""
    notes = []
    for key in ("lm_eval_version", "transformers_version", "dtype", "batch_size"):
        values = {run.label: _facts(run)[key] for run in runs}
        if len({str(v) for v in values.values()}) > 1:
            notes.append(f"{key}: " + ", ".join(f"{v} ({k})" for k, v in values.items()))
    limit = _facts(runs[0])["limit"]
    if is_number(limit):
        notes.append(f"limited to {limit:g} documents a task: not a benchmark result")
    return notes
