"""Around the attention backward: statistics of a row, and the mean key."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_deltamatch.kernels.casts import round_bf16, widen
from hf_deltamatch.kernels.geometry import segment_of
from hf_deltamatch.kernels.logits import LOG2E


@triton.jit
def row_lse2(lse, fold, DLSE: tl.constexpr):
    """lse in base 2, as the backward kernels read it: +inf (P = 0) where a row sees nothing and,
    without a gradient of lse, where dO is zero (``fold`` 0); NaN where dO or what the row sees is poisoned."""
    lse2 = lse * LOG2E
    if not DLSE:
        lse2 = tl.where((fold == 0.0) & (lse == lse), float("inf"), lse2)
    lse2 = tl.where(fold == fold, lse2, float("nan"))
    return tl.where(lse == float("-inf"), float("inf"), lse2)


@triton.jit
def row_delta(do, o, lse, SOFT_CAST: tl.constexpr):
    """δ of the unmatched rules, or the estimate that one pass starts from: rowsum(dO ∘ O) with O in BF16; 0
    where a row sees nothing. The last axis of ``do`` and ``o`` holds the features."""
    bf16 = widen(o, SOFT_CAST)
    if o.dtype != tl.bfloat16:
        bf16 = round_bf16(bf16)
    delta = tl.sum(do * bf16, len(do.shape) - 1)
    return tl.where(lse == float("-inf"), 0.0, delta)


@triton.jit
def store_row_statistics(
    do, lse, fold, offs_t, inside, row, stat, o_ptr, dlse_ptr, lse2_ptr, delta_ptr, shifted_ptr, Dv,
    stride_ot, stride_od, SOFT_CAST: tl.constexpr,
):  # fmt: skip
    """``lse2`` and, where ``o`` is given (unmatched rules, and as an estimate), ``delta`` and ``delta − dlse``
    of rows of ``do``, whose last axis holds the features. ``row`` and ``stat``: where the rows lie in plain
    tensors and in slots; ``o_ptr`` points at the first row that ``offs_t`` counts from."""
    tl.store(lse2_ptr + stat, row_lse2(lse, fold, dlse_ptr is not None), mask=inside)
    if o_ptr is not None:
        offs_d = tl.arange(0, do.shape[len(do.shape) - 1])
        at = tl.expand_dims(offs_t.to(tl.int64), len(offs_t.shape)) * stride_ot + offs_d * stride_od
        use = tl.expand_dims(inside, len(offs_t.shape)) & (offs_d < Dv)
        delta = row_delta(do, tl.load(o_ptr + at, mask=use, other=0.0), lse, SOFT_CAST)
        tl.store(delta_ptr + row, delta, mask=inside)
        if dlse_ptr is not None:
            dlse = tl.load(dlse_ptr + row, mask=inside, other=0.0)
            delta = delta - tl.where(lse == float("-inf"), 0.0, dlse)
        tl.store(shifted_ptr + stat, delta, mask=inside)


@triton.jit(do_not_specialize=["H", "T", "T_queries", "slots", "segments", "hide"])
def _mean_key_kernel(
    k_ptr, descale_ptr, state_ptr, mean_ptr, cu_ptr, cu_q_ptr, H, T, T_queries, D, D_padded, slots,
    segments, hide, stride_sb, stride_sh, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Mean of the dequantised keys of a segment that any query sees, ``[B·Hkv, segments, D]``.
    ``state`` and ``hide`` as in ``quantize._quantize_slot``."""
    segment = tl.program_id(0) % segments
    bh = tl.program_id(0) // segments
    base, length, slot = segment_of(segment, T, cu_ptr, cu_ptr is not None)
    _, other, _ = segment_of(segment, T_queries, cu_q_ptr, cu_q_ptr is not None)
    row = bh.to(tl.int64) * T + base
    offs_d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    count = 0
    if state_ptr is not None:
        state_ptr += (bh // H).to(tl.int64) * stride_sb + (bh % H).to(tl.int64) * stride_sh
    for start in range(0, length, 128):
        offs = start + tl.arange(0, 128)
        live = offs < length
        if hide is not None:
            live = live & (offs >= length - other + hide)
        if state_ptr is not None:
            live = live & (tl.load(state_ptr + base + offs, mask=live, other=1) != 1)
        at = (row + offs)[:, None] * D_padded + offs_d[None, :]
        k = tl.load(k_ptr + at, mask=live[:, None] & (offs_d < D)[None, :], other=0.0)
        k = k.to(tl.float32)
        if TILE:
            descale = tl.load(descale_ptr + bh * slots + slot + start // 128)
            k = k * tl.where(descale == descale, descale, 0.0)
        else:
            descale = tl.load(descale_ptr + row + offs, mask=live, other=0.0)
            k = k * tl.where(descale == descale, descale, 0.0)[:, None]
        total += tl.sum(k, 0)
        count += tl.sum(live.to(tl.int32), 0)
    mean = total / tl.maximum(count, 1).to(tl.float32)
    tl.store(mean_ptr + (bh * segments + segment) * D + offs_d, mean, mask=offs_d < D)
