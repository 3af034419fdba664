"""lm-eval model ``hf-deltamatch``: loads, evaluates, and says what really ran."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from tiny_models import build
from transformers import AutoModelForCausalLM, ByT5Tokenizer

import hf_deltamatch
from hf_deltamatch.testing import rel_rms

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from hf_deltamatch import AttentionRecipe  # noqa: E402
from hf_deltamatch.hf.linear import fp8_linears  # noqa: E402
from hf_deltamatch.hf.lm_eval import DeltaMatchLM  # noqa: E402
from hf_deltamatch.hf.modules import attention_modules, choice_of  # noqa: E402

TEXTS = ["def add(a, b):\n    return a + b\n", "import os\nprint(os.sep)\n", "x = 1\n" * 9]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    build("llama", vocab_size=259).save_pretrained(folder)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("task") / "mc.jsonl"
    rows = [
        {"question": t[:12], "choices": [t[12:18], "zzzzzz", "????"], "answer": i % 3}
        for i, t in enumerate(TEXTS * 3)
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return {
        "task": "tiny_mc",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
        "metadata": {"version": 1.0},
    }


def evaluate(lm, task: dict) -> dict:
    return lm_eval.simple_evaluate(
        model=lm,
        tasks=[dict(task)],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )


def scores(out: dict) -> torch.Tensor:
    samples = sorted(out["samples"]["tiny_mc"], key=lambda s: s["doc_id"])
    return torch.tensor([[float(r[0]) for r in s["filtered_resps"]] for s in samples])


def load(checkpoint, **kwargs) -> DeltaMatchLM:
    return DeltaMatchLM(str(checkpoint), device="cpu", dtype="float32", **kwargs)


def test_provenance_counts_what_ran(checkpoint, task) -> None:
    lm = load(checkpoint, batch_size=4)
    out = evaluate(lm, task)
    found = out["config"]["deltamatch"]
    assert found["attention"] == {"delta_matching": 2} and found["attention_modules"] == 2
    assert found["linear"] == {"blockwise": 14} and found["fp8_linears"] == 14
    assert found["calls"]["attention_fwd"] > 0
    assert found["calls"]["linear_fwd"] == 7 * found["calls"]["attention_fwd"]
    assert found["environment"]["packages"]["lm-eval"]
    assert len(found["weights_sha256"]) == 64


def test_recipes_are_arguments(checkpoint) -> None:
    lm = load(checkpoint, attention="stale_delta", linear="rowwise")
    found = lm.provenance()
    assert found["attention"] == {"stale_delta": 2} and found["linear"] == {"rowwise": 14}


def test_none_is_the_plain_model(checkpoint, task) -> None:
    lm = load(checkpoint, attention="none", linear="none", batch_size=4)
    assert lm.provenance()["fp8_linears"] == 0 and lm.provenance()["calls"] == {}
    stock = HFLM(str(checkpoint), device="cpu", dtype="float32", batch_size=4)
    assert torch.equal(scores(evaluate(lm, task)), scores(evaluate(stock, task)))


def test_batch_size_changes_only_rounding(checkpoint, task) -> None:
    one = scores(evaluate(load(checkpoint, batch_size=1), task))
    many = scores(evaluate(load(checkpoint, batch_size=5), task))
    # lm-eval pads on the right without a mask; real rows see no padding. Quantised along tokens
    # are only gradients, so what is left is the order of FP32 sums in batched products.
    assert rel_rms(many, one) < 1e-5


@pytest.mark.parametrize("save_config", [False, True])
def test_saved_config_is_restored_and_overridden(tmp_path, task, save_config) -> None:
    model = build("llama", vocab_size=259)
    if save_config:
        hf_deltamatch.DeltaMatchConfig("dequantized_delta", "rowwise").apply_to(model)
    model.save_pretrained(tmp_path)
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path)
    found = load(tmp_path).provenance()
    wanted = ("dequantized_delta", "rowwise") if save_config else ("delta_matching", "blockwise")
    assert (found["attention"], found["linear"]) == ({wanted[0]: 2}, {wanted[1]: 14})
    over = load(tmp_path, attention="stale_delta", linear="none").provenance()
    assert (over["attention"], over["linear"]) == ({"stale_delta": 2}, {})


LAYERS = {"model.layers.1.mlp": "bf16", "model.layers.1.self_attn": "bf16"}


@pytest.fixture
def mixed(tmp_path):
    """A checkpoint whose own config makes exceptions of every kind."""
    config = hf_deltamatch.DeltaMatchConfig(
        "stale_delta",
        "mx",
        layers={**LAYERS, "model.layers.0.mlp": "rowwise"},
        modules_to_not_convert=["*.q_proj"],
        include=["lm_head"],
    )
    config.apply_to(build("llama", vocab_size=259)).save_pretrained(tmp_path)
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path)
    return tmp_path


def what_runs(model) -> tuple[dict, dict, set]:
    attention, linears = attention_modules(model), fp8_linears(model)
    backends = {choice_of(m).backend for m in attention.values()}
    backends |= {m.fp8_backend for m in linears.values()}
    return (
        {n: choice_of(m).recipe.name for n, m in attention.items()},
        {n: m.fp8_recipe.name for n, m in linears.items()},
        backends,
    )


def test_backend_changes_no_recipe(mixed) -> None:
    attention, linears, backends = what_runs(load(mixed).model)
    assert backends == {None} and set(linears.values()) == {"mx", "rowwise"}
    assert attention["model.layers.1.self_attn"] == "bf16" and "lm_head" in linears
    assert what_runs(load(mixed, fp8_backend="reference").model) == (
        attention, linears, {"reference"},
    )  # fmt: skip


@pytest.mark.parametrize("backend", [None, "reference"])
def test_recipe_keeps_what_the_checkpoint_leaves_in_high_precision(mixed, backend) -> None:
    attention, linears, _ = what_runs(load(mixed).model)
    lm = load(mixed, attention="dequantized_delta", linear="blockwise", fp8_backend=backend)
    over = what_runs(lm.model)
    left = {n for n, r in attention.items() if r == "bf16"}
    assert left and over[0] == {
        n: r if n in left else "dequantized_delta" for n, r in attention.items()
    }
    assert over[1] == dict.fromkeys(linears, "blockwise") and over[2] == {backend}
    lm = load(mixed, linear="none", fp8_backend=backend)
    assert what_runs(lm.model) == (attention, {}, {backend})


def test_half_that_the_checkpoint_leaves_out(tmp_path) -> None:
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path)
    config = hf_deltamatch.DeltaMatchConfig("bf16", None, layers={"model.layers.1": "bf16"})
    config.apply_to(build("llama", vocab_size=259)).save_pretrained(tmp_path)
    assert what_runs(load(tmp_path, fp8_backend="reference").model)[1] == {}
    attention, linears, _ = what_runs(load(tmp_path, attention="stale_delta", linear="mx").model)
    assert set(attention.values()) == {"stale_delta"}  # "bf16" was the recipe of the whole model
    assert len(linears) == 7 and not any("layers.1." in n for n in linears)


@pytest.mark.parametrize("recipe", [("stale_delta", None), (None, "rowwise"), None])
def test_exported_folder_runs_as_it_was_trained(tmp_path, recipe) -> None:
    build("llama", vocab_size=259).save_pretrained(tmp_path)
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path)
    config = recipe and hf_deltamatch.DeltaMatchConfig(*recipe).to_dict()
    said = {"format": "hf_deltamatch.train_config", "quantization_config": config}
    (tmp_path / "config.train.json").write_text(json.dumps(said))
    attention, linear = recipe or (None, None)
    found = load(tmp_path).provenance()
    assert found["attention"] == ({attention: 2} if attention else {})
    assert found["linear"] == ({linear: 14} if linear else {})
    asked = {"attention": "dequantized_delta", "linear": "blockwise"}
    found = load(tmp_path, **asked).provenance()
    assert (found["attention"], found["linear"]) == ({"dequantized_delta": 2}, {"blockwise": 14})
    found = load(tmp_path, attention="dequantized_delta").provenance()
    assert found["attention"] == {"dequantized_delta": 2}
    assert found["linear"] == ({linear: 14} if linear else {})


def test_weights_that_say_nothing_are_evaluated_with_a_warning(tmp_path, caplog) -> None:
    build("llama", vocab_size=259).save_pretrained(tmp_path)
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path)
    load(tmp_path, linear="none")
    (said,) = (r.getMessage() for r in caplog.records if "arithmetic" in r.getMessage())
    assert "evaluated with attention=delta_matching,linear=none." in said
    caplog.clear()
    load(tmp_path, attention="stale_delta", linear="none")
    assert not any("arithmetic" in r.getMessage() for r in caplog.records)


def test_quantised_weights_are_evaluated_only_as_they_are(tmp_path) -> None:
    build("llama", vocab_size=259).save_pretrained(tmp_path)
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    stored = {"quant_method": "fp8", "modules_to_not_convert": ["model", "lm_head"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": stored}))
    with pytest.raises(ValueError, match="quantised with FineGrainedFP8Config.*attention=none"):
        load(tmp_path)
    found = load(tmp_path, attention="none", linear="none").provenance()
    assert (found["attention"], found["linear"], found["stored_as"]) == ({}, {}, "fp8")


def test_unknown_backend(checkpoint) -> None:
    with pytest.raises(ValueError, match="fp8_backend: `backend` is 'slow'; allowed .*'reference'"):
        load(checkpoint, fp8_backend="slow")


def test_folders_of_a_run(checkpoint, tmp_path) -> None:
    """Neither the run's own folder nor a checkpoint in it can be evaluated as it is."""
    run, final = tmp_path / "run", tmp_path / "run" / "final"
    shutil.copytree(checkpoint, final)
    with pytest.raises(ValueError, match=f"{run} is the folder of a run.*evaluate {final}"):
        load(run)
    saved = run / "checkpoint-00000003"
    shutil.copytree(checkpoint, saved)
    (saved / "manifest.json").write_text("{}")
    assert len(load(saved).tokenizer) > 1  # somebody put one there
    for path in saved.glob("*token*"):
        path.unlink()
    with pytest.raises(ValueError, match="is a checkpoint of a run, and has no tokenizer"):
        load(saved)
    lm = load(saved, tokenizer=str(final))
    assert len(lm.tokenizer) > 1


def test_a_model_that_is_nowhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        OSError, match="pretrained='nowhere' is no folder here; as a name of the hub"
    ):
        DeltaMatchLM(pretrained="nowhere", device="cpu")


def test_generate_until_is_the_same_in_a_padded_batch(checkpoint) -> None:
    contexts = ["def f(x):", "import numpy as np\nx = np.zeros(3)\n"]
    options = {"until": ["\n\n\n"], "max_gen_toks": 6, "do_sample": False}

    def answers(batch_size: int) -> list[str]:
        requests = [
            Instance("generate_until", {}, (c, dict(options)), i) for i, c in enumerate(contexts)
        ]
        # Strictly causal and per token, so that left padding moves no tile.
        lm = load(checkpoint, batch_size=batch_size)
        hf_deltamatch.set_attention_recipe(lm.model, AttentionRecipe(block="1xD"))
        return lm.generate_until(requests)

    together = answers(2)
    assert together == answers(1) and all(together)


def test_model_object_refuses_load_options(checkpoint) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    for name, value in (("attention", "stale_delta"), ("fp8_backend", "reference")):
        with pytest.raises(ValueError, match="model object is evaluated as it is.*backend="):
            DeltaMatchLM(model, tokenizer=ByT5Tokenizer(extra_ids=0), **{name: value})


def test_foreign_quantisation_is_refused(checkpoint) -> None:
    lm = DeltaMatchLM.__new__(DeltaMatchLM)
    lm._wanted = {"attention": "auto", "linear": "auto"}
    with pytest.raises(ValueError, match="high-precision"):
        lm._create_model(pretrained=str(checkpoint), quantization_config=object())


def test_command_takes_lm_evals_options(checkpoint, task, tmp_path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "tiny.yaml").write_text(json.dumps(task))  # JSON is YAML
    command = [sys.executable, "-m", "hf_deltamatch", "eval", "--tasks", "tiny_mc"]
    command += ["--include_path", str(folder), "--device", "cpu", "--batch_size", "4"]
    command += ["--model_args", f"pretrained={checkpoint},dtype=float32,linear=none"]
    command += ["--output_path", str(tmp_path / "out"), "--limit", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    saved = json.loads(results.read_text())
    assert saved["config"]["model"] == "hf-deltamatch"
    assert saved["config"]["deltamatch"]["attention"] == {"delta_matching": 2}
    assert saved["config"]["deltamatch"]["calls"]["attention_fwd"] > 0
