"""``swap_linears(..., filter_fn="auto")``: which layers the model of costs leaves, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import (
    build,
    one_thread,  # noqa: F401
)
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_deltamatch import DeltaMatchConfig, LinearRecipe, swap_linears
from hf_deltamatch.hf.linear import fp8_linears, unswap_linears
from hf_deltamatch.hf.linear_cost import RATES, AutoFilter, Rates, predict

RESULTS = json.loads(
    (Path(__file__).parent.parent / "examples" / "benchmarks" / "linear_h200.json").read_text()
)
HOPPER = RATES[9, 0]
NO_HOST = Rates(1.0, {"blockwise": (2.0, 2.0)}, 100.0, 0.0, 0.0)


def llama_8b() -> LlamaForCausalLM:
    """Of its sizes, two layers, without memory."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def ends(names) -> set[str]:
    return {name.rsplit(".", 1)[-1] for name in names}


def test_a_large_model_is_swapped() -> None:
    report = swap_linears(llama_8b(), filter_fn="auto", tokens=16384)
    assert len(report.swapped) == 14 and set(report.skipped) == {"lm_head"}


def test_the_default_tokens_are_8192() -> None:
    default, few = llama_8b(), llama_8b()
    plans = [swap_linears(m, filter_fn="auto", tokens=t) for m, t in ((default, None), (few, 8192))]
    assert plans[0] == plans[1] and AutoFilter().tokens == 8192


def test_few_tokens_leave_what_does_not_pay() -> None:
    """Launches and the weight's quantisation cost the same for any number of tokens."""
    report = swap_linears(llama_8b(), filter_fn="auto", tokens=4096)
    assert ends(report.swapped) == {"gate_proj", "up_proj", "down_proj"}
    reason = report.skipped["model.layers.0.self_attn.k_proj"]
    assert reason == (
        "BF16 is no slower: predicted 1124 µs in FP8, 187 µs in BF16, 4096 tokens a call"
    )
    assert "k_proj: BF16 is no slower" in str(report)


def test_a_tiny_model_has_nothing_that_pays() -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="BF16 is no slower: predicted 1124 µs in FP8, 187 µs"):
        swap_linears(model, filter_fn="auto")
    assert not fp8_linears(model)
    with pytest.raises(ValueError, match="measured on an H200") as error:
        swap_linears(model, filter_fn="auto")
    (line,) = [x for x in str(error.value).splitlines() if "up_proj" in x]  # of all layers one
    count = model.config.num_hidden_layers
    assert line.startswith(f"  left {count} x model.layers.*.mlp.up_proj: BF16 is no slower")


def test_prediction_adds_up() -> None:
    """Two products at one rate, one at another, and the bytes of every quantiser."""
    t, i, o = 16384, 4096, 14336
    flops, copy = 2.0 * t * i * o, HOPPER.quantise
    plain, over_tokens = HOPPER.fp8["blockwise"]
    p = predict(t, i, o, LinearRecipe(), HOPPER)
    assert p.bf16 == pytest.approx(3 * flops / HOPPER.bf16)
    moved = t * (i + o) * (2 + 2) + i * o * (2 * 2 + 2)
    assert p.fp8 == pytest.approx(2 * flops / plain + flops / over_tokens + moved / copy)
    rowwise = predict(t, i, o, LinearRecipe("rowwise"), HOPPER)
    moved = t * (i + o) * (4 + 2) + i * o * (4 * 2 + 2)
    rates = HOPPER.fp8["rowwise"]
    assert rowwise.fp8 == pytest.approx(2 * flops / rates[0] + flops / rates[1] + moved / copy)
    hp = predict(t, i, o, LinearRecipe(grad_weight_hp=True), HOPPER)
    moved = t * (i + o) * 3 + i * o * 6
    assert hp.fp8 == pytest.approx(2 * flops / plain + flops / HOPPER.bf16 + moved / copy)
    frozen = predict(t, i, o, LinearRecipe(), HOPPER, trains=False)
    assert frozen.bf16 == pytest.approx(2 * flops / HOPPER.bf16) and frozen.fp8 < p.fp8
    wide = predict(t, i, o, LinearRecipe(), HOPPER, weight_bytes=4)
    assert wide.fp8 - p.fp8 == pytest.approx(4 * i * o / copy)
    assert not predict(t, i, o, LinearRecipe.from_name("mx"), HOPPER).pays  # emulated there


def test_rates_are_those_of_the_committed_results() -> None:
    measured = Rates.from_results(RESULTS)
    assert HOPPER.fp8.keys() == measured.fp8.keys()
    for name, rates in measured.fp8.items():
        assert HOPPER.fp8[name] == pytest.approx(rates, rel=2e-3)
    for name in ("bf16", "quantise", "host_bf16", "host_fp8"):
        assert getattr(HOPPER, name) == pytest.approx(getattr(measured, name), rel=2e-3), name


def test_the_host_counts_where_the_device_waits_for_it() -> None:
    """Narrow layers among wide ones: their launches are hidden behind what the device has to do. An
    AutoFilter looks anew at every model."""
    filter_fn = AutoFilter(16384)
    narrow = nn.ModuleList([nn.Linear(4096, 1024, device="meta", dtype=torch.bfloat16)])
    for _ in range(2):
        report = swap_linears(llama_8b(), filter_fn=filter_fn)
        assert {"q_proj", "k_proj", "v_proj", "o_proj"} < ends(report.swapped)
        with pytest.raises(ValueError, match="BF16 is no slower: predicted 1124 µs in FP8, 602 µs"):
            swap_linears(narrow, filter_fn=filter_fn)


def test_the_measured_shapes_pay() -> None:
    """And are predicted to take what they were measured to."""
    assert len(RESULTS["shapes"]) == 3
    for found in RESULTS["shapes"]:
        of, rows = found["shape"], found["rows"]
        p = predict(of["tokens"], of["n_in"], of["n_out"], LinearRecipe(), HOPPER)
        bf16 = min(r["fwd_bwd_ms"] for r in rows.values() if r["bf16"] and "failed" not in r)
        fp8 = rows["blockwise"]["fwd_bwd_ms"]
        assert p.pays and p.bf16 / p.fp8 > 1.2, found["name"]
        assert p.bf16 / p.fp8 == pytest.approx(bf16 / fp8, rel=0.07), found["name"]
        assert (1e3 * p.bf16, 1e3 * p.fp8) == pytest.approx((bf16, fp8), rel=0.06), found["name"]


def test_the_weight_counts() -> None:
    """Frozen, it has no grad_weight; in FP32, it is longer to read."""
    one = AutoFilter(1024, HOPPER._replace(host_bf16=60e-6, host_fp8=200e-6))
    layer = nn.Linear(4096, 4096, device="meta", dtype=torch.bfloat16)
    of = lambda module: one.reason(module, LinearRecipe())
    trained, wide = of(layer), of(nn.Linear(4096, 4096, device="meta"))
    assert "151 µs in BF16" in trained and "100 µs in BF16" in of(layer.requires_grad_(False))
    assert wide == trained  # the host's time is the longer one
    fast_host = AutoFilter(512, HOPPER._replace(host_bf16=0.0, host_fp8=0.0))
    reasons = [
        fast_host.reason(nn.Linear(4096, 4096, device="meta", dtype=d), LinearRecipe())
        for d in (torch.bfloat16, torch.float32)
    ]
    assert None not in reasons and reasons[0] != reasons[1]


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True, "8192"])
def test_tokens_are_a_number(tokens) -> None:
    with pytest.raises(ValueError, match="`tokens` is"):
        swap_linears(build("llama"), filter_fn="auto", tokens=tokens)


def test_other_filters_are_refused() -> None:
    with pytest.raises(ValueError, match="'fast'; it must be 'auto'"):
        swap_linears(build("llama"), filter_fn="fast")
    with pytest.raises(ValueError, match="only filter_fn='auto' reads"):
        swap_linears(build("llama"), tokens=64)
    with pytest.raises(TypeError, match="`filter_fn` is a list"):
        swap_linears(build("llama"), filter_fn=["q_proj"])


def test_what_is_named_is_swapped_and_words_combine() -> None:
    """`include` beats the prediction, which uses each layer's own recipe."""
    report = swap_linears(llama_8b(), filter_fn="auto", tokens=4096, include=["*.k_proj"])
    assert ends(report.swapped) == {"gate_proj", "up_proj", "down_proj", "k_proj"}
    report = swap_linears(llama_8b(), filter_fn="auto", tokens=16384, layers={"*.up_proj": "mx"})
    assert ends(report.skipped) == {"up_proj", "lm_head"}
    no_rates = AutoFilter(16384, NO_HOST)
    report = swap_linears(llama_8b(), filter_fn=no_rates, layers={"*.up_proj": "rowwise"})
    assert "no rates for recipe 'rowwise'" in report.skipped["model.layers.0.mlp.up_proj"]


def test_the_report_says_whose_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, words in (
        ((9, 0), None),
        ((10, 0), "capability 10.0"),
        (None, "no CUDA device"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda c=capability: c is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        notes = " ".join(swap_linears(llama_8b(), filter_fn="auto").notes)
        assert ("has no rates" in notes) == (words is not None) and (words or "") in notes


def test_saved_by_name(tmp_path) -> None:
    """A config keeps what was chosen, not how: the names of what was left."""
    model = build("llama", hidden_size=64, intermediate_size=512)
    DeltaMatchConfig(attention=None).apply_to(model)
    # Saved: 3·t·in·out; paid: 4·t·(in + out)/100. The narrow projections do not pay.
    pays = 4 / (3 * NO_HOST.quantise)
    rates = NO_HOST._replace(quantise=NO_HOST.quantise * pays / (64 * 64 / 128) * 0.9)
    report = swap_linears(model, "blockwise", filter_fn=AutoFilter(10**9, rates))
    assert ends(report.swapped) == {"gate_proj", "up_proj", "down_proj"}
    left = set(report.skipped) - {"lm_head"}
    assert ends(left) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    model.save_pretrained(tmp_path)
    saved = model.config.quantization_config
    assert set(saved.modules_to_not_convert) == left
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert set(fp8_linears(again)) == set(report.swapped)


def test_twice() -> None:
    """FP8 linears that a second call leaves are plain again."""
    model = llama_8b()
    swap_linears(model)
    report = swap_linears(model, filter_fn="auto", tokens=4096)
    assert set(fp8_linears(model)) == set(report.swapped) and len(report.swapped) == 6
    assert unswap_linears(model) == 6 and type(model.model.layers[0].mlp.up_proj) is nn.Linear


def test_rates_from_results() -> None:
    """As the benchmark writes them."""
    part = lambda rate: {"ms": 1.0, "tflops": rate}
    parts = {"output": part(1000.0), "grad_input": part(500.0), "grad_weight": part(900.0)}
    row = {"parts": parts, "share_of_copy": 0.8, "fwd_ms": 1.0}
    result = {
        "bf16_tflops": 700.0, "copy_TBps": 4.0, "host_us": {"bf16": 50.0, "fp8": 150.0},
        "shapes": [{"rows": {"BF16": {}, "rowwise": row, "rowwise compiled": row}}],
    }  # fmt: skip
    rates = Rates.from_results(result)
    assert rates.bf16 == 700e12 and rates.fp8 == {"rowwise": (pytest.approx(2e15 / 3), 900e12)}
    assert rates.quantise == pytest.approx(3.2e12)
    assert (rates.host_bf16, rates.host_fp8) == pytest.approx((50e-6, 150e-6))
    result["shapes"][0]["rows"] = {"BF16": {}}
    with pytest.raises(ValueError, match="no plain row"):
        Rates.from_results(result)


def test_experts() -> None:
    """A grouped product against one after the other: many small experts do not pay, few large do."""
    from transformers import MixtralConfig, MixtralForCausalLM

    def mixture(experts: int, size: int):
        with torch.device("meta"):
            return MixtralForCausalLM(
                MixtralConfig(
                    num_hidden_layers=1, hidden_size=size, intermediate_size=2 * size, vocab_size=64,
                    num_attention_heads=8, num_key_value_heads=8, num_local_experts=experts,
                )
            )  # fmt: skip

    name = "model.layers.0.mlp.experts"
    report = swap_linears(mixture(4, 4096), filter_fn="auto", tokens=65536)
    assert name in report.swapped
    report = swap_linears(mixture(64, 4096), filter_fn="auto", tokens=1024, include=["*.q_proj"])
    assert report.skipped[name].startswith("BF16 is no slower: predicted")
