"""What ``results.json`` says of a study's run: its numbers, those of the other seeds, the gap to the
baseline, and the study file of this run alone."""

from __future__ import annotations

import statistics

from hf_deltamatch.export.facts import last_part
from hf_deltamatch.export.study import StudyRun, last_stage
from hf_deltamatch.training.seeds import paired_gap, spread

COMMAND = "hf-deltamatch study study.yaml --save"
STUDY_FILE = "study.yaml"
LOSSES = ("final_loss", "held_out_loss")
_ARITHMETIC = ("attention", "linear", "leave")


def training(run: StudyRun) -> dict:
    """The section ``training``, JSON types; its numbers are those of the last stage."""
    row = run.row
    peers, others = _seeds(run)
    config, local = without_paths(run.config)
    stages = [row] if last_stage(row) is row else [row, last_stage(row)]
    trains = [run.config["train"], run.last_train][: len(stages)]
    return {
        "options": None,
        "study": {
            **{k: row[k] for k in ("key", "setting", "arm", "seed")},
            "config": config,
            "corpus": row["corpus"],
            "precision": stages[-1]["precision"],
            "not_counted": others,
            "damaged_lines": run.damaged,
        },
        "local": local,
        "data": None,
        "command": COMMAND,
        "step": run.last_train["steps"],
        "tokens": sum(t["steps"] * t["batch_size"] * t["seq_len"] for t in trains),
        "numbers": {
            **_numbers(row),
            "skipped": sum(stage["skipped_steps"] for stage in stages),
        },
        "spread": _over(peers) if len(peers) > 1 else None,
        "gap": _gap(run, peers),
        "scores": _scores(run, peers),
        "environment": row["environment"],
        "processes": 1,
    }


def without_paths(config: dict) -> tuple[dict, list[str]]:
    """``config`` with paths cut to their last part, and the names of the options that name something
    that only the machine of the run has."""
    out, local = dict(config), []
    for part, name in (("corpus", "source"), ("evaluate", "include")):
        value = config.get(part, {}).get(name)
        if isinstance(value, str) and (part, value) != ("corpus", "stdlib"):
            out[part] = {**config[part], name: last_part(value) or "text"}
            local.append(f"{part}.{name}")
    return out, local


def study_file(study: dict, name: str) -> dict:
    """A study of one arm, one setting and one seed, as the YAML file has it: the run of
    ``results.json``'s ``training.study``, every option spelled out. Where no path was cut, its run has
    the same key."""
    config = study["config"]
    out = {
        "name": name,
        "arms": {study["arm"]: {k: config[k] for k in _ARITHMETIC if k in config}},
        "seeds": [study["seed"]],
        "corpus": config["corpus"],
        "model": config["model"],
        "train": config["train"],
        "settings": [{"name": study["setting"]}],
    }
    if "then" in config:
        out["then"] = {**config["then"]["train"], "model": config["then"]["model"]}
    if "evaluate" in config:
        out["evaluate"] = config["evaluate"]
    return out


def _seeds(run: StudyRun) -> tuple[dict[int, dict], list[int]]:
    """Rows by seed of what differs from the run in the seed alone, the run among them; and the seeds
    that trained on other text or in another precision, whose losses do not belong beside it."""
    mine = _without(run.config, "seed")
    found = [row for row in run.rows if _without(row["config"], "seed") == mine]
    peers = {row["seed"]: row for row in found if _comparable(row, run.row)}
    return dict(sorted(peers.items())), sorted({row["seed"] for row in found} - set(peers))


def _comparable(row: dict, mine: dict) -> bool:
    if row["status"] == "failed":
        return True
    hashes = [
        [r["corpus"].get(n) for n in ("train_sha256", "held_out_sha256")] for r in (row, mine)
    ]
    return hashes[0] == hashes[1] and row["precision"] == mine["precision"]


def _without(config: dict, *names: str) -> dict:
    return {k: v for k, v in config.items() if k not in names}


def _numbers(row: dict) -> dict:
    """Of one run."""
    last = last_stage(row)
    residuals = [v for v in last["residual"]["values"] if v is not None]
    return {
        "status": last["status"],
        "final_loss": last["final_loss"],
        "best_loss": last["best_loss"],
        "held_out_loss": last["held_out_loss"],
        **({"held_out_before": last["held_out_before"]} if "held_out_before" in last else {}),
        "grad_norm_last": last["grad_norm_last"],
        "residual": statistics.median(residuals) if residuals else None,
        "residual_max": max(residuals, default=None),
        "residual_count": len(residuals),
    }


def _over(peers: dict[int, dict]) -> dict:
    """Of the seeds that ran; of those that failed, that they did."""
    ran = {seed: _numbers(row) for seed, row in peers.items() if row["status"] != "failed"}
    status = {str(s): ran[s]["status"] if s in ran else "failed" for s in peers}
    return {
        "seeds": list(peers),
        "count": len(ran),
        "status": status,
        "diverged": sum(word == "diverged" for word in status.values()),
        "failed": len(peers) - len(ran),
        **{
            name: spread([n.get(name) for n in ran.values()])
            for name in (*LOSSES, "held_out_before", "residual")
        },
        "devices": list(dict.fromkeys(str(peers[s]["environment"]["device"]) for s in ran)),
    }


def _baseline(run: StudyRun) -> dict[int, dict]:
    """Rows by seed of the baseline's arm in the run's setting; empty for the baseline itself."""
    mine = _without(run.config, "seed", *_ARITHMETIC)
    if run.baseline in (None, run.row["arm"]):
        return {}
    found = [
        row
        for row in run.rows
        if row["arm"] == run.baseline
        and _without(row["config"], "seed", *_ARITHMETIC) == mine
        and _comparable(row, run.row)
    ]
    # An arm may have had another recipe before: the last line's counts.
    recipe = lambda row: [row["config"].get(n) for n in _ARITHMETIC]
    return {row["seed"]: row for row in found if recipe(row) == recipe(found[-1])}


def _gap(run: StudyRun, peers: dict[int, dict]) -> dict | None:
    base = {seed: last_stage(row) for seed, row in _baseline(run).items()}
    mine = {seed: last_stage(row) for seed, row in peers.items()}
    found = {name: paired_gap(mine, base, name) for name in LOSSES}
    pairs = sum(found["final_loss"][n] for n in ("n", "not_finite"))
    if not pairs:
        return None
    diverged = sum(base[seed]["status"] == "diverged" for seed in mine if seed in base)
    return {"to": run.baseline, "pairs": pairs, "diverged": diverged, **found}


def _scores(run: StudyRun, peers: dict[int, dict]) -> dict | None:
    """lm-eval's, of the run; over the seeds; and against the baseline's, paired."""
    mine = last_stage(run.row).get("scores")
    if not mine:
        return None
    scores = lambda rows: {
        seed: last_stage(row)["scores"] for seed, row in rows.items() if "scores" in last_stage(row)
    }
    ours, theirs = scores(peers), scores(_baseline(run))

    def one(task: str, metric: str) -> dict:
        value = lambda found: found.get(task, {}).get(metric, (None, None))[0]
        pairs = [(value(ours[s]), value(theirs[s])) for s in ours if s in theirs]
        return {
            "value": mine[task][metric][0],
            "stderr": mine[task][metric][1],
            "over_seeds": spread([value(found) for found in ours.values()]),
            "gap": spread([a - b for a, b in pairs if None not in (a, b)]),
        }

    evaluate = run.config.get("evaluate", {})
    return {
        "lm_eval_version": run.row["environment"]["packages"].get("lm-eval"),
        "limit": evaluate.get("limit"),
        "num_fewshot": evaluate.get("num_fewshot"),
        "tasks": {task: {metric: one(task, metric) for metric in mine[task]} for task in mine},
    }
