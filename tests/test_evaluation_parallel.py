"""Evaluation by two processes through Accelerate: the documents are shared, the scores are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import build
from transformers import ByT5Tokenizer

pytest.importorskip("lm_eval")

TASKS = Path(__file__).parent / "lm_eval_tasks"
LAUNCHERS = {
    "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0"],
    "torchrun": ["torch.distributed.run", "--nproc_per_node=2", "--standalone"],
}  # fmt: skip


def evaluate(model: Path, folder: Path, launcher: str | None) -> tuple[dict, dict]:
    """The results file, and responses by task and document."""
    command = [sys.executable]
    if launcher:
        command += ["-m", *LAUNCHERS[launcher]]
    command += ["-m", "hf_deltamatch", "eval", str(model), "--tasks", "tiny,tiny_gen"]
    command += ["--include_path", str(TASKS), "--model_args", "dtype=float32,add_bos_token=False"]
    command += [
        "--device",
        "cpu",
        "--batch_size",
        "1",
        "--output_path",
        str(folder),
        "--log_samples",
    ]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    (results,) = folder.rglob("results_*.json")
    responses = {}
    for task in ("tiny_ll", "tiny_mc", "tiny_gen"):
        (file,) = folder.rglob(f"samples_{task}_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(samples) == 13
        responses[task] = {s["doc_id"]: s["filtered_resps"] for s in samples}
    return json.loads(results.read_text()), responses


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, dict, dict]:
    """A model, its results by one process, and its responses."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("alone")
    model = folder / "model"
    build("llama", vocab_size=259, max_position_embeddings=512).save_pretrained(model)
    ByT5Tokenizer(extra_ids=0).save_pretrained(model)
    return model, *evaluate(model, folder / "out", None)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_two_processes_score_as_one(launcher, alone, tmp_path) -> None:
    """Bitwise: every document is computed by itself, here or there."""
    model, one, responses = alone
    two, together = evaluate(model, tmp_path / "two", launcher)
    assert responses == together and all(len(r) == 13 for r in responses.values())
    assert (one["config"]["deltamatch"]["processes"], two["config"]["deltamatch"]["processes"]) == (
        1,
        2,
    )
    for name, scores in one["results"].items():
        for key, score in scores.items():
            if "," in key and "_stderr" not in key:  # that of a perplexity is bootstrapped
                assert two["results"][name][key] == pytest.approx(score, rel=1e-12), (name, key)
    calls = lambda out: out["config"]["deltamatch"]["calls"]["attention_fwd"]
    assert calls(two) < 0.75 * calls(one), "the first process did more than its share"
