r"""FP8 attention backward by query rows: the matched δ, and dQ.

.. math::
    \delta_i = \sum_j P_{ij} dP_{ij} \Big/ \Big(\sum_j P_{ij} + P_{sink,i}\Big), \quad
    dS = P \circ (dP - \delta), \quad dQ = \widehat{dS}\, \hat K

The δ pass and the dQ pass are one kernel with a switch: both recompute P and dP by the same
instructions from the same FP8 operands, which is what makes δ match. dS is cast with a power of two
per query row × key tile, which leaves the product. ``MX``: descales are E8M0 codes, those of Kᵀ in
place of the fold; see ``attention_mx``. Reference: ``reference.attention_bwd``.

``ONE_PASS``: both in one sweep, from an estimate z of δ, with four products instead of five:

.. math::
    U = \widehat{P \circ (dP - z)}\, \hat K, \quad W = \widehat P \hat K, \quad dQ = U - (\delta - z) W

δ is exact whatever z is; the nearer z, the less W has to do, so W may be coarse: P is cast to E5M2,
times 2¹⁵ (P ≤ 1, and E5M2 reaches down to 2⁻³¹ so), and W adds up in the tensor cores, in units of
K's latest descale (see ``unit_of``). ``FIXED_UNIT``: in units of K's largest, what another tile's descale is
less goes into P; that saves the multiplication of W.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_deltamatch.formats import P_SWEEP_CAST_LOG2
from hf_deltamatch.kernels.attention_mx import dq_tile_mx
from hf_deltamatch.kernels.casts import (
    cast_and_rest,
    cast_e4m3,
    cast_e5m2,
    exp2_int,
    inverse_exp2_int,
    load_scalar,
    nan_to_zero,
    pow2_exponent,
    reciprocal,
    regroup_rows,
    unknown_zero,
)
from hf_deltamatch.kernels.geometry import (
    COMPACT_MASK,
    key_tiles,
    own_program,
    own_segment,
    segment_of,
    visible,
)
from hf_deltamatch.kernels.logits import LOG2E, positive, tanh
from hf_deltamatch.kernels.quantize_mx import row_codes

LIFT = tl.constexpr(float(P_SWEEP_CAST_LOG2))
LOWER = tl.constexpr(2.0**-P_SWEEP_CAST_LOG2)


@triton.jit
def unit_of(own, top):
    """Unit of W from a tile of descale ``own`` on, where ``top`` is the largest descale so far: its own, or
    2⁻⁸⁰ of the largest, or W would overflow. What is smaller than that counts for as little."""
    return tl.maximum(own, top * 2.0**-80)


@triton.jit
def _dq_tile(
    n, acc, key, unit, top, sum_a, sum_b, leak, q, do, q_row, do_row, lse2, shifted, k_desc, v_desc, kt_desc,
    k_descale_ptr, v_descale_ptr, k_fold_ptr, k_row, kt_row, k_slot, offs_m, Tq, Tk, offset, window,
    mask_ptr, stride_mq, stride_mk, softmax_scale, softcap, ds_ptr, p_ptr, T_keys, k_base,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr, DELTA: tl.constexpr, ONE_PASS: tl.constexpr,
    PROJECT: tl.constexpr, ROW_SUMS: tl.constexpr, STORE_DS: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFT_CAST: tl.constexpr, MX: tl.constexpr, FIXED_UNIT: tl.constexpr = False,
):  # fmt: skip
    if MX:
        acc, sum_a, sum_b, leak = dq_tile_mx(
            n, acc, sum_a, sum_b, leak, q, do, q_row, do_row, lse2, shifted, k_desc, v_desc, kt_desc,
            k_descale_ptr, v_descale_ptr, k_fold_ptr, k_row, kt_row, k_slot, offs_m, Tq, Tk, offset,
            window, mask_ptr, stride_mq, stride_mk, softmax_scale, softcap, ds_ptr, T_keys, k_base,
            CAUSAL, WINDOW, MASK, SOFTCAP, MASKED, DELTA, PROJECT, ROW_SUMS, STORE_DS, BLOCK_N,
            SOFT_CAST,
        )  # fmt: skip
        return acc, key, unit, top, sum_a, sum_b, leak
    else:
        return _dq_tile_fp8(
            n, acc, key, unit, top, sum_a, sum_b, leak, q, do, q_row, do_row, lse2, shifted, k_desc, v_desc, kt_desc,
            k_descale_ptr, v_descale_ptr, k_fold_ptr, k_row, kt_row, k_slot, offs_m, Tq, Tk, offset,
            window, mask_ptr, stride_mq, stride_mk, softmax_scale, softcap, ds_ptr, p_ptr, T_keys,
            k_base,
            CAUSAL, WINDOW, MASK, SOFTCAP, TILE, MASKED, DELTA, ONE_PASS, PROJECT, ROW_SUMS,
            STORE_DS, BLOCK_N, SOFT_CAST, FIXED_UNIT,
        )  # fmt: skip


@triton.jit
def _dq_tile_fp8(
    n, acc, key, unit, top, sum_a, sum_b, leak, q, do, q_row, do_row, lse2, shifted, k_desc, v_desc, kt_desc,
    k_descale_ptr, v_descale_ptr, k_fold_ptr, k_row, kt_row, k_slot, offs_m, Tq, Tk, offset, window,
    mask_ptr, stride_mq, stride_mk, softmax_scale, softcap, ds_ptr, p_ptr, T_keys, k_base,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr, DELTA: tl.constexpr, ONE_PASS: tl.constexpr,
    PROJECT: tl.constexpr, ROW_SUMS: tl.constexpr, STORE_DS: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFT_CAST: tl.constexpr, FIXED_UNIT: tl.constexpr,
):  # fmt: skip
    """One key tile. ``sum_a, sum_b``: ΣP·dP and ΣP for δ, ΣP·(dP − z) and ΣP in one pass; for dQ the
    row sums ΣdS and Σ|dS| (FP64) if they are asked for. ``leak``: what the cast of dS adds to its row
    sums. ``key``: W / ``unit``. In one pass ``lse2`` comes less 15, ``shifted`` times 2⁻¹⁵."""
    start = n * BLOCK_N
    offs_n = start + tl.arange(0, BLOCK_N)
    k = k_desc.load([k_row + start, 0])
    v = v_desc.load([k_row + start, 0])
    s = tl.dot(q, k.T)
    dp = tl.dot(do, v.T)
    if TILE:
        k_tile = load_scalar(k_descale_ptr + start // 128, SOFT_CAST)
        f = q_row * k_tile
        g = do_row * load_scalar(v_descale_ptr + start // 128, SOFT_CAST)
        if ONE_PASS:
            lower = LOWER
            own = tl.where(k_tile == k_tile, k_tile, unit)
            if FIXED_UNIT:
                change = unit * reciprocal(own, SOFT_CAST)
                lower = LOWER * change
                lse2 += tl.log2(change)
                shifted *= change
            g = g * lower
    else:
        inside = offs_n < Tk
        f = q_row[:, None] * tl.load(k_descale_ptr + offs_n, mask=inside, other=1.0)[None, :]
        g = do_row[:, None] * tl.load(v_descale_ptr + offs_n, mask=inside, other=1.0)[None, :]
    if SOFTCAP:
        t = tanh(s * (f * (softmax_scale / softcap)), SOFTCAP)
        p = tl.exp2(t * (softcap * LOG2E) - lse2[:, None])
    elif TILE:
        p = tl.exp2(s * positive(f * (softmax_scale * LOG2E)) - lse2[:, None])
    else:
        p = tl.exp2((s * f) * (softmax_scale * LOG2E) - lse2[:, None])
    if not DELTA or MASKED or not TILE:
        dp = dp * g
    if MASKED:
        seen = visible(
            offs_m[:, None], offs_n[None, :], Tq, Tk, offset, window, mask_ptr, stride_mq,
            stride_mk, CAUSAL, WINDOW, MASK,
        )  # fmt: skip
        p = tl.where(seen, p, 0.0)
        if SOFTCAP:  # 0 · NaN where a query or key is NaN that this pair hides
            t = tl.where(seen, t, 0.0)
        dp = tl.where(seen, dp, 0.0)
    if DELTA:
        if MASKED or not TILE:
            sum_a += tl.sum(p * dp, 1)
        else:  # every row sees the tile, so one factor after the sum will do
            sum_a += tl.sum(p * dp, 1) * g
        sum_b += tl.sum(p, 1)
    else:
        ds = p * (dp - shifted[:, None])
        if MASKED:
            ds = tl.where(seen, ds, 0.0)
        if ROW_SUMS:
            sum_a += tl.sum(ds.to(tl.float64), 1)
            sum_b += tl.sum(tl.abs(ds.to(tl.float64)), 1)
        if STORE_DS:
            at = offs_m.to(tl.int64)[:, None] * T_keys + k_base + offs_n[None, :]
            inside = (offs_m < Tq)[:, None] & (offs_n < Tk)[None, :]
            tl.store(ds_ptr + at, ds, mask=inside)
            if ONE_PASS:
                tl.store(p_ptr + at, p * lower, mask=inside)
        if ONE_PASS:
            sum_a += tl.sum(ds, 1)
            sum_b += tl.sum(p, 1) * lower
        if SOFTCAP:
            ds = ds * (1.0 - t * t)
            if ONE_PASS:
                p = p * (1.0 - t * t)
        if TILE:
            out = nan_to_zero(k_tile)
            folded = ds
        else:
            fold = nan_to_zero(tl.load(k_fold_ptr + offs_n, mask=offs_n < Tk, other=0.0))
            folded = ds * fold[None, :]
        e = pow2_exponent(tl.max(tl.abs(folded), 1))
        scaled = folded * inverse_exp2_int(e)[:, None]
        back = exp2_int(e)
        if PROJECT:
            cast, rest = cast_and_rest(scaled, unknown_zero(softcap, SOFT_CAST), False, SOFT_CAST)
            if not TILE:
                # Zero keys were left out of the cast; nothing leaks along them.
                rest = tl.where(
                    (fold == 0)[None, :], 0.0, rest / tl.where(fold == 0, 1.0, fold)[None, :]
                )
            leak -= tl.sum(rest, 1) * back
        else:
            cast = cast_e4m3(scaled, SOFT_CAST)
        if TILE:
            back = back * out
        kt = kt_desc.load([kt_row, (k_slot + start // 128) * 128 + start % 128])
        if ONE_PASS:
            if not FIXED_UNIT:
                top = tl.maximum(top, nan_to_zero(k_tile))
                own_unit = unit_of(own, top)
                key *= unit * reciprocal(own_unit, SOFT_CAST)
                unit = own_unit
                p *= own * reciprocal(own_unit, SOFT_CAST)
            key = tl.dot(regroup_rows(cast_e5m2(p, SOFT_CAST)), kt.T, key)
        acc += tl.dot(regroup_rows(cast), kt.T) * back[:, None]
    return acc, key, unit, top, sum_a, sum_b, leak


@triton.jit
def _largest_descale(k_descale_ptr, lo, hi, top, BLOCK_N: tl.constexpr):
    """The largest of ``top`` and the descales of K's tiles ``lo … hi − 1``, and whether the smallest is within
    2⁻⁸ of it, so that P keeps its precision in E5M2. NaN (a poisoned tile holds zeros) is passed over."""
    first = lo * BLOCK_N // 128
    end = (hi * BLOCK_N + 127) // 128
    largest = top
    smallest = float("inf")
    for slot in range(first, end, 128):
        at = slot + tl.arange(0, 128)
        descale = tl.load(k_descale_ptr + at, mask=at < end, other=float("nan"))
        known = descale == descale
        largest = tl.maximum(largest, tl.max(tl.where(known, descale, 0.0), 0))
        smallest = tl.minimum(smallest, tl.min(tl.where(known, descale, float("inf")), 0))
    return largest, (largest > 0.0) & (smallest >= largest * 0.00390625)


@triton.jit(do_not_specialize=["heads_at_once", "places"])
def _attention_bwd_dq_kernel(
    q_desc, do_desc, k_desc, v_desc, kt_desc, dq_ptr, delta_ptr, shifted_ptr, dlse_ptr, lse2_ptr,
    q_descale_ptr, do_descale_ptr, k_descale_ptr, v_descale_ptr, k_fold_ptr, sinks_ptr,
    mean_key_ptr, ds_ptr, p_ptr, row_sum_ptr, mask_ptr, bounds_ptr, cu_q_ptr, cu_k_ptr, segment_q_ptr,
    heads_at_once, places, Hq, G, Tq, Tk, D, D_padded, slots_q, slots_k, segments, softmax_scale,
    softcap, window, mask_heads, stride_stat, stride_dqb, stride_dqh, stride_dqt, stride_mb,
    stride_mh, stride_mq, stride_mk,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, DLSE: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr,
    DELTA: tl.constexpr, PROJECT: tl.constexpr, ROW_SUMS: tl.constexpr, STORE_DS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SOFT_CAST: tl.constexpr, MX: tl.constexpr = False, ONE_PASS: tl.constexpr = False,
):  # fmt: skip
    place, bh = own_program(heads_at_once, places)
    tile = places - 1 - place  # the longest causal rows first
    b = bh // Hq
    h = bh % Hq
    kv = b * (Hq // G) + h // G
    segment, q_base, q_len, q_slot, first = own_segment(
        tile, Tq, cu_q_ptr, segment_q_ptr, BLOCK_M, PACKED
    )
    if first >= q_len:
        return
    k_base, k_len, k_slot = segment_of(segment, Tk, cu_k_ptr, PACKED)
    offset = k_len - q_len
    if MASK != 0:
        mask_ptr += b.to(tl.int64) * stride_mb + h.to(tl.int64) * stride_mh
        if MASK == COMPACT_MASK:
            offset = tl.load(mask_ptr + 2 * Tk)
        bounds_ptr += ((b * mask_heads + h % mask_heads) * slots_q + first // 128) * 2
    lo, full_lo, full_hi, hi = key_tiles(
        first, q_len, k_len, offset, window, bounds_ptr, CAUSAL, WINDOW, MASK, BLOCK_M, BLOCK_N
    )
    offs_m = first + tl.arange(0, BLOCK_M)
    rows = offs_m < q_len
    row = bh.to(tl.int64) * Tq + q_base
    stat = bh.to(tl.int64) * stride_stat + q_slot * 128
    q = q_desc.load([bh * Tq + q_base + first, 0])
    do = do_desc.load([bh * Tq + q_base + first, 0])
    if MX:
        COLUMNS: tl.constexpr = q.shape[1] // 32
        COLUMNS_V: tl.constexpr = do.shape[1] // 32
        q_row = row_codes(q_descale_ptr, row + offs_m, rows, COLUMNS)
        do_row = row_codes(do_descale_ptr, row + offs_m, rows, COLUMNS_V)
        k_descale_ptr += (kv.to(tl.int64) * Tk + k_base) * COLUMNS
        v_descale_ptr += (kv.to(tl.int64) * Tk + k_base) * COLUMNS_V
        k_fold_ptr += (kv * slots_k + k_slot).to(tl.int64) * (4 * (BLOCK_D + 16))
    elif TILE:
        q_row = tl.load(q_descale_ptr + bh * slots_q + q_slot + first // 128)
        do_row = tl.load(do_descale_ptr + bh * slots_q + q_slot + first // 128)
        k_descale_ptr += kv * slots_k + k_slot
        v_descale_ptr += kv * slots_k + k_slot
    else:
        q_row = tl.load(q_descale_ptr + row + offs_m, mask=rows, other=1.0)
        do_row = tl.load(do_descale_ptr + row + offs_m, mask=rows, other=1.0)
        k_descale_ptr += kv.to(tl.int64) * Tk + k_base
        v_descale_ptr += kv.to(tl.int64) * Tk + k_base
        k_fold_ptr += kv.to(tl.int64) * Tk + k_base
    lse2 = tl.load(lse2_ptr + stat + offs_m, mask=rows, other=float("inf"))
    k_row = kv * Tk + k_base
    kt_row = kv * D_padded
    if STORE_DS:
        ds_ptr += row * Tk
        if ONE_PASS:
            p_ptr += row * Tk
    if DELTA:
        shifted = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, 1], tl.float32)
    else:
        shifted = tl.load(shifted_ptr + stat + offs_m, mask=rows, other=0.0)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    SUMS: tl.constexpr = tl.float64 if ROW_SUMS else tl.float32
    sum_a = tl.zeros([BLOCK_M], SUMS)
    sum_b = tl.zeros([BLOCK_M], SUMS)
    leak = tl.zeros([BLOCK_M], tl.float32)
    unit = 1.0
    top = 0.0
    key = leak
    if ONE_PASS:
        # An estimate that is no number would stay in what it is taken out of again.
        z = tl.where(tl.abs(shifted) < float("inf"), shifted, 0.0)
        shifted = z * LOWER
        lse2 -= LIFT
        key = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in tl.range(0, hi - full_hi, num_stages=STAGES):
        acc, key, unit, top, sum_a, sum_b, leak = _dq_tile(
            hi - 1 - i, acc, key, unit, top, sum_a, sum_b, leak, q, do, q_row, do_row, lse2, shifted,
            k_desc, v_desc, kt_desc, k_descale_ptr, v_descale_ptr, k_fold_ptr, k_row, kt_row, k_slot,
            offs_m, q_len, k_len, offset, window, mask_ptr, stride_mq, stride_mk, softmax_scale,
            softcap, ds_ptr, p_ptr, Tk, k_base, CAUSAL, WINDOW, MASK, SOFTCAP, TILE, True, DELTA,
            ONE_PASS, PROJECT, ROW_SUMS, STORE_DS, BLOCK_N, SOFT_CAST, MX,
        )  # fmt: skip
    if MASK == 0:
        inner = full_hi - full_lo
        if ONE_PASS:
            top, fits = _largest_descale(k_descale_ptr, full_lo, full_hi, top, BLOCK_N)
            fixed = tl.where(fits, inner, 0)
            if fixed > 0:
                key = key * (unit / top)
                unit = top
            for i in tl.range(0, fixed, num_stages=STAGES):
                acc, key, unit, top, sum_a, sum_b, leak = _dq_tile(
                    full_hi - 1 - i, acc, key, unit, top, sum_a, sum_b, leak, q, do, q_row, do_row, lse2,
                    shifted, k_desc, v_desc, kt_desc, k_descale_ptr, v_descale_ptr, k_fold_ptr, k_row,
                    kt_row, k_slot, offs_m, q_len, k_len, offset, window, mask_ptr, stride_mq,
                    stride_mk, softmax_scale, softcap, ds_ptr, p_ptr, Tk, k_base, CAUSAL, WINDOW, MASK,
                    SOFTCAP, TILE, False, DELTA, ONE_PASS, PROJECT, ROW_SUMS, STORE_DS, BLOCK_N,
                    SOFT_CAST, MX, True,
                )  # fmt: skip
            inner -= fixed
        for i in tl.range(0, inner, num_stages=STAGES):
            acc, key, unit, top, sum_a, sum_b, leak = _dq_tile(
                full_hi - 1 - i, acc, key, unit, top, sum_a, sum_b, leak, q, do, q_row, do_row, lse2,
                shifted, k_desc, v_desc, kt_desc, k_descale_ptr, v_descale_ptr, k_fold_ptr, k_row,
                kt_row, k_slot, offs_m, q_len, k_len, offset, window, mask_ptr, stride_mq, stride_mk,
                softmax_scale, softcap, ds_ptr, p_ptr, Tk, k_base, CAUSAL, WINDOW, MASK, SOFTCAP, TILE,
                False, DELTA, ONE_PASS, PROJECT, ROW_SUMS, STORE_DS, BLOCK_N, SOFT_CAST, MX,
            )  # fmt: skip
    if WINDOW:
        for i in tl.range(0, full_lo - lo, num_stages=STAGES):
            acc, key, unit, top, sum_a, sum_b, leak = _dq_tile(
                full_lo - 1 - i, acc, key, unit, top, sum_a, sum_b, leak, q, do, q_row, do_row, lse2,
                shifted, k_desc, v_desc, kt_desc, k_descale_ptr, v_descale_ptr, k_fold_ptr, k_row,
                kt_row, k_slot, offs_m, q_len, k_len, offset, window, mask_ptr, stride_mq, stride_mk,
                softmax_scale, softcap, ds_ptr, p_ptr, Tk, k_base, CAUSAL, WINDOW, MASK, SOFTCAP, TILE,
                True, DELTA, ONE_PASS, PROJECT, ROW_SUMS, STORE_DS, BLOCK_N, SOFT_CAST, MX,
            )  # fmt: skip
    if ONE_PASS:
        lse2 += LIFT
        sum_a += z * sum_b
    if DELTA or ONE_PASS:
        if SINKS:
            sink = tl.load(sinks_ptr + h).to(tl.float32) * LOG2E
            sum_b += tl.exp2(sink - lse2)
        delta = sum_a / tl.where(sum_b == 0.0, 1.0, sum_b)
        tl.store(delta_ptr + row + offs_m, delta, mask=rows)
        if DLSE:
            delta = delta - tl.load(dlse_ptr + row + offs_m, mask=rows, other=0.0)
            # A row that sees nothing has no gradient, whatever comes down to its lse.
            delta = tl.where(lse2 == float("inf"), 0.0, delta)
        tl.store(shifted_ptr + stat + offs_m, delta, mask=rows)
    if ONE_PASS:
        acc -= key * ((delta - z) * (unit * LOWER))[:, None]
    if not DELTA:
        offs_d = tl.arange(0, BLOCK_D)
        if PROJECT:
            mean_key_ptr += (kv * segments + segment) * D
            mean = tl.load(mean_key_ptr + offs_d, mask=offs_d < D, other=0.0)
            acc -= leak[:, None] * mean[None, :]
        if ROW_SUMS:
            total = (tl.num_programs(0) // places * Tq).to(tl.int64)
            tl.store(row_sum_ptr + row + offs_m, sum_a, mask=rows)
            tl.store(row_sum_ptr + total + row + offs_m, sum_b, mask=rows)
        out = acc * softmax_scale
        dq_ptr += b.to(tl.int64) * stride_dqb + h.to(tl.int64) * stride_dqh
        at = (q_base + offs_m).to(tl.int64)[:, None] * stride_dqt + offs_d[None, :]
        tl.store(
            dq_ptr + at, out.to(dq_ptr.dtype.element_ty),
            mask=rows[:, None] & (offs_d < D)[None, :],
        )  # fmt: skip
