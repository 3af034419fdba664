r"""FP8 attention backward by keys: dK and dV, all query heads of a key head in one program.

.. math::  dV = \hat P^T \widehat{dO}, \quad dK = \widehat{dS}^T \hat Q

One kernel, for both or for one of them (``DK``, ``DV``): apart they need a product more, but fit the
registers of more programs. Works on Sᵀ, so that a power of two per key × query tile is a row of the
register operand and leaves the product. δ comes from the query-row kernel; that it still matches
here is what the row sums of the debug store show. Reference: ``reference.attention_bwd`` with
``block_m = BLOCK_M``.

Tiles come by pointers (see ``tiles``), ``*_src``; under ``MX`` these are TMA descriptors, descales are
E8M0 codes, and the transposed copies have their own: see ``attention_mx``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_deltamatch.kernels.attention_mx import dkdv_tile_mx
from hf_deltamatch.kernels.casts import (
    cast_e4m3,
    exp2_int,
    inverse_exp2_int,
    load_negated,
    load_scalar,
    nan_to_zero,
    pow2_exponent,
    regroup_rows,
)
from hf_deltamatch.kernels.geometry import (
    COMPACT_MASK,
    own_program,
    own_segment,
    query_tiles,
    segment_of,
    visible,
)
from hf_deltamatch.kernels.logits import LOG2E, positive, tanh
from hf_deltamatch.kernels.quantize_mx import row_codes
from hf_deltamatch.kernels.tiles import load_columns, load_rows


@triton.jit
def _dkdv_tile(
    i, tiles, first_tile, dk, dv, k, v, k_row, v_row, q_src, do_src, qt_src, dot_src,
    q_descale_ptr, do_descale_ptr, q_fold_ptr, do_fold_ptr, lse2_ptr, shifted_ptr, head, q_base,
    q_slot, offs_n, Tq, Tk, T_queries, D_STORED: tl.constexpr, DV_STORED: tl.constexpr, slots_q,
    offset, window, mask_ptr, stride_mh, stride_mq, stride_mk, softmax_scale, softcap, ds_ptr, T_keys,
    k_base, stride_stat,
    qt_code_ptr, dot_code_ptr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    DLSE: tl.constexpr, TILE: tl.constexpr, GROUPED: tl.constexpr, MASKED: tl.constexpr,
    STORE_DS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    SOFT_CAST: tl.constexpr, MX: tl.constexpr,
):  # fmt: skip
    if MX:
        return dkdv_tile_mx(
            i, tiles, first_tile, dk, dv, k, v, k_row, v_row, q_src, do_src, qt_src, dot_src,
            q_descale_ptr, do_descale_ptr, qt_code_ptr, dot_code_ptr, q_fold_ptr, do_fold_ptr,
            lse2_ptr, shifted_ptr, head, q_base, q_slot, offs_n, Tq, Tk, T_queries, D_STORED,
            DV_STORED, slots_q, offset, window, mask_ptr, stride_mh, stride_mq, stride_mk,
            softmax_scale, softcap, ds_ptr, T_keys, k_base, stride_stat, CAUSAL, WINDOW, MASK,
            SOFTCAP, GROUPED, MASKED, STORE_DS, DK, DV, BLOCK_M, SOFT_CAST,
        )  # fmt: skip
    else:
        return _dkdv_tile_fp8(
            i, tiles, first_tile, dk, dv, k, v, k_row, v_row, q_src, do_src, qt_src, dot_src,
            q_descale_ptr, do_descale_ptr, q_fold_ptr, do_fold_ptr, lse2_ptr, shifted_ptr, head,
            q_base, q_slot, offs_n, Tq, Tk, T_queries, D_STORED, DV_STORED, slots_q, offset, window,
            mask_ptr, stride_mh, stride_mq, stride_mk, softmax_scale, softcap, ds_ptr, T_keys,
            k_base, stride_stat, CAUSAL, WINDOW, MASK, SOFTCAP, DLSE, TILE, GROUPED, MASKED,
            STORE_DS, DK, DV, BLOCK_M, SOFT_CAST,
        )  # fmt: skip


@triton.jit
def _dkdv_tile_fp8(
    i, tiles, first_tile, dk, dv, k, v, k_row, v_row, q_src, do_src, qt_src, dot_src,
    q_descale_ptr, do_descale_ptr, q_fold_ptr, do_fold_ptr, lse2_ptr, shifted_ptr, head, q_base,
    q_slot, offs_n, Tq, Tk, T_queries, D_STORED: tl.constexpr, DV_STORED: tl.constexpr, slots_q,
    offset, window, mask_ptr, stride_mh, stride_mq, stride_mk, softmax_scale, softcap, ds_ptr, T_keys,
    k_base, stride_stat,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    DLSE: tl.constexpr, TILE: tl.constexpr, GROUPED: tl.constexpr, MASKED: tl.constexpr,
    STORE_DS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    SOFT_CAST: tl.constexpr,
):  # fmt: skip
    """Query tile ``i`` of ``G · tiles``: query head ``i // tiles`` of this key head."""
    if GROUPED:
        # An empty loop is still looked ahead into; a division by zero there is a wild read.
        group = i // tl.maximum(tiles, 1)
        bh = head + group
        start = (first_tile + i - group * tiles) * BLOCK_M
        if MASK != 0:
            mask_ptr += group.to(tl.int64) * stride_mh
    else:
        bh = head
        start = (first_tile + i) * BLOCK_M
    offs_m = start + tl.arange(0, BLOCK_M)
    at = bh * T_queries + q_base
    row = bh.to(tl.int64) * T_queries + q_base
    stat = bh.to(tl.int64) * stride_stat + q_slot * 128
    inside = offs_m < Tq
    q = load_rows(q_src, at, start, Tq, BLOCK_M, k.shape[1], D_STORED, not MASKED)
    s = tl.dot(k, q.T)
    minus_lse2 = load_negated(lse2_ptr + stat + offs_m, SOFT_CAST)
    if TILE:
        slot = bh * slots_q + q_slot + start // 128
        q_tile = load_scalar(q_descale_ptr + slot, SOFT_CAST)
        do_tile = load_scalar(do_descale_ptr + slot, SOFT_CAST)
        f = k_row * q_tile
        g = v_row * do_tile
    else:
        q_column = tl.load(q_descale_ptr + row + offs_m, mask=inside, other=1.0)
        do_column = tl.load(do_descale_ptr + row + offs_m, mask=inside, other=1.0)
        f = k_row[:, None] * q_column[None, :]
        g = v_row[:, None] * do_column[None, :]
    if SOFTCAP:
        t = tanh(s * (f * (softmax_scale / softcap)), SOFTCAP)
        p = tl.exp2(t * (softcap * LOG2E) + minus_lse2[None, :])
    elif TILE:
        p = tl.exp2(s * positive(f * (softmax_scale * LOG2E)) + minus_lse2[None, :])
    else:
        p = tl.exp2((s * f) * (softmax_scale * LOG2E) + minus_lse2[None, :])
    if MASKED:
        seen = visible(
            offs_m[None, :], offs_n[:, None], Tq, Tk, offset, window, mask_ptr, stride_mq,
            stride_mk, CAUSAL, WINDOW, MASK,
        )  # fmt: skip
        p = tl.where(seen, p, 0.0)
        if SOFTCAP:  # 0 · NaN where a query or key is NaN that this pair hides
            t = tl.where(seen, t, 0.0)
    if DK:
        minus_shifted = load_negated(shifted_ptr + stat + offs_m, SOFT_CAST)
        do = load_rows(do_src, at, start, Tq, BLOCK_M, v.shape[1], DV_STORED, not MASKED)
        dp = tl.dot(v, do.T)
        ds = p * (dp * g + minus_shifted[None, :])
        if MASKED:
            ds = tl.where(seen, ds, 0.0)
        if STORE_DS:
            at = (row + offs_m.to(tl.int64))[None, :] * T_keys + k_base + offs_n[:, None]
            tl.store(ds_ptr + at, ds, mask=inside[None, :] & (offs_n < Tk)[:, None])
        if SOFTCAP:
            ds = ds * (1.0 - t * t)
    if DV:
        # Rows of dO that are zero add nothing to dV (unless P is NaN) and must not raise a descale of P: their
        # lse2 is +inf, so P is already 0, unless a gradient of lse needs it.
        if not TILE or DLSE:
            fold = tl.load(do_fold_ptr + row + offs_m, mask=inside, other=0.0)
        if not TILE:
            p = p * nan_to_zero(fold)[None, :]
        largest = p
        if TILE and DLSE:
            largest = tl.where((fold == 0.0)[None, :], 0.0, p)
        e = pow2_exponent(tl.max(largest, 1))
        cast = cast_e4m3(p * inverse_exp2_int(e)[:, None], SOFT_CAST)
        back = exp2_int(e)
        if TILE:
            back = back * nan_to_zero(do_tile)
        do_t = load_columns(
            dot_src, bh * DV_STORED, q_slot, start, slots_q, BLOCK_M, v.shape[1], DV_STORED
        )
        dv += tl.dot(regroup_rows(cast), do_t.T) * back[:, None]
    if DK:
        if not TILE:
            fold = tl.load(q_fold_ptr + row + offs_m, mask=inside, other=0.0)
            ds = ds * nan_to_zero(fold)[None, :]
        e = pow2_exponent(tl.max(tl.abs(ds), 1))
        cast = cast_e4m3(ds * inverse_exp2_int(e)[:, None], SOFT_CAST)
        back = exp2_int(e)
        if TILE:
            back = back * nan_to_zero(q_tile)
        q_t = load_columns(
            qt_src, bh * D_STORED, q_slot, start, slots_q, BLOCK_M, k.shape[1], D_STORED
        )
        dk += tl.dot(regroup_rows(cast), q_t.T) * back[:, None]
    return dk, dv


@triton.jit(do_not_specialize=["heads_at_once", "places"])
def _attention_bwd_dkdv_kernel(
    q_src, do_src, qt_src, dot_src, k_src, v_src, dk_ptr, dv_ptr, lse2_ptr, shifted_ptr,
    q_descale_ptr, do_descale_ptr, k_descale_ptr, v_descale_ptr, q_fold_ptr, do_fold_ptr, ds_ptr,
    mask_ptr, bounds_ptr, cu_q_ptr, cu_k_ptr, segment_k_ptr,
    heads_at_once, places, Hkv, G, Tq, Tk, D, Dv, slots_q, slots_k, softmax_scale, softcap, window,
    mask_heads, stride_stat, stride_dkb, stride_dkh, stride_dkt, stride_dvb, stride_dvh, stride_dvt,
    stride_mb,
    stride_mh, stride_mq, stride_mk,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    DLSE: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr, GROUPED: tl.constexpr,
    STORE_DS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, D_STORED: tl.constexpr, DV_STORED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SOFT_CAST: tl.constexpr,
    qt_code_ptr=None, dot_code_ptr=None, MX: tl.constexpr = False,
):  # fmt: skip
    tile, bh = own_program(heads_at_once, places)  # the first keys have the most causal rows
    b = bh // Hkv
    h = bh % Hkv
    head = b * (Hkv * G) + h * G
    segment, k_base, k_len, k_slot, first = own_segment(
        tile, Tk, cu_k_ptr, segment_k_ptr, BLOCK_N, PACKED
    )
    if first >= k_len:
        return
    q_base, q_len, q_slot = segment_of(segment, Tq, cu_q_ptr, PACKED)
    offset = k_len - q_len
    if MASK != 0:
        mask_ptr += b.to(tl.int64) * stride_mb + (h * G).to(tl.int64) * stride_mh
        if MASK == COMPACT_MASK:
            offset = tl.load(mask_ptr + 2 * Tk)
        bounds_ptr += ((b * mask_heads + h % mask_heads) * slots_k + first // 128) * 2
    lo, full_lo, full_hi, hi = query_tiles(
        first, q_len, k_len, offset, window, bounds_ptr, CAUSAL, WINDOW, MASK, BLOCK_M, BLOCK_N
    )
    offs_n = first + tl.arange(0, BLOCK_N)
    keys = offs_n < k_len
    if MX:
        k = k_src.load([bh * Tk + k_base + first, 0])
        v = v_src.load([bh * Tk + k_base + first, 0])
    else:
        at = bh * Tk + k_base
        k = load_rows(k_src, at, first, k_len, BLOCK_N, BLOCK_D, D_STORED, False)
        v = load_rows(v_src, at, first, k_len, BLOCK_N, BLOCK_DV, DV_STORED, False)
    if MX:
        at = bh.to(tl.int64) * Tk + k_base + offs_n
        k_row = row_codes(k_descale_ptr, at, keys, BLOCK_D // 32)
        v_row = row_codes(v_descale_ptr, at, keys, BLOCK_DV // 32)
    elif TILE:
        k_row = tl.load(k_descale_ptr + bh * slots_k + k_slot + first // 128)
        v_row = tl.load(v_descale_ptr + bh * slots_k + k_slot + first // 128)
    else:
        at = bh.to(tl.int64) * Tk + k_base + offs_n
        k_row = tl.load(k_descale_ptr + at, mask=keys, other=1.0)
        v_row = tl.load(v_descale_ptr + at, mask=keys, other=1.0)
    dk = tl.zeros([BLOCK_N, BLOCK_D if DK else 1], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV if DV else 1], tl.float32)
    for i in tl.range(0, G * (full_lo - lo), num_stages=STAGES):
        dk, dv = _dkdv_tile(
            i, full_lo - lo, lo, dk, dv, k, v, k_row, v_row, q_src, do_src, qt_src, dot_src,
            q_descale_ptr, do_descale_ptr, q_fold_ptr, do_fold_ptr, lse2_ptr, shifted_ptr, head,
            q_base, q_slot, offs_n, q_len, k_len, Tq, D_STORED, DV_STORED, slots_q, offset, window,
            mask_ptr, stride_mh, stride_mq, stride_mk, softmax_scale, softcap, ds_ptr, Tk, k_base,
            stride_stat, qt_code_ptr, dot_code_ptr, CAUSAL, WINDOW, MASK, SOFTCAP, DLSE, TILE,
            GROUPED, True, STORE_DS, DK, DV, BLOCK_M, SOFT_CAST, MX,
        )  # fmt: skip
    if MASK == 0:
        for i in tl.range(0, G * (full_hi - full_lo), num_stages=STAGES):
            dk, dv = _dkdv_tile(
                i, full_hi - full_lo, full_lo, dk, dv, k, v, k_row, v_row, q_src, do_src, qt_src,
                dot_src, q_descale_ptr, do_descale_ptr, q_fold_ptr, do_fold_ptr, lse2_ptr,
                shifted_ptr, head, q_base, q_slot, offs_n, q_len, k_len, Tq, D_STORED, DV_STORED,
                slots_q, offset, window, mask_ptr, stride_mh, stride_mq, stride_mk, softmax_scale,
                softcap, ds_ptr, Tk, k_base, stride_stat, qt_code_ptr, dot_code_ptr, CAUSAL, WINDOW,
                MASK, SOFTCAP, DLSE, TILE, GROUPED, False, STORE_DS, DK, DV, BLOCK_M, SOFT_CAST, MX,
            )  # fmt: skip
        # The ragged end, and the far side of a window.
        for i in tl.range(0, G * (hi - full_hi), num_stages=STAGES):
            dk, dv = _dkdv_tile(
                i, hi - full_hi, full_hi, dk, dv, k, v, k_row, v_row, q_src, do_src, qt_src,
                dot_src, q_descale_ptr, do_descale_ptr, q_fold_ptr, do_fold_ptr, lse2_ptr,
                shifted_ptr, head, q_base, q_slot, offs_n, q_len, k_len, Tq, D_STORED, DV_STORED,
                slots_q, offset, window, mask_ptr, stride_mh, stride_mq, stride_mk, softmax_scale,
                softcap, ds_ptr, Tk, k_base, stride_stat, qt_code_ptr, dot_code_ptr, CAUSAL, WINDOW,
                MASK, SOFTCAP, DLSE, TILE, GROUPED, True, STORE_DS, DK, DV, BLOCK_M, SOFT_CAST, MX,
            )  # fmt: skip
    if DK:
        offs_d = tl.arange(0, BLOCK_D)
        dk_ptr += b.to(tl.int64) * stride_dkb + h.to(tl.int64) * stride_dkh
        at = (k_base + offs_n).to(tl.int64)[:, None] * stride_dkt + offs_d[None, :]
        out = (dk * softmax_scale).to(dk_ptr.dtype.element_ty)
        tl.store(dk_ptr + at, out, mask=keys[:, None] & (offs_d < D)[None, :])
    if DV:
        offs_d = tl.arange(0, BLOCK_DV)
        dv_ptr += b.to(tl.int64) * stride_dvb + h.to(tl.int64) * stride_dvh
        at = (k_base + offs_n).to(tl.int64)[:, None] * stride_dvt + offs_d[None, :]
        out = dv.to(dv_ptr.dtype.element_ty)
        tl.store(dv_ptr + at, out, mask=keys[:, None] & (offs_d < Dv)[None, :])
