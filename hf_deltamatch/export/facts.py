"""``results.json``: what a card quotes, from the run's own files and the written weights."""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from pathlib import Path

import torch
from torch import Tensor

from hf_deltamatch.export.evaluations import HUB_NAME
from hf_deltamatch.export.source import Source
from hf_deltamatch.recipes import AttentionRecipe, LinearRecipe

FORMAT = "hf_deltamatch.model_results"
FORMAT_VERSION = 1
_DATA_FILE = re.compile(r"\.(jsonl?|csv|parquet|txt)$")


def equations(attention: AttentionRecipe | None, linear: LinearRecipe | None) -> str:
    """As ``hf-deltamatch recipe`` prints them."""
    parts = [
        "attention in high precision: softmax(Q Kᵀ) V by torch's SDPA"
        if attention is None
        else str(attention),
        "linears in high precision" if linear is None else f"{linear}\n{linear.legend}",
    ]
    return "\n".join(parts)


def is_hub_name(name: object) -> bool:
    """``owner/name``, and nothing on this machine."""
    return (
        isinstance(name, str)
        and HUB_NAME.fullmatch(name) is not None
        and not name.startswith(".")
        and not _DATA_FILE.search(name)
        and not Path(name).exists()
    )


def last_part(path: str) -> str:
    """Of a path; a folder that is called like the keyword ``stdlib`` keeps a slash."""
    name = Path(path).name
    return "stdlib/" if name == "stdlib" and path != "stdlib" else name


def without_paths(options: dict) -> dict:
    """Options with local paths cut to their last part: a published file names no machine's folders."""
    out = dict(options)
    for key in ("model", "tokenizer", "data"):
        value = out.get(key)
        if isinstance(value, str) and not is_hub_name(value):
            out[key] = last_part(value)
            if key == "data" and _DATA_FILE.search(value):
                out["data_config"] = None  # of another data set: a file has no configurations
    return out


def local_names(options: dict) -> list[str]:
    """Options that name something that only the machine of the run has."""
    local = lambda key, v: (
        isinstance(v, str) and not is_hub_name(v) and (key, v) != ("data", "stdlib")
    )
    return [k for k in ("model", "tokenizer", "data") if local(k, options.get(k))]


def spread(sources: list[Source]) -> dict | None:
    """Losses over runs that differ in nothing but their seed; None of one alone.

    Raises:
        ValueError: runs that differ in more, a seed twice, or a run at another step.
    """
    if len(sources) < 2:
        return None
    first = sources[0]
    same = lambda s: {k: v for k, v in (s.options or {}).items() if k != "seed"}
    for other in sources[1:]:
        if first.options is None or same(other) != same(first) or other.step != first.step:
            mine, theirs = same(first), same(other)
            keys = sorted(k for k in {*mine, *theirs} if mine.get(k) != theirs.get(k))
            what = ", ".join(keys) or f"the step, {other.step} and {first.step}"
            raise ValueError(
                f"--seeds: {other.weights}: differs from {first.weights} in more than its seed: {what}."
            )
    seeds = [s.options["seed"] for s in sources]
    if len(set(seeds)) != len(seeds):
        raise ValueError(f"--seeds: seeds are {seeds}; each run must have another.")
    out: dict = {"seeds": seeds, "count": len(seeds)}
    for name in ("loss", "eval_loss"):
        values = [s.numbers.get(name) for s in sources]
        if all(isinstance(v, float) and math.isfinite(v) for v in values):
            out[name] = {
                "values": values,
                "mean": statistics.mean(values),
                "std": statistics.stdev(values),
            }
    return out


def weight_facts(folder: Path, parameters: int) -> dict:
    """Of the written safetensors."""
    files = sorted(folder.glob("*.safetensors"))
    whole = hashlib.sha256()
    out = {}
    for path in files:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
                whole.update(chunk)
        out[path.name] = {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
    return {"parameters": parameters, "files": out, "sha256": whole.hexdigest()}


@torch.no_grad()
def text_loss(model, ids: Tensor, length: int) -> dict:
    """Mean loss of a token of ``ids [T]`` in windows of ``length``, each seeing itself alone."""
    total, count = 0.0, 0
    for window in ids.split(length):
        if len(window) < 2:
            continue
        logits = model(input_ids=window[None], use_cache=False).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
        count += len(window) - 1
    return {"loss": total / count, "targets": count, "window": length}


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
