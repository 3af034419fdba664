"""Short training runs to export, and Transformers in a process that cannot import the package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from accelerate.state import AcceleratorState

from hf_deltamatch.training.state import model_state, save_model

EXAMPLES = Path(__file__).parent.parent / "examples"
TEXTS = [f"{n} times {m} is {n * m}, and that is all. " * 4 for n in range(3, 9) for m in (7, 8)]
MODEL = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
CONFIG = {
    "model": MODEL,
    "linear": "blockwise",
    "held_out": 2,
    "eval_rows": 2,
    "seq_len": 64,
    "batch_size": 2,
    "micro_batch": 2,
    "steps": 3,
    "warmup": 1,
    "lr": 3e-3,
    "log_every": 1,
    "eval_every": 3,
    "save_every": 1,
    "keep": 9,
    "monitor_every": 0,
    "tracker": "none",
}


def train(folder: Path, name: str, **changes) -> Path:
    """The output folder of a run of three steps in this process, on the CPU."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import pretrain

    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    output = folder / name
    options = {**CONFIG, "data": str(data), "output": str(output), **changes}
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(options))
    before = os.environ.get("ACCELERATE_USE_CPU")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        pretrain.main(["--config", str(config)])
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.pop("ACCELERATE_USE_CPU")
        if before is not None:
            os.environ["ACCELERATE_USE_CPU"] = before
    return output


def checkpoint_of(model, folder: Path, /, **options) -> Path:
    """A run's folder with one checkpoint of ``model``, without training it."""
    from hf_deltamatch.training import write_checkpoint

    state = model_state(model)
    files = {
        "model.safetensors": lambda path: save_model(state, path),
        "config.json": lambda path: path.write_text(model.config.to_json_string()),
    }
    run = {"arm": "dm", "block": "128xD", "linear": "blockwise", "data": "stdlib", "seed": 0}
    run |= {"documents": "separate", "held_out": 2, "seq_len": 64, "model": {}, "tokenizer": None}
    write_checkpoint(folder, 1, files, run={**run, **options})
    return folder


PLAIN = """
import sys
sys.modules["hf_deltamatch"] = None  # importing it raises
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
folder, text, length = sys.argv[1], open(sys.argv[2], encoding="utf-8").read(), int(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
total = count = 0
with torch.no_grad():
    for start in range(0, len(ids) - 1, length):
        window = ids[start : start + length][None]
        if window.shape[1] > 1:
            n = window.shape[1] - 1
            total += float(model(input_ids=window, labels=window).loss) * n
            count += n
assert not any(name.split(".")[0] == "hf_deltamatch" for name, m in sys.modules.items() if m)
print("LOSS", total / count)
"""


def plain_loss(folder: Path, text: Path, length: int) -> tuple[float, str]:
    """Loss of a token by Transformers alone, and what it printed."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(folder), str(text), str(length)],
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split("LOSS")[1]), done.stdout + done.stderr


_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")


def numbers_in(text: str) -> set[str]:
    """Number-like words of a text, without separators of thousands."""
    return {n.replace(",", "").rstrip(",") for n in _NUMBER.findall(text)}


def untraced(card: str, results: dict) -> set[str]:
    """Numbers of a card that no number of ``results``, rounded as they are, and no text in it has."""
    values, words = [], set()

    def walk(value) -> None:
        if isinstance(value, dict):
            for key, v in value.items():
                words.update(numbers_in(key))
                walk(v)
        elif isinstance(value, list):
            for v in value:
                walk(v)
        elif isinstance(value, str):
            words.update(numbers_in(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            values.append(value)

    walk(results)

    def found(number: str) -> bool:
        if number in words:
            return True
        if "e" in number:
            digits = len(number.partition("e")[0].partition(".")[2])
            return any(f"{v:.{digits}e}" == number for v in values) or float(number) in values
        decimals = len(number.partition(".")[2])
        return any(f"{v:.{decimals}f}" == number for v in values) or float(number) in values

    return {n for n in numbers_in(card) if not found(n)}


def results_of(training: dict) -> dict:
    """``results.json`` of a model without files, with ``training`` as its section of that name."""
    card = {"name": "x", "about": None, "license": None, "base_model": None, "datasets": None}
    weights = {"parameters": 1, "dtype": "bfloat16", "exact": True, "files": {}}
    return {
        "card": {**card, "limits": []},
        "model_type": "llama",
        "weights": weights,
        "tokenizer": "UTF-8 bytes",
        "recipe": {"equations": "", "quantization_config": None},
        "training": training,
    }


def bitwise(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
