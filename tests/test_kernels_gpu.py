"""The attention kernels on a CUDA device: accuracy against FP64, the invariant, determinism, memory,
extreme inputs, and a model trained through them."""

from __future__ import annotations

import gc

import pytest
import torch
from attention_cases import Shape

pytest.importorskip("triton")
from kernel_cases import (
    DEVICE,
    difference,
    exact,
    make_call,
    through_kernels,
    through_reference,
)

import hf_deltamatch
from hf_deltamatch import delta_matching_attention
from hf_deltamatch.diagnostics import count_calls, record_row_sum
from hf_deltamatch.kernels import HOPPER_VARIABLE
from hf_deltamatch.testing import row_sum_residual

pytestmark = pytest.mark.gpu


def mask_options(mode: str, B: int, Tq: int, Tk: int) -> dict:
    g = torch.Generator().manual_seed(1)
    if mode == "window":
        return dict(window=97)
    if mode == "full":
        return dict(is_causal=False)
    if mode == "softcap":
        return dict(softcap=20.0)
    if mode == "packed":
        ends = [0, Tk // 3, Tk // 3 + 1, Tk]
        return dict(cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=DEVICE))
    if mode == "bool":
        return dict(mask=(torch.rand(B, 1, Tq, Tk, generator=g) > 0.3).to(DEVICE))
    if mode == "padded":
        position = torch.arange(Tk, dtype=torch.int32).repeat(B, 1)
        position[0, : Tk // 4] = -1
        rows = [position, torch.full_like(position, 2**31 - 1), torch.full_like(position, Tk - Tq)]
        return dict(mask=torch.stack(rows, 1)[:, :, None].to(DEVICE), is_causal=False)
    assert mode == "causal"
    return {}


SHAPES = [
    Shape(2, 4, 2, 512, 512, 64, 64),
    Shape(1, 4, 4, 1000, 1000, 128, 128),
    Shape(1, 8, 1, 257, 640, 128, 128),
    Shape(1, 2, 2, 384, 384, 80, 80),
    Shape(1, 2, 1, 300, 300, 96, 96),
    Shape(1, 2, 2, 320, 320, 192, 128),
    Shape(1, 2, 1, 256, 256, 256, 256),
]
MODES = ["causal", "full", "window", "softcap", "padded", "bool", "packed"]
GRID = [
    (shape, mode, block, dtype)
    for i, shape in enumerate(SHAPES)
    for j, mode in enumerate(MODES)
    for block in ("128xD", "1xD")
    for dtype in (torch.bfloat16, torch.float32)
    # Every mode with every block on the first two shapes, in one dtype; a third of the rest.
    if (dtype == torch.bfloat16 and i < 2) or (i >= 2 and (i + j + (block == "1xD")) % 3 == 0)
    if not (mode == "packed" and (shape.B > 1 or shape.Tq != shape.Tk))
    if not (dtype == torch.float32 and block == "1xD")
]
GRID += [
    (SHAPES[i], mode, "mx", torch.bfloat16)
    for i, mode in [
        (0, "causal"), (0, "bool"), (0, "padded"), (1, "packed"), (1, "window"), (1, "full"),
        (2, "softcap"), (3, "causal"), (4, "bool"), (5, "full"), (6, "causal"),
    ]
] + [(SHAPES[4], "window", "mx", torch.float32)]  # fmt: skip


def grid_id(case: tuple) -> str:
    shape, mode, block, dtype = case
    return f"{shape}-{mode}-{block}-{str(dtype)[6:]}"


@pytest.mark.parametrize("case", GRID, ids=grid_id)
def test_accuracy_against_fp64(case: tuple) -> None:
    """No less accurate than the reference that it emulates, and close to it."""
    shape, mode, block, dtype = case
    options = mask_options(mode, shape.B, shape.Tq, shape.Tk)
    call = make_call(shape, dtype=dtype, fields=dict(block=block), **options)
    fwd, bwd = through_kernels(call, store_ds=True)
    ref_fwd, ref_bwd = through_reference(call)
    true_fwd, true_bwd = exact(call)
    for field in ("o", "dq", "dk", "dv"):
        kernel, ref, true = (
            getattr(f if field == "o" else b, field)
            for f, b in ((fwd, bwd), (ref_fwd, ref_bwd), (true_fwd, true_bwd))
        )
        error, own = difference(kernel, true), difference(ref, true)
        assert error <= 1.1 * own, (field, error, own)
        # Measured: 0.02 to 0.2 of it; most is the rounding of the output to BF16.
        assert difference(kernel, ref) <= 0.3 * own, (field, difference(kernel, ref), own)
    assert difference(fwd.lse, ref_fwd.lse) < 1e-4
    for ds in bwd.ds:
        assert row_sum_residual(ds) < 1e-5


@pytest.mark.parametrize("mode", [m for m in MODES if m != "bool"])
@pytest.mark.parametrize("shape", [s for s in SHAPES if 64 < s.D <= 128], ids=str)
def test_hopper_kernels_agree_with_the_plain_ones(shape: Shape, mode: str, monkeypatch) -> None:
    """On the same payloads: the same sums, dK and dV in another order of query heads. (A gradient of
    lse, sinks, and BF16 and FP32 results besides.)"""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper device")
    if mode == "packed" and shape.Tq != shape.Tk:
        mode = "causal"
    shape = shape._replace(B=1)
    options = mask_options(mode, 1, shape.Tq, shape.Tk)
    for dtype in (torch.bfloat16, torch.float32):
        if dtype == torch.float32:
            options["sinks"] = torch.linspace(-1, 1, shape.Hq, device=DEVICE)
        call = make_call(shape, dtype=dtype, dlse=dtype == torch.float32, **options)
        with monkeypatch.context() as patch:
            patch.setenv(HOPPER_VARIABLE, "1")
            _, ours = through_kernels(call)
            patch.setenv(HOPPER_VARIABLE, "0")
            _, plain = through_kernels(call)
        bound = 1e-5 if dtype == torch.float32 else 3e-3  # a rounding of BF16, here and there
        for field in ("dq", "dk", "dv", "dsinks"):
            assert difference(getattr(ours, field), getattr(plain, field)) < bound, field
        assert difference(ours.delta, plain.delta) < 1e-5


def test_delta_against_fp64() -> None:
    """δ of the FP8 operands, in FP64 from the payloads themselves: 2e-3 of its size."""
    call = make_call(Shape(1, 4, 4, 1024, 1024, 128, 128), dtype=torch.bfloat16)
    fwd, bwd = through_kernels(call)
    from hf_deltamatch.reference.operands import as_operand, quantize_operand
    from hf_deltamatch.reference.quantize import Quantized

    recipe = call.options["recipe"]
    do = as_operand(quantize_operand(call.do, "do", recipe), recipe, tiles=True).tok.double()
    q, k, v = (
        as_operand(Quantized(payload, descale), recipe, tiles=True).tok.double()
        for payload, descale in (
            (fwd.q_fp8, fwd.q_descale),
            (fwd.k_fp8, fwd.k_descale),
            (fwd.v_fp8, fwd.v_descale),
        )
    )
    s = q @ k.transpose(-1, -2) * call.options["softmax_scale"]
    causal = torch.ones(1024, 1024, dtype=torch.bool, device=DEVICE).tril()
    p = s.masked_fill(~causal, -torch.inf).softmax(-1)
    delta = (p * (do @ v.transpose(-1, -2))).sum(-1)
    assert difference(bwd.delta, delta) < 2e-3


@pytest.mark.parametrize("mode", MODES)
def test_bitwise_repeatable(mode: str) -> None:
    shape = Shape(1, 8, 2, 700, 700, 128, 128)
    call = make_call(shape, dtype=torch.bfloat16, **mask_options(mode, 1, 700, 700))
    first = through_kernels(call)
    for _ in range(3):
        for a, b in zip(first, through_kernels(call), strict=True):
            assert all(
                torch.equal(x.view(torch.uint8), y.view(torch.uint8))
                for x, y in zip(a[:5], b[:5], strict=True)
                if isinstance(x, torch.Tensor)
            )


def test_causality() -> None:
    """``1xD``: changing later tokens leaves earlier outputs and lse as they are, bit by bit."""
    call = make_call(
        Shape(1, 2, 2, 500, 500, 64, 64), dtype=torch.bfloat16, fields=dict(block="1xD")
    )
    fwd, _ = through_kernels(call)
    for x in (call.q, call.k, call.v):
        x[:, :, 333:] = 1000 * torch.randn_like(x[:, :, 333:])
    again, _ = through_kernels(call)
    assert torch.equal(fwd.o[:, :, :333], again.o[:, :, :333])
    assert torch.equal(fwd.lse[:, :, :333], again.lse[:, :, :333])


@pytest.mark.parametrize("block", ["128xD", "1xD", "mx"])
@pytest.mark.parametrize("D", [64, 128])
def test_extremes(block: str, D: int) -> None:
    """Zero tokens, one huge outlier, logits of ±120, magnitudes of 1e-30: finite, as the reference."""
    call = make_call(Shape(1, 2, 2, 300, 300, D, D), fields=dict(block=block))
    call.q[:, :, 3], call.k[:, :, 5], call.v[:, :, 7], call.do[:, :, 9] = 0, 0, 0, 0
    call.v[:, :, 200, 1] = 3e4
    call.k[:, :, 100] *= 60
    call.do[:, :, 150:] *= 1e-30
    fwd, bwd = through_kernels(call)
    ref_fwd, ref_bwd = through_reference(call)
    for a, b in zip((fwd.o, *bwd[:3]), (ref_fwd.o, *ref_bwd[:3]), strict=True):
        assert a.isfinite().all() and difference(a, b) < 2e-2


@pytest.mark.parametrize("block", ["128xD", "1xD"])
@pytest.mark.parametrize("Hkv", [16, 2])
def test_memory(Hkv: int, block: str) -> None:
    """What the docstring of the launchers states, per token and query head: saved for the backward,
    the forward's own, the backward's own; and the bound on the latter, twice an FP32 dQ."""
    B, H, T, D = 1, 16, 4096, 128
    call = make_call(Shape(B, H, Hkv, T, T, D, D), dtype=torch.bfloat16, fields=dict(block=block))
    q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
    step = lambda: delta_matching_attention(q, k, v, is_causal=True, recipe=call.options["recipe"])
    torch.autograd.grad(step(), (q, k, v), call.do)  # compiled, and whatever stays is there
    rows = B * H * T
    kv = Hkv / H
    descale = 4 / 128 if block == "128xD" else 4
    slack = 0.2  # every tensor is rounded up to 512 bytes

    gc.collect()  # nothing of an earlier test is let go meanwhile
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = step()
    held = torch.cuda.memory_allocated()
    saved = (1 + 2 * kv) * (D + descale) + 4 + 2 * D  # payloads, descales, lse; o is held here
    assert (held - before) / rows <= saved + slack
    assert (held - before) / rows >= saved - slack  # else the sum above is not what is saved
    # Transposed V, and with 1xD its descale as folded.
    temporary = kv * (D + (4 if block == "1xD" else 0))
    assert (torch.cuda.max_memory_allocated() - held) / rows <= temporary + slack

    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(o, (q, k, v), call.do)
    own = sum(g.numel() * g.element_size() for g in grads)
    extra = torch.cuda.max_memory_allocated() - held - own
    assert extra <= 2 * (rows * D * 4)
    # dO and the transposed copies of Q, K and dO; statistics of the rows, and descales.
    assert extra / rows <= 4 * D + (28 if block == "1xD" else 12 + 4 / 128) + slack


def test_compiled_training_step() -> None:
    """Inductor, ``fullgraph=True``: same bits, no graph break, no recompilation."""
    call = make_call(Shape(1, 4, 2, 256, 256, 80, 80), dtype=torch.bfloat16)

    def step(function):
        leaves = [x.detach().clone().requires_grad_() for x in (call.q, call.k, call.v)]
        o = function(*leaves, is_causal=True)
        o.backward(call.do)
        return o.detach(), *(x.grad for x in leaves)

    torch._dynamo.reset()
    compiled = torch.compile(delta_matching_attention, fullgraph=True)
    eager = step(delta_matching_attention)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(eager, step(compiled), strict=True))


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_model_trains_through_the_kernels(model_type: str) -> None:
    """A tiny model in BF16 on the GPU; every attention layer calls the op, the invariant holds."""
    from tiny_models import FAMILIES, build

    layers = FAMILIES[model_type][1]
    model = build(model_type).to(DEVICE, torch.bfloat16)
    model.set_attn_implementation("fp8_delta_matching")
    ids = torch.randint(3, 128, (2, 200), device=DEVICE)
    padding = torch.ones_like(ids)
    padding[0, :60] = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with count_calls() as calls, record_row_sum() as residual:
        for _ in range(3):
            loss = model(input_ids=ids, attention_mask=padding, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert calls["attention_fwd"] == calls["attention_bwd"] == 3 * layers
    assert residual.value < 1e-6
    assert hf_deltamatch.check_model(model)


def test_second_device() -> None:
    """Tensors on another device than the current one, as in a model spread over several."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    results = []
    for index in range(2):
        g = torch.Generator().manual_seed(0)
        q, k, v, do = (
            torch.randn(1, h, 300, 128, generator=g).to(f"cuda:{index}", torch.bfloat16)
            for h in (4, 2, 2, 4)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        assert torch.cuda.current_device() == 0
        o = delta_matching_attention(*leaves, is_causal=True)
        o.backward(do)
        torch.cuda.synchronize(index)
        results.append([x.cpu() for x in (o.detach(), *(x.grad for x in leaves))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
