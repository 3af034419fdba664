"""The software casts that stand in for the hardware's in the interpreter, whose own round wrongly; on a
device the hardware's too."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from hf_deltamatch import kernels as package
from hf_deltamatch.kernels.casts import cast_fp8, round_bf16

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if package.missing("attention", DEVICE):
    pytest.skip("no device for the kernels", allow_module_level=True)

SIZE = 1024


@triton.jit
def _cast_kernel(x, out, n, E5M2: tl.constexpr, SOFT_CAST: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    values = tl.load(x + at, at < n, other=0.0)
    code = cast_fp8(values, E5M2, SOFT_CAST).to(tl.uint8, bitcast=True)
    tl.store(out + at, code, at < n)


@triton.jit
def _round_kernel(x, out, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, round_bf16(tl.load(x + at, at < n, other=0.0)), at < n)


def values(dtype: torch.dtype) -> torch.Tensor:
    """Every FP8 value, the middle between neighbours and what lies a bit to either side of both; the
    ends of FP32; and random floats of every exponent. Both signs."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].unique()
    points = torch.cat((codes, (codes[1:] + codes[:-1]) / 2))
    up, down = (torch.nextafter(points, torch.tensor(s)) for s in (torch.inf, -torch.inf))
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (8192,), generator=g, dtype=torch.int32)
    anything = bits.view(torch.float32)
    ends = torch.tensor([0.0, 1e-45, 3e38, torch.inf, torch.nan, 449.0, 464.0, 57345.0, 61440.0])
    x = torch.cat((points, up, down, anything[~anything.isnan()], ends))
    return torch.cat((x, -x))


@pytest.mark.parametrize("soft", [True, pytest.param(False, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_cast_is_bit_exact(dtype: torch.dtype, soft: bool) -> None:
    x = values(dtype)
    largest = torch.finfo(dtype).max
    expected = x.clamp(-largest, largest).to(dtype)
    out = torch.zeros(x.numel(), dtype=torch.uint8, device=DEVICE)
    grid = (triton.cdiv(x.numel(), SIZE),)
    _cast_kernel[grid](x.to(DEVICE), out, x.numel(), dtype == torch.float8_e5m2, soft, SIZE)
    nan = x.isnan()
    assert torch.equal(out.cpu()[~nan], expected.view(torch.uint8)[~nan])
    assert out.cpu().view(dtype)[nan].float().isnan().all()


def test_bf16_is_bit_exact() -> None:
    """Nearest even, where the interpreter truncates."""
    x = values(torch.float8_e4m3fn)
    out = torch.zeros_like(x, device=DEVICE)
    _round_kernel[(triton.cdiv(x.numel(), SIZE),)](x.to(DEVICE), out, x.numel(), SIZE)
    assert torch.equal(out.cpu().nan_to_num(7.0), x.bfloat16().float().nan_to_num(7.0))
