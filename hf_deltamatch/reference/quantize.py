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
    return _finish((amax.float() / fmt.max).clamp_min(MIN_DESCALE), amax)


def _finish(descale: Tensor, amax: Tensor) -> Tensor:
    descale = torch.where(amax == 0, 1.0, descale)
    return torch.where(amax.isfinite(), descale, math.nan)


def descale_of(amax: Tensor, fmt: Float8Format, kind: str) -> Tensor:
    """Descale of blocks with the given amax; ``kind`` is ``pow2`` or ``fp32``."""
    return (pow2_descale if kind == "pow2" else fp32_descale)(amax, fmt)


def cast(x: Tensor, fmt: Float8Format) -> Tensor:
    """Clamped, round-to-nearest-even cast to FP8. NaN stays NaN."""
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def round_trip(x: Tensor, fmt: Float8Format) -> Tensor:
    """The FP32 value of ``cast(x)``."""
    return cast(x, fmt).float()


def _pad(x: Tensor, rows: int, cols: int) -> Tensor:
    t, d = x.shape[-2:]
    return torch.nn.functional.pad(x, (0, -d % cols, 0, -t % rows))


def block_amax(x: Tensor, block: Block) -> Tensor:
    """|x| maximum of each block of ``x [..., T, D]``: ``[..., rows, cols]``. Propagates NaN."""
    t, d = x.shape[-2:]
    bt, bd = block.tokens or max(t, 1), block.features or max(d, 1)
    rows, cols = block.descale_shape(t, d)
    if x.numel() == 0:
        return x.new_zeros(*x.shape[:-2], rows, cols)
    a = _pad(x.abs(), bt, bd)
    return a.view(*x.shape[:-2], rows, bt, cols, bd).amax((-3, -1))


def expand_descale(descale: Tensor, block: Block, tokens: int, features: int) -> Tensor:
    """Descale ``[..., rows, cols]`` broadcast to its elements, ``[..., T, D]`` (or ``[..., T, 1]``)."""
    if block.tokens is None:
        rows = descale
    elif block.tokens == 1:
        rows = descale
    else:
        rows = descale.repeat_interleave(block.tokens, -2)[..., :tokens, :]
    if block.features is None or block.features == 1:
        return rows
    return rows.repeat_interleave(block.features, -1)[..., :features]


def quantize(x: Tensor, fmt: Float8Format, block: Block, kind: str = "pow2") -> Quantized:
    """Quantise ``x [..., T, D]`` in blocks over its last two axes.

    Returns:
        payload ``[..., T, D]`` in ``fmt.dtype`` and FP32 descale ``[..., rows, cols]``.
    """
    x = x.float()
    descale = descale_of(block_amax(x, block), fmt, kind)
    return Quantized(apply_descale(x, expand_descale(descale, block, *x.shape[-2:]), fmt), descale)


def apply_descale(x: Tensor, descale: Tensor, fmt: Float8Format) -> Tensor:
    """Payload of ``x`` under a descale broadcast to it; 0 where the descale is NaN."""
    return cast(torch.where(descale.isnan(), 0.0, x * descale.reciprocal()), fmt)


def dequantize(payload: Tensor, descale: Tensor, block: Block) -> Tensor:
    """``payload · descale`` in FP32; the whole block is NaN where its descale is NaN."""
    return payload.float() * expand_descale(descale, block, *payload.shape[-2:])


def round_trip_blocks(x: Tensor, fmt: Float8Format, size: int, dim: int) -> Tensor:
    """FP32 value of ``x`` after a cast with a power-of-two descale per ``size`` elements of ``dim``.

    ``dim`` is −1 or −2. This is the cast of P and dS, which rows of very different magnitude force
    to carry real block scales.
    """
    block = Block("", 1, size) if dim == -1 else Block("", size, 1)
    q = quantize(x, fmt, block)
    return dequantize(q.payload, q.descale, block)
