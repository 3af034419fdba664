"""``README.md`` of an exported folder; every number in it comes from the ``results.json`` beside it."""

from __future__ import annotations

from huggingface_hub import EvalResult, ModelCardData

from hf_deltamatch.export import card_study
from hf_deltamatch.export.markdown import table

TEMPLATE = """\
# {name}

{about}

{facts}

## Use

{use}

## Recipe

{recipe}

## Data

{data}

## Reproduce

{reproduce}

## Numbers

{numbers}

## Limits

{limits}

## Files

{files}
"""

USE = """\
Plain Transformers, nothing else to install:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
{tokenizer}```"""

USE_FP8 = """

In the arithmetic of training, with `hf_deltamatch` installed:

```python
import json
from hf_deltamatch import DeltaMatchConfig

with open("{name}/config.train.json") as file:
    recipe = json.load(file)["quantization_config"]
DeltaMatchConfig.from_dict(recipe).apply_to(model)
```"""

USE_FINEGRAINED = """

The linears are stored in Transformers' fine-grained FP8 format: the numbers that training multiplied
with. On a GPU with FP8 they run in FP8; elsewhere Transformers turns them back by itself."""

ATTENTION = {
    "mp": "SDPA in high precision (arm MP)",
    "sd": "FP8, stale δ (arm SD)",
    "dm": "FP8, matched δ (arm DM)",
}
PRECISION = {"bf16": "BF16 autocast, FP32 weights", "no": "FP32"}


def write_card(results: dict) -> str:
    """The whole file."""
    return f"---\n{front_matter(results)}\n---\n{_body(results)}"


def front_matter(r: dict) -> str:
    """YAML that ``ModelCardData`` reads back."""
    card, options = r["card"], r["training"].get("options") or {}
    tags = ["fp8", "delta-matching"]
    if arm := options.get("arm"):
        tags.append(f"arm-{arm}")
    if study := r["training"].get("study"):
        tags.append(card_study.tag(study))
    benchmarks = [
        EvalResult(
            task_type="text-generation",
            dataset_type=task["dataset"],
            dataset_name=name,
            metric_type=metric,
            metric_value=numbers["value"],
        )
        for name, task in _benchmarks(r).items()
        for metric, numbers in task["metrics"].items()
    ]
    data = ModelCardData(
        model_name=card["name"],
        library_name="transformers",
        pipeline_tag="text-generation",
        license=card["license"],
        base_model=card["base_model"],
        datasets=card["datasets"],
        tags=tags,
        eval_results=benchmarks or None,
    )
    return data.to_yaml(line_break="\n")


def _benchmarks(r: dict) -> dict:
    found = r.get("lm_eval")
    if not found or found["limit"] is not None:
        return {}
    return {name: task for name, task in found["tasks"].items() if task["benchmark"]}


def _body(r: dict) -> str:
    name, options = r["card"]["name"], r["training"].get("options") or {}
    has_tokenizer = not r["tokenizer"].startswith("none")
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n' if has_tokenizer else ""
    use = USE.format(name=name, tokenizer=tokenizer)
    if not has_tokenizer:
        use = use.replace(", AutoTokenizer", "")
    if r["weights"].get("fp8"):
        use += USE_FINEGRAINED
    elif r["recipe"]["quantization_config"]:
        use += USE_FP8.format(name=name)
    training, about = r["training"], "A causal language model trained with hf_deltamatch."
    if study := training.get("study"):
        about = card_study.about(study)
    return TEMPLATE.format(
        name=name,
        about=r["card"]["about"] or about,
        facts=table(("", ""), _facts(r, options)),
        use=use,
        recipe=_recipe(r["recipe"]["equations"]),
        data=card_study.data(training) if study else _data(training, options),
        reproduce=_reproduce(training, name),
        numbers=_numbers(r),
        limits="\n".join(f"* {text}" for text in _limits(r)),
        files=table(("file", "bytes", "sha256"), _files(r)),
    )


def _facts(r: dict, options: dict) -> list[tuple]:
    weights, training = r["weights"], r["training"]
    rows = [("architecture", f"{r['model_type']}, {weights['parameters']:,} parameters")]
    stored = weights["dtype"]
    if weights.get("fp8"):
        stored = f"{len(weights['fp8']['stored'])} linears in FP8, the rest in {stored}"
    rows.append(("weights", stored))
    rows.append(("tokenizer", r["tokenizer"]))
    if options:
        rows.append(("attention in training", ATTENTION[options["arm"]]))
        linear = options.get("linear")
        rows.append(("linears in training", f"FP8, `{linear}`" if linear else "high precision"))
        if words := PRECISION.get(options.get("precision")):
            rows.append(("precision in training", words))
        if rank := options.get("lora_rank"):
            rows.append(("trained", f"LoRA adapters of rank {rank}, merged into the base model"))
        if (rope := options.get("rope")) and "factor" in options:
            rows.append(
                ("context", f"{options['factor']:g} times the base model's, RoPE by `{rope}`")
            )
    if training.get("study"):
        return rows + card_study.facts(training)
    if training.get("step") is not None:
        steps = options.get("steps")
        rows.append(("step", f"{training['step']:,}" + (f" of {steps:,}" if steps else "")))
    if tokens := training.get("tokens"):
        rows.append(("tokens", f"{tokens:,}"))
    return rows


def _recipe(equations: str | None) -> str:
    if equations is None:
        return "In what arithmetic these weights were trained is not recorded beside them."
    return (
        "What each product took as operands in training, as `hf-deltamatch recipe` prints it:\n\n"
        f"```text\n{equations}\n```"
    )


def _data(training: dict, options: dict) -> str:
    if not options:
        return "Not recorded beside the weights."
    environment = training.get("environment") or {}
    data = options["data"]
    if data == "stdlib":
        python = environment.get("python")
        what = "The source of Python's standard library"
        what += f" (Python {python})" if python else ""
    else:
        what = f"`{data}`" + (f", `{options['data_config']}`" if options.get("data_config") else "")
        what += f", split `{options['split']}`"
        if "messages_column" in options:  # of finetune.py
            what += f", column `{options['messages_column']}`; losses are of the answers alone"
        else:
            what += f", column `{options['text_column']}`"
    apart = "do not see each other" if options["documents"] == "separate" else "see each other"
    held = options["held_out"]
    out = (
        f"{what}. Documents are packed into rows of {options['seq_len']:,} tokens, in which they "
        f"{apart}; {held:,} {'document is' if held == 1 else 'documents are'} held out."
    )
    if rows := (training.get("data") or {}).get("rows"):
        out += f" {rows:,} rows, in an order drawn from the seed."
    return out


def _reproduce(training: dict, name: str) -> str:
    if training["command"] is None:
        return "The run that made these weights is not recorded beside them."
    environment = training.get("environment") or {}
    packages = environment.get("packages") or {}
    if training.get("study"):
        said = [card_study.reproduce(training, name)]
    else:
        said = [f"```bash\n{training['command']}\n```"]
    if local := training["local"]:
        said.append(f"Name your own copy of: {', '.join(local)} (local to the machine of the run).")
    if environment:
        versions = ", ".join(
            f"{p} {packages[p]}"
            for p in ("hf-deltamatch", "torch", "transformers")
            if p in packages
        )
        said.append(
            f"Trained on {environment['device']}, processes: {training['processes']}; {versions}."
        )
    return "\n\n".join(said)


def _numbers(r: dict) -> str:
    training = r["training"]
    study = training.get("study")
    heads, rows = card_study.losses(training) if study else _losses(training)
    if check := r.get("check"):
        row = (f"loss on `{check['file']}`, plain Transformers", f"{check['loss']:.3f}")
        rows.append(row + ("–",) * (len(heads) - len(row)))
    parts = [table(heads, rows)] if rows else []
    if study:
        parts += card_study.other_numbers(training)
    if found := r.get("lm_eval"):
        parts.append(_lm_eval(found))
    return "\n\n".join(parts) or "None recorded."


def _losses(training: dict) -> tuple[tuple, list[tuple]]:
    rows = []
    spread = training.get("spread") or {}
    for key, text in (("loss", "training loss, last step"), ("eval_loss", "held-out loss")):
        value = training["numbers"].get(key)
        if value is None:
            continue
        over = spread.get(key)
        many = f"{over['mean']:.3f} ± {over['std']:.3f}" if over else "–"
        rows.append((text, f"{value:.3f}", many))
    count = spread.get("count")
    seeds = f"{count} seeds, mean ± deviation" if count else "over seeds"
    return ("nats per token", "this checkpoint", seeds), rows


def _lm_eval(found: dict) -> str:
    rows = []
    for name, task in found["tasks"].items():
        for metric, n in task["metrics"].items():
            error = "–" if n["stderr"] is None else f"{n['stderr']:.4f}"
            rows.append((name, metric, f"{n['value']:.4f}", error))
    said = f"lm-eval {found['lm_eval_version']}"
    if ran := found["arithmetic"]:
        part = lambda kind: ", ".join(f"`{name}`" for name in ran[kind] or {}) or "high precision"
        said += f", attention in {part('attention')}, linears in {part('linear')}"
    if found["limit"] is not None:
        said += f", the first {found['limit']:g} documents of each task only: no benchmark result"
    return f"{said}:\n\n{table(('task', 'metric', 'value', 'standard error'), rows)}"


def _limits(r: dict) -> list[str]:
    training, out = r["training"], list(r["card"]["limits"])
    study = training.get("study")
    if study:
        out += card_study.limits(training)
    if training["numbers"]:
        out.append(_rounding(study, r["weights"].get("exact")))
    spread = training.get("spread") or {}
    if (training["options"] or study) and spread.get("count", 0) < 2:
        out.append("One seed: differences to other checkpoints may be chance.")
    if training["numbers"].get("skipped"):
        out.append(f"{training['numbers']['skipped']} steps were not finite and were skipped.")
    if fp8 := r["weights"].get("fp8"):
        out.append(
            f"Linears left in {r['weights']['dtype']}: {fp8['left_count']}; results.json names them, "
            "with the reasons."
        )
    if not (r.get("lm_eval") or training.get("scores")):
        out.append("No downstream evaluation.")
    return out


def _rounding(study: dict | None, exact: bool | None) -> str:
    """Of the losses, which training measured."""
    what = "The losses of training were measured in its own arithmetic"
    if exact:
        return f"{what}, with the weights that are stored here."
    own = "the weights of the run" if study else "its FP32 weights"
    return f"{what} and with {own}; what is stored here is rounded once more."


def _files(r: dict) -> list[tuple]:
    return [
        (f"`{name}`", f"{fact['bytes']:,}", f"`{fact['sha256']}`")
        for name, fact in r["weights"]["files"].items()
    ]
