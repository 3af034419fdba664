"""The attention kernels against the reference that emulates their tiles: every path, in small.

On a CPU they run in Triton's interpreter, where every cast is the software one; on a CUDA device
the same cases run for real.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_cases import Shape

pytest.importorskip("triton")
from hf_deltamatch import kernels as package

if package.missing("attention", torch.device("cuda" if torch.cuda.is_available() else "cpu")):
    pytest.skip("no device for the kernels", allow_module_level=True)

from kernel_cases import (  # noqa: E402
    BWD,
    DEVICE,
    FWD,
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

from hf_deltamatch.kernels import attention_config  # noqa: E402
from hf_deltamatch.ops import attention_kernels  # noqa: E402
from hf_deltamatch.reference.operands import has_tile_descales  # noqa: E402
from hf_deltamatch.testing import row_sum_residual  # noqa: E402

pytestmark = pytest.mark.interpreted
ON_GPU = DEVICE.type == "cuda"
S = Shape(B=1, Hq=2, Hkv=1, Tq=150, Tk=150, D=64, Dv=64)


SINKS = torch.tensor([0.5, -1.0])
ROW = dict(block="1xD")
CASES = {
    "causal": (S, {}),
    "full": (S, dict(is_causal=False)),
    "1xD": (S, dict(fields=dict(block="1xD"))),
    "1xD-full-gqa": (S._replace(Hq=4, Hkv=2), dict(fields=dict(block="1xD"), is_causal=False)),
    "window": (S._replace(Tq=70), dict(window=20)),
    "window-long": (S._replace(Tq=300, Tk=300, Hq=1), dict(window=100)),
    "bottom-right-sinks": (S._replace(Tk=70), dict(sinks=on(SINKS))),
    "one-query": (S._replace(Tq=1), {}),
    "one-key": (S._replace(Tq=1, Tk=1), {}),
    "softcap": (S, dict(softcap=5.0, is_causal=False)),
    "softcap-dlse-1xD": (S, dict(softcap=5.0, dlse=True, fields=dict(block="1xD"))),
    "dlse": (S, dict(dlse=True)),
    "packed": (S, dict(cu_seqlens=segments(37, 37, 150), window=30)),
    "packed-1xD-sinks": (
        S,
        dict(cu_seqlens=segments(16, 144, 150), sinks=on(SINKS), fields=dict(block="1xD")),
    ),
    "compact-padding": (S, dict(mask=compact(150, 40), is_causal=False)),
    "compact-window-1xD": (
        S,
        dict(mask=compact(150, 7, 33), is_causal=False, fields=dict(block="1xD")),
    ),
    "bool": (S, dict(mask=holes())),
    "bool-heads-1xD": (S, dict(mask=holes(2), sinks=on(SINKS), fields=dict(block="1xD"))),
    "stale": (S, dict(recipe="stale_delta")),
    "dequantized-dlse": (S, dict(recipe="dequantized_delta", dlse=True)),
    "forward": (S, dict(recipe="forward_delta")),
    "forward-window-1xD-sinks-dlse": (
        S,
        dict(recipe="forward_delta", fields=ROW, window=60, sinks=on(SINKS), dlse=True),
    ),
    "forward-softcap-packed": (
        S,
        dict(recipe="forward_delta", softcap=5.0, cu_seqlens=segments(37, 37, 150)),
    ),
    "forward-compact": (
        S,
        dict(recipe="forward_delta", mask=compact(150, 40), is_causal=False),
    ),
    "forward-bool-fp32-descales": (
        S,
        dict(recipe="forward_delta", mask=holes(), fields=dict(block="1xD", descale="fp32")),
    ),
    "forward-D192-Dv128-projection": (
        S._replace(D=192, Dv=128, Hq=1),
        dict(recipe="forward_delta", fields=dict(project_row_sum=True)),
    ),
    "projection": (S, dict(fields=dict(project_row_sum=True))),
    "projection-packed-1xD": (
        S,
        dict(fields=dict(project_row_sum=True, block="1xD"), cu_seqlens=segments(60, 150)),
    ),
    "e5m2": (S, dict(fields=dict(do_format="e5m2"))),
    "fp32-descales": (S, dict(fields=dict(descale="fp32"), is_causal=False)),
    "D80-Dv40": (S._replace(D=80, Dv=40), {}),
    "D7": (S._replace(D=7, Dv=7, Tq=40, Tk=40), {}),
    "D192-Dv128": (S._replace(D=192, Dv=128, Hq=1), {}),
    "fp16": (S, dict(dtype=torch.float16)),
}
TWO_PASSES = (
    "causal",
    "full",
    "window",
    "bottom-right-sinks",
    "softcap",
    "dlse",
    "packed",
    "compact-padding",
    "e5m2",
)
SUM_IN_UNITS = ("causal", "window-long", "softcap", "packed", "forward", "D192-Dv128", "fp16")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    check = poison_empty(monkeypatch)
    yield
    check()


def test_writing_outside_of_a_buffer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    check = poison_empty(monkeypatch)
    x = torch.empty(2, 3, 5).transpose(0, 1)
    x.fill_(1.0)
    check()
    x.as_strided((1,), (1,), x.storage_offset() + 30).fill_(0.0)
    with pytest.raises(AssertionError, match="outside of a buffer"):
        check()


@pytest.mark.parametrize("name", [*CASES, *(f"{name}: two passes" for name in TWO_PASSES)])
def test_kernels_equal_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, both do the same FP32 arithmetic up to the order of sums: 1e-6, and a few casts
    of P or dS that fall on the other side of a tie. On a GPU the tensor cores keep about 14 bits
    and outputs round to their dtype; measured: below 1e-2 everywhere, 2e-4 for δ."""
    name, _, passes = name.partition(": ")
    monkeypatch.setattr(attention_config, "sums_in_units", lambda *heads: name in SUM_IN_UNITS)
    if passes:
        monkeypatch.setattr(attention_config, "has_one_pass", lambda *_, tile: False)
    shape, options = CASES[name]
    call = make_call(shape, **options)
    tile = has_tile_descales(call.options["recipe"], call.options["mask"])
    one_pass = attention_config.has_one_pass(call.options["recipe"], shape.D, shape.Dv, tile=tile)
    fwd, bwd = through_kernels(call, store_ds=True, row_sums=True)
    ref_fwd, ref_bwd = through_reference(call)
    for field, a, b in zip(FWD, fwd, ref_fwd, strict=True):
        if field == "o" and call.options["recipe"].two_terms and not ON_GPU:
            check_two_terms(a, b)
        elif field in ("o", "lse"):
            assert difference(a, b) < (5e-3 if ON_GPU or a.dtype != torch.float32 else 1e-6), field
        elif field.endswith("fp8"):
            assert torch.equal(a.float(), b.float()), field
        elif call.options["cu_seqlens_q"] is None:  # packed: unused slots are filled at will
            assert torch.equal(a, b), field
    for field, a, b in zip(BWD, bwd[:5], ref_bwd, strict=True):
        bound = 1.5e-2 if ON_GPU else 1e-3
        assert difference(a, b) < (2e-3 if field in ("delta", "dsinks") else bound), field
    assert fwd.o.transpose(1, 2).is_contiguous() and bwd.dq.transpose(1, 2).is_contiguous()
    if call.options["recipe"].delta != "matched" or call.dlse is not None:
        return
    # The invariant, on FP32 dS of either kernel; rows with a sink do not sum to zero without it.
    if call.options["sinks"] is None:
        assert row_sum_residual(bwd.ds[0]) < 1e-6
        assert row_sum_residual(bwd.ds[1]) < (1e-5 if ON_GPU else 1e-6)
        sums, magnitude = bwd.row_sums
        assert magnitude.sum().item() == pytest.approx(bwd.ds[0].double().abs().sum().item())
        if one_pass:  # dS is computed again to be summed
            assert sums.abs().sum() <= 1e-6 * magnitude.sum()
        else:
            residual = row_sum_residual(bwd.ds[0])
            expected = pytest.approx(residual * magnitude.sum().item(), rel=1e-3, abs=1e-12)
            assert sums.abs().sum().item() == expected


@pytest.mark.parametrize(
    "sizes", [(1, 1e-9, 1e9), (1e9, 1, 1e-9), (1e-20, 1, 1e20), (1e20, 1e-9, 1)]
)
@pytest.mark.parametrize("in_units", [False, True])
def test_values_of_any_size(in_units: bool, sizes: tuple[float, ...], monkeypatch) -> None:
    """Tiles of V of sizes far apart: in units of the latest tile's descale where that is in the range of FP32,
    as they are (the last two) where it is not. Each query's output to what its largest value leaves."""
    monkeypatch.setattr(attention_config, "sums_in_units", lambda *heads: in_units)
    call = make_call(S._replace(Hq=1, Tq=384, Tk=384, D=32, Dv=32))
    for tile, size in enumerate(sizes):
        call.v[:, :, 128 * tile : 128 * (tile + 1)] *= size
    o = attention_kernels.attention_fwd(call.q, call.k, call.v, **call.options).o
    ref, _ = through_reference(call)
    assert torch.isfinite(o).all()
    off = (o - ref.o).norm(dim=-1) / ref.o.norm(dim=-1)
    if (
        ON_GPU
    ):  # a cast of P on the other side of a tie: a step of E4M3, half of it of one key's share
        assert off.max() < 2.0**-4 and off.median() < 2e-3
    else:
        assert off.max() < 1e-6


def test_sums_in_units_stay_in_range() -> None:
    """Many keys of descales as far apart as units allow, and just too far."""
    shape = Shape(1, 1, 1, 1, 9600, 16, 16)
    for exponent in (35, 49):
        call = make_call(shape)
        call.q.zero_()
        call.v.fill_(448 * 2.0**exponent)
        call.v[:, :, :128] = 448 * 2.0**-exponent
        o = attention_kernels.attention_fwd(call.q, call.k, call.v, **call.options).o
        assert difference(o, call.v.mean(2, keepdim=True)) < (5e-3 if ON_GPU else 1e-5)


def check_two_terms(o: torch.Tensor, expected: torch.Tensor) -> None:
    """Every row to 1e-6, but for the few in which a second term, which magnifies an FP32 rounding of P,
    falls on the other side of a tie: half a unit of E4M3 (2⁻⁴) of what is at most 2⁻⁴ of a probability."""
    off = (o - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    assert off.max() < 2.0**-7
    assert (off > 1e-6).sum() <= max(1, 0.03 * off.numel())


def test_two_terms_are_what_differs() -> None:
    """``forward`` and ``dequantized``: the same payloads and lse bit for bit, an O nearer to P V̂."""
    shape = S._replace(Hq=2, Tq=200, Tk=200)
    (one, grads_one), (two, grads_two) = (
        through_kernels(make_call(shape, recipe=r)) for r in ("dequantized_delta", "forward_delta")
    )
    for field, a, b in zip(FWD, one, two, strict=True):
        if field != "o":
            assert torch.equal(a, b), field
    assert torch.equal(grads_one.dv, grads_two.dv)  # which reads no δ
    # One descale serves 128 tokens.
    q, k, v = (
        getattr(two, f"{n}_fp8").float()
        * getattr(two, f"{n}_descale").repeat_interleave(128, -1)[..., :200, None]
        for n in "qkv"
    )
    s = (q.double() @ k.double().mT * 64**-0.5).masked_fill(
        torch.ones(200, 200, dtype=torch.bool, device=DEVICE).triu(1), -torch.inf
    )
    truth = s.softmax(-1) @ v.double()
    errors = [difference(x.o, truth) for x in (one, two)]
    assert errors[1] < 1e-3 < 5e-3 < errors[0]


def test_nothing_to_do() -> None:
    for shape in (S._replace(B=0), S._replace(Tq=0), S._replace(Tk=0)):
        fwd, bwd = through_kernels(make_call(shape, is_causal=False))
        assert fwd.o.shape == (shape.B, 2, shape.Tq, 64) and not fwd.o.any()
        assert bwd.dk.shape == (shape.B, 1, shape.Tk, 64)
        assert not any(x.any() for x in bwd[:3])


def test_payloads_survive_a_copy_between_forward_and_backward() -> None:
    """Offloading saved tensors loses the padding of their rows (D = 80 is kept in 80, 7 in 16)."""
    call = make_call(S._replace(D=7, Dv=7, Tq=40, Tk=40))
    fwd, bwd = through_kernels(call)
    assert fwd.q_fp8.stride(2) == 16
    moved = type(fwd)(*(x.contiguous() for x in fwd))
    from hf_deltamatch.kernels import attention
    from hf_deltamatch.ops import attention_kernels

    x = attention_kernels.problem(call.q.shape, call.k.shape, 7, DEVICE, **call.options)
    again = attention.attention_bwd(call.do, None, moved, x)
    assert all(torch.equal(a, b) for a, b in zip(bwd[:3], again[:3], strict=True))


def test_hidden_contents_do_not_reach_anything() -> None:
    """Padding holds NaN and huge numbers; outputs and gradients of real tokens keep every bit."""
    call = make_call(S, mask=compact(150, 40), is_causal=False)
    fwd, bwd = through_kernels(call)
    for x in (call.q, call.k, call.v, call.do):
        x[:, :, :20], x[:, :, 20:40] = float("nan"), 3e38
    dirty_fwd, dirty_bwd = through_kernels(call)
    assert torch.equal(fwd.o, dirty_fwd.o) and torch.equal(fwd.lse, dirty_fwd.lse)
    assert all(torch.equal(a, b) for a, b in zip(bwd[:3], dirty_bwd[:3], strict=True))
    assert not fwd.o[:, :, :40].any() and not bwd.dk[:, :, :40].any()


def test_script_for_the_checkers(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """`sanitize_kernels.py` picks cases by name and fails where a result is wrong."""
    import sanitize_kernels

    assert sanitize_kernels.main(["D7"]) == 0
    assert "1 cases, 0 wrong" in capsys.readouterr().out
    assert sanitize_kernels.main(["no-such"]) == 2
    monkeypatch.setattr(sanitize_kernels, "check", lambda *_: {"o": 1e-7, "dq": float("nan")})
    assert sanitize_kernels.main(["causal"]) == 1


def test_public_function_runs_the_kernels() -> None:
    """``backend="triton"`` in eager and compiled, forward and backward, with the layouts promised."""
    from hf_deltamatch import delta_matching_attention

    call = make_call(S._replace(D=40, Dv=40))
    fwd, bwd = through_kernels(call)

    def step(function):
        leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
        o = function(*leaves, is_causal=True, backend="triton")
        o.backward(call.do)
        return o.detach(), *(x.grad for x in leaves)

    torch._dynamo.reset()
    compiled = torch.compile(delta_matching_attention, fullgraph=True, backend="aot_eager")
    for function in (delta_matching_attention, compiled):
        results = step(function)
        for a, b in zip(results, (fwd.o, *bwd[:3]), strict=True):
            assert torch.equal(a, b)


def test_public_function_names_what_the_kernels_do_not_do() -> None:
    from hf_deltamatch import delta_matching_attention

    q = torch.zeros(1, 1, 8, 16, device=DEVICE)
    for options in (dict(recipe="bf16"), dict(softmax_scale=-1.0)):
        with pytest.raises(NotImplementedError, match="backend=.reference"):
            delta_matching_attention(q, q, q, backend="triton", **options)


@pytest.mark.parametrize("block", ["128xD", "mx"])
def test_sinks_of_any_stride(block: str) -> None:
    """A column of a table, one number for all heads, every second one."""
    if block == "mx" and not ON_GPU and not package.interprets_scaled_products():
        pytest.skip("needs tl.dot_scaled")
    table = on(torch.tensor([[0.5, 9.0], [-1.0, 9.0]]))
    shape = S._replace(Tq=20, Tk=20, D=32, Dv=32)
    for sinks in (table[:, 0], table[:1, 0].expand(2), table.flatten()[::2]):
        assert not sinks.is_contiguous() or sinks.stride(0) != 1
        results = []
        for given in (sinks, sinks.clone().contiguous()):
            fwd, bwd = through_kernels(make_call(shape, sinks=given, fields=dict(block=block)))
            results.append((fwd.o, fwd.lse, *bwd[:5]))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("block", ["128xD", "1xD", "mx"])
def test_a_soft_cap_too_large_to_bend(block: str) -> None:
    """tanh(x) is x there, and what is left of an absolute error of 1e-7 is multiplied by the cap."""
    if block == "mx" and not ON_GPU and not package.interprets_scaled_products():
        pytest.skip("needs tl.dot_scaled")
    options = dict(fields=dict(block=block), is_causal=False)
    shape = S._replace(Tq=20, Tk=20, D=32, Dv=32)
    plain_fwd, plain_bwd = through_kernels(make_call(shape, **options))
    for softcap in (501.0, 1e5, 1e30):
        fwd, bwd = through_kernels(make_call(shape, softcap=softcap, **options))
        bound = 1e-3 if softcap < 1e5 else 1e-6  # 501 bends a logit of 4 by 8e-5
        assert difference(fwd.lse, plain_fwd.lse) < bound
        assert difference(fwd.o, plain_fwd.o) < max(bound, 1e-4)
        for a, b in zip(bwd[:3], plain_bwd[:3], strict=True):
            assert difference(a, b) < 1e-2  # casts that fall on the other side of a tie


@pytest.mark.skipif(ON_GPU, reason="a failed assertion on a device is the end of the process")
@pytest.mark.parametrize(
    "ends", [[0, 30], [0, 60], [5, 40], [0, 30, 20, 40], [0, -5, 40], [0, 2**31 - 1, 40]], ids=str
)
def test_offsets_that_do_not_fit(ends: list[int]) -> None:
    """Refused before anything is read or written by them, of q and of k."""
    shape = S._replace(Tq=40, Tk=40, D=32, Dv=32)
    fine = torch.tensor([0, *[40] * (len(ends) - 1)], dtype=torch.int32)
    bad = torch.tensor(ends, dtype=torch.int32)
    for q, k in ((bad, bad), (bad, fine), (fine, bad)):
        call = make_call(shape, cu_seqlens=fine)
        call.options.update(cu_seqlens_q=q, cu_seqlens_k=k)
        with pytest.raises(RuntimeError, match="`cu_seqlens` must rise from 0 .* 40 for q and 40"):
            through_kernels(call)


@pytest.mark.parametrize("block", ["128xD", "1xD"])
def test_values_near_the_end_of_fp32(block: str) -> None:
    """The output is a mean of values, so it fits where they do; and near the other end."""
    call = make_call(S._replace(Tq=40, Tk=40, D=32, Dv=32), fields=dict(block=block))
    o = through_kernels(call)[0].o
    for factor in (2.0**118, 2.0**-110):
        scaled = call._replace(v=call.v * factor, do=call.do / factor)
        fwd, bwd = through_kernels(scaled)
        assert fwd.o.isfinite().all() and difference(fwd.o / factor, o) < 1e-5
        assert all(x.isfinite().all() for x in bwd[:3])
