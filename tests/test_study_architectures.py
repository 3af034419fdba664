"""The study's model classes: our call of their layers is the model's own forward and waits for nothing."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
import yaml
from study_files import CONFIGS, NoWaiting, small
from tiny_models import NEWEST, one_thread  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_deltamatch.study import model as study_model
from hf_deltamatch.study import report
from hf_deltamatch.study.corpus import load_corpus
from hf_deltamatch.study.model import (
    build_model,
    decays,
    is_direct,
    is_known,
    logits_of,
    to_working_dtype,
)
from hf_deltamatch.study.run import Trainer, train
from hf_deltamatch.study.spec import parse_study
from hf_deltamatch.testing import assert_close

CPU = torch.device("cpu")
FILE = "study_architectures.yaml"
# Older versions of Transformers lack the newest classes.
RUNS = [run for run in parse_study(small(FILE, "stdlib")).runs if is_known(run.config)]
SETTINGS = list(dict.fromkeys(run.setting for run in RUNS))


def run_of(setting: str, arm: str, text: str = "stdlib"):
    runs = parse_study(small(FILE, text)).runs
    return next(r for r in runs if (r.setting, r.arm) == (setting, arm))


def test_settings_are_the_architectures_that_the_paper_names() -> None:
    types = {
        r.setting: r.config["model"]["model_type"] for r in parse_study(small(FILE, "stdlib")).runs
    }
    assert Counter(types.values()) == dict.fromkeys(
        ("llama", "smollm3", "deepseek_v3", "qwen3_next", "bamba", "kimi_linear"), 1
    )


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("arm", ["MP", "DM"])
def test_forward_is_the_model_s_own(setting, arm, monkeypatch) -> None:
    """With its norms as they are: the fused ones are the same formula."""
    config = run_of(setting, arm).config
    ours = build_model(config, CPU, None)
    monkeypatch.setattr(study_model, "_NORMS", {})
    own = build_model(config, CPU, None)
    fused = [m for m in ours.modules() if "forward" in vars(m)]
    assert len(fused) >= 9 and not any("forward" in vars(m) for m in own.modules())
    for model in (ours, own):
        torch.manual_seed(1)
        with torch.no_grad():  # weights that differ from what a norm would start with
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape))
    ids = torch.randint(256, (2, 40))
    assert is_direct(ours)
    # FP8 rounds what differs by rounding to one side or the other.
    rms = 1e-6 if arm == "MP" else 5e-3
    assert_close(logits_of(ours, ids), own(input_ids=ids, use_cache=False).logits, rms=rms)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("arm", ["MP", "DM"])
def test_no_step_waits_for_the_device(setting, arm, text) -> None:
    """Else it could not be recorded as a graph. (The bodies of our ops are not looked into.)"""
    trainer = Trainer(run_of(setting, arm, text).config, load_corpus(text, 5, 10**6), CPU)
    trainer.optimizer.step = lambda: None  # torch's fused AdamW, which reads its step on a CPU
    with NoWaiting():
        trainer.step()
    assert trainer.losses[0].isfinite()


class OneDevice(TorchDispatchMode):
    """Fails where a tensor is made on another device than ``meta``: a copy to it would wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        assert all(t.device.type == "meta" for t in found), func
        return out


@pytest.mark.skipif(
    not NEWEST, reason="Gated DeltaNet of Transformers 5.4 makes tensors on the CPU"
)
@pytest.mark.parametrize("setting", SETTINGS)
def test_everything_is_made_on_the_device(setting) -> None:
    model = build_model(run_of(setting, "MP").config, CPU, None).to("meta")
    ids = torch.zeros(2, 40, dtype=torch.int64, device="meta")
    with OneDevice():
        torch.autograd.grad(logits_of(model, ids).sum(), list(model.parameters()))
    with OneDevice(), pytest.raises(AssertionError):
        torch.zeros(1)


@pytest.mark.skipif(not NEWEST, reason="no Kimi Linear in Transformers 5.4")
def test_decays_stay_in_float32_and_do_not_decay() -> None:
    model = build_model(run_of("Kimi Delta Attention 3 to 1", "MP").config, CPU, None)
    decayed = dict(zip((n for n, _ in model.named_parameters()), decays(model), strict=True))
    to_working_dtype(model, torch.bfloat16)
    for name, p in model.named_parameters():
        kept = name.endswith(("A_log", "dt_bias"))
        assert p.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert decayed[name] == (p.dim() >= 2 and not kept), name
    assert any(p.dim() > 2 for n, p in model.named_parameters() if n.endswith("A_log"))


@pytest.mark.parametrize("setting", SETTINGS[3:])
def test_bfloat16(setting, text) -> None:
    """As on a GPU: what a class computes with weights of two dtypes."""
    data = small(FILE, text)
    data["train"]["precision"] = "bfloat16"
    run = next(r for r in parse_study(data).runs if (r.setting, r.arm) == (setting, "DM"))
    row = train(run, load_corpus(text, 5, 10**6), CPU)
    assert row["status"] == "done" and row["precision"] == "bfloat16"


def test_the_file_end_to_end(text, tmp_path) -> None:
    study = parse_study(small(FILE, text))
    corpus = load_corpus(text, 5, 10**6)
    rows = {run.key: train(run, corpus, CPU) for run in study.runs if is_known(run.config)}
    attention = {"Llama, GQA": 4, "Llama, GQA, NoPE": 4, "MLA": 4}
    for row in rows.values():
        assert row["status"] == "done" and row["loss"][-1] < row["loss"][0], row["name"]
        n = 0 if row["arm"] == "MP" else attention.get(row["setting"], 1)
        expected = {"attention_fwd": n, "attention_bwd": n} if n else {}
        assert row["calls_per_step"] == expected, row["name"]
    found = report.write_report(study, rows, tmp_path, png=False)
    assert list(found["settings"]) == SETTINGS
    assert set(found["parameters"]) == set(SETTINGS)
    for arms in found["settings"].values():
        assert arms["DM"]["residual"]["max"] < 1e-6 < 1e-4 < arms["SD"]["residual"]["median"]
    json.dumps(found, allow_nan=False)


@pytest.mark.gpu
@pytest.mark.parametrize("arm", ["MP", "DM"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_recorded_step_is_the_step(setting, arm, text) -> None:
    """At the file's own sizes. A step that cannot be recorded leaves a process that can do no more."""
    data = yaml.safe_load((CONFIGS / FILE).read_text())
    data["train"] |= {"steps": 12, "batch_size": 2, "warmup": 2, "last": 2, "residual_every": 0}
    data["train"]["held_out_sequences"] = 2
    study = parse_study({**data, "corpus": {"source": text, "held_out_every": 5}})
    run = next(r for r in study.runs if (r.setting, r.arm) == (setting, arm))
    device = torch.device("cuda")
    corpus = load_corpus(text, 5, 10**6).to(device)
    recorded, plain = (train(run, corpus, device, cuda_graph=graph) for graph in (True, False))
    assert recorded["cuda_graph"] and not plain["cuda_graph"]
    assert recorded["loss"] == pytest.approx(plain["loss"], rel=2e-2)
    assert recorded["loss"][-1] < recorded["loss"][0]
