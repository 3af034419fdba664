"""The attention kernels under ``mx`` against the reference: every path, in small, in Triton's
interpreter on a CPU; on a CUDA device the same cases run for real, emulated or native."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_cases import Shape
from torch import Tensor

pytest.importorskip("triton")
from hf_deltamatch import kernels as package

if package.missing("attention", torch.device("cuda" if torch.cuda.is_available() else "cpu")):
    pytest.skip("no device for the kernels", allow_module_level=True)
if not torch.cuda.is_available() and not package.interprets_scaled_products():
    pytest.skip(
        "this Triton's interpreter fails on tl.dot_scaled (3.6's does, 3.9's does not), which every "
        "product of block 'mx' is",
        allow_module_level=True,
    )

from kernel_cases import (  # noqa: E402
    BWD,
    DEVICE,
    compact,
    difference,
    holes,
    make_call,
    on,
    poison_empty,
    segments,
    through_kernels,
    through_reference,
)

from hf_deltamatch import AttentionRecipe, delta_matching_attention  # noqa: E402
from hf_deltamatch.formats import FORMATS, MX_TOKENS  # noqa: E402
from hf_deltamatch.kernels.attention_operands_mx import quantize_do_mx, reencode  # noqa: E402
from hf_deltamatch.ops import attention_kernels  # noqa: E402
from hf_deltamatch.reference.operands import as_operand, quantize_operand  # noqa: E402
from hf_deltamatch.reference.quantize import quantize  # noqa: E402
from hf_deltamatch.testing import row_sum_residual  # noqa: E402

ON_GPU = DEVICE.type == "cuda"
S = Shape(B=1, Hq=2, Hkv=1, Tq=150, Tk=150, D=64, Dv=64)
S100 = S._replace(Tq=100, Tk=100)
SMALL = Shape(B=1, Hq=1, Hkv=1, Tq=100, Tk=100, D=32, Dv=32)
SINKS = torch.tensor([0.5, -1.0])
CASES = {
    "causal": (S, {}),
    "full-gqa": (S._replace(Hq=4, Hkv=2, Tq=90, Tk=90), dict(is_causal=False)),
    "window": (S._replace(Tq=70), dict(window=20)),
    "window-long": (S._replace(Tq=300, Tk=300, Hq=1, D=32, Dv=32), dict(window=100)),
    "bottom-right-sinks": (S._replace(Tk=70), dict(sinks=on(SINKS))),
    "one-query": (S._replace(Tq=1), {}),
    "one-key": (S._replace(Tq=1, Tk=1), {}),
    "softcap": (S100, dict(softcap=5.0, is_causal=False)),
    "softcap-dlse-sinks": (S100, dict(softcap=5.0, dlse=True, sinks=on(SINKS))),
    "packed": (S, dict(cu_seqlens=segments(37, 37, 150), window=30)),
    "packed-sinks": (S, dict(cu_seqlens=segments(16, 144, 150), sinks=on(SINKS))),
    "compact-padding": (S, dict(mask=compact(150, 40), is_causal=False)),
    "compact-window": (S, dict(mask=compact(150, 7, 33), is_causal=False)),
    "bool": (S, dict(mask=holes())),
    "bool-heads-sinks": (S, dict(mask=holes(2), sinks=on(SINKS))),
    "stale": (S100, dict(recipe="stale_delta")),
    "dequantized-dlse": (S100, dict(recipe="dequantized_delta", dlse=True)),
    "stale-dlse-packed-sinks": (
        S,
        dict(recipe="stale_delta", dlse=True, cu_seqlens=segments(60, 150), sinks=on(SINKS)),
    ),
    "projection": (S100, dict(fields=dict(project_row_sum=True))),
    "projection-packed": (
        S,
        dict(fields=dict(project_row_sum=True), cu_seqlens=segments(60, 150), window=20),
    ),
    "projection-padding": (
        S,
        dict(fields=dict(project_row_sum=True), mask=compact(150, 40), is_causal=False),
    ),
    "e5m2": (S100, dict(fields=dict(do_format="e5m2"))),
    "D80-Dv40": (S._replace(D=80, Dv=40), {}),
    "D7": (S._replace(D=7, Dv=7, Tq=40, Tk=40), {}),
    "D192-Dv128": (S._replace(D=192, Dv=128, Hq=1), {}),
    "D256": (SMALL._replace(D=256, Dv=256), {}),
    "fp16": (S100, dict(dtype=torch.float16)),
}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    check = poison_empty(monkeypatch)
    yield
    check()


def values(codes: Tensor) -> Tensor:
    """FP32 descales of E8M0 codes."""
    return codes.view(torch.float8_e8m0fnu).float()


def mx_call(shape: Shape, *, fields: dict | None = None, **options):
    return make_call(shape, fields={"block": "mx", **(fields or {})}, **options)


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_reference(name: str) -> None:
    """Interpreted: the same FP32 arithmetic up to the order of sums, and a few casts of P or dS that
    fall on the other side of a tie. On a GPU outputs round to their dtype, and exp2 differs more."""
    shape, options = CASES[name]
    call = mx_call(shape, **options)
    fwd, bwd = through_kernels(call, store_ds=True, row_sums=True)
    ref_fwd, ref_bwd = through_reference(call)
    for which in "qkv":
        for field in (f"{which}_fp8", f"{which}_descale"):
            a, b = getattr(fwd, field), getattr(ref_fwd, field)
            assert torch.equal(values(a) if field.endswith("descale") else a.float(), b.float())
    for field in ("o", "lse"):
        bound = 5e-3 if ON_GPU or call.q.dtype != torch.float32 else 1e-6
        assert difference(getattr(fwd, field), getattr(ref_fwd, field)) < bound, field
    for field, a, b in zip(BWD, bwd[:5], ref_bwd, strict=True):
        bound = 1.5e-2 if ON_GPU else 1e-3
        assert difference(a, b) < (2e-3 if field in ("delta", "dsinks") else bound), field
    assert fwd.o.transpose(1, 2).is_contiguous() and bwd.dq.transpose(1, 2).is_contiguous()
    if call.options["recipe"].delta != "matched" or call.dlse is not None:
        return
    # The invariant, on FP32 dS of either kernel; rows with a sink do not sum to zero without it.
    if call.options["sinks"] is None:
        assert row_sum_residual(bwd.ds[0]) < (1e-5 if ON_GPU else 5e-7)
        assert row_sum_residual(bwd.ds[1]) < (1e-5 if ON_GPU else 5e-7)
        sums, magnitude = bwd.row_sums
        residual = row_sum_residual(bwd.ds[0])
        expected = pytest.approx(residual * magnitude.sum().item(), rel=1e-3, abs=1e-12)
        assert sums.abs().sum().item() == expected


@pytest.mark.parametrize("D", [7, 80, 128])
@pytest.mark.parametrize("do_format", ["e4m3", "e5m2"])
def test_quantiser_is_bitwise_the_reference(D: int, do_format: str) -> None:
    """Payload, codes, re-encoded payload and codes, and what is zero or poisoned: magnitudes from
    subnormal to 1e38, zero and bad blocks, hidden tokens, and the ragged end of a block. The copy of
    dO, made with its payload, holds the bytes of one made from it."""
    recipe = AttentionRecipe.from_name("delta_matching", block="mx", do_format=do_format)
    B, H, T = 2, 2, 150
    x = torch.randn(B, T, H, D).transpose(1, 2) * torch.exp(4 * torch.randn(B, H, T, 1))
    x[:, :, 5], x[:, :, 33, : D // 2] = 0, 0
    x[0, 0, 40, 0], x[0, 1, 70, -1], x[1, 0, 149, 1] = float("nan"), float("inf"), -float("inf")
    x[1, 1, 90], x[1, 1, 91], x[1, 1, 100:132] = 1e-42, 3.4e38, 1e-36
    hidden = torch.zeros(B, 1, T, dtype=torch.bool)
    hidden[0, :, 100:110], hidden[1, :, :2] = True, True
    x = on(x)
    options = {**make_call(SMALL).options, "recipe": recipe}
    problem = attention_kernels.problem(x.shape, x.shape, D, DEVICE, **options)
    problem.facts = problem.facts._replace(do_state=on(hidden.to(torch.uint8)))
    lse = on(torch.randn(B, H, T))
    lse[:, 1, 60] = -torch.inf
    payload, codes, copy, lse2, _ = quantize_do_mx(x, x, lse, None, torch.empty_like(lse), problem)
    expected = torch.where(lse == -torch.inf, torch.inf, lse * 1.4426950408889634)
    assert torch.equal(lse2[:, :, :T], expected)
    ref = quantize_operand(x, "do", recipe, hidden=on(hidden))
    assert torch.equal(payload[..., :D].view(torch.uint8), ref.payload.view(torch.uint8))
    assert not payload[..., D:].view(torch.uint8).any()
    columns = ref.descale.shape[-1]
    same(values(codes[..., :columns]), ref.descale)

    again = reencode(payload, codes, problem.pack_q, fold=True)
    out, out_codes, fold = copy
    columns = codes.shape[-1] * 32 + 1
    assert torch.equal(out.view(torch.uint8), again.payload.view(torch.uint8))
    assert torch.equal(out_codes[..., :columns], again.codes[..., :columns])
    same(fold, again.fold)
    op = as_operand(ref, recipe, tiles=False)
    again = quantize(op.feat, FORMATS[do_format], MX_TOKENS)
    tokens = out[:, :, :D].transpose(-1, -2)
    assert torch.equal(tokens[:, :, :T].view(torch.uint8), again.payload.view(torch.uint8))
    assert not tokens[:, :, T:].reshape(-1).view(torch.uint8).any()
    rows = again.descale.shape[2]
    descale = values(out_codes[:, :, :rows, :D])
    bad = again.descale.isnan()
    assert (
        bad.any() and torch.equal(descale[~bad], again.descale[~bad]) and (descale[bad] == 1).all()
    )
    flags = out_codes[:, :, :rows, codes.shape[-1] * 32]
    assert torch.equal(flags == 255, bad.any(-1)) and set(flags.unique().tolist()) == {0, 255}
    poisoned = bad.any(-1).repeat_interleave(32, -1)[..., :T]
    expected = (op.tok != 0).any(-1).float()
    same(fold, torch.where(poisoned, torch.nan, expected))


def same(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0))


@pytest.mark.parametrize("which", ["q", "k", "v", "do"])
@pytest.mark.parametrize("options", [{}, dict(is_causal=False)], ids=["causal", "full"])
def test_poison_reaches_what_depends_on_it(which: str, options: dict) -> None:
    """One bad value: rows that the reference makes non-finite, and no others."""
    call = mx_call(SMALL._replace(Tq=150, Tk=150, D=64, Dv=64), **options)
    getattr(call, which)[:, :, 85, 3] = float("nan" if which in ("q", "v") else "inf")
    fwd, bwd = through_kernels(call)
    ref_fwd, ref_bwd = through_reference(call)
    for a, b in zip((fwd.o, *bwd[:3]), (ref_fwd.o, *ref_bwd[:3]), strict=True):
        bad, must = (~x.isfinite().all(-1) for x in (a, b))
        assert torch.equal(bad, must)
        if not must.all():
            assert difference(a[~bad], b[~must]) < (1.5e-2 if ON_GPU else 1e-3)


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("token", [64, 85])
def test_poison_stays_outside_a_window(which: str, token: int) -> None:
    """A window of 20, one bad key or value: rows that visit its tile without seeing it stay as they
    are, bit for bit, and the rest is non-finite where the reference is."""
    shape = SMALL._replace(Tq=150, Tk=150, D=64, Dv=64)
    clean, _ = through_kernels(mx_call(shape, window=20))
    call = mx_call(shape, window=20)
    getattr(call, which)[:, :, token, 3] = float("nan")
    fwd, bwd = through_kernels(call)
    ref_fwd, ref_bwd = through_reference(call)
    ours, theirs = ((f.o, f.lse[..., None], *g[:3]) for f, g in ((fwd, bwd), (ref_fwd, ref_bwd)))
    for a, b in zip(ours, theirs, strict=True):
        bad, must = (~x.isfinite().all(-1) for x in (a, b))
        assert torch.equal(bad, must) and not must.all()
        assert difference(a[~bad], b[~must]) < (1.5e-2 if ON_GPU else 1e-3)
    first, last = (token, token + 20) if which == "k" else (64, 96 + 19)
    rows = torch.arange(150, device=DEVICE)
    blind = (rows < first) | (rows >= last)
    assert fwd.o[:, :, ~blind].isnan().any(-1).all()
    assert torch.equal(fwd.o[:, :, blind], clean.o[:, :, blind])


def test_hidden_contents_do_not_reach_anything() -> None:
    """Padding holds NaN and huge numbers; outputs and gradients of real tokens keep every bit."""
    call = mx_call(S, mask=compact(150, 40), is_causal=False)
    fwd, bwd = through_kernels(call)
    for x in (call.q, call.k, call.v, call.do):
        x[:, :, :20], x[:, :, 20:40] = float("nan"), 3e38
    dirty_fwd, dirty_bwd = through_kernels(call)
    assert torch.equal(fwd.o, dirty_fwd.o) and torch.equal(fwd.lse, dirty_fwd.lse)
    assert all(torch.equal(a, b) for a, b in zip(bwd[:3], dirty_bwd[:3], strict=True))
    assert not fwd.o[:, :, :40].any() and not bwd.dk[:, :, :40].any()


def test_packed_sequences_are_as_alone() -> None:
    """Blocks of 32 tokens start with their sequence."""
    call = mx_call(SMALL, cu_seqlens=segments(45, 100))
    fwd, bwd = through_kernels(call)
    for start, stop in ((0, 45), (45, 100)):
        part = mx_call(SMALL)
        part = part._replace(
            **{n: getattr(call, n)[:, :, start:stop] for n in ("q", "k", "v", "do")}
        )
        alone_fwd, alone_bwd = through_kernels(part)
        for a, b in zip((fwd.o, *bwd[:3]), (alone_fwd.o, *alone_bwd[:3]), strict=True):
            a = a[:, :, start:stop]
            assert difference(a, b) < 1e-3 if ON_GPU else torch.equal(a, b)


def test_nothing_to_do() -> None:
    for shape in (SMALL._replace(B=0), SMALL._replace(Tq=0), SMALL._replace(Tk=0)):
        fwd, bwd = through_kernels(mx_call(shape, is_causal=False))
        assert fwd.o.shape == (shape.B, 1, shape.Tq, 32) and not fwd.o.any()
        assert not any(x.any() for x in bwd[:3])


def test_operands_survive_a_copy_between_forward_and_backward() -> None:
    """Offloading saved tensors loses the padding of their rows: 80 features have 3 codes in 4."""
    call = mx_call(SMALL._replace(D=80, Dv=7))
    fwd, bwd = through_kernels(call)
    assert fwd.q_descale.shape[-1] == 3 and fwd.q_descale.stride(2) == 4
    moved = type(fwd)(*(x.contiguous() for x in fwd))
    from hf_deltamatch.kernels import attention

    x = attention_kernels.problem(call.q.shape, call.k.shape, 7, DEVICE, **call.options)
    again = attention.attention_bwd(call.do, None, moved, x)
    assert all(torch.equal(a, b) for a, b in zip(bwd[:3], again[:3], strict=True))


def test_public_function_runs_the_kernels() -> None:
    """``backend="triton"`` in eager and compiled, forward and backward, with the layouts promised."""
    call = mx_call(SMALL._replace(D=80, Dv=40))
    fwd, bwd = through_kernels(call)
    recipe = call.options["recipe"]

    def step(function):
        leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
        o = function(*leaves, is_causal=True, recipe=recipe, backend="triton")
        o.backward(call.do)
        return o.detach(), *(x.grad for x in leaves)

    torch._dynamo.reset()
    compiled = torch.compile(delta_matching_attention, fullgraph=True, backend="aot_eager")
    for function in (delta_matching_attention, compiled):
        for a, b in zip(step(function), (fwd.o, *bwd[:3]), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("cu", [False, True], ids=["plain", "packed"])
def test_fake_outputs_are_like_the_real_ones(cu: bool) -> None:
    """Shape, dtype and strides that the op promises to torch.compile."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = mx_call(SMALL._replace(D=80, Dv=40))
    offsets = segments(45, 100) if cu else None

    def forward(q, k, v, offsets):
        return torch.ops.hf_deltamatch.attention_fwd(
            q, k, v, None, None, offsets, offsets, True, None, 0.1, None,
            call.options["recipe"].encoded, "triton",
        )  # fmt: skip

    real = forward(call.q, call.k, call.v, offsets)
    with FakeTensorMode() as mode:
        inputs = [None if x is None else mode.from_tensor(x) for x in (*call[:3], offsets)]
        fake = forward(*inputs)
    assert all(
        (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        for a, b in zip(real, fake, strict=True)
    )


def test_old_interpreters_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = AttentionRecipe.from_name("delta_matching", block="mx")
    cpu = torch.device("cpu")
    monkeypatch.setattr(package, "triton_version", lambda: (3, 9))
    assert package.unsupported_attention(recipe, (64, 64), 1.0, cpu) is None
    monkeypatch.setattr(package, "triton_version", lambda: (3, 6))
    sentence = package.unsupported_attention(recipe, (64, 64), 1.0, cpu)
    assert "dot_scaled" in sentence and "3.6" in sentence and "'mx'" in sentence
