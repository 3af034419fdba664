"""The public attention function as PyTorch sees it: schema, compile, autocast, autograd, arguments."""

from __future__ import annotations

import shutil

import pytest
import torch
from attention_cases import (
    EXACT,
    FIELDS,
    MODES,
    Result,
    Shape,
    causal,
    compact,
    make_inputs,
    offsets,
    padded_positions,
    run,
)
from torch.utils.checkpoint import checkpoint

from hf_deltamatch import AttentionRecipe, delta_matching_attention
from hf_deltamatch.ops import attention_bwd, attention_fwd
from hf_deltamatch.ops.observe import CALLS
from hf_deltamatch.testing import assert_bitwise_equal

SMALL = Shape(B=1, Hq=2, Hkv=1, Tq=130, Tk=130, D=16, Dv=8)
SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0])


def assert_same(actual: Result, expected: Result) -> None:
    for field in FIELDS if expected.dsinks is None else (*FIELDS, "dsinks"):
        assert_bitwise_equal(getattr(actual, field), getattr(expected, field), field)


# --- torch.library ------------------------------------------------------------------------------

OP_MODES = {
    "full": {},
    "causal-window": {"is_causal": True, "window": 40},
    "bool": {"mask": causal(130, 130)},
    "compact": {"mask": compact(padded_positions([120], 130, "right"))},
    "packed": {"cu": offsets([3, 0, 127]), "is_causal": True},
    "softcap-sinks": {"softcap": 3.0, "sinks": SINKS[:2]},
}


# The shapes of what the op returns depend on the block, and under 128xD on the kind of mask.
@pytest.mark.parametrize(
    "mode, recipe",
    [*((m, r) for m in OP_MODES for r in ("128xD", "bf16")), ("bool", "1xD"), ("packed", "mx")],
)
def test_attention_op_opcheck(mode: str, recipe: str) -> None:
    options = {"mask": None, "sinks": None, "cu": None, "is_causal": False, "window": None}
    options |= {"softcap": None} | OP_MODES[mode]
    mask, sinks, cu, is_causal, window, softcap = options.values()
    recipe = EXACT if recipe == "bf16" else AttentionRecipe(block=recipe)
    tail = (mask, sinks, cu, cu, is_causal, window, 0.25, softcap, recipe.encoded, "reference")
    q, k, v, do = make_inputs(SMALL)
    torch.library.opcheck(attention_fwd, (q, k, v, *tail))

    o, lse, q_fp8, q_descale, k_fp8, k_descale, v_fp8, v_descale = attention_fwd(q, k, v, *tail)
    if recipe.quantize:
        q, k, v = q_fp8, k_fp8, v_fp8
    args = (do, torch.ones_like(lse), o, lse, q, q_descale, k, k_descale, v, v_descale, *tail)
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not recipe.quantize:
        utils.append("test_schema")  # compares inputs with allclose, which FP8 tensors lack
    torch.library.opcheck(attention_bwd, args, test_utils=utils)


def test_attention_op_has_no_silent_gradient() -> None:
    """The op itself has no autograd formula; calling it that way must not look differentiable."""
    q, k, v, _ = make_inputs(SMALL)
    tail = (None, None, None, None, True, None, 0.25, None, EXACT.encoded, "reference")
    with pytest.raises(RuntimeError, match="no autograd formula"):
        attention_fwd(q.requires_grad_(), k, v, *tail)
    with torch.no_grad():
        attention_fwd(q, k, v, *tail)


# --- torch.compile ------------------------------------------------------------------------------

COMPILE_MODES = {
    "full": {},
    "window": {},
    "bool-head": {},
    "compact-left-pad": {},
    "packed-causal": {},
    "packed-pair": {},
    "causal": {"softcap": 3.0, "sinks": SINKS, "softmax_scale": 0.2},
}


def compiled(**options):
    torch._dynamo.reset()  # what earlier tests compiled must not make shapes dynamic here
    options = {"fullgraph": True, "backend": "aot_eager", **options}
    return torch.compile(delta_matching_attention, **options)


@pytest.mark.parametrize("mode", COMPILE_MODES)
def test_delta_matching_attention_compile(mode: str) -> None:
    m = MODES[mode]()
    x, options = make_inputs(m.shape), {**m.options, **COMPILE_MODES[mode]}
    before = CALLS["attention_fwd"], CALLS["attention_bwd"]
    actual = run(*x, attention=compiled(), **options)
    assert (CALLS["attention_fwd"], CALLS["attention_bwd"]) == tuple(n + 1 for n in before)
    assert_same(actual, run(*x, **options))


def test_delta_matching_attention_compile_dynamic() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    attention = compiled(dynamic=True, backend=counter)
    for T in (130, 140, 300):
        x = make_inputs(Shape(B=1, Tq=T, Tk=T, D=16, Dv=16))
        assert_same(run(*x, attention=attention, is_causal=True), run(*x, is_causal=True))
    assert counter.frame_count == 1


@pytest.mark.parametrize("mode", ["bool-2d", "compact-left-pad"])
def test_delta_matching_attention_compile_dynamic_then_mask(mode: str) -> None:
    """Lengths that have become symbolic meet the first mask, whose shape is still static."""
    m, attention = MODES[mode](), compiled()
    for T in (60, 70):
        run(*make_inputs(Shape(Tq=T, Tk=T)), attention=attention)
    x = make_inputs(m.shape)
    assert_same(run(*x, attention=attention, **m.options), run(*x, **m.options))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_delta_matching_attention_compile_inductor() -> None:
    x = make_inputs(SMALL)
    actual = run(*x, attention=compiled(backend="inductor"), is_causal=True)
    assert_same(actual, run(*x, is_causal=True))


# --- autocast -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["delta_matching", "bf16"])
def test_delta_matching_attention_autocast(recipe: str) -> None:
    """Computes in autocast's dtype, takes mixed inputs, returns gradients in each input's dtype."""
    q, k, v, do = make_inputs(Shape(Tq=60, Tk=60))
    options = {"is_causal": True, "sinks": SINKS, "recipe": recipe}
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(q, k.bfloat16(), v, do.bfloat16(), **options)
    expected = run(*(x.bfloat16() for x in (q, k, v, do)), **options)
    assert actual.o.dtype == torch.bfloat16 and actual.lse.dtype == torch.float32
    assert (actual.dq.dtype, actual.dk.dtype) == (torch.float32, torch.bfloat16)
    assert actual.dsinks.dtype == torch.float32
    for field in (*FIELDS, "dsinks"):
        assert_bitwise_equal(getattr(actual, field).float(), getattr(expected, field).float())
    with pytest.raises(ValueError, match="must share one dtype.*torch.autocast"):
        run(q, k.bfloat16(), v, do, **options)


def test_delta_matching_attention_autocast_fp64() -> None:
    """FP64 stays what it is, as in SDPA."""
    q, k, v, _ = make_inputs(SMALL, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert delta_matching_attention(q, k, v, recipe="bf16").dtype == torch.float64


# --- autograd -----------------------------------------------------------------------------------


def saved_by(recipe: str, **options) -> tuple[list[torch.Tensor], torch.Tensor, list]:
    """Tensors kept for the backward, the output, and the inputs."""
    saved: list[torch.Tensor] = []
    leaves = [x.requires_grad_() for x in make_inputs(Shape(B=1, Tq=130, Tk=130))[:3]]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        o = delta_matching_attention(*leaves, recipe=recipe, **options)
    return saved, o, leaves


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"mask": causal(130, 130), "sinks": SINKS},
        {"mask": compact(padded_positions([120], 130, "right"))},
        {"cu_seqlens": offsets([30, 100])},
    ],
    ids=["causal", "bool-sinks", "compact", "packed"],
)
def test_delta_matching_attention_saves_little(options: dict) -> None:
    saved, o, leaves = saved_by("delta_matching", **options)
    mine = {x.data_ptr(): name for name, x in options.items() if isinstance(x, torch.Tensor)}
    assert not {x.data_ptr() for x in (o, *leaves)} & {t.data_ptr() for t in saved}
    rest = [t for t in saved if t.data_ptr() not in mine]
    assert {mine[t.data_ptr()] for t in saved if t.data_ptr() in mine} == set(mine.values())
    payloads = [t for t in rest if t.dtype == torch.float8_e4m3fn]
    statistics = [t for t in rest if t.dtype == torch.float32]
    assert [t.shape for t in payloads] == [x.shape for x in leaves]
    assert len(payloads) + len(statistics) == len(rest) == 7  # lse and three descales
    per_token = 1 if options.get("mask") is not None and options["mask"].dtype == torch.bool else 0
    tiles = 130 if per_token else 130 // 128 + options.get("cu_seqlens", offsets([1])).numel() - 1
    assert sorted(t.numel() for t in statistics) == sorted(
        [4 * 130, *(h * tiles for h in (4, 2, 2))]
    )


@pytest.mark.parametrize("recipe", ["stale_delta", "dequantized_delta", "forward_delta"])
def test_unmatched_rules_keep_the_output_itself(recipe: str) -> None:
    saved, o, _ = saved_by(recipe, is_causal=True)
    assert [t.data_ptr() for t in saved if t.shape == o.shape and t.dtype == o.dtype] == [
        o.data_ptr()
    ]


def test_delta_matching_attention_saves_inputs_unquantised() -> None:
    saved, o, leaves = saved_by("bf16", is_causal=True)
    kept = {x.data_ptr() for x in leaves}
    assert kept <= {t.data_ptr() for t in saved}
    assert sum(t.numel() for t in saved if t.data_ptr() not in kept) == 4 * 130  # lse


def test_delta_matching_attention_layout() -> None:
    q, k, v, _ = make_inputs(Shape(Dv=24))
    for recipe in ("delta_matching", "bf16"):
        o, lse = delta_matching_attention(q, k, v, recipe=recipe, return_lse=True)
        assert o.shape == (2, 4, 150, 24) and lse.shape == (2, 4, 150)
        assert o.transpose(1, 2).is_contiguous() and lse.is_contiguous()


def test_delta_matching_attention_double_backward() -> None:
    q, k, v, _ = (x.requires_grad_() for x in make_inputs(SMALL))
    o = delta_matching_attention(q, k, v, recipe="bf16")
    # Linear in o too: there the second derivative through q, k and v would be dropped silently.
    for loss in (o.square().sum(), o.sum()):
        with pytest.raises(RuntimeError, match="create_graph=True.*second derivative"):
            torch.autograd.grad(loss, q, create_graph=True)


@pytest.mark.parametrize("which", ["q", "k", "v", "sinks"])
def test_delta_matching_attention_requires_grad(which: str) -> None:
    """One input alone that wants a gradient gets the one it gets among all."""
    q, k, v, do = make_inputs(Shape(B=1, Tq=60, Tk=60))
    inputs = {"q": q, "k": k, "v": v, "sinks": SINKS.clone()}
    everything = run(q, k, v, do, sinks=SINKS)
    inputs[which].requires_grad_()
    o, lse = delta_matching_attention(**inputs, return_lse=True)
    assert o.requires_grad and lse.requires_grad
    o.backward(do)
    grads = dict(zip(inputs, everything[2:], strict=True))
    assert_bitwise_equal(inputs[which].grad, grads[which], which)
    with torch.no_grad():
        assert not delta_matching_attention(**inputs).requires_grad


@pytest.mark.parametrize("return_lse", [False, True])
def test_lse_that_nobody_asked_for_has_no_gradient(return_lse: bool, monkeypatch) -> None:
    """A gradient of zeros in its place is as good for the numbers, but not for the time."""
    from hf_deltamatch.ops import attention

    given = []

    def spy(do, dlse, *rest):
        given.append(dlse)
        return attention_bwd(do, dlse, *rest)

    monkeypatch.setattr(attention, "attention_bwd", spy)
    q, k, v, do = make_inputs(SMALL)
    out = delta_matching_attention(q.requires_grad_(), k, v, return_lse=return_lse)
    (out[0] if return_lse else out).backward(do)
    assert (given == [None]) != return_lse


def test_delta_matching_attention_sinks_dtype() -> None:
    q, k, v, do = make_inputs(Shape(B=1, Tq=60, Tk=60), torch.bfloat16)
    assert run(q, k, v, do, sinks=SINKS.bfloat16()).dsinks.dtype == torch.bfloat16


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_delta_matching_attention_checkpoint(use_reentrant: bool) -> None:
    x = make_inputs(Shape(B=1, Tq=140, Tk=140))

    def attention(q, k, v, **kwargs):
        call = lambda *qkv: delta_matching_attention(*qkv, **kwargs)
        return checkpoint(call, q, k, v, use_reentrant=use_reentrant)

    assert_same(run(*x, attention=attention, is_causal=True), run(*x, is_causal=True))


# --- arguments ----------------------------------------------------------------------------------

Q, K = torch.zeros(2, 4, 6, 8), torch.zeros(2, 2, 6, 8)
QKV = {"q": Q, "k": K, "v": K}
PACKED = {"q": Q[:1], "k": K[:1], "v": K[:1]}
FP8 = torch.float8_e4m3fn

# id: arguments, exception, and what its message says: the argument, what was given, what is allowed.
BAD_ARGUMENTS = {
    "q-3d": ({"q": Q[0]}, ValueError, ["`q` is (4, 6, 8)", "[B, H, T, D]"]),
    "v-list": ({"v": [1]}, TypeError, ["`v` is a list", "torch.Tensor"]),
    "dtypes": ({"k": K.half()}, ValueError, ["float16", "share one dtype", "autocast"]),
    "fp64": ({n: x.double() for n, x in QKV.items()}, ValueError, ["float64", "takes torch.float32"]),
    "fp8": ({n: x.to(FP8) for n, x in QKV.items()}, ValueError, ["float8_e4m3fn", "bfloat16"]),
    "int": ({n: x.int() for n, x in QKV.items()}, ValueError, ["torch.int32", "torch.bfloat16"]),
    "devices": ({"v": K.to("meta")}, ValueError, ["on cpu, cpu, meta", "one device"]),
    "batch": ({"k": K[:1]}, ValueError, ["k (1, 2, 6, 8)", "[B, Hkv, Tk, D]"]),
    "kv-length": ({"v": K[:, :, :5]}, ValueError, ["v (2, 2, 5, 8)", "[B, Hkv, Tk, Dv]"]),
    "kv-heads": ({"v": K[:, :1]}, ValueError, ["v (2, 1, 6, 8)", "[B, Hkv, Tk, Dv]"]),
    "head-dim": ({"k": K[..., :7]}, ValueError, ["k (2, 2, 6, 7)", "k [B, Hkv, Tk, D]"]),
    "groups": ({"q": Q[:, :3]}, ValueError, ["3 query heads over 2 key heads", "multiple"]),
    "no-heads": ({"k": K[:, :0], "v": K[:, :0]}, ValueError, ["over 0 key heads", "multiple"]),
    "no-features": ({"v": K[..., :0]}, ValueError, ["head_dim is 8 and 0", "positive"]),
    "window-0": ({"is_causal": True, "window": 0}, ValueError, ["`window` is 0", "positive int"]),
    "window-true": ({"is_causal": True, "window": True}, ValueError, ["`window` is True", "None"]),
    "window-float": ({"is_causal": True, "window": 2.0}, ValueError, ["`window` is 2.0", "int"]),
    "window-full": ({"window": 4}, ValueError, ["`window` is 4", "is_causal=True"]),
    "softcap-0": ({"softcap": 0.0}, ValueError, ["`softcap` is 0.0", "positive", "None"]),
    "softcap-nan": ({"softcap": float("nan")}, ValueError, ["`softcap` is nan", "finite"]),
    "sinks-shape": ({"sinks": torch.zeros(2)}, ValueError, ["`sinks` is torch.float32 (2,)", "(4,)"]),
    "sinks-int": ({"sinks": torch.zeros(4).int()}, ValueError, ["`sinks`", "int32", "floating"]),
    "mask-float": ({"mask": torch.zeros(6, 6)}, ValueError, ["`mask` is torch.float32", "mask == 0"]),
    "mask-int64": ({"mask": torch.ones(6, 6).long()}, ValueError, ["`mask` is torch.int64", "bool"]),
    "mask-shape": ({"mask": torch.ones(6, 5).bool()}, ValueError, ["`mask` is (6, 5)", "(2, 4, 6, 6)"]),
    "mask-5d": ({"mask": torch.ones(1, 1, 1, 6, 6).bool()}, ValueError, ["`mask` is (1, 1, 1, 6, 6)"]),
    "mask-compact": ({"mask": torch.zeros(2, 3, 1, 5).int()}, ValueError, ["(2, 3, 1, 5)", "(2, 3, 1, 6)"]),
    "mask-compact-causal": (
        {"mask": torch.zeros(2, 3, 1, 6).int(), "is_causal": True}, ValueError,
        ["is_causal=True", "`mask`", "Leave is_causal and window"],
    ),
    "mask-device": ({"mask": causal(6, 6).to("meta")}, ValueError, ["`mask` is on meta", "q on cpu"]),
    "cu-list": ({"cu_seqlens": [0, 6]}, TypeError, ["`cu_seqlens` is a list", "int32 tensor [n + 1]"]),
    "cu-dtype": ({"cu_seqlens": torch.zeros(2)}, ValueError, ["`cu_seqlens` of q", "float32", "int32"]),
    "cu-2d": ({"cu_seqlens": offsets([6])[None]}, ValueError, ["`cu_seqlens`", "(1, 2)", "[n + 1]"]),
    "cu-empty": ({"cu_seqlens": offsets([])}, ValueError, ["`cu_seqlens`", "(1,)", "[n + 1]"]),
    "cu-pair": (
        {"cu_seqlens": (offsets([6]), offsets([3, 3]))}, ValueError,
        ["`cu_seqlens`", "1 sequences for q and 2 for k", "agree"],
    ),
    "cu-batch": ({"cu_seqlens": offsets([6])}, ValueError, ["`cu_seqlens` with batch 2", "B = 1"]),
    "cu-end": ({**PACKED, "cu_seqlens": offsets([5])}, ValueError, ["cu_seqlens", "[0, 5]", "tokens, 6"]),
    "cu-start": (
        {**PACKED, "cu_seqlens": torch.tensor([1, 6])}, ValueError, ["cu_seqlens", "[1, 6]", "from 0"],
    ),
    "cu-falls": (
        {**PACKED, "cu_seqlens": torch.tensor([0, 4, 2, 6])}, ValueError,
        ["cu_seqlens", "[0, 4, 2, 6]", "rise"],
    ),
    "recipe-name": (
        {"recipe": "delta"}, ValueError,
        ["'delta'", "bf16, delta_matching, dequantized_delta, forward_delta, stale_delta"],
    ),
    "recipe-type": ({"recipe": 3}, TypeError, ["delta_matching", "AttentionRecipe", "got int"]),
    "backend": ({"backend": "cuda"}, ValueError, ["`backend` is 'cuda'", "None", "'reference'"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_delta_matching_attention_bad_argument(case: str) -> None:
    arguments, error, says = BAD_ARGUMENTS[case]
    with pytest.raises(error) as raised:
        delta_matching_attention(**{**QKV, **arguments})
    message = str(raised.value)
    assert all(text in message for text in says), message
    if not case.startswith(("recipe", "backend")):
        assert message.startswith("delta_matching_attention: ")
