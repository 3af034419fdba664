"""An unquantised recipe on a device runs torch's own attention: what the reference computes, under
every mask, without the emulation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_cases import EXACT, MODES, Shape, make_inputs, run
from tiny_models import (
    FAMILIES,
    build,
    one_thread,  # noqa: F401
    padded,
    padded_for,
    plain,
    rel_grads,
    use,
)
from tiny_models import run as run_model

from hf_deltamatch import delta_matching_attention, set_attention_recipe
from hf_deltamatch.diagnostics import count_calls
from hf_deltamatch.ops import attention
from hf_deltamatch.ops.backend import runs_plain
from hf_deltamatch.testing import rel_rms

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
OPTIONS = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": SINKS.double()},
    "softcap-sinks": {"softcap": 2.0, "sinks": SINKS.double()},
}


def on_a_device(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """A CPU that chooses as a device does; returns the calls of SDPA, as (mask, is_causal)."""
    monkeypatch.setattr(
        attention, "runs_plain", lambda quantize, device, backend: not quantize and backend is None
    )
    calls, sdpa = [], F.scaled_dot_product_attention

    def spy(q, k, v, mask=None, *, is_causal=False, **kwargs):
        calls.append((mask, is_causal))
        return sdpa(q, k, v, mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return calls


def without_lse(q, k, v, *, return_lse, **options) -> tuple:
    return delta_matching_attention(q, k, v, **options), torch.zeros(())


@pytest.mark.parametrize(
    "mode,options,traced",
    [(mode, options, False) for mode in MODES for options in ("plain", "softcap-sinks")]
    + [("causal", options, False) for options in ("scale", "softcap", "sinks")]
    # Only packed sequences are another matter in a compiled graph.
    + [(mode, "plain", True) for mode in MODES if mode.startswith("packed")],
)
def test_plain_equals_the_reference(mode: str, options: str, traced: bool, monkeypatch) -> None:
    """Output and every gradient, in FP64; hidden queries get 0 and send nothing."""
    shape, masks, visible = MODES[mode]()
    inputs = make_inputs(shape, torch.float64)
    asked = {**masks, **OPTIONS[options], "recipe": EXACT}
    if traced:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    expected = run(*inputs, **asked)
    calls = on_a_device(monkeypatch)
    with count_calls() as ours:
        actual = run(*inputs, attention=without_lse, **asked)
    assert not ours and bool(calls) == ("softcap" not in options and "sinks" not in options)
    for field in ("o", "dq", "dk", "dv", "dsinks"):
        if getattr(expected, field) is not None:
            assert rel_rms(getattr(actual, field), getattr(expected, field)) < 1e-14, field
    if visible is not None:
        nobody = ~visible.any(-1).expand(*expected.o.shape[:3])
        assert not actual.o[nobody].any() and not actual.dq[nobody].any()


def test_plain_makes_no_mask_where_none_is_needed(monkeypatch) -> None:
    """Plain causal attention, and one new token before a cache, keep SDPA's fast kernels."""
    calls = on_a_device(monkeypatch)
    q, k, v, _ = make_inputs(Shape(Tq=40, Tk=40))
    delta_matching_attention(q, k, v, is_causal=True, recipe="bf16")
    delta_matching_attention(q[:, :, :1], k, v, is_causal=True, recipe="bf16")
    delta_matching_attention(q, k, v, recipe="bf16")
    assert calls == [(None, True), (None, False), (None, False)]


def test_plain_is_for_unquantised_recipes_on_devices() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert runs_plain(False, cuda, None)
    assert not any(
        runs_plain(*args)
        for args in ((True, cuda, None), (False, cpu, None), (False, cuda, "reference"))
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt_oss", "bamba"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_models_in_high_precision_run_torchs_attention(family: str, side: str, monkeypatch) -> None:
    """All layers "bf16": the numbers of Transformers' attention, and none of our ops."""
    inputs = padded_for(family, side)
    expected, expected_grads = run_model(use(build(family), plain(family)), **inputs._asdict())
    calls = on_a_device(monkeypatch)
    with count_calls() as ours:
        logits, grads = run_model(use(build(family), recipe="bf16"), **inputs._asdict())
    assert not ours
    assert len(calls) == (0 if family in ("gemma2", "gpt_oss") else FAMILIES[family][1])
    real = inputs.real
    assert rel_rms(logits[real], expected[real]) < 1e-6  # measured: below 4e-7
    assert rel_grads(grads, expected_grads) < 1e-6


def test_layer_in_high_precision_beside_kernels(monkeypatch) -> None:
    """Of a model that asks for the kernels by name, the layer left in high precision runs SDPA."""
    pytest.importorskip("triton")
    from hf_deltamatch import kernels

    if kernels.missing("attention", torch.device("cpu")):
        pytest.skip("no interpreter")
    model, inputs = use(build("llama")), padded("left")._asdict()
    set_attention_recipe(model, "delta_matching", {"model.layers.0": "bf16"})
    reference, reference_grads = run_model(model, **inputs)
    calls = on_a_device(monkeypatch)
    set_attention_recipe(model, backend="triton")
    with count_calls() as ours:
        logits, grads = run_model(model, **inputs)
    assert len(calls) == 1 and ours["attention_fwd"] == ours["attention_bwd"] == 1
    # As far as the kernels are from the reference; measured: 0.0004, 0.0008.
    assert rel_rms(logits, reference) < 0.003 and rel_grads(grads, reference_grads) < 0.0055


def test_plain_autocast_and_compile(monkeypatch) -> None:
    """In autocast's dtype, and in one graph."""
    on_a_device(monkeypatch)
    q, k, v, do = make_inputs(Shape(Tq=40, Tk=40))
    with torch.autocast("cpu", torch.bfloat16):
        o = delta_matching_attention(q, k, v, is_causal=True, recipe="bf16")
    assert o.dtype == torch.bfloat16
    call = lambda q, k, v: delta_matching_attention(
        q, k, v, is_causal=True, window=7, softcap=2.0, recipe="bf16"
    )
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert rel_rms(compiled(q, k, v), call(q, k, v)) < 1e-6
