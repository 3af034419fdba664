"""Runs of a study in small: what they compute, how they resume, and that a failure stays alone."""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import threading
from types import SimpleNamespace

import pytest
import torch
from study_files import NoWaiting
from tiny_models import one_thread  # noqa: F401
from transformers import AutoModelForCausalLM

from hf_deltamatch import cli
from hf_deltamatch.study import pool
from hf_deltamatch.study import run as study_run
from hf_deltamatch.study.corpus import load_corpus
from hf_deltamatch.study.model import build_model, logits_of
from hf_deltamatch.study.spec import parse_study
from hf_deltamatch.testing import assert_close, rel_rms
from hf_deltamatch.training.study_rows import read_rows

CPU = torch.device("cpu")
MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "attention_bias": True,
    "max_position_embeddings": 128,
}
TRAIN = {"steps": 6, "batch_size": 2, "seq_len": 64, "warmup": 2, "last": 3, "residual_every": 3}
FILE = {
    "name": "tiny",
    "seeds": [0],
    "model": MODEL,
    "train": {**TRAIN, "lr": 3e-3, "held_out_sequences": 4},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(f"Line {i}: the quick brown fox, {i * i} times.\n" for i in range(600)))
    return str(path)


@pytest.fixture(scope="module")
def corpus(text):
    return load_corpus(text, 10, 10**6)


def runs_of(**changes) -> dict:
    return {r.arm: r for r in parse_study({**FILE, **changes}).runs}


def test_corpus(text, tmp_path) -> None:
    found = load_corpus(text, 10, 10**6)
    whole = (tmp_path / text).read_bytes()
    joined = torch.cat([found.train, found.held_out]).numpy().tobytes()
    assert joined == whole and found.train.dtype == torch.uint8
    assert len(found.held_out) == len(whole) // 10 == found.facts["held_out_bytes"]
    assert found.facts["source"] == "words.txt" and len(found.facts["train_sha256"]) == 64
    for i in range(4):
        (tmp_path / f"{i}.py").write_text(f"x{i}\n")
    several = load_corpus(str(tmp_path), 4, 10**6)
    assert several.held_out.numpy().tobytes().count(b"x") == 1
    parts = several.train.numpy().tobytes().split(b"\0")
    assert len(parts) == 3 and all(p.startswith(b"x") for p in parts)
    with pytest.raises(ValueError, match="neither `stdlib` nor a file"):
        load_corpus(str(tmp_path / "none"), 10, 10**6)


def test_standard_library_has_enough_text() -> None:
    first, again = (load_corpus("stdlib", 50, 2 * 10**6) for _ in range(2))
    assert first.facts == again.facts and first.facts["train_bytes"] > 1.8e6
    assert b"def " in first.train.numpy().tobytes()


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("arm", ["MP", "DM"])
def test_direct_forward_is_the_model_s_own(model_type, arm) -> None:
    run = runs_of(model={**MODEL, "model_type": model_type})[arm]
    model = build_model(run.config, CPU, None)
    ids = torch.randint(256, (2, 40))
    own = model(input_ids=ids, use_cache=False).logits
    assert_close(logits_of(model, ids), own, rms=1e-6)


def test_arms_start_from_the_same_weights() -> None:
    runs = runs_of()
    states = [build_model(runs[arm].config, CPU, None).state_dict() for arm in ("MP", "SD", "DM")]
    for other in states[1:]:
        assert all(torch.equal(states[0][k], other[k]) for k in states[0])
    seed1 = build_model({**runs["MP"].config, "seed": 1}, CPU, None).state_dict()
    assert not torch.equal(states[0]["lm_head.weight"], seed1["lm_head.weight"])


def test_step_is_adamw_with_clipping(corpus) -> None:
    """Against the same steps written the ordinary way."""
    config = runs_of(train={**FILE["train"], "clip": 0.3})["MP"].config
    trainer = study_run.Trainer(config, corpus, CPU)
    model = build_model(config, CPU, None)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    losses = []
    for step in range(4):
        rows = [corpus.train[s : s + 65] for s in trainer.starts[step].tolist()]
        batch = torch.stack(rows).long()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 2)
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        losses.append(loss.item())
        trainer.step()
    assert trainer.losses[:4].tolist() == pytest.approx(losses, rel=1e-5)
    for ours, theirs in zip(trainer.params, model.parameters(), strict=True):
        assert rel_rms(ours, theirs) < 1e-4


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("arm", ["MP", "DM"])
def test_no_step_waits_for_the_device(model_type, arm, corpus) -> None:
    """Else it could not be recorded as a graph. (The bodies of our ops are not looked into.)"""
    run = runs_of(model={**MODEL, "model_type": model_type})[arm]
    trainer = study_run.Trainer(run.config, corpus, CPU)
    trainer.optimizer.step = lambda: None  # torch's fused AdamW, which reads its step on a CPU
    with NoWaiting():
        trainer.step()
    assert trainer.losses[0].isfinite()
    with NoWaiting(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        trainer.losses[0].item()


def test_bfloat16_keeps_master_weights(corpus) -> None:
    config = runs_of(train={**FILE["train"], "precision": "bfloat16"})["DM"].config
    trainer = study_run.Trainer(config, corpus, CPU)
    frequencies = trainer.model.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    for _ in range(3):
        trainer.step()
    assert all(p.dtype == torch.bfloat16 for p in trainer.params)
    for p, m in zip(trainer.params, trainer.master, strict=True):
        assert m.dtype == torch.float32 and torch.equal(p, m.bfloat16())
    assert any(not torch.equal(m, m.bfloat16().float()) for m in trainer.master)


def test_a_step_that_is_not_finite_changes_nothing(corpus) -> None:
    trainer = study_run.Trainer(runs_of()["MP"].config, corpus, CPU)
    trainer.step()
    before = [m.clone() for m in trainer.master]
    state = [v.clone() for s in trainer.optimizer.state.values() for v in s.values()]
    good = trainer.params[0].data.clone()
    trainer.params[0].data.fill_(math.nan)
    trainer.step()
    assert trainer.skipped.item() == 1 and trainer.losses[1].isnan()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.master, strict=True))
    after = [v for s in trainer.optimizer.state.values() for v in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
    # The next step goes on from the weights that were good.
    assert torch.equal(trainer.params[0], good)
    trainer.step()
    assert trainer.losses[2].isfinite() and trainer.skipped.item() == 1


def test_a_run_of_nan_ends_as_diverged(corpus, monkeypatch) -> None:
    monkeypatch.setattr(study_run, "LOOK_EVERY", 2)
    run = runs_of(train={**FILE["train"], "max_skipped": 1})["MP"]
    real = study_run.Trainer.loss_of
    monkeypatch.setattr(study_run.Trainer, "loss_of", lambda *a: real(*a) * math.nan)
    row = study_run.train(run, corpus, CPU)
    assert row["status"] == "diverged" and row["steps"] == 2 and row["skipped_steps"] == 2
    assert row["final_loss"] is None and json.loads(json.dumps(row, allow_nan=False)) == row


def test_rows(corpus) -> None:
    runs = runs_of()
    rows = {arm: study_run.train(run, corpus, CPU) for arm, run in runs.items()}
    for arm, row in rows.items():
        assert row["status"] == "done" and len(row["loss"]) == 6 and row["steps"] == 6
        assert row["loss"][-1] < row["loss"][0] and row["final_loss"] == pytest.approx(
            sum(row["loss"][-3:]) / 3, rel=1e-4
        )
        assert abs(row["held_out_loss"] - row["loss"][-1]) < 0.5
        json.dumps(row, allow_nan=False)
        calls = row["calls_per_step"]
        assert calls == ({} if arm == "MP" else {"attention_fwd": 2, "attention_bwd": 2})
    assert rows["MP"]["residual"]["steps"] == [] and rows["DM"]["residual"]["steps"] == [3, 5]
    assert (
        max(rows["DM"]["residual"]["values"]) < 1e-6 < 1e-3 < min(rows["SD"]["residual"]["values"])
    )
    assert rows["SD"]["loss"][0] == rows["DM"]["loss"][0] != rows["MP"]["loss"][0]
    again = study_run.train(runs["DM"], corpus, CPU)
    assert again["loss"] == rows["DM"]["loss"]


def study_file(folder, text: str, **changes) -> str:
    import yaml

    data = {**FILE, "corpus": {"source": text, "held_out_every": 10}, **changes}
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


def test_command_trains_resumes_and_reports(tmp_path, text, capsys, monkeypatch) -> None:
    """Processes and all: one run by itself, then the rest, then nothing."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    command = ["study", study_file(tmp_path, text), "--output", str(out), "--workers", "1"]
    assert cli.main([*command, "--only", "mp", "--save"]) == 0
    assert "default / MP / seed 0: step 6 of 6, loss " in capsys.readouterr().err
    first = (out / "runs.jsonl").read_text()
    saved = AutoModelForCausalLM.from_pretrained(out / "models" / json.loads(first)["key"])
    assert sum(p.numel() for p in saved.parameters()) == json.loads(first)["parameters"]
    assert first.count("\n") == 1 and json.loads(first)["arm"] == "MP"
    assert json.loads((out / "report.json").read_text())["runs"] == {"planned": 3, "present": 1}
    # A kill within a line: the line is lost, and what comes after it is not.
    (out / "runs.jsonl").write_text(first + '{"key": "ab')
    assert cli.main(command) == 0
    capsys.readouterr()
    rows = read_rows(out)
    assert sorted(r["arm"] for r in rows.values()) == ["DM", "MP", "SD"]
    assert "| DM |" in (out / "report.md").read_text()
    assert len(list((out / "models").iterdir())) == 1  # those without --save are not kept
    monkeypatch.setattr(pool, "run_all", lambda *_, **__: pytest.fail("trained again"))
    assert cli.main(command) == 0
    assert cli.main([*command, "--list"]) == 0
    assert capsys.readouterr().out.count("done") >= 3


def test_a_run_that_fails_is_recorded_and_the_others_go_on(tmp_path, text, capsys) -> None:
    arms = {"MP": None, "BAD": {"attention": {"recipe": "delta_matching", "descale": "fp32"}}}
    out = tmp_path / "out"
    file = study_file(tmp_path, text, arms={"BAD": arms["BAD"], "MP": None}, baseline="MP")
    command = ["study", file, "--output", str(out), "--workers", "1"]
    assert cli.main(command) == 1
    rows = {r["arm"]: r for r in read_rows(out).values()}
    assert rows["MP"]["status"] == "done" and rows["BAD"]["status"] == "failed"
    assert "descale" in rows["BAD"]["error"]
    assert "0 of 0, 1 failed" in capsys.readouterr().out


class Threads:
    """Workers in this process, in place of processes of their own."""

    class Process(threading.Thread):
        terminate = lambda self: None

    @staticmethod
    def Pipe():
        here, there = multiprocessing.Pipe()
        return here, SimpleNamespace(send=there.send, recv=there.recv, close=lambda: None)


def test_a_step_that_cannot_be_recorded_costs_its_own_setting_the_graph(
    text, tmp_path, monkeypatch
) -> None:
    settings = [{"name": "a"}, {"name": "b", "train": {"lr": 1e-3}}]
    study = parse_study({**FILE, "arms": ["MP", "DM"], "settings": settings})
    tried = []

    def train(run, *_, cuda_graph, **__) -> dict:
        tried.append((run.setting, run.arm, cuda_graph))
        if cuda_graph and run.setting == "a":
            raise study_run.GraphError("no")
        row = {"key": run.key, "name": run.name, "status": "done", "final_loss": 1.0}
        return {**row, "seconds": 1.0, "tokens_per_second": 9, "cuda_graph": cuda_graph}

    monkeypatch.setattr(pool, "train", train)
    monkeypatch.setattr(pool.multiprocessing, "get_context", lambda _: Threads)
    said = []
    rows = pool.run_all(
        study.runs,
        {"source": text, "held_out_every": 10, "limit_bytes": 10**6},
        tmp_path,
        devices=["cpu"],
        workers=1,
        cuda_graph=True,
        say=said.append,
    )
    assert [r["cuda_graph"] for r in rows] == [False, False, True, True]
    assert [r["key"] for r in rows] == [run.key for run in study.runs]
    assert tried[:2] == [("a", "MP", True), ("a", "MP", False)] and len(tried) == 5
    assert "no CUDA graph, going on without (no)" in said[0]


def test_model_types_that_transformers_lacks_are_left_out(tmp_path, text, capsys) -> None:
    settings = [{"name": "a"}, {"name": "b", "model": {"model_type": "nothing_yet"}}]
    file = study_file(tmp_path, text, settings=settings, arms=["MP"])
    assert cli.main(["study", file, "--output", str(tmp_path / "out"), "--list"]) == 0
    said = capsys.readouterr().out
    assert "b: left out, Transformers " in said and "-         a / MP / seed 0" in said
    assert "b / MP" not in said


def test_nothing_that_can_be_run(tmp_path, text, capsys) -> None:
    """A misspelled model type: a sentence and no report, but results from elsewhere are shown."""
    file = study_file(tmp_path, text, model={**MODEL, "model_type": "lama"}, arms=["MP"])
    out = tmp_path / "out"
    assert cli.main(["study", file, "--output", str(out)]) == 2
    said = capsys.readouterr()
    assert "default: left out, Transformers " in said.out
    assert "study: nothing can be run: model_type is 'lama'" in said.err and "llama" in said.err
    assert not out.exists()
    assert cli.main(["study", file, "--output", str(out), "--report-only"]) == 0
    assert not (out / "report.png").exists() and "png" not in (out / "report.md").read_text()


@pytest.mark.parametrize(
    ("device", "there", "words"),
    [
        ("cuda:0", 0, "finds no CUDA device here.*allowed here: cpu"),
        ("cuda", 0, "finds no CUDA device here"),
        ("cuda:2", 2, "finds 2 CUDA devices here.*allowed here: cpu, cuda:0, cuda:1"),
        ("meta", 0, "allowed here: cpu and cuda:0"),
        ("mtia", 0, "allowed here: cpu and cuda:0"),
    ],
)
def test_devices_are_there_before_a_worker_starts(
    device, there, words, tmp_path, text, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(pool, "run_all", lambda *_, **__: pytest.fail("trained"))
    out = tmp_path / "out"
    command = ["study", study_file(tmp_path, text), "--output", str(out), "--devices", device]
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(f"hf-deltamatch study: --devices has '{device}', on .*{words}.*\n", said)
    assert not out.exists()
    assert cli.main([*command, "--report-only"]) == 1  # the report of elsewhere's results


def test_time_limit_leaves_runs_for_later(tmp_path, text, capsys) -> None:
    out = tmp_path / "out"
    command = ["study", study_file(tmp_path, text), "--output", str(out), "--workers", "1"]
    assert cli.main([*command, "--time-limit", "0.01"]) == 1
    said = capsys.readouterr().out
    assert "time limit: 3 runs were not done" in said and "runs.jsonl" not in said
    assert not read_rows(out)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "nothing"], "matches no run"),
        (["--workers", "0"], "--workers is 0"),
    ],
)
def test_command_refuses(options, words, tmp_path, text, capsys) -> None:
    assert cli.main(["study", study_file(tmp_path, text), *options]) == 2
    assert words in capsys.readouterr().err
    assert cli.main(["study", str(tmp_path / "none.yaml")]) == 2


@pytest.mark.parametrize(
    ("code", "words"),
    [(-9, "SIGKILL: out of memory"), (-11, "SIGSEGV"), (3, "exit status 3"), (None, "hangs")],
)
def test_how_a_lost_process_ended(code: int | None, words: str) -> None:
    from multiprocessing import Pipe
    from types import SimpleNamespace

    here, there = Pipe()
    there.close()
    process = SimpleNamespace(exitcode=code, join=lambda timeout: None)
    kind, text = pool._receive(pool._Worker(process, here, "cpu"))
    assert kind == "lost" and words in text
