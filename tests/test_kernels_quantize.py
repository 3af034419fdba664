"""The quantisers: transposed copies hold the bytes of the payload, whichever kernel makes them, and
row statistics are what the backward kernels expect.

Payloads and descales are compared with the reference in ``test_kernels_attention.py``. In the
interpreter on a CPU; marked ``gpu``, larger and in every layout, for real.
"""

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

from kernel_cases import DEVICE, Call, make_call, poison_empty  # noqa: E402

from hf_deltamatch.kernels import attention_operands as operands  # noqa: E402
from hf_deltamatch.kernels.attention_problem import Problem  # noqa: E402
from hf_deltamatch.kernels.launch import Packing  # noqa: E402
from hf_deltamatch.ops import attention_kernels  # noqa: E402
from hf_deltamatch.reference.operands import quantize_operand  # noqa: E402

S = Shape(B=1, Hq=2, Hkv=1, Tq=150, Tk=150, D=64, Dv=64)
NAN, INF = float("nan"), float("inf")


def padded(T: int, left: int, right: int) -> Tensor:
    """Padding at both ends, as the compact mask; the queries of the right one are uncounted."""
    position = torch.arange(T, dtype=torch.int32)
    position[:left] = -1
    position[T - right :] = -1
    rows = [position, torch.full_like(position, 2**31 - 1), torch.zeros_like(position)]
    return torch.stack(rows)[None, :, None].to(DEVICE)


def packed(*ends: int) -> Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32, device=DEVICE)


def holes(T: int, heads: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(1)
    seen = torch.rand(1, heads, T, T, generator=g) > 0.3
    seen[:, :, :, 70:] &= torch.arange(T)[:, None] >= 70  # two blocks: the tile of Q is cut
    seen[:, :, 70:, :70] = False
    return seen.to(DEVICE)


CASES = {
    "plain": (S, {}),
    "cross": (S._replace(Tq=40, Tk=300, B=2), dict(is_causal=False)),
    "unseen-queries": (S._replace(Tk=70), {}),
    "unseen-keys": (S._replace(Tq=70), dict(window=20)),
    "1xD": (S, dict(fields=dict(block="1xD"))),
    "fp32-descales": (S, dict(fields=dict(block="1xD", descale="fp32"))),
    "e5m2-gqa": (S._replace(Hq=4, Hkv=2), dict(fields=dict(do_format="e5m2"))),
    "stale": (S, dict(recipe="stale_delta", dlse=True)),
    "dequantized": (S, dict(recipe="dequantized_delta")),
    "forward": (S, dict(recipe="forward_delta")),
    "packed": (S, dict(cu_seqlens=packed(37, 37, 150), window=30)),
    "packed-1xD-e5m2": (
        S,
        dict(cu_seqlens=packed(16, 144, 150), fields=dict(block="1xD", do_format="e5m2")),
    ),
    "compact": (S, dict(mask=padded(150, 11, 20), is_causal=False)),
    "compact-1xD": (
        S,
        dict(mask=padded(150, 11, 20), is_causal=False, fields=dict(block="1xD")),
    ),
    "bool": (S, dict(mask=holes(150, 2))),
    "bool-e5m2": (S, dict(mask=holes(150), fields=dict(do_format="e5m2"))),
    "one-token": (S._replace(Tq=1, Tk=1), {}),
    "D80-Dv40": (S._replace(D=80, Dv=40), {}),
    "D7-bf16": (S._replace(D=7, Dv=7, Tq=40, Tk=40), dict(dtype=torch.bfloat16)),
    "D192-Dv128": (S._replace(D=192, Dv=128, Hq=1), dict(dtype=torch.bfloat16)),
}
LAYOUTS = {
    "bthd": lambda x: x,
    "bhtd": lambda x: x.contiguous(),
    "features-strided": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "broadcast": lambda x: x[..., :1].expand_as(x),
}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    check = poison_empty(monkeypatch)
    yield
    check()


def columns(T: int, pack: Packing) -> tuple[Tensor, Tensor]:
    """The column of each token in a transposed copy, and which columns are written: slots that no
    segment owns are not."""
    ends = [0, T] if pack.cu is None else pack.cu.tolist()
    column = torch.empty(T, dtype=torch.long)
    written = torch.zeros(pack.slots * 128, dtype=torch.bool)
    for i, (start, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        base = (start // 128 + i) * 128
        n = torch.arange(end - start)
        column[start:end] = base + n // 16 * 16 + n % 8 // 2 * 4 + n % 16 // 8 * 2 + n % 2
        written[base : base + -(-(end - start) // 128) * 128] = True
    return column.to(DEVICE), written.to(DEVICE)


def assert_copy(copy: Tensor, payload: Tensor, pack: Packing) -> None:
    """Byte for byte; NaN and missing tokens are 0."""
    column, written = columns(payload.shape[2], pack)
    code = payload.view(torch.uint8)
    largest = 0x7B if payload.dtype == torch.float8_e5m2 else 0x7E
    expected = torch.zeros(copy.shape, dtype=torch.uint8, device=DEVICE)
    expected[..., column] = torch.where((code & 0x7F) > largest, 0, code).transpose(2, 3)
    assert copy.dtype == payload.dtype
    assert torch.equal(copy.view(torch.uint8)[..., written], expected[..., written])


def slot_rows(T: int, pack: Packing) -> Tensor:
    """Where the statistics of each token lie, in slots."""
    ends = [0, T] if pack.cu is None else pack.cu.tolist()
    base = [(start // 128 + i) * 128 - start for i, start in enumerate(ends[:-1])]
    lengths = torch.tensor(ends).diff()
    return (torch.arange(T) + torch.tensor(base).repeat_interleave(lengths)).to(DEVICE)


def per_token(descale: Tensor, T: int, x: Problem, pack: Packing) -> Tensor:
    return descale[..., columns(T, pack)[0] // 128] if x.tile else descale


def assert_fold(fold: Tensor, payload: Tensor, descale: Tensor) -> None:
    """The descale, 0 where the payload is, NaN where it is poisoned."""
    bad = payload.float().isnan().any(-1) | descale.isnan()
    zero = (payload.float() == 0).all(-1)
    expected = torch.where(bad, NAN, torch.where(zero, 0.0, descale))
    assert torch.equal(fold.nan_to_num(-1), expected.nan_to_num(-1))


def check(c: Call, finite: bool = True, o_scale: float = 1.0) -> None:
    """Every copy of one call, fused and rebuilt, against the bytes of its payload; the folds too of
    finite inputs (poisoned tokens that are hidden fold as 0 or NaN: nothing multiplies them)."""
    x = attention_kernels.problem(c.q.shape, c.k.shape, c.v.shape[-1], c.q.device, **c.options)
    saved = {which: x.empty_operand(which) for which in "qkv"}
    vt, v_fold = operands.quantize_qkv(c.q, c.k, c.v, saved, x)
    (q8, qd), (k8, kd), (v8, vd) = saved.values()
    qt, q_fold, kt, k_fold = operands.transpose_qk(q8, qd, k8, kd, x)
    for copy, payload, pack in ((vt, v8, x.pack_k), (qt, q8, x.pack_q), (kt, k8, x.pack_k)):
        assert_copy(copy, payload, pack)
    assert (v_fold is None) == (q_fold is None) == (k_fold is None) == x.tile
    if not x.tile and finite:
        for fold, payload, descale in ((v_fold, v8, vd), (q_fold, q8, qd), (k_fold, k8, kd)):
            assert_fold(fold, payload, descale)

    g = torch.Generator().manual_seed(2)
    lse = torch.randn(x.B, x.Hq, x.Tq, generator=g).to(DEVICE)
    lse[..., 3:5] = -INF
    o = (o_scale * torch.randn(c.do.shape, generator=g)).to(DEVICE, c.do.dtype)
    delta = torch.empty_like(lse)
    do8, dod, do_t, fold, *stats = operands.quantize_do(c.do, o, lse, c.dlse, delta, x)
    assert_copy(do_t, do8, x.pack_q)
    assert (fold is None) == (x.tile and c.dlse is None)
    if not finite:
        return
    dod = per_token(dod, x.Tq, x, x.pack_q)
    lse2, shifted = (t[..., slot_rows(x.Tq, x.pack_q)] for t in stats)
    if fold is not None:
        assert_fold(fold, do8, dod)
    dead = lse == -INF
    zero = (do8.float() == 0).all(-1) if c.dlse is None else torch.zeros_like(dead)
    expected = torch.where(dead | zero, INF, lse * 1.4426950408889634)
    torch.testing.assert_close(lse2, expected, rtol=1e-6, atol=1e-7)
    rule = c.options["recipe"].delta
    if rule == "matched" and not x.one_pass:
        return
    do = c.do.double() if rule == "stale" else do8[..., : x.Dv].double() * dod[..., None].double()
    expected = (do * o.bfloat16().double()).sum(-1).masked_fill(dead, 0.0)
    torch.testing.assert_close(delta.double(), expected, rtol=1e-5, atol=1e-5)
    if c.dlse is not None:
        expected = expected - c.dlse.double().masked_fill(dead, 0.0)
    torch.testing.assert_close(shifted.double(), expected, rtol=1e-5, atol=1e-5)


def zero_tokens(c: Call) -> Call:
    for x in (c.q, c.k, c.v, c.do):
        x[:, :, -2:-1] = 0.0
    return c


def poison_tokens(c: Call) -> None:
    for x in (c.q, c.k, c.v, c.do):
        x[:, 0, 17, 3], x[:, -1, 30, 2], x[:, :, -3, 5] = NAN, INF, -INF


@pytest.mark.parametrize("name", CASES)
def test_copies_hold_the_bytes_of_the_payload(name: str) -> None:
    shape, options = CASES[name]
    check(zero_tokens(make_call(shape, **options)))


@pytest.mark.parametrize("name", ["plain", "1xD", "e5m2-gqa", "packed", "compact", "bool"])
def test_copies_of_poisoned_tokens(name: str) -> None:
    """NaN in the first head, infinity in the last and at the end, which ``compact`` leaves
    uncounted: NaN in the payload, 0 in the copy."""
    shape, options = CASES[name]
    c = make_call(shape, **options)
    poison_tokens(c)
    check(c, finite=False)


@pytest.mark.parametrize("name", ["plain", "1xD", "bool-e5m2", "e5m2-gqa"])
def test_delta_of_a_large_output(name: str) -> None:
    """δ is of the order of one, and the codes of dO times O are not: nothing may be summed of these."""
    shape, options = CASES[name]
    c = make_call(shape, **options)
    check(c._replace(do=c.do * 1e-36), o_scale=1e36)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_of_any_layout(layout: str) -> None:
    c = make_call(S._replace(B=2, Hq=4), dtype=torch.bfloat16)
    q, k, v, do = (LAYOUTS[layout](x) for x in (c.q, c.k, c.v, c.do))
    check(c._replace(q=q, k=k, v=v, do=do))


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SQUARE = [name for name, (shape, _) in CASES.items() if shape.D == shape.Dv == 64]
ON_DEVICE = [(name, 128, BF16) for name in SQUARE] + [
    (name, D, dtype)
    for name in ("plain", "1xD", "compact", "bool-e5m2")
    for D, dtype in ((64, BF16), (80, BF16), (256, BF16), (128, FP16), (128, FP32), (256, FP32))
]


@pytest.mark.gpu
@pytest.mark.parametrize("name,D,dtype", ON_DEVICE)
def test_copies_on_the_device(name: str, D: int, dtype: torch.dtype) -> None:
    """Where compilers have gone wrong (only compiled code shows it), clean and poisoned."""
    shape, options = CASES[name]
    c = make_call(shape._replace(D=D, Dv=D), **{**options, "dtype": dtype})
    check(zero_tokens(c))
    if shape.Tq > 30 and shape.Tk > 30:
        poison_tokens(c)
        check(c, finite=False)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_copies_on_the_device(layout: str) -> None:
    c = make_call(Shape(2, 8, 4, 4096, 4096, 128, 128), dtype=BF16)
    q, k, v, do = (LAYOUTS[layout](x) for x in (c.q, c.k, c.v, c.do))
    check(c._replace(q=q, k=k, v=v, do=do))


def test_padding_beside_queries_that_are_zero() -> None:
    """Nothing gives their tile a descale but the padding, whose NaN must stay in its own row."""
    c = make_call(S._replace(Tq=130, Tk=130), mask=padded(130, 3, 5))
    c.q[:, :, 3:125] = 0.0
    c.q[:, 0, 127, 2], c.q[:, 1, 126, 0] = NAN, INF
    x = attention_kernels.problem(c.q.shape, c.k.shape, c.v.shape[-1], c.q.device, **c.options)
    saved = {which: x.empty_operand(which) for which in "qkv"}
    operands.quantize_qkv(c.q, c.k, c.v, saved, x)
    payload, descale = saved["q"]
    state = x.facts.query_state
    spec = quantize_operand(c.q, "q", c.options["recipe"], hidden=state == 1, counted=(state == 0))
    assert descale.isfinite().all() and torch.equal(descale, spec.descale)
    bad = payload[..., :64].float().isnan().any(-1)
    assert bad.nonzero().tolist() == [[0, 0, 127], [0, 1, 126]]
    assert torch.equal(payload[..., :64].view(torch.uint8), spec.payload.view(torch.uint8))
