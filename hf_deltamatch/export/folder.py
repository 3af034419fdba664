"""The exported folder, written beside its place and renamed: it is there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from torch import Tensor
from transformers import AutoTokenizer, FineGrainedFP8Config, PreTrainedModel

from hf_deltamatch.export import card, card_study, evaluations, facts, fp8, study_facts
from hf_deltamatch.export import weights as w
from hf_deltamatch.export.source import Source, find_source
from hf_deltamatch.export.study import find_study
from hf_deltamatch.hf import DeltaMatchConfig
from hf_deltamatch.hf.train_config import config_of, write_train_config
from hf_deltamatch.training import CheckpointError, recipes_of


@dataclass
class Request:
    """What is asked for; ``hf-deltamatch export --help`` says what each is."""

    run: Path
    output: Path
    checkpoint: int | None = None
    fp8: bool = False
    dtype: str = "bfloat16"
    keep_recipe: bool = False
    name: str | None = None
    license: str | None = None
    about: str | None = None
    limits: list[str] = field(default_factory=list)
    seeds: list[Path] = field(default_factory=list)
    lm_eval: list[Path] = field(default_factory=list)
    text: Path | None = None


def export(asked: Request) -> dict:
    """Write ``asked.output``; returns its ``results.json``.

    Raises:
        ValueError: what cannot be exported as asked (CheckpointError: a damaged or foreign file, named).
        OSError: a folder that cannot be written.
    """
    _check(asked)
    source = find_source(asked.run, asked.checkpoint)
    spread = _spread(asked, source)
    lm_eval = evaluations.merge_lm_eval(asked.lm_eval)
    config, saved = w.read_config(source)
    recipe = trained_recipe(source, saved)
    plan = None
    if asked.fp8:
        if source.merged:
            raise ValueError(
                "--fp8: an adapter was merged into these weights, which no training multiplied with. "
                "Export without --fp8."
            )
        if recipe is None:
            raise ValueError(
                "--fp8: nothing says that these weights were trained in FP8. Export without --fp8."
            )
        plan = fp8.plan_fp8(config, recipe)
    if asked.keep_recipe and recipe is None:
        raise ValueError("--keep-recipe: the run has no FP8 recipe to keep; leave the flag out.")
    master = w.load_master(source, config)
    if source.study is not None:
        _check_size(source, master)
    with _whole_or_nothing(asked.output) as folder:
        _write_model(source, master, folder, w.DTYPES[asked.dtype], plan)
        tokenizer = w.write_tokenizer(source, folder)
        exact = _verify(folder, master, w.DTYPES[asked.dtype], plan)
        results = _results(asked, source, master, folder, recipe, plan, spread, lm_eval)
        results["tokenizer"] = tokenizer
        results["weights"]["exact"] = exact
        if asked.text is not None:
            results["check"] = _check_text(asked.text, source, folder, plan)
        if asked.keep_recipe:  # last: what was measured above is the plain model
            _set_quantization(folder, recipe.to_dict())
        _write_rest(folder, results)
    return results


def trained_recipe(source: Source, saved: dict | None) -> DeltaMatchConfig | None:
    """Recipes by what config.json says, else by the run's options; None: all in high precision."""
    if saved is not None:
        return DeltaMatchConfig.from_dict(saved)
    leave = None
    if source.study is not None:
        attention, linear = source.study.recipes
        leave = source.study.config.get("leave")
    elif source.options is not None:
        attention, linear = recipes_of(
            source.options["arm"], source.options.get("linear"), source.options["block"]
        )
    elif source.said is not None:
        found = source.said.get("quantization_config")
        return None if found is None else DeltaMatchConfig.from_dict(found)
    else:
        return None
    return config_of(attention, linear, leave)


def _spread(asked: Request, source: Source) -> dict | None:
    """Over the runs of ``--seeds``; a study's other seeds are in its own results file."""
    if source.study is not None:
        if asked.seeds:
            raise ValueError(
                f"--seeds {' '.join(map(str, asked.seeds))}: RUN is of a study, whose other seeds are "
                "counted from its runs.jsonl; leave the flag out."
            )
        return None
    for run in asked.seeds:
        if find_study(run) is not None:
            raise ValueError(
                f"--seeds {run}: a run of a study, and RUN {asked.run} is none; name runs of the same "
                "script, or export the study's run, whose other seeds are counted by themselves."
            )
    others = [find_source(run, source.step if source.as_trained else None) for run in asked.seeds]
    return facts.spread([source, *others])


def _check_size(source: Source, master: PreTrainedModel) -> None:
    """Nothing in a study's folder ties weights to a run but their number."""
    count = sum(p.numel() for p in master.parameters() if p.requires_grad)
    row = source.study.row
    if count != row["parameters"]:
        raise CheckpointError(
            f"{source.weights}: {count:,} parameters, and the run {row['name']!r} has "
            f"{row['parameters']:,}: weights of another model. Remove the folder, and let "
            "`hf-deltamatch study … --save` make them again."
        )


def _check(asked: Request) -> None:
    if asked.dtype not in w.DTYPES:
        raise ValueError(f"--dtype is {asked.dtype!r}; allowed values are {', '.join(w.DTYPES)}.")
    if asked.fp8 and asked.keep_recipe:
        raise ValueError(
            "--fp8 and --keep-recipe: config.json has room for one quantization_config; leave one out "
            "(config.train.json keeps the recipe in any case)."
        )
    if asked.output.exists() and (not asked.output.is_dir() or any(asked.output.iterdir())):
        raise ValueError(f"--output {asked.output}: there is something already; name a new folder.")
    if asked.text is not None and not asked.text.is_file():
        raise ValueError(f"--text {asked.text}: no such file.")


@contextmanager
def _whole_or_nothing(output: Path) -> Iterator[Path]:
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".partial-{output.name}-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        partial.rename(output)  # over an empty folder too
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_model(
    source: Source,
    master: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype,
    plan: fp8.Fp8Plan | None,
) -> None:
    w.write_weights(source, master, folder, dtype)
    if plan is None:
        return
    exact = folder / ".exact"
    try:
        master.save_pretrained(exact)
        fp8.write_fp8(folder, exact, master, plan)
    finally:
        shutil.rmtree(exact, ignore_errors=True)
    _set_quantization(folder, plan.quantization_config())


def _set_quantization(folder: Path, value: dict) -> None:
    path = folder / "config.json"
    facts.write_json(path, {**json.loads(path.read_text()), "quantization_config": value})


def _load(folder: Path, plan: fp8.Fp8Plan | None) -> PreTrainedModel:
    """With plain Transformers, in FP32."""
    how = {} if plan is None else {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    try:
        return w.load_saved(folder, torch.float32, **how).eval()
    except ImportError as error:
        raise ValueError(f"--fp8: the export is checked by loading it: {error}") from error


def _verify(
    folder: Path, master: PreTrainedModel, dtype: torch.dtype, plan: fp8.Fp8Plan | None
) -> bool:
    """What Transformers reads back is the run's weights, bit for bit, in the precision asked for.
    Returns whether that rounds nothing."""
    exact = True
    trained = {} if plan is None else fp8.trained_values(master, plan)
    read = _load(folder, plan).state_dict()
    for name, tensor in master.state_dict().items():
        if name in trained:
            fine = torch.equal(read[name], trained[name])
        else:  # a model may keep some in FP32
            fine = _same(read[name], tensor) or _same(read[name], tensor.to(dtype))
        if not fine:
            raise ValueError(
                f"Transformers reads {name!r} back as other numbers than the run's; nothing was "
                "written. Please report it with the model's config.json."
            )
        if name not in trained and not torch.isfinite(read[name]).all():
            raise ValueError(
                f"--dtype: {name!r} has values that {str(dtype)[6:]} cannot hold. Export in another dtype: "
                "bfloat16 or float32."
            )
        exact = exact and _same(read[name], tensor)
    return exact


def _same(read: Tensor, tensor: Tensor) -> bool:
    return torch.equal(read.float(), tensor.float())


def _results(
    asked: Request,
    source: Source,
    master: PreTrainedModel,
    folder: Path,
    recipe: DeltaMatchConfig | None,
    plan: fp8.Fp8Plan | None,
    spread: dict | None,
    lm_eval: dict | None,
) -> dict:
    name = asked.name or asked.output.name
    if source.study is None:
        training = _training(source, name, spread)
    else:
        training = study_facts.training(source.study)
    options = training["options"]
    base, data = (options or {}).get("model"), (options or {}).get("data")
    attention, linear = (None, None) if recipe is None else (recipe.attention, recipe.linear)
    weights = facts.weight_facts(folder, sum(p.numel() for p in master.parameters()))
    weights["dtype"] = asked.dtype
    if plan is not None:
        weights["fp8"] = {
            "stored_count": len(plan.stored),
            "left_count": len(plan.left),
            "stored": {n: r.name for n, r in sorted(plan.stored.items())},
            "left": dict(sorted(plan.left.items())),
        }
    if lm_eval is not None:
        _check_evaluated(lm_eval, weights["sha256"])
    return {
        "format": facts.FORMAT,
        "format_version": facts.FORMAT_VERSION,
        "card": {
            "name": name,
            "about": asked.about,
            "license": asked.license,
            "base_model": base if facts.is_hub_name(base) else None,
            "datasets": [data] if facts.is_hub_name(data) else None,
            "limits": asked.limits,
        },
        "model_type": master.config.model_type,
        "weights": weights,
        "recipe": {
            "equations": facts.equations(attention, linear)
            if recipe or options or source.study or source.said
            else None,
            "quantization_config": None if recipe is None else recipe.to_dict(),
        },
        "training": training,
        **({"lm_eval": lm_eval} if lm_eval else {}),
    }


def _training(source: Source, name: str, spread: dict | None) -> dict:
    """What the run of a script says of itself."""
    return {
        "options": facts.without_paths(source.options) if source.options else None,
        "aside": source.aside,
        "local": facts.local_names(source.options or {}),
        "data": source.data,
        "command": source.script
        and f"python examples/{source.script} --config train.yaml --output runs/{name}",
        "step": source.step,
        "tokens": source.numbers.get("tokens"),
        "numbers": source.numbers,
        "spread": spread,
        **source.where,
    }


def _check_evaluated(lm_eval: dict, sha256: str) -> None:
    evaluated = (lm_eval["arithmetic"] or {}).get("weights_sha256")
    if evaluated is not None and evaluated != sha256:
        raise ValueError(
            "--lm-eval: the results are of other weights (SHA-256 "
            f"{evaluated[:12]}…, exported {sha256[:12]}…). Export once without --lm-eval, evaluate that "
            "folder, and export again with its results."
        )


def _check_text(text: Path, source: Source, folder: Path, plan: fp8.Fp8Plan | None) -> dict:
    if not (folder / "tokenizer_config.json").is_file():
        raise ValueError("--text: there is no tokenizer to read it with; leave it out.")
    data = text.read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = tokenizer(data.decode("utf-8"), add_special_tokens=False, return_tensors="pt")
    if found["input_ids"].numel() < 2:
        raise ValueError(
            f"--text: {text} has {found['input_ids'].numel()} tokens; a loss needs two at least."
        )
    model = _load(folder, plan)
    model.set_attn_implementation("eager")  # the same sums on any machine
    longest = getattr(model.config, "max_position_embeddings", None) or 1024
    trained = source.study.last_train if source.study else source.options or {}
    length = min(trained.get("seq_len") or longest, longest)
    loss = facts.text_loss(model, found["input_ids"][0], length)
    return {"file": text.name, "sha256": hashlib.sha256(data).hexdigest(), **loss}


def _write_rest(folder: Path, results: dict) -> None:
    training = results["training"]
    facts.write_json(folder / "results.json", results)
    options = training["options"]
    study = training.get("study")
    if study:
        options = study["config"]
        text = card_study.yaml_of(study, results["card"]["name"])
        (folder / study_facts.STUDY_FILE).write_text(text, encoding="utf-8")
    recipe = results["recipe"]["quantization_config"]
    # Null says "in high precision", so of what is not known nothing is written.
    if results["recipe"]["equations"] is not None:
        recipe = recipe and DeltaMatchConfig.from_dict(recipe)
        write_train_config(folder, recipe, step=training["step"], options=options)
    if training["options"]:
        again = {**training["options"], **training.get("aside", {})}
        text = yaml.safe_dump(again, sort_keys=False, allow_unicode=True)
        (folder / "train.yaml").write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(card.write_card(results), encoding="utf-8")
    entries = evaluations.hub_entries(results["lm_eval"]) if "lm_eval" in results else {}
    for name, entry in entries.items():
        (folder / ".eval_results").mkdir(exist_ok=True)
        (folder / ".eval_results" / name).write_text(yaml.safe_dump(entry, sort_keys=False))
