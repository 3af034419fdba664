"""Optimisers, throughput, arms, and the policy for steps that are not finite."""

from __future__ import annotations

import math
import time

import pytest
import torch
from tiny_models import build, one_thread  # noqa: F401

from hf_deltamatch.training import (
    Meter,
    NotFinite,
    StepGuard,
    apply_arm,
    build_optimizers,
    flops_per_token,
    peak_flops,
    set_lr,
)

CPU = torch.device("cpu")


def names(model, parameters) -> set[str]:
    ids = {id(p) for p in parameters}
    return {n for n, p in model.named_parameters() if id(p) in ids}


@pytest.mark.parametrize("tied", [True, False])
def test_muon_has_the_matrices_in_between(tied: bool) -> None:
    model = build("llama", attention_bias=True, tie_word_embeddings=tied)
    adamw, muon = build_optimizers(model, "muon", lr=1e-3, weight_decay=0.1)
    hidden = names(model, muon.param_groups[0]["params"])
    assert len(hidden) == 2 * 7 and all(n.endswith("proj.weight") for n in hidden)
    decays, vectors = adamw.param_groups
    outer = {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    assert names(model, decays["params"]) == outer and decays["weight_decay"] == 0.1
    assert all(p.dim() == 1 for p in vectors["params"]) and vectors["weight_decay"] == 0.0
    everything = hidden | outer | names(model, vectors["params"])
    assert everything == {n for n, _ in model.named_parameters()}


def test_adamw_and_what_is_frozen() -> None:
    model = build("llama")
    model.model.embed_tokens.requires_grad_(False)
    (adamw,) = build_optimizers(model, lr=1e-3, betas=(0.8, 0.9))
    held = names(model, [p for g in adamw.param_groups for p in g["params"]])
    assert held == {n for n, p in model.named_parameters() if p.requires_grad}
    set_lr([adamw], 0.5)
    set_lr([adamw], 0.25)
    assert {g["lr"] for g in adamw.param_groups} == {2.5e-4}
    assert adamw.defaults["betas"] == (0.8, 0.9)
    with pytest.raises(ValueError, match="'sgd' is unknown; allowed values are 'adamw', 'muon'"):
        build_optimizers(model, "sgd", lr=1.0)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        build_optimizers(model.requires_grad_(False), lr=1.0)


@pytest.mark.parametrize("tied", [True, False])
def test_flops_by_hand(tied: bool) -> None:
    """Hidden 64, feed-forward 96, 4 heads on 2 of 16, 2 layers, 128 tokens."""
    model = build("llama", tie_word_embeddings=tied)
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
    parameters = 2 * layer + 64 + 128 * 64
    expected = 6 * parameters + 6 * 2 * 64 * 1000
    assert flops_per_token(model, 1000) == expected
    model.model.layers.requires_grad_(False)
    assert flops_per_token(model, 1000) == expected - 2 * 2 * layer


def test_meter(monkeypatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter = Meter(flops_per_token=1e6, peak=1e9)
    meter.add(300)
    meter.add(200)
    now[0] = 12.0
    assert meter.read() == {"tokens_per_second": 250.0, "mfu": 0.25}
    with meter.paused():
        now[0] = 22.0
    meter.add(50)
    now[0] = 22.5
    assert meter.read()["tokens_per_second"] == 100.0
    now[0] = 23.0
    assert meter.read()["tokens_per_second"] == 0.0
    assert "mfu" not in Meter(1e6, peak_flops(CPU)).read()


def test_guard_counts_and_stops() -> None:
    guard = StepGuard(3)
    assert guard.ok(0, 1.0, 1.0)
    assert not guard.ok(1, math.nan, 1.0) and not guard.ok(2, 1.0, math.inf)
    assert guard.ok(3, 1.0, 1.0)  # the row ends
    assert not guard.ok(4, math.nan, 1.0) and not guard.ok(5, math.nan, 1.0)
    other = StepGuard(3)
    other.load_state_dict(guard.state_dict())
    with pytest.raises(NotFinite, match="step 6: 3 steps in a row.*5 in all"):
        other.ok(6, math.nan, math.nan)
    with pytest.raises(ValueError, match="`stop_after` is 0"):
        StepGuard(0)


def test_arms() -> None:
    model = build("llama")
    said = apply_arm(model, "sd", linear="blockwise", block="1xD", device=CPU)
    assert "stale_delta 1xD on reference" in said and "14 linears in FP8 (blockwise)" in said
    recipes = {m.deltamatch.recipe for m in model.modules() if hasattr(m, "deltamatch")}
    assert {(r.delta, r.block) for r in recipes} == {("stale", "1xD")}
    assert apply_arm(build("llama"), "mp", device=CPU) == "arm mp"
    said = apply_arm(build("llama"), "mp", linear="blockwise", device=CPU)
    assert said == "arm mp; 14 linears in FP8 (blockwise)"
    with pytest.raises(ValueError, match="arm is 'bf16'; allowed values are 'mp', 'sd', 'dm'"):
        apply_arm(model, "bf16", device=CPU)
