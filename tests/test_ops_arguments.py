"""Arguments of the public ops: what would run and be wrong, or fail below, is refused in one sentence."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from attention_cases import FIELDS, Shape, causal, make_inputs, offsets, run

from hf_deltamatch import delta_matching_attention, fp8_linear, swap_linears
from hf_deltamatch.ops import fp8_experts_linear
from hf_deltamatch.testing import assert_bitwise_equal, assert_close

Q, K = torch.zeros(1, 4, 6, 8), torch.zeros(1, 2, 6, 8)
QKV = {"q": Q, "k": K, "v": K}
X, W = torch.zeros(5, 64), torch.zeros(48, 64)
LEARNED = torch.tensor(0.5, requires_grad=True)
WIDE = {
    "int32": torch.int32,
    "bool": torch.bool,
    "complex64": torch.complex64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float64": torch.float64,
}


def refusal(error: type, fn, **arguments) -> str:
    """The message, one line; the same under autocast, whose casts come before most checks."""
    with pytest.raises(error) as plain:
        fn(**arguments)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(error) as autocast:
        fn(**arguments)
    assert str(plain.value) == str(autocast.value) and "\n" not in str(plain.value)
    return str(plain.value)


@pytest.mark.parametrize("given", [[[1.0]], None, np.zeros((1, 2, 6, 8)), "x"], ids=repr)
@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "sinks"])
def test_attention_takes_tensors(name: str, given: object) -> None:
    if given is None and name in ("mask", "sinks"):
        return
    message = refusal(TypeError, delta_matching_attention, **{**QKV, name: given})
    assert f"`{name}` is a {type(given).__name__}" in message and "torch.Tensor" in message


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "sinks"])
def test_attention_takes_dense_tensors(name: str) -> None:
    dense = QKV.get(name, torch.zeros(4) if name == "sinks" else torch.ones(6, 6).bool())
    message = refusal(TypeError, delta_matching_attention, **{**QKV, name: dense.to_sparse()})
    assert f"`{name}` is torch.sparse_coo" in message and "to_dense" in message
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(3, 3)])
    message = refusal(TypeError, delta_matching_attention, **{**QKV, name: nested})
    assert f"`{name}` is a nested tensor" in message and "to_padded_tensor" in message


@pytest.mark.parametrize("given", [[[1.0]], None, np.zeros((48, 64))], ids=repr)
@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_linear_takes_tensors(name: str, given: object) -> None:
    if given is None and name == "bias":
        return
    message = refusal(TypeError, fp8_linear, **{"x": X, "weight": W, name: given})
    assert f"fp8_linear: `{name}` is a {type(given).__name__}" in message


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_attention_dtypes_are_not_cast_by_autocast(name: str, dtype: str) -> None:
    if (name, dtype) == ("sinks", "float64"):
        return
    given = (torch.zeros(4) if name == "sinks" else QKV[name]).to(WIDE[dtype])
    message = refusal(ValueError, delta_matching_attention, **{**QKV, name: given})
    assert str(WIDE[dtype]) in message


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_linear_dtypes_are_not_cast_by_autocast(name: str, dtype: str) -> None:
    arguments = {"x": X, "weight": W, "bias": torch.zeros(48)}
    arguments[name] = arguments[name].to(WIDE[dtype])
    message = refusal(ValueError, fp8_linear, **arguments)
    assert str(WIDE[dtype]) in message and "torch.bfloat16" in message


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("mask", torch.ones(6, 6, dtype=torch.bool, device="meta")),
        ("mask", torch.zeros(1, 3, 1, 6, dtype=torch.int32, device="meta")),
        ("sinks", torch.zeros(4, device="meta")),
        ("cu_seqlens", offsets([2, 4]).to("meta")),
        ("cu_seqlens", (offsets([2, 4]), offsets([2, 4]).to("meta"))),
        ("cu_seqlens", (offsets([2, 4]).to("meta"), offsets([2, 4]))),
    ],
)
def test_attention_devices(name: str, given: object) -> None:
    """Another device than that of q would be read as if it were the same."""
    message = refusal(ValueError, delta_matching_attention, **QKV, **{name: given})
    assert f"`{name}` is on meta, q on cpu" in message


@pytest.mark.parametrize(
    ("name", "given", "error", "words"),
    [
        ("softmax_scale", LEARNED, ValueError, ["requires grad", "Multiply q by it"]),
        ("softcap", LEARNED, ValueError, ["requires grad", "softcap.item()"]),
        ("softmax_scale", torch.ones(2), TypeError, ["(2,)", "one finite number"]),
        ("softcap", torch.tensor(True), TypeError, ["torch.bool", "one finite number"]),
        ("softmax_scale", float("nan"), ValueError, ["nan", "finite"]),
        ("softmax_scale", -float("inf"), ValueError, ["-inf", "finite"]),
        ("softmax_scale", 10**400, ValueError, ["finite"]),
        ("softmax_scale", 1e39, ValueError, ["1e+39", "at most 1e+30"]),
        ("softmax_scale", torch.tensor(float("nan")), ValueError, ["nan", "finite"]),
        ("softmax_scale", "0.5", TypeError, ["'0.5' (str)", "finite number"]),
        ("softmax_scale", True, TypeError, ["True (bool)", "finite number"]),
        ("softmax_scale", 1j, TypeError, ["1j (complex)", "finite number"]),
        ("softmax_scale", [1.0], TypeError, ["[1.0] (list)", "finite number"]),
        ("softcap", float("inf"), ValueError, ["inf", "finite"]),
        ("softcap", "x", TypeError, ["'x' (str)", "finite number"]),
        ("softcap", -1, ValueError, ["-1", "positive"]),
        ("softcap", 1e31, ValueError, ["1e+31", "between 1e-30 and 1e30", "None for none"]),
        ("softcap", 1e-300, ValueError, ["1e-300", "between 1e-30 and 1e30"]),
        ("is_causal", 1, TypeError, ["1 (int)", "True or False"]),
        ("is_causal", None, TypeError, ["None", "True or False"]),
        ("is_causal", "no", TypeError, ["'no' (str)", "True or False"]),
        ("is_causal", torch.tensor(True), TypeError, ["Tensor", "True or False"]),
    ],
)  # fmt: skip
def test_attention_numbers(name: str, given: object, error: type, words: list[str]) -> None:
    message = refusal(error, delta_matching_attention, **QKV, **{name: given})
    assert f"`{name}`" in message and all(word in message for word in words), message


def same(actual, expected) -> None:
    for field in FIELDS:
        assert_bitwise_equal(getattr(actual, field), getattr(expected, field), field)


@pytest.mark.parametrize("given", [np.float32(0.5), torch.tensor(0.5), torch.tensor([0.5])])
def test_attention_takes_any_real_number(given: object) -> None:
    x = make_inputs(Shape(B=1, Tq=20, Tk=20))
    same(run(*x, softmax_scale=given), run(*x, softmax_scale=0.5))
    same(run(*x, softcap=given), run(*x, softcap=0.5))


@pytest.mark.parametrize("scale", [0, -0.3])
def test_softmax_scale_zero_and_negative(scale: float) -> None:
    """Legal: 0 averages the values, a negative one prefers what is unlike."""
    x = make_inputs(Shape(B=1, Hq=2, Hkv=2, Tq=40, Tk=40), torch.float64)
    ours = run(*x, softmax_scale=scale, recipe="bf16", is_causal=True)
    q, k, v = (t.detach().requires_grad_() for t in x[:3])
    logits = (q @ k.mT * scale).masked_fill(~causal(40, 40), -torch.inf)  # SDPA: NaN for -0.3
    o = logits.softmax(-1) @ v
    expected = (o, *torch.autograd.grad(o, (q, k, v), x[3]))
    for actual, exact in zip((ours.o, ours.dq, ours.dk, ours.dv), expected, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-15)
    quantised = run(*(t.float() for t in x), softmax_scale=scale, is_causal=True)
    assert_close(quantised.o, o, rms=0.06)  # measured 0.053 at -0.3, 0.052 at +0.3
    assert all(getattr(quantised, field).isfinite().all() for field in FIELDS)


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**32 + 1, sys.maxsize, 2**63, 10**30])
def test_huge_window_is_no_window(window: int) -> None:
    x = make_inputs(Shape(B=1, Tq=20, Tk=30))
    same(run(*x, is_causal=True, window=window), run(*x, is_causal=True))


def test_huge_window_is_no_window_compiled() -> None:
    torch._dynamo.reset()
    x = make_inputs(Shape(B=1, Tq=20, Tk=30))
    attention = torch.compile(delta_matching_attention, fullgraph=True, backend="aot_eager")
    compiled = run(*x, attention=attention, is_causal=True, window=sys.maxsize)
    same(compiled, run(*x, is_causal=True))


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
@pytest.mark.parametrize("op", ["delta_matching_attention", "fp8_linear", "fp8_experts_linear"])
def test_transforms_of_functions(op: str, transform: str) -> None:
    """Refused in words for who calls, not for who writes ops; `functional_call` is no transform."""
    fn = {
        "delta_matching_attention": lambda w: delta_matching_attention(Q, w, K),
        "fp8_linear": lambda w: fp8_linear(X, w),
        "fp8_experts_linear": lambda w: fp8_experts_linear(X, w[None], torch.tensor([5])),
    }[op]
    w = K if op.startswith("delta") else W
    call = {
        "vmap": lambda: torch.func.vmap(fn)(w[None]),
        "grad": lambda: torch.func.grad(lambda w: fn(w).sum())(w),
        "jvp": lambda: torch.func.jvp(fn, (w,), (w,)),
    }[transform]
    with pytest.raises(
        NotImplementedError, match=f"^{op}: called within a transform of torch.func"
    ):
        call()
    linear = torch.nn.Linear(64, 48)
    swap_linears(linear)
    assert torch.func.functional_call(linear, {"weight": W}, (X,)).shape == (5, 48)


def test_ends_without_values() -> None:
    with pytest.raises(ValueError, match="`ends` is on meta and x on cpu"):
        fp8_experts_linear(X, W[None], torch.tensor([5], device="meta"))
