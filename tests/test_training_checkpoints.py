"""Checkpoints: whole or not there, checked before use, of one run only."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import batch, build, one_thread  # noqa: F401

from hf_deltamatch.testing import assert_bitwise_equal
from hf_deltamatch.training import (
    CheckpointError,
    build_optimizers,
    checkpoints,
    read_manifest,
    write_checkpoint,
)
from hf_deltamatch.training import state as st
from hf_deltamatch.training.metrics import read_metrics

RUN = {"arm": "dm", "betas": (0.9, 0.95)}
FILES = {"a.bin": lambda p: p.write_bytes(b"a" * 1000), "b.txt": lambda p: p.write_text("b")}


def write(folder: Path, step: int, **options) -> Path:
    return write_checkpoint(folder, step, FILES, **{"run": RUN, **options})


def test_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 100, 20):
        path = write(tmp_path, step, keep=2)
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-00000020", "checkpoint-00000100"]
    assert sorted(p.name for p in path.iterdir()) == ["a.bin", "b.txt", "manifest.json"]
    manifest = read_manifest(path, RUN)
    assert manifest["step"] == 20 and manifest["files"]["a.bin"]["bytes"] == 1000
    assert not list(tmp_path.glob(".*"))


def test_the_same_step_again(tmp_path: Path) -> None:
    write(tmp_path, 5)
    path = write(tmp_path, 5, run={"arm": "mp"})
    assert read_manifest(path)["run"] == {"arm": "mp"} and len(checkpoints(tmp_path)) == 1


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    path.write_bytes(b"b" + path.read_bytes()[1:])


@pytest.mark.parametrize(
    ("damage", "file", "words"),
    [
        (truncate, "a.bin", "999 bytes where the manifest says 1000"),
        (flip, "a.bin", "SHA-256"),
        (Path.unlink, "b.txt", "missing, though"),
        (Path.unlink, "manifest.json", "not a whole one"),
        (truncate, "manifest.json", ""),
        (lambda p: p.write_text("{"), "manifest.json", "not JSON"),
        (lambda p: p.write_text('{"format": "other"}'), "manifest.json", "`format` is not"),
    ],
)
def test_damage_is_refused_by_name(damage, file: str, words: str, tmp_path: Path) -> None:
    path = write(tmp_path, 5) / file
    damage(path)
    if damage is truncate and file == "manifest.json":
        assert read_manifest(path.parent)["step"] == 5  # the last newline alone is no loss
        return
    with pytest.raises(CheckpointError, match=f"{file}: .*{words}"):
        read_manifest(path.parent)


def test_another_runs_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    read_manifest(path, json.loads(json.dumps(RUN)))
    with pytest.raises(CheckpointError, match="manifest.json: .*arm is 'dm' there and 'mp' here"):
        read_manifest(path, {**RUN, "arm": "mp"})
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format_version": 2}))
    with pytest.raises(CheckpointError, match="`format_version` is 2; this version reads 1"):
        read_manifest(path, RUN)


@pytest.mark.parametrize("at", range(5))
def test_an_interrupted_write_changes_nothing(at: int, tmp_path: Path, monkeypatch) -> None:
    """Stopped at any flush: the former checkpoint is the newest, and the next write clears up."""
    write(tmp_path, 5)
    module = sys.modules[write_checkpoint.__module__]
    calls, flush = [], module._flush

    def stop(path: Path) -> None:
        calls.append(path)
        if len(calls) > at:
            raise KeyboardInterrupt
        flush(path)

    monkeypatch.setattr(module, "_flush", stop)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 10)
    newest = checkpoints(tmp_path)[-1]
    read_manifest(newest, RUN)
    assert newest.name == ("checkpoint-00000010" if at == 4 else "checkpoint-00000005")
    monkeypatch.setattr(module, "_flush", flush)
    write(tmp_path, 15)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_goes_on_bitwise(kind: str, tmp_path: Path) -> None:
    """Tied embeddings, two optimisers, random numbers."""
    ids = batch(2, 16)

    def make(seed: int):
        model = build("llama", seed=seed, tie_word_embeddings=True).train()
        return model, build_optimizers(model, kind, lr=1e-2)

    def steps(model, optimizers, n: int) -> None:
        for _ in range(n):
            noise = torch.rand(()).item()
            (model(ids, labels=ids, use_cache=False).loss * (1 + noise)).backward()
            for o in optimizers:
                o.step()
                o.zero_grad()

    model, optimizers = make(0)
    steps(model, optimizers, 2)
    st.save_model(st.model_state(model), tmp_path / "model.safetensors")
    torch.save(st.optimizer_state(model, optimizers), tmp_path / "optimizer.pt")
    torch.save(st.rng_state(), tmp_path / "random.pt")
    steps(model, optimizers, 2)
    other, others = make(1)
    st.load_model(other, tmp_path / "model.safetensors")
    st.load_optimizers(other, others, tmp_path / "optimizer.pt")
    st.set_rng_state(torch.load(tmp_path / "random.pt", weights_only=True))
    steps(other, others, 2)
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert_bitwise_equal(b, a, name)


def test_weights_of_another_model(tmp_path: Path) -> None:
    st.save_model(st.model_state(build("llama")), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors: its tensors are not those"):
        st.load_model(build("llama", num_hidden_layers=1), tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda m: m.pop("files"), "no, or no valid, `files`: damaged"),
        (lambda m: m.update(files=[1]), "no, or no valid, `files`: damaged"),
        (lambda m: m.pop("run"), "no, or no valid, `run`: damaged"),
        (lambda m: m.update(step="4"), "no, or no valid, `step`: damaged"),
        (lambda m: m["files"].update(a=3), "no size and SHA-256 of a: damaged"),
        (lambda m: m["files"].pop("a"), "does not name a: damaged"),
    ],
)
def test_a_damaged_manifest(tmp_path: Path, damage, words: str) -> None:
    write = lambda path: path.write_text("x")
    folder = write_checkpoint(tmp_path, 4, {"a": write}, run={})
    assert read_manifest(folder, {}, ["a"])["step"] == 4
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    damage(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=f"manifest.json: {words}"):
        read_manifest(folder, {}, ["a"])


@pytest.mark.parametrize("line", [b"\xff", b"7", b'{"loss": 3}', b"[1]", b"{"])
def test_a_damaged_line_of_metrics(tmp_path: Path, line: bytes) -> None:
    """In the middle it is named, for what stands behind it would be lost; at the end a process was
    killed while it wrote."""
    row = b'{"step": 1}'
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([row, line, row]))
    with pytest.raises(
        CheckpointError, match="metrics.jsonl: line 2 is no JSON object with a step"
    ):
        read_metrics(path)
    path.write_bytes(b"\n".join([row, line]))
    assert read_metrics(path) == [{"step": 1}]
