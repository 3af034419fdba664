"""Small kernels around the attention backward: statistics of a row, and the mean key."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_deltamatch.kernels.casts import exp2_int, round_bf16
from hf_deltamatch.kernels.geometry import segment_of
from hf_deltamatch.kernels.logits import LOG2E
from hf_deltamatch.kernels.quantize_mx import row_codes, spread_blocks


@triton.jit(do_not_specialize=["H", "T"])
def _rows_kernel(
    lse_ptr, lse2_ptr, fold_ptr, do_ptr, o_ptr, do_fp8_ptr, delta_ptr, H, T, Dv,
    D_padded_v, stride_dob, stride_doh, stride_dot, stride_dod, stride_ob, stride_oh,
    stride_ot, stride_od,
    DLSE: tl.constexpr, STALE: tl.constexpr, DEQUANTIZED: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr, MX: tl.constexpr = False,
):  # fmt: skip
    """``lse2``, base 2, as the backward kernels read it: +inf (P = 0) where a row sees nothing and,
    without a gradient of lse, where dO is zero; NaN where dO is poisoned. And the δ of the two
    unmatched rules, rowsum(dO ∘ O) with O in BF16. ``MX``: codes of dO in place of ``fold``, and
    ``lse2`` is plain: what is zero or poisoned shows in the operands."""
    bh = tl.program_id(1)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < T
    row = bh.to(tl.int64) * T + offs
    lse = tl.load(lse_ptr + row, mask=inside, other=0.0)
    if not MX:
        fold = tl.load(fold_ptr + row, mask=inside, other=0.0)
    dead = lse == float("-inf")
    if STALE or DEQUANTIZED:
        b = bh // H
        h = bh % H
        offs_d = tl.arange(0, BLOCK_D)
        t = offs.to(tl.int64)[:, None]
        d = offs_d[None, :]
        use = inside[:, None] & (d < Dv)
        at = b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh + t * stride_ot + d * stride_od
        o = round_bf16(tl.load(o_ptr + at, mask=use, other=0.0).to(tl.float32))
        if STALE:
            at = b.to(tl.int64) * stride_dob + h.to(tl.int64) * stride_doh
            at += t * stride_dot + d * stride_dod
            do = tl.load(do_ptr + at, mask=use, other=0.0).to(tl.float32)
        else:
            do = tl.load(do_fp8_ptr + row[:, None] * D_padded_v + d, mask=use, other=0.0)
            do = do.to(tl.float32)
            if MX:
                descale = exp2_int(row_codes(fold_ptr, row, inside, BLOCK_D // 32).to(tl.int32))
                do = do * spread_blocks(descale, BLOCK_D)
            else:
                do = do * fold[:, None]
        delta = tl.where(dead, 0.0, tl.sum(do * o, 1))
        tl.store(delta_ptr + row, delta, mask=inside)
    lse2 = lse * LOG2E
    if not MX:
        if not DLSE:
            lse2 = tl.where(fold == 0.0, float("inf"), lse2)
        lse2 = tl.where(fold == fold, lse2, float("nan"))
    tl.store(lse2_ptr + row, tl.where(dead, float("inf"), lse2), mask=inside)


@triton.jit(do_not_specialize=["H", "T", "slots", "segments", "first_shown"])
def _mean_key_kernel(
    k_ptr, descale_ptr, hidden_ptr, mean_ptr, cu_ptr, H, T, D, D_padded, slots, segments, offset_ptr,
    first_shown, stride_sb, stride_sh,
    TILE: tl.constexpr, STATE: tl.constexpr, HIDE: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Mean of the dequantised keys of a segment that any query sees, ``[B·Hkv, segments, D]``."""
    segment = tl.program_id(0)
    bh = tl.program_id(1)
    base, length, slot = segment_of(segment, T, cu_ptr, PACKED)
    if HIDE:
        if PACKED:
            first_shown = tl.load(offset_ptr + segment)
    row = bh.to(tl.int64) * T + base
    offs_d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    count = 0
    if STATE:
        hidden_ptr += (bh // H).to(tl.int64) * stride_sb + (bh % H).to(tl.int64) * stride_sh
    for start in range(0, length, 128):
        offs = start + tl.arange(0, 128)
        live = offs < length
        if HIDE:
            live = live & (offs >= first_shown)
        if STATE:
            live = live & (tl.load(hidden_ptr + base + offs, mask=live, other=1) != 1)
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
