"""The parts of a card that are of a study's run; every number is in ``results.json``."""

from __future__ import annotations

import re

import yaml

from hf_deltamatch.export.markdown import mean_and_deviation, table
from hf_deltamatch.export.study_facts import study_file
from hf_deltamatch.training.markdown import cell
from hf_deltamatch.training.study_rows import recipes_of_config


def about(study: dict) -> str:
    """The first sentence where none is given."""
    return (
        "A causal language model of bytes, trained with hf_deltamatch in a study of arithmetics: "
        f"setting “{study['setting']}”, arm {study['arm']}, seed {study['seed']}."
    )


def tag(study: dict) -> str:
    """The hub's tags are small letters, digits and dashes."""
    return f"arm-{re.sub(r'[^a-z0-9]+', '-', study['arm'].lower()).strip('-')}"


def facts(training: dict) -> list[tuple]:
    """Rows of the card's first table."""
    study = training["study"]
    config, arm = study["config"], cell(study["arm"])
    attention, linear = recipes_of_config(config)
    said = "SDPA in high precision"
    if attention is not None:
        said = f"{'FP8' if attention.quantize else 'high precision'}, `{attention.name}`"
    linears = "high precision"
    if linear is not None:
        linears = f"FP8, `{linear.name}`"
        if "leave" in config:
            left = ", ".join(f"`{pattern}`" for pattern in config["leave"])
            linears += f"; in high precision those of {left}"
    first, last = config["train"], _last(config)
    steps = f"{first['steps']:,} of {_batch(first)}"
    if last is not first:
        steps += f", then {last['steps']:,} of {_batch(last)}"
    precision = study["precision"]
    if precision != "float32":
        precision += ", master weights and AdamW in FP32"
    return [
        ("attention in training", f"{said} (arm {arm})"),
        ("linears in training", linears),
        ("setting, seed", f"{cell(study['setting'])}, {study['seed']}"),
        ("precision in training", precision),
        ("steps", steps),
        ("tokens", f"{training['tokens']:,}"),
    ]


def _last(config: dict) -> dict:
    return config.get("then", config)["train"]


def _batch(train: dict) -> str:
    return f"{train['batch_size']:,} × {train['seq_len']:,} tokens"


def data(training: dict) -> str:
    """The corpus, whole: a token is a byte of it."""
    study = training["study"]
    config, found = study["config"]["corpus"], study["corpus"]
    if config["source"] == "stdlib":
        python = training["environment"].get("python")
        what = "The source of Python's standard library, without its tests"
        what += f" (Python {python})" if python else ""
    else:
        what = f"`{found['source']}`"
    every = config["held_out_every"]
    order = "Sequences are cut from the text and come in an order drawn from the seed."
    if found["documents"] == 1:
        parts = f"one file, the last 1/{every:,} of it held out"
    else:
        parts = (
            f"{found['documents']:,} files in a fixed shuffled order, cut at "
            f"{config['limit_bytes']:,} bytes, one in {every:,} of them held out"
        )
        order = (
            "Byte 0 stands between files. Sequences are cut from the joined text, so that tokens see "
            "those of the file before theirs, and come in an order drawn from the seed."
        )
    rows = [
        (text, f"{found[f'{part}_bytes']:,}", f"`{found[f'{part}_sha256']}`")
        for part, text in (("train", "training"), ("held_out", "held out"))
    ]
    told = table(("text", "bytes", "sha256"), rows)
    return f"{what}: {parts}. A token is a byte. {order}\n\n{told}"


def reproduce(training: dict, name: str) -> str:
    """The command and its file; what follows of versions is every card's."""
    study = training["study"]
    said = [
        f"```bash\n{training['command']}\n```",
        f"`study.yaml`, beside this card, is this run alone:\n\n```yaml\n{yaml_of(study, name)}```",
    ]
    where = f"The weights come to `runs/{name}/models/{study['key']}`"
    if not training["local"]:
        said.append(
            f"{where}: the key, a hash of the options that numbers depend on, is that of the study's "
            "run."
        )
    else:
        said.append(
            f"{where} if the paths are those of the study's run, which are part of that key, and to "
            "another key otherwise. The text is the same where the hashes above are."
        )
    if "evaluate" in study["config"]:
        said.append('`evaluate` needs lm-eval: `pip install "hf-deltamatch[eval]"`.')
    return "\n\n".join(said)


def yaml_of(study: dict, name: str) -> str:
    """``study.yaml``."""
    return yaml.safe_dump(
        study_file(study, name),
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=110,
    )


def losses(training: dict) -> tuple[tuple, list[tuple]]:
    """Heads and rows of the table of losses."""
    numbers, spread, gap = (training[k] for k in ("numbers", "spread", "gap"))
    last = _last(training["study"]["config"])
    window = min(last["last"], last["steps"])
    names = {
        "final_loss": f"training loss, mean of the last {_many(window, 'step')}",
        "held_out_loss": "held-out loss",
        "held_out_before": f"held-out loss at {last['seq_len']:,} tokens before the second stage",
    }
    heads: tuple = ("nats per token", "this checkpoint", _heading(spread))
    if gap:
        pairs = f", {gap['pairs']} paired seeds" if gap["pairs"] > 1 else ", same seed"
        heads += (f"gap to {cell(gap['to'])}{pairs}",)
    rows = []
    for name, text in names.items():
        if name not in numbers:
            continue
        row = (text, _number(numbers[name]), _over(spread, name))
        if gap:
            row += (_gap(gap[name]) if name in gap else "–",)
        rows.append(row)
    return heads, rows


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _heading(spread: dict | None) -> str:
    several = spread and spread["count"] > 1
    return f"{spread['count']} seeds, mean ± deviation" if several else "over seeds"


def _number(x: float | None) -> str:
    return "not finite" if x is None else f"{x:.3f}"


def _over(spread: dict | None, name: str) -> str:
    if not spread or spread["count"] < 2:
        return "–"
    over = spread[name]
    part = f" (of {over['n']})" if over["n"] not in (0, spread["count"]) else ""
    return mean_and_deviation(over, 3) + part


def _gap(gap: dict) -> str:
    lost = f" ({gap['not_finite']} not finite)" if gap["not_finite"] else ""
    return mean_and_deviation(gap, 4, "+") + lost


def other_numbers(training: dict) -> list[str]:
    """What stands below the table of losses."""
    study, numbers, spread = (training[k] for k in ("study", "numbers", "spread"))
    out = []
    if "then" in study["config"]:
        out.append("All of the second stage.")
    if numbers["residual"] is not None:
        text = (
            "Row-sum residual of dS (Σ|Σ_j dS_ij| / Σ|dS_ij|), median of "
            f"{_many(numbers['residual_count'], 'step')}: {numbers['residual']:.1e}"
        )
        if spread and spread["residual"]["std"] is not None:
            over = spread["residual"]
            text += f"; over seeds {over['mean']:.1e} ± {over['std']:.1e}"
        out.append(f"{text}.")
    if spread:
        seeds = ", ".join(f"{seed} {word}" for seed, word in spread["status"].items())
        failed = f", failed: {spread['failed']}" if spread["failed"] else ""
        many = _many(spread["count"], "seed")
        out.append(f"Diverged: {spread['diverged']} of {many}{failed} (by seed: {seeds}).")
    if gap := training["gap"]:
        text = (
            f"Gaps: to runs of arm {gap['to']} with the same seed, which started from the same weights "
            "and read the same data in the same order."
        )
        if gap["diverged"]:
            text += f" Of these, {gap['diverged']} diverged."
        out.append(text)
    if scores := training["scores"]:
        out.append(_scores(scores, training))
    return out


def _scores(scores: dict, training: dict) -> str:
    gap = training["gap"]
    said = f"lm-eval {scores['lm_eval_version'] or ''}".strip()
    said += " at the end of the run, on its final weights in the arithmetic of training"
    if scores["num_fewshot"] is not None:
        said += f", {scores['num_fewshot']}-shot"
    if scores["limit"] is not None:
        said += f", the first {scores['limit']} documents of each task only: no benchmark result"
    heads = ("task", "metric", "value", "standard error", _heading(training["spread"]))
    several = training["spread"] and training["spread"]["count"] > 1
    rows = []
    for task, metrics in scores["tasks"].items():
        for metric, n in metrics.items():
            digits = lambda x: "–" if x is None else f"{x:.4f}"
            over = mean_and_deviation(n["over_seeds"], 4) if several else "–"
            row = (task, metric, digits(n["value"]), digits(n["stderr"]), over)
            rows.append(row + ((mean_and_deviation(n["gap"], 4, "+"),) if gap else ()))
    heads += (f"gap to {cell(gap['to'])}",) if gap else ()
    return f"{said}:\n\n{table(heads, rows)}"


def limits(training: dict) -> list[str]:
    """What is true of every such checkpoint, and what is odd about this one's numbers."""
    study, spread = training["study"], training["spread"]
    out = [
        f"Trained to compare arithmetics, on {study['corpus']['train_bytes']:,} bytes of text: a model "
        "to measure, not to use."
    ]
    if spread and len(spread["devices"]) > 1:
        out.append(f"Its seeds ran on different devices: {', '.join(spread['devices'])}.")
    if others := study["not_counted"]:
        seeds = ", ".join(map(str, others))
        out.append(f"Not counted, of other text or precision: seeds {seeds}.")
    if lost := study["damaged_lines"]:
        out.append(f"Not counted, damaged: {_many(lost, 'line')} of the study's results file.")
    return out
