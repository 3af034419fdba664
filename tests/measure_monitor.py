"""What ``diagnostics.Monitor`` costs: steps of ``examples/pretrain.py`` that it samples beside those that it
does not, each waited for.

A script:

    python tests/measure_monitor.py --json monitor.json    # on a GPU: 135M parameters and 0.6 billion
    python tests/measure_monitor.py --case tiny            # in seconds on a CPU

``share``: what a sampled step takes longer (medians), over the steps of the default interval; on a busy
machine less than the spread of the steps says nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import pretrain  # noqa: E402

from hf_deltamatch.environment import environment  # noqa: E402
from hf_deltamatch.training.options import Options  # noqa: E402

EVERY = 10
DEFAULT = Options.__dataclass_fields__["monitor_every"].default


def small() -> dict:
    """SmolLM2-135M's shape from ``pretrain_125m.yaml``, on local text."""
    config = yaml.safe_load((ROOT / "examples/configs/pretrain_125m.yaml").read_text())
    for name in ("tokenizer", "data_config", "streaming"):
        del config[name]
    model = {**config["model"], "vocab_size": 320}
    return {**config, "model": model, "data": "stdlib", "held_out": 8, "batch_size": 16} | {
        "micro_batch": 16, "linear": "blockwise", "optimizer": "adamw", "warmup": 5,
    }  # fmt: skip


def large() -> dict:
    """0.6 billion parameters, head dimension 128."""
    model = {
        **small()["model"], "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 10,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    return {**small(), "model": model, "seq_len": 4096, "batch_size": 8, "micro_batch": 8} | {
        "lr": 1e-4
    }


def tiny() -> dict:
    config = yaml.safe_load((ROOT / "examples/configs/pretrain_tiny.yaml").read_text())
    return {**config, "warmup": 5}


CASES = {
    "135M": (small, 62),
    "135M compiled": (lambda: {**small(), "compile": True}, 42),
    "135M checkpointing": (lambda: {**small(), "checkpointing": True}, 42),
    "0.6B": (large, 32),
}
ALL = {**CASES, "tiny": (tiny, 32)}


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(name: str) -> dict:
    make, steps = ALL[name]
    seconds: list[float] = []
    plain = pretrain.Training.train_step

    def timed(self: pretrain.Training) -> dict:
        wait()
        start = time.perf_counter()
        numbers = plain(self)
        numbers |= self.monitor.pop()
        wait()
        seconds.append(time.perf_counter() - start)
        return numbers

    with tempfile.TemporaryDirectory() as folder:
        never = dict.fromkeys(("log_every", "save_every", "eval_every"), 10**6)
        config = {**make(), **never, "steps": steps, "monitor_every": EVERY, "tracker": "none"}
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump({**config, "output": str(Path(folder) / "run")}))
        with (
            mock.patch.object(pretrain.Training, "train_step", timed),
            mock.patch.object(pretrain.Training, "save", lambda self, output: None),
        ):
            pretrain.main(["--config", str(path)])
    # The first sampled step warms up, and a step after a sampled one may.
    counted = range(EVERY + 1, steps)
    off = statistics.median(seconds[i] for i in counted if i % EVERY > 1)
    sampled = [seconds[i] for i in counted if i % EVERY == 0]
    extra = statistics.median(sampled) - off
    return {
        "case": name,
        "rows": f"{config['batch_size']} x {config['seq_len']}",
        "step_ms": 1e3 * off,
        "sampled_ms": [1e3 * x for x in sampled],
        "extra_ms": 1e3 * extra,
        "interval": DEFAULT,
        "share": extra / (DEFAULT * off),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--case", action="append", choices=ALL, help="may be repeated")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"--json is {args.json}; it must be a file in a folder that exists.")
    result = {"method": " ".join(__doc__.split("\n\n")[0].split()), "rows": []}
    for name in args.case or CASES:
        row = measure(name)
        result["rows"].append(row)
        print(
            f"{name:<20} step {row['step_ms']:.1f} ms, sampled {row['extra_ms']:+.1f} ms "
            f"({min(row['sampled_ms']):.1f} to {max(row['sampled_ms']):.1f}): "
            f"{row['share']:.3%} of {DEFAULT} steps"
        )
    if args.json:
        args.json.write_text(json.dumps({**result, "environment": environment()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
