"""The matched δ and dQ in one sweep: whatever it starts from, and keys of any size. Interpreted on a CPU."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Shape

pytest.importorskip("triton")
from hf_deltamatch import kernels as package

if package.missing("attention", torch.device("cuda" if torch.cuda.is_available() else "cpu")):
    pytest.skip("no device for the kernels", allow_module_level=True)

from kernel_cases import (  # noqa: E402
    DEVICE,
    Call,
    compact,
    difference,
    exact,
    make_call,
    segments,
    through_kernels,
    through_reference,
)

from hf_deltamatch import delta_matching_attention  # noqa: E402
from hf_deltamatch.kernels import attention as kernels  # noqa: E402
from hf_deltamatch.ops import attention_kernels  # noqa: E402
from hf_deltamatch.testing import row_sum_residual  # noqa: E402

pytestmark = pytest.mark.interpreted
ON_GPU = DEVICE.type == "cuda"
S = Shape(B=1, Hq=2, Hkv=1, Tq=150, Tk=150, D=64, Dv=64)
CASES = {
    "causal": {},
    "full": dict(is_causal=False),
    "window": dict(window=40),
    "compact": dict(mask=compact(150, 40), is_causal=False),
    "packed": dict(cu_seqlens=segments(37, 37, 150)),
    "softcap": dict(softcap=5.0),
    "sinks": dict(sinks=torch.tensor([0.5, -1.0], device=DEVICE)),
    "dlse": dict(dlse=True),
    "fp32-descales": dict(fields=dict(descale="fp32")),
}
ESTIMATES = {
    "noise": lambda o: o + o.square().mean().sqrt() * torch.randn_like(o),
    "nan": lambda o: o * torch.nan,
    "none": None,
}


def backward(call: Call, fwd: kernels.Forward, **debug: bool) -> kernels.Backward:
    x = attention_kernels.problem(
        call.q.shape, call.k.shape, call.v.shape[-1], DEVICE, **call.options
    )
    return kernels.attention_bwd(call.do, call.dlse, fwd, x, **debug)


@pytest.mark.parametrize("estimate", ESTIMATES)
@pytest.mark.parametrize("name", CASES)
def test_delta_is_exact_whatever_the_sweep_starts_from(name: str, estimate: str) -> None:
    """The estimate is what O gives: with noise as large as O, no number, or nothing, which takes the δ pass. The
    coarse product does more then, so dQ is the worse for it (1.2 and 1.1 to 1.2 times), and nothing else."""
    torch.manual_seed(0)
    call = make_call(S, **CASES[name])
    fwd, bwd = through_kernels(call)
    change = ESTIMATES[estimate]
    again = backward(call, fwd._replace(o=None if change is None else change(fwd.o)), store_ds=True)
    assert difference(again.delta, bwd.delta) < 1e-5
    for field in ("dk", "dv", "dsinks"):
        assert difference(getattr(again, field), getattr(bwd, field)) < 1e-3, field
    truth = exact(call)[1].dq
    error = difference(bwd.dq, truth)
    assert difference(again.dq, truth) < (1.03 if estimate == "none" else 1.3) * error
    if call.dlse is None and call.options["sinks"] is None:
        assert row_sum_residual(again.ds[0]) < (1e-5 if ON_GPU else 1e-6)


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 2, 0.5),
        (1, 100, 1e-2),
        (1e-20, 1, 0),
        (0, 1e-20, 1e-12),
        (1e-9, 30, 1),
        (1, 1e-9, 30),
        (1e-30, 64, 1),
        (1e-38, 1, 1e-34),
    ],
)
def test_keys_of_any_size(sizes: tuple[float, ...]) -> None:
    """Tiles of K of sizes far apart, some of them zero: W in units of the largest descale where all are near,
    of the latest where not. V has a mean, so that O says little of δ and W has much to do; Q makes up for
    the largest, so that the softmax has many keys."""
    call = make_call(S._replace(Hq=1, Tq=384, Tk=384, D=32, Dv=32), is_causal=sizes[0] != 1e-9)
    call.v.add_(2.0)
    call.q.div_(max(sizes))
    for tile, size in enumerate(sizes):
        call.k[:, :, 128 * tile : 128 * (tile + 1)] *= size
    bwd, ref = through_kernels(call)[1], through_reference(call)[1]
    off = (bwd.dq - ref.dq).norm(dim=-1) / ref.dq.norm(dim=-1).clamp_min(1e-38)
    if ON_GPU:
        assert off.median() < 1e-2 and difference(bwd.dq, ref.dq) < 2e-2
    else:
        assert off.median() < 1e-5 and difference(bwd.dq, ref.dq) < 1e-3
    assert difference(bwd.delta, ref.delta) < 2e-3


def test_a_poisoned_key_reaches_those_who_see_its_tile() -> None:
    call = make_call(S._replace(Tq=300, Tk=300))
    clean = through_kernels(call)[1]
    call.k[:, :, 140] = torch.nan
    dirty = through_kernels(call)[1]
    assert torch.equal(dirty.dq[:, :, :128], clean.dq[:, :, :128])
    assert dirty.dq[:, :, 140:].isnan().all()


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_row_that_sees_nothing_gives_its_sink_nothing(backend: str) -> None:
    """Where halves of the keys are merged by lse, such a row's gradient of lse is NaN."""
    made = torch.randn(3, 1, 1, 8, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = made.to(DEVICE).unbind()
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool, device=DEVICE)
    mask[:, :, 0] = False
    sinks = torch.zeros(1, device=DEVICE, requires_grad=True)
    _, lse = delta_matching_attention(
        q, k, v, mask=mask, sinks=sinks, return_lse=True, backend=backend
    )
    grad = torch.ones_like(lse)
    grad[:, :, 0] = torch.nan
    lse.backward(grad)
    assert sinks.grad.isfinite().all() and sinks.grad.abs().item() > 1e-3


def test_rows_without_a_gradient_stay_zero_beside_an_output_that_is_no_number() -> None:
    """dO is zero where the loss leaves a token out; 0 · NaN is no δ to start from."""
    call = make_call(S)
    call.do[:, :, 100:] = 0.0
    fwd, expected = through_kernels(call)
    o = fwd.o.clone()
    o[:, :, 100:] = torch.nan
    bwd = backward(call, fwd._replace(o=o))
    assert all(torch.equal(a, b) for a, b in zip(bwd[:3], expected[:3], strict=True))
    assert not bwd.dq[:, :, 100:].any() and not bwd.delta[:, :, 100:].any()


@pytest.mark.parametrize(("D", "block"), [(64, "128xD"), (64, "1xD"), (256, "128xD")])
def test_the_output_is_kept_where_it_is_read(D: int, block: str) -> None:
    """The op's own, without a copy; where δ takes a pass of its own, none."""
    call = make_call(S._replace(Tq=20, Tk=20, D=D, Dv=D), fields=dict(block=block))
    leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.data_ptr()) or t, lambda t: t
    ):
        o = delta_matching_attention(
            *leaves, is_causal=True, recipe=call.options["recipe"], backend="triton"
        )
    assert (o.data_ptr() in kept) is ((D, block) == (64, "128xD"))


def test_logits_that_round_away_stay_numbers() -> None:
    """Above 2²⁴ a unit in the last place of lse is 2, and P may come out as more than 1."""
    call = make_call(S)
    call.q.mul_(2000.0)
    call.k.mul_(2000.0)
    assert through_kernels(call)[1].dq.isfinite().all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize(
    "fields", [{}, dict(block="1xD"), dict(delta="stale"), dict(block="mx")], ids=str
)
def test_a_gradient_of_lse_that_is_no_number_stays_one(fields: dict, value: float) -> None:
    """In the row that it belongs to, in dS of both kernels: of an infinite dS a cast would make 448."""
    call = make_call(S._replace(Tq=70, Tk=70), dlse=True, fields=fields)
    call.dlse[:, 0, 50] = value
    bwd = through_kernels(call, store_ds=True)[1]
    assert bwd.dq[:, 1].isfinite().all()
    assert bwd.dq[:, 0, :50].isfinite().all() and bwd.dq[:, 0, 51:].isfinite().all()
    for ds in bwd.ds:
        assert ds[:, 0, 50, :51].isnan().all() and ds[:, 1].isfinite().all()
    if ON_GPU:  # the interpreter's products of FP8 lose it
        assert bwd.dq[:, 0, 50].isnan().all() and bwd.dk[:, 0, :51].isnan().all()
