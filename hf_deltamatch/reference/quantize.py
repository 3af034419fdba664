"""amax -> descale -> clamp -> cast, per block; and back. Pure torch, any device.

``x ≈ x_fp8 · descale``. Rules that hold for every block:

* always clamped before the cast, rounded to nearest even;
* ``amax == 0`` gives descale 1; a descale is at least 2**-126;
* a block with NaN or Inf gets descale NaN and payload 0, so that what depends on the block is NaN
  and nothing is laundered into zeros or finite values;
* a hidden token (one that nothing attends to) has payload 0 and takes no part in any amax.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_deltamatch.formats import MIN_DESCALE, Block, Float8Format


class Quantized(NamedTuple):
    """An FP8 payload and the descale of each block."""

    payload: Tensor
    descale: Tensor


def pow2_descale(amax: Tensor, fmt: Float8Format) -> Tensor:
    """Smallest power of two with ``amax / descale <= fmt.max``; FP32, exact, no rounding involved.

    Both formats end at 1.75 · 2**max_exponent, so for ``amax = f · 2**k`` with f in [1, 2) the
    exponent is ``k − max_exponent``, plus one where f > 1.75. Read off the bits, as a kernel does.
    """
    bits = amax.float().view(torch.int32)
    exponent = (bits >> 23) - fmt.max_exponent + ((bits & 0x7FFFFF) > 0x600000).int()
    descale = (exponent.clamp_min(1) << 23).view(torch.float32)
    return _finish(descale, amax)


def fp32_descale(amax: Tensor, fmt: Float8Format) -> Tensor:
    """``amax / fmt.max`` in FP32, at least 2**-126."""
    amax = amax.float()
    # By a tensor: a GPU divides by a Python number by multiplying with its reciprocal.
    return _finish((amax / torch.full_like(amax, fmt.max)).clamp_min(MIN_DESCALE), amax)


def _finish(descale: Tensor, amax: Tensor) -> Tensor:
    descale = torch.where(amax == 0, 1.0, descale)
    return torch.where(amax.isfinite(), descale, math.nan)


def descale_of(amax: Tensor, fmt: Float8Format, kind: str) -> Tensor:
    """Descale of blocks with the given amax; ``kind`` is ``pow2`` or ``fp32``."""
    return (pow2_descale if kind == "pow2" else fp32_descale)(amax, fmt)


def cast(x: Tensor, fmt: Float8Format) -> Tensor:
    """Clamped, round-to-nearest-even cast to FP8. NaN stays NaN."""
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def decode(payload: Tensor) -> Tensor:
    """FP32 values of an FP8 payload, exact.

    torch's own conversion is about five times slower on a CPU, where it dominates the emulation, so
    there the code is shifted into the bits of an FP16 number of 2**-8 the value (E4M3) or of the
    value itself (E5M2).
    """
    if payload.device.type != "cpu":
        return payload.float()
    bits = payload.view(torch.int8).to(torch.int16)
    if payload.dtype == torch.float8_e5m2:
        return (bits << 8).view(torch.float16).float()
    magnitude = bits & 0x7F
    half = magnitude * 128 | (bits & -0x8000)
    value = half.view(torch.float16).float().mul_(2.0**8)
    if payload.numel() and int(magnitude.max()) == 0x7F:  # NaN, which the shift turns into 480
        value = torch.where(magnitude == 0x7F, math.nan, value)
    return value


def round_trip(x: Tensor, fmt: Float8Format) -> Tensor:
    """The FP32 value of ``cast(x)``."""
    return decode(cast(x, fmt))


def _blocked(x: Tensor, block: Block) -> Tensor:
    """``x [..., T, D]`` as ``[..., rows, bt, cols, bd]``, zero-padded to whole blocks."""
    t, d = x.shape[-2:]
    rows, cols = block.descale_shape(t, d)
    bt, bd = block.tokens or t, block.features or d
    if (rows * bt, cols * bd) != (t, d):
        x = torch.nn.functional.pad(x, (0, cols * bd - d, 0, rows * bt - t))
    return x.reshape(*x.shape[:-2], rows, bt, cols, bd)


def _flat(blocks: Tensor, tokens: int, features: int) -> Tensor:
    """Inverse of :func:`_blocked`."""
    rows, bt, cols, bd = blocks.shape[-4:]
    return blocks.reshape(*blocks.shape[:-4], rows * bt, cols * bd)[..., :tokens, :features]


def block_amax(x: Tensor, block: Block) -> Tensor:
    """|x| maximum of each block of ``x [..., T, D]``: ``[..., rows, cols]``. Propagates NaN."""
    if x.numel() == 0:
        return x.new_zeros(*x.shape[:-2], *block.descale_shape(*x.shape[-2:]))
    return _blocked(x.abs(), block).amax((-3, -1))


def quantize(x: Tensor, fmt: Float8Format, block: Block, kind: str = "pow2") -> Quantized:
    """Quantise ``x [..., T, D]`` in blocks over its last two axes.

    Returns:
        payload ``[..., T, D]`` in ``fmt.dtype`` and FP32 descale ``[..., rows, cols]``.
    """
    x = x.float()
    descale = descale_of(block_amax(x, block), fmt, kind)
    if x.numel() == 0:
        return Quantized(x.to(fmt.dtype), descale)
    payload = apply_descale(_blocked(x, block), descale[..., :, None, :, None], fmt)
    return Quantized(_flat(payload, *x.shape[-2:]).contiguous(), descale)


def apply_descale(x: Tensor, descale: Tensor, fmt: Float8Format) -> Tensor:
    """Payload of ``x`` under a descale that broadcasts to it; 0 where the descale is NaN."""
    bad = descale.isnan()
    if bool(bad.any()):
        x = torch.where(bad, 0.0, x)
        descale = torch.where(bad, 1.0, descale)
    return cast(x * descale.reciprocal(), fmt)


def dequantize(payload: Tensor, descale: Tensor, block: Block) -> Tensor:
    """``payload · descale`` in FP32; the whole block is NaN where its descale is NaN."""
    if payload.numel() == 0:
        return payload.float()
    blocks = _blocked(decode(payload), block) * descale[..., :, None, :, None]
    return _flat(blocks, *payload.shape[-2:])


def round_trip_blocks(x: Tensor, fmt: Float8Format, size: int, dim: int) -> Tensor:
    """FP32 value of ``x`` after a cast with a power-of-two descale per ``size`` elements of ``dim``.

    ``dim`` is −1 or −2. This is the cast of P and dS, which rows of very different magnitude force
    to carry real block scales.
    """
    block = Block("", 1, size) if dim == -1 else Block("", size, 1)
    return dequantize(*quantize(x, fmt, block), block)
