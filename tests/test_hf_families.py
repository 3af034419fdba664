"""Every family: trains in FP8, calls our op once per attention layer, and computes what SDPA does."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import (
    FAMILIES,
    batch,
    build,
    linear_calls,
    one_thread,  # noqa: F401
    padded,
    padded_for,
    plain,
    rel_grads,
    run,
    use,
)

from hf_deltamatch import AttentionRecipe, check_model, swap_linears
from hf_deltamatch.diagnostics import count_calls, record_row_sum
from hf_deltamatch.testing import assert_close, rel_rms

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)

# Relative error of logits and of all gradients with FP8 attention, the larger of left and right
# padding: measured, times 1.15. Gemma multiplies embeddings and has norms around attention; in the
# mixtures a rounding can send a token to another expert.
FP8_ERROR = {
    "llama": (0.024, 0.031),
    "mistral": (0.025, 0.033),
    "qwen2": (0.022, 0.030),
    "qwen3": (0.034, 0.051),
    "gemma2": (0.056, 0.068),
    "gemma3_text": (0.060, 0.081),
    "phi3": (0.021, 0.031),
    "olmo2": (0.040, 0.055),
    "gpt2": (0.0067, 0.0113),
    "gpt_neox": (0.0152, 0.0174),
    "mixtral": (0.0213, 0.037),
    "gpt_oss": (0.104, 0.105),
    "deepseek_v3": (0.022, 0.036),
    "qwen3_next": (0.012, 0.024),
    "bamba": (0.0106, 0.0152),
}


@EVERY_FAMILY
def test_families_train(family: str) -> None:
    """Attention and linears in FP8, three steps of AdamW on one batch."""
    layers = FAMILIES[family][1]
    model = use(build(family)).train()
    report = swap_linears(model)
    assert len(check_model(model).attention) == layers
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids, losses = batch(), []
    for _ in range(3):
        with count_calls() as calls:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        assert calls["attention_fwd"] == calls["attention_bwd"] == layers
        for op in ("linear_fwd", "linear_bwd_input", "linear_bwd_weight"):
            assert calls[op] == linear_calls(model, report.swapped), op
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # Measured: 0.14 to 0.3 a step.
    assert math.isfinite(losses[0])
    assert losses[0] - losses[1] > 0.1 and losses[1] - losses[2] > 0.05, losses


@pytest.mark.parametrize("side", ["left", "right"])
@EVERY_FAMILY
def test_families_against_transformers(family: str, side: str) -> None:
    """Without quantisation the same logits and gradients; with it, close ones."""
    inputs = padded_for(family, side)
    model = build(family)
    expected, expected_grads = run(use(model, plain(family)), **inputs._asdict())
    real = inputs.real
    # Measured over all families: 4e-7, 6e-7. A parameter whose gradient cancels has more.
    logits, grads = run(use(model, recipe="bf16"), **inputs._asdict())
    assert_close(logits[real], expected[real], rms=1e-6, max_rel=1e-5)
    assert rel_grads(grads, expected_grads) < 1e-6
    total = math.hypot(*(g.norm().item() for g in expected_grads.values()))
    for name, grad in expected_grads.items():
        assert (grads[name] - grad).norm() < 1e-5 * grad.norm() + 1e-7 * total, name
    logits, grads = run(use(model, recipe="delta_matching"), **inputs._asdict())
    on_logits, on_grads = rel_rms(logits[real], expected[real]), rel_grads(grads, expected_grads)
    assert 1e-3 < on_logits < FP8_ERROR[family][0]
    assert 1e-3 < on_grads < FP8_ERROR[family][1]


def test_families_gpt_oss_sinks() -> None:
    """A sink takes probability and so has a gradient."""
    inputs = padded("right")._asdict()
    model = build("gpt_oss")
    sinks = [n for n, _ in model.named_parameters() if n.endswith("sinks")]
    assert len(sinks) == 2
    _, expected = run(use(model, "eager"), **inputs)
    _, exact = run(use(model, recipe="bf16"), **inputs)
    _, fp8 = run(use(model, recipe="delta_matching"), **inputs)
    for name in sinks:
        assert expected[name].norm() > 0
        assert rel_rms(exact[name], expected[name]) < 1e-5
        assert rel_rms(fp8[name], expected[name]) < 0.2


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_families_row_sum(family: str) -> None:
    """The δ that a model's backward uses belongs to its operands: rows of dS sum to zero."""
    model, residuals = build(family), {}
    for delta in ("matched", "stale"):
        use(model, recipe=AttentionRecipe(delta=delta))
        with record_row_sum() as residual:
            run(model, **padded("left")._asdict())
        residuals[delta] = residual.value
        assert len(residual.per_call) == 2
    assert residuals["matched"] < 2e-6 < 1e-3 < residuals["stale"], residuals
