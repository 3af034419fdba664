r"""FP8 attention forward: ``O = P V / l`` with an online softmax over key tiles, newest first.

.. math::  S = \hat Q \hat K^T, \quad \hat P = cast(2^8\, e^{S - m}), \quad O = \hat P \hat V / l

``m`` is the running maximum, ``l`` sums the unquantised exponentials. Both products read FP8 and
leave FP32; each tile's P V is added to the accumulator in FP32 registers, so the tensor cores'
short accumulators never see a long contraction. Reference: ``reference.attention`` with
``block_n = BLOCK_N`` and descending order.

``TILE``: one descale per 128 tokens, applied to the result of a product. Otherwise one per token;
that of V rides in the exponent of P under a running maximum of its own (``r``, relative to m).
``MX``: descales are E8M0 codes; see ``attention_mx``. ``TWO_TERMS``: P V in two FP8 products, of P as
cast and of what that cast left, for a δ that is read off O.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_deltamatch.formats import P_REST_CAST_LOG2
from hf_deltamatch.kernels.attention_mx import fwd_tile_mx
from hf_deltamatch.kernels.casts import (
    cast_and_rest,
    cast_e4m3,
    load_scalar,
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
from hf_deltamatch.kernels.logits import LN2, LOG2E, positive, tanh
from hf_deltamatch.kernels.quantize_mx import row_codes

REST = tl.constexpr(2.0**P_REST_CAST_LOG2)
REST_DESCALE = tl.constexpr(2.0**-P_REST_CAST_LOG2)


@triton.jit
def _product_pv(p, vt, zero, TWO_TERMS: tl.constexpr, SOFT_CAST: tl.constexpr):
    """``p [M, N] <= 256`` as one or two E4M3 terms, times ``vt [D, N]``: FP32."""
    if TWO_TERMS:
        first, rest = cast_and_rest(p, zero, True, SOFT_CAST)
        rest = cast_e4m3(rest * REST, SOFT_CAST)
        # The smaller one first: the accumulator of the other then starts from it.
        part = tl.dot(regroup_rows(rest), vt.T) * REST_DESCALE
        return tl.dot(regroup_rows(first), vt.T, part)
    else:
        return tl.dot(regroup_rows(cast_e4m3(p, SOFT_CAST)), vt.T)


@triton.jit
def _fwd_tile(
    n, m, l, r, unit, acc, q, q_row, k_desc, vt_desc, k_descale_ptr, v_descale_ptr, k_row, vt_row, k_slot,
    offs_m, Tq, Tk, offset, window, mask_ptr, stride_mq, stride_mk, softmax_scale, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, SOFT_CAST: tl.constexpr,
    MX: tl.constexpr, TWO_TERMS: tl.constexpr, IN_UNITS: tl.constexpr = False,
):  # fmt: skip
    if MX:
        m, l, r, acc = fwd_tile_mx(
            n, m, l, r, acc, q, q_row, k_desc, vt_desc, k_descale_ptr, v_descale_ptr, k_row, vt_row,
            k_slot, offs_m, Tq, Tk, offset, window, mask_ptr, stride_mq, stride_mk, softmax_scale,
            softcap, CAUSAL, WINDOW, MASK, SOFTCAP, MASKED, BLOCK_N, SOFT_CAST,
        )  # fmt: skip
        return m, l, r, unit, acc
    else:
        return _fwd_tile_fp8(
            n, m, l, r, unit, acc, q, q_row, k_desc, vt_desc, k_descale_ptr, v_descale_ptr, k_row, vt_row,
            k_slot, offs_m, Tq, Tk, offset, window, mask_ptr, stride_mq, stride_mk, softmax_scale,
            softcap, CAUSAL, WINDOW, MASK, SOFTCAP, TILE, MASKED, BLOCK_N, SOFT_CAST,
            TWO_TERMS, IN_UNITS,
        )  # fmt: skip


@triton.jit
def _fwd_tile_fp8(
    n, m, l, r, unit, acc, q, q_row, k_desc, vt_desc, k_descale_ptr, v_descale_ptr, k_row, vt_row, k_slot,
    offs_m, Tq, Tk, offset, window, mask_ptr, stride_mq, stride_mk, softmax_scale, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, SOFT_CAST: tl.constexpr,
    TWO_TERMS: tl.constexpr, IN_UNITS: tl.constexpr,
):  # fmt: skip
    """One key tile of the online softmax. ``IN_UNITS``: ``acc`` is in units of the descale of the last
    tile of V, ``unit``, so that a tile costs it one operation an element; otherwise unit is passed on."""
    start = n * BLOCK_N
    offs_n = start + tl.arange(0, BLOCK_N)
    k = k_desc.load([k_row + start, 0])
    s = tl.dot(q, k.T)
    if TILE:
        f = q_row * load_scalar(k_descale_ptr + start // 128, SOFT_CAST)
        # P carries 2⁸; taken out here and not at the end, where large values have overflowed.
        v_tile = load_scalar(v_descale_ptr + start // 128, SOFT_CAST) * 0.00390625
    else:
        column = tl.load(k_descale_ptr + offs_n, mask=offs_n < Tk, other=1.0)
        f = q_row[:, None] * column[None, :]
        fold = tl.load(v_descale_ptr + offs_n, mask=offs_n < Tk, other=0.0)
    if SOFTCAP:
        s = tanh(s * (f * (softmax_scale / softcap)), SOFTCAP)
        c = softcap * LOG2E
    elif TILE:
        c = positive(f * (softmax_scale * LOG2E))
    else:
        s = s * f
        c = softmax_scale * LOG2E
    if MASKED:
        seen = visible(
            offs_m[:, None], offs_n[None, :], Tq, Tk, offset, window, mask_ptr, stride_mq,
            stride_mk, CAUSAL, WINDOW, MASK,
        )  # fmt: skip
        # After the scaling: −inf · NaN would carry a poisoned descale to rows that see none of it.
        s = tl.where(seen, s * c, float("-inf"))
        c = 1.0
    m_new = tl.maximum(m, tl.max(s, 1) * c)
    # A row that has seen nothing yet has no maximum; 0 stands in and P = 0 whatever it is.
    top = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - top)
    vt = vt_desc.load([vt_row, (k_slot + start // 128) * 128 + start % 128])
    if TILE:
        p = tl.exp2(s * c - (top - 8.0)[:, None])
        l = l * alpha + tl.sum(p, 1)
        part = _product_pv(p, vt, unknown_zero(softcap, SOFT_CAST), TWO_TERMS, SOFT_CAST)
        if IN_UNITS:
            alpha = alpha * (unit * reciprocal(v_tile, SOFT_CAST))
            unit = v_tile
        else:
            part = part * v_tile
        if MASKED:
            # A poisoned tile of V must not reach rows that see none of it.
            part = tl.where((tl.max(s, 1) > float("-inf"))[:, None] | (part == part), part, 0.0)
        acc = acc * alpha[:, None] + part
    else:
        x = s * c - top[:, None]
        l = l * alpha + tl.sum(tl.exp2(x), 1)
        x = x + tl.log2(fold)[None, :]
        if MASKED:
            x = tl.where(seen, x, float("-inf"))
        r_new = tl.maximum(r + (m - top), tl.max(x, 1))
        r_top = tl.where(r_new == float("-inf"), 0.0, r_new)
        p = tl.exp2(x - (r_top - 8.0)[:, None])
        part = _product_pv(p, vt, unknown_zero(softcap, SOFT_CAST), TWO_TERMS, SOFT_CAST)
        acc = acc * tl.exp2(r + (m - top) - r_top)[:, None] + part
        r = r_new
    return m_new, l, r, unit, acc


@triton.jit
def _descales_fit(v_descale_ptr, lo, hi, BLOCK_N: tl.constexpr):
    """True where O in units of any descale of V of key tiles ``lo … hi − 1`` is in the range of FP32: the ratio
    of two descales times 448 · 2⁸ and fewer than 2³¹ keys."""
    first = lo * BLOCK_N // 128
    end = (hi * BLOCK_N + 127) // 128
    strange = 0
    for slot in range(first, end, 128):
        at = slot + tl.arange(0, 128)
        descale = tl.load(v_descale_ptr + at, mask=at < end, other=1.0)
        fits = (descale > 2.0**-36) & (descale < 2.0**36)  # NaN does not
        strange += tl.sum((~fits).to(tl.int32), 0)
    return strange == 0


@triton.jit(do_not_specialize=["heads_at_once", "places"])
def _attention_fwd_kernel(
    q_desc, k_desc, vt_desc, o_ptr, lse_ptr, q_descale_ptr, k_descale_ptr, v_descale_ptr,
    sinks_ptr, mask_ptr, bounds_ptr, cu_q_ptr, cu_k_ptr, segment_q_ptr,
    heads_at_once, places, Hq, G, Tq, Tk, Dv, D_padded_v, slots_q, slots_k, softmax_scale, softcap,
    window, mask_heads,
    stride_ob, stride_oh, stride_ot, stride_mb, stride_mh, stride_mq, stride_mk,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SOFT_CAST: tl.constexpr,
    MX: tl.constexpr = False, TWO_TERMS: tl.constexpr = False, IN_UNITS: tl.constexpr = False,
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
    q = q_desc.load([bh * Tq + q_base + first, 0])
    if MX:
        COLUMNS: tl.constexpr = q.shape[1] // 32
        row = bh.to(tl.int64) * Tq + q_base
        q_row = row_codes(q_descale_ptr, row + offs_m, offs_m < q_len, COLUMNS)
        k_descale_ptr += (kv.to(tl.int64) * Tk + k_base) * COLUMNS
        v_descale_ptr += (kv * slots_k + k_slot).to(tl.int64) * (4 * (BLOCK_DV + 16))
    elif TILE:
        q_row = tl.load(q_descale_ptr + bh * slots_q + q_slot + first // 128)
        k_descale_ptr += kv * slots_k + k_slot
        v_descale_ptr += kv * slots_k + k_slot
    else:
        q_row = tl.load(
            q_descale_ptr + bh.to(tl.int64) * Tq + q_base + offs_m, mask=offs_m < q_len, other=1.0
        )
        k_descale_ptr += kv.to(tl.int64) * Tk + k_base
        v_descale_ptr += kv.to(tl.int64) * Tk + k_base
    k_row = kv * Tk + k_base
    vt_row = kv * D_padded_v
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    r = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    unit = 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for i in tl.range(0, hi - full_hi, num_stages=STAGES):
        m, l, r, unit, acc = _fwd_tile(
            hi - 1 - i, m, l, r, unit, acc, q, q_row, k_desc, vt_desc, k_descale_ptr, v_descale_ptr,
            k_row, vt_row, k_slot, offs_m, q_len, k_len, offset, window, mask_ptr, stride_mq,
            stride_mk, softmax_scale, softcap, CAUSAL, WINDOW, MASK, SOFTCAP, TILE, True, BLOCK_N,
            SOFT_CAST, MX, TWO_TERMS,
        )  # fmt: skip
    if MASK == 0:
        inner = full_hi - full_lo
        if TILE and IN_UNITS:
            in_units = tl.where(_descales_fit(v_descale_ptr, lo, hi, BLOCK_N), inner, 0)
            for i in tl.range(0, in_units, num_stages=STAGES):
                m, l, r, unit, acc = _fwd_tile(
                    full_hi - 1 - i, m, l, r, unit, acc, q, q_row, k_desc, vt_desc, k_descale_ptr,
                    v_descale_ptr, k_row, vt_row, k_slot, offs_m, q_len, k_len, offset, window,
                    mask_ptr, stride_mq, stride_mk, softmax_scale, softcap, CAUSAL, WINDOW, MASK,
                    SOFTCAP, TILE, False, BLOCK_N, SOFT_CAST, MX, TWO_TERMS, True,
                )  # fmt: skip
            acc = acc * unit
            inner = inner - in_units
        for i in tl.range(0, inner, num_stages=STAGES):
            m, l, r, unit, acc = _fwd_tile(
                full_hi - 1 - i, m, l, r, unit, acc, q, q_row, k_desc, vt_desc, k_descale_ptr,
                v_descale_ptr, k_row, vt_row, k_slot, offs_m, q_len, k_len, offset, window,
                mask_ptr, stride_mq, stride_mk, softmax_scale, softcap, CAUSAL, WINDOW, MASK,
                SOFTCAP, TILE, False, BLOCK_N, SOFT_CAST, MX, TWO_TERMS,
            )  # fmt: skip
    if WINDOW:
        for i in tl.range(0, full_lo - lo, num_stages=STAGES):
            m, l, r, unit, acc = _fwd_tile(
                full_lo - 1 - i, m, l, r, unit, acc, q, q_row, k_desc, vt_desc, k_descale_ptr,
                v_descale_ptr, k_row, vt_row, k_slot, offs_m, q_len, k_len, offset, window,
                mask_ptr, stride_mq, stride_mk, softmax_scale, softcap, CAUSAL, WINDOW, MASK,
                SOFTCAP, TILE, True, BLOCK_N, SOFT_CAST, MX, TWO_TERMS,
            )  # fmt: skip
    if TILE:
        l = l * 0.00390625  # 2⁻⁸, which P carries
    elif not MX:
        acc = acc * tl.exp2(tl.where(r == float("-inf"), 0.0, r) - 8.0)[:, None]
    seen = (l > 0.0) | (l != l)
    m = tl.where(m == float("-inf"), 0.0, m)
    if SINKS:
        sink = tl.load(sinks_ptr + h).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        shrink = tl.exp2(m - top)
        acc = acc * shrink[:, None]
        l = l * shrink + tl.exp2(sink - top)
        m = top
    # A row that sees nothing: O = 0 and lse = −inf.
    safe = tl.where(seen, l, 1.0)
    out = tl.where(seen[:, None], acc / safe[:, None], 0.0)
    lse = tl.where(seen, (m + tl.log2(safe)) * LN2, float("-inf"))
    rows = offs_m < q_len
    tl.store(lse_ptr + bh.to(tl.int64) * Tq + q_base + offs_m, lse, mask=rows)
    offs_d = tl.arange(0, BLOCK_DV)
    o_ptr += b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh
    at = (q_base + offs_m).to(tl.int64)[:, None] * stride_ot + offs_d[None, :]
    tl.store(
        o_ptr + at, out.to(o_ptr.dtype.element_ty), mask=rows[:, None] & (offs_d < Dv)[None, :]
    )
