"""What is exported: the weights that a run's folder means, checked, and what the run knows of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hf_deltamatch.export.study import StudyRun, find_study, saved_runs
from hf_deltamatch.hf.train_config import FILE, read_train_config
from hf_deltamatch.training import CheckpointError, checkpoints, read_manifest
from hf_deltamatch.training.metrics import read_metrics

_OBJECTS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "model.safetensors.index.json", FILE),
)


@dataclass
class Source:
    """Weights and where they come from."""

    weights: Path
    """Folder of config and safetensors."""
    as_trained: bool
    """Tensors by the names of the model in memory, as checkpoints have them; else as
    ``save_pretrained`` writes them."""
    options: dict | None = None
    """Of the run; None for a model that was saved without one."""
    data: dict | None = None
    """Identity of the run's data."""
    step: int | None = None
    numbers: dict = field(default_factory=dict)
    """Logged at that step."""
    where: dict = field(default_factory=dict)
    """``environment`` and ``processes`` of the run, once it has ended."""
    companion: Path | None = None
    """Folder that has tokenizer and generation config, if there is one."""
    merged: bool = False
    """An adapter was merged into the weights: they are none that training multiplied with."""
    study: StudyRun | None = None
    """The run of a study that kept the weights; it has no ``options`` of a script."""
    aside: dict = field(default_factory=dict)
    """Options of the run that two runs may differ in, which a command that repeats it names."""
    said: dict | None = None
    """What a saved model's own ``config.train.json`` says."""

    @property
    def script(self) -> str | None:
        """The example that knows these options."""
        if self.options is None:
            return None
        if "lora_rank" in self.options:
            return "finetune.py"
        return "extend_context.py" if "rope" in self.options else "pretrain.py"


def find_source(run: Path, step: int | None = None) -> Source:
    """The checkpoint of ``step`` (default: the newest) in the output folder of a training script; or
    ``run`` itself, where it is a checkpoint, what a study kept or what ``save_pretrained`` wrote.

    Raises:
        CheckpointError: a file that is missing, truncated, changed or of another program, by its name.
        ValueError: no folder, nothing to export in it, no such step, or a study's run that is not done.
    """
    if not run.is_dir():
        there = saved_runs(run.parent)
        also = f" {run.parent} is {there}." if there else ""
        raise ValueError(
            f"{run}: no such folder; name the output folder of a training script.{also}"
        )
    if (study := find_study(run)) is not None:
        if step is not None:
            raise ValueError(
                f"--checkpoint is {step}: a study keeps the weights of a run's last step alone; leave the "
                "flag out."
            )
        source = _saved_model(run)
        source.study = study
        return source
    if (run / "manifest.json").exists():
        return _checkpoint(run, run.parent, step)
    found = checkpoints(run)
    if found and step is None:
        return _checkpoint(found[-1], run, None)
    if found:
        for folder in found:
            if int(folder.name.rpartition("-")[2]) == step:
                return _checkpoint(folder, run, step)
        there = ", ".join(str(int(f.name.rpartition("-")[2])) for f in found)
        raise ValueError(f"{run}: no checkpoint of step {step}; there are {there}.")
    if step is not None:
        raise ValueError(
            f"{run}: no checkpoint at all, so none of step {step}; leave --checkpoint out."
        )
    for folder in (run, run / "merged", run / "final"):
        if (folder / "config.json").is_file() and not (folder / "adapter_config.json").exists():
            return _saved_model(folder)
    if (names := saved_runs(run)) is not None:
        raise ValueError(f"{run}: {names}.")
    raise ValueError(
        f"{run}: neither checkpoints of a training script (checkpoint-…) nor a saved model "
        "(config.json and safetensors) in it. Name the output folder of examples/pretrain.py, "
        "finetune.py or extend_context.py, one of its checkpoints, OUTPUT/models/KEY of a study, or a saved "
        "model."
    )


def _checkpoint(folder: Path, run: Path, step: int | None) -> Source:
    manifest = read_manifest(folder, files=("model.safetensors", "config.json"))
    if step is not None and step != manifest["step"]:
        raise CheckpointError(
            f"{folder / 'manifest.json'}: of step {manifest['step']}, and --checkpoint is {step}."
        )
    step, options = manifest["step"], dict(manifest["run"])
    source = Source(folder, True, options, options.pop("data_identity", None), step)
    rows = read_metrics(run / "metrics.jsonl")
    source.aside = dict(manifest.get("aside") or {})
    source.numbers = next((dict(r) for r in reversed(rows) if r["step"] == step), {})
    source.numbers.pop("step", None)
    results = _json(run / "results.json")
    if results.get("options") == manifest["run"]:
        source.where = {k: results[k] for k in ("environment", "processes") if k in results}
    if (run / "final" / "config.json").exists() or options.get("lora_rank"):
        source.companion = run / "final"
    if options.get("lora_rank"):
        _take_merged(source, run, results)
    if source.companion is not None:
        _check_json(source.companion)
    return source


def _take_merged(source: Source, run: Path, results: dict) -> None:
    """A checkpoint of LoRA holds base and adapter; what can be loaded as a model is ``merged/``."""
    merged = run / "merged"
    if not (merged / "config.json").is_file() or results.get("steps") != source.step:
        raise CheckpointError(
            f"{source.weights / 'model.safetensors'}: of a LoRA run, base model and adapter apart. "
            "Let the run end with `merge: true`; the model of its last step is then exported from "
            f"{merged}. The adapter alone is {run / 'final'}."
        )
    _check_safetensors(merged)
    source.weights, source.as_trained, source.merged = merged, False, True
    source.companion = merged


def _saved_model(folder: Path) -> Source:
    _check_safetensors(folder)
    _check_json(folder)
    source = Source(folder, False, companion=folder, merged=folder.name == "merged")
    if (folder / FILE).is_file():
        source.said = read_train_config(str(folder))
    results = _json(folder.parent / "results.json")
    if folder.name in ("final", "merged") and isinstance(results.get("options"), dict):
        source.options = dict(results["options"])
        source.data = source.options.pop("data_identity", None)
        source.step = results.get("steps")
        source.aside = dict(results.get("aside") or {})
        source.where = {k: results[k] for k in ("environment", "processes") if k in results}
        known = ("options", "aside", "steps", "environment", "processes")
        source.numbers = {k: v for k, v in results.items() if k not in known}
    return source


def _check_json(folder: Path) -> None:
    """What Transformers reads beside weights are whole JSON objects: its own messages do not name the file, or
    there is none."""
    for path in (folder / name for name in _OBJECTS if (folder / name).is_file()):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: truncated or no JSON ({error}).") from error
        if not isinstance(found, dict):
            raise CheckpointError(
                f"{path}: holds a {type(found).__name__}; it must be a JSON object."
            )


def _check_safetensors(folder: Path) -> None:
    """Every file of weights can be opened whole; pickles are not read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = [p.name for p in sorted(folder.glob("*.bin"))]
        also = f" ({', '.join(pickles)} is a pickle, which is not read)" if pickles else ""
        raise CheckpointError(f"{folder}: no safetensors in it{also}.")
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: truncated or no safetensors ({error}).") from error


def _json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
