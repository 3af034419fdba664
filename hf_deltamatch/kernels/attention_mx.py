r"""Tiles of the attention kernels under ``mx``: every product by ``tl.dot_scaled``.

Both operands of all seven products are FP8 with one E8M0 code per 32 elements along the contraction.
P and dS are cast in the kernel, 32 along the contraction, with the codes that the reference's
``cast_p_forward`` and ``cast_backward`` give them. What surrounds a tile (masks, packing, which
tiles are visited) is the same as for the other blocks: :mod:`attention_fwd`, :mod:`attention_dq` and
:mod:`attention_dkdv` call these under their constexpr ``MX``.

A token block with a poisoned value (see :mod:`quantize_mx`) turns the code of P or dS into NaN for
whoever sees any of it: NaN in all features, where the reference keeps those of other blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import target_info

from hf_deltamatch.kernels import interpreted, triton_version
from hf_deltamatch.kernels.casts import exp2_int, from_cast, unknown_zero
from hf_deltamatch.kernels.geometry import visible
from hf_deltamatch.kernels.logits import LOG2E, tanh
from hf_deltamatch.kernels.quantize_mx import (
    block_max,
    cast_blocks,
    row_codes,
    spread_blocks,
    token_codes,
    token_flags,
)

HIDE_ZERO = tl.constexpr(triton_version() < (3, 9))
"""Triton 3.6 and 3.7 fail, for tensor memory, on a product in a loop whose accumulator they know to
be zero."""


ON_DEVICE = tl.constexpr(not interpreted())


@triton.jit
def renew(code):
    """``code`` through an instruction that no loop leaves out. Hopper's wgmma takes the decoded A from
    registers; where a loop does not change them, ptxas (12.8, 13.0) may give them to something else in
    the loop, and later rounds multiply by that."""
    if ON_DEVICE and target_info.cuda_capability_geq(9, 0):
        if not target_info.cuda_capability_geq(10, 0):
            code = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [code.to(tl.int32)], dtype=tl.int32, is_pure=False,
                pack=1,
            ).to(tl.uint8)  # fmt: skip
    return code


@triton.jit
def product(a, a_code, b, b_code):
    """``a [M, K]``, which a loop leaves as it is, times ``b [N, K]`` transposed, both with codes along
    K."""
    a_code = renew(a_code)
    A: tl.constexpr = "e5m2" if a.dtype == tl.float8e5 else "e4m3"
    B: tl.constexpr = "e5m2" if b.dtype == tl.float8e5 else "e4m3"
    if HIDE_ZERO:
        zero = tl.max(a_code.to(tl.int32), 1).to(tl.float32) * 0.0
        zero = tl.broadcast_to(zero[:, None], [a.shape[0], b.shape[0]])
        return tl.dot_scaled(a, a_code, A, b.T, b_code, B, zero)
    else:
        return tl.dot_scaled(a, a_code, A, b.T, b_code, B)


@triton.jit
def add_product(acc, a, a_code, b, b_code):
    """``acc`` plus :func:`product` of codes that are int32 for ``a``."""
    A: tl.constexpr = "e5m2" if a.dtype == tl.float8e5 else "e4m3"
    B: tl.constexpr = "e5m2" if b.dtype == tl.float8e5 else "e4m3"
    return tl.dot_scaled(a, a_code.to(tl.uint8), A, b.T, b_code, B, acc)


@triton.jit
def fwd_tile_mx(
    n, m, l, r, acc, q, q_code, k_desc, vt_desc, k_code_ptr, vt_code_ptr, k_row, vt_row, k_slot,
    offs_m, Tq, Tk, offset, window, mask_ptr, stride_mq, stride_mk, softmax_scale, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, SOFT_CAST: tl.constexpr,
):  # fmt: skip
    """One key tile of the online softmax; ``r`` is passed on."""
    start = n * BLOCK_N
    offs_n = start + tl.arange(0, BLOCK_N)
    k = k_desc.load([k_row + start, 0])
    s = product(q, q_code, k, row_codes(k_code_ptr, offs_n, offs_n < Tk, q.shape[1] // 32))
    if SOFTCAP:
        s = tanh(s * (softmax_scale / softcap), SOFTCAP)
        c = softcap * LOG2E
    else:
        c = softmax_scale * LOG2E
    if MASKED:
        seen = visible(
            offs_m[:, None], offs_n[None, :], Tq, Tk, offset, window, mask_ptr, stride_mq,
            stride_mk, CAUSAL, WINDOW, MASK,
        )  # fmt: skip
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * c)
    # A row that has seen nothing yet has no maximum; 0 stands in and P = 0 whatever it is.
    top = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - top)
    p = tl.exp2(s * c - top[:, None])
    l = l * alpha + tl.sum(p, 1)
    cast, code = cast_blocks(p, False, False, SOFT_CAST)
    flags = token_flags(vt_code_ptr, start // 32, acc.shape[1], BLOCK_N // 32)[None, :]
    if MASKED:
        flags = tl.where(block_max(seen.to(tl.int32)) > 0, flags, 0)
    vt = vt_desc.load([vt_row, (k_slot + start // 128) * 128 + start % 128])
    vt_code = token_codes(vt_code_ptr, start // 32, acc.shape[1], BLOCK_N // 32)
    acc = add_product(acc * alpha[:, None], cast, code | flags, vt, vt_code)
    return m_new, l, r, acc


@triton.jit
def dq_tile_mx(
    n, acc, sum_a, sum_b, leak, q, do, q_code, do_code, lse2, shifted, k_desc, v_desc, kt_desc,
    k_code_ptr, v_code_ptr, kt_code_ptr, k_row, kt_row, k_slot, offs_m, Tq, Tk, offset, window,
    mask_ptr, stride_mq, stride_mk, softmax_scale, softcap, ds_ptr, T_keys, k_base,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr, DELTA: tl.constexpr, PROJECT: tl.constexpr, ROW_SUMS: tl.constexpr,
    STORE_DS: tl.constexpr, BLOCK_N: tl.constexpr, SOFT_CAST: tl.constexpr,
):  # fmt: skip
    """One key tile of the δ pass or of dQ; arguments as ``attention_dq._dq_tile``."""
    start = n * BLOCK_N
    offs_n = start + tl.arange(0, BLOCK_N)
    inside = offs_n < Tk
    k = k_desc.load([k_row + start, 0])
    v = v_desc.load([k_row + start, 0])
    s = product(q, q_code, k, row_codes(k_code_ptr, offs_n, inside, q.shape[1] // 32))
    dp = product(do, do_code, v, row_codes(v_code_ptr, offs_n, inside, do.shape[1] // 32))
    if SOFTCAP:
        t = tanh(s * (softmax_scale / softcap), SOFTCAP)
        p = tl.exp2(t * (softcap * LOG2E) - lse2[:, None])
    else:
        p = tl.exp2(s * (softmax_scale * LOG2E) - lse2[:, None])
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
        sum_a += tl.sum(p * dp, 1)
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
            tl.store(ds_ptr + at, ds, mask=(offs_m < Tq)[:, None] & inside[None, :])
        if SOFTCAP:
            ds = ds * (1.0 - t * t)
        cast, code = cast_blocks(ds, False, False, SOFT_CAST)
        if PROJECT:
            rounded = from_cast(cast, unknown_zero(softcap, SOFT_CAST), SOFT_CAST)
            rounded = rounded * spread_blocks(exp2_int(code), BLOCK_N)
            leak += tl.sum(rounded - ds, 1)
        flags = token_flags(kt_code_ptr, start // 32, acc.shape[1], BLOCK_N // 32)[None, :]
        if MASKED:
            flags = tl.where(block_max(seen.to(tl.int32)) > 0, flags, 0)
        kt = kt_desc.load([kt_row, (k_slot + start // 128) * 128 + start % 128])
        kt_code = token_codes(kt_code_ptr, start // 32, acc.shape[1], BLOCK_N // 32)
        acc = add_product(acc, cast, code | flags, kt, kt_code)
    return acc, sum_a, sum_b, leak


@triton.jit
def dkdv_tile_mx(
    i, tiles, first_tile, dk, dv, k, v, k_code, v_code, q_desc, do_desc, qt_desc, dot_desc,
    q_code_ptr, do_code_ptr, qt_code_ptr, dot_code_ptr, q_fold_ptr, do_fold_ptr, lse2_ptr,
    shifted_ptr, head, q_base, q_slot, offs_n, Tq, Tk, T_queries, D_padded, D_padded_v, slots_q,
    offset, window, mask_ptr, stride_mh, stride_mq, stride_mk, softmax_scale, softcap, ds_ptr,
    T_keys, k_base, stride_stat,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    GROUPED: tl.constexpr, MASKED: tl.constexpr, STORE_DS: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_M: tl.constexpr, SOFT_CAST: tl.constexpr,
):  # fmt: skip
    """One query tile of dK and dV, on Sᵀ; arguments as ``attention_dkdv._dkdv_tile``. ``fold`` leaves
    out tokens that are zero, which must not raise a descale of P or dS."""
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
    BLOCK_D: tl.constexpr = k.shape[1]
    BLOCK_DV: tl.constexpr = v.shape[1]
    offs_m = start + tl.arange(0, BLOCK_M)
    token = bh * T_queries + q_base + start
    row = bh.to(tl.int64) * T_queries + q_base
    stat = bh.to(tl.int64) * stride_stat + q_slot * 128
    column = (q_slot + start // 128) * 128 + start % 128
    block = ((bh * slots_q + q_slot) * 4 + start // 32).to(tl.int64)
    inside = offs_m < Tq
    q = q_desc.load([token, 0])
    s = product(k, k_code, q, row_codes(q_code_ptr, row + offs_m, inside, BLOCK_D // 32))
    lse2 = tl.load(lse2_ptr + stat + offs_m, mask=inside, other=float("inf"))
    if SOFTCAP:
        t = tanh(s * (softmax_scale / softcap), SOFTCAP)
        p = tl.exp2(t * (softcap * LOG2E) - lse2[None, :])
    else:
        p = tl.exp2(s * (softmax_scale * LOG2E) - lse2[None, :])
    if MASKED:
        seen = visible(
            offs_m[None, :], offs_n[:, None], Tq, Tk, offset, window, mask_ptr, stride_mq,
            stride_mk, CAUSAL, WINDOW, MASK,
        )  # fmt: skip
        p = tl.where(seen, p, 0.0)
        if SOFTCAP:  # 0 · NaN where a query or key is NaN that this pair hides
            t = tl.where(seen, t, 0.0)
    if DK:
        shifted = tl.load(shifted_ptr + stat + offs_m, mask=inside, other=0.0)
        do_code = row_codes(do_code_ptr, row + offs_m, inside, BLOCK_DV // 32)
        dp = product(v, v_code, do_desc.load([token, 0]), do_code)
        ds = p * (dp - shifted[None, :])
        if MASKED:
            ds = tl.where(seen, ds, 0.0)
        if STORE_DS:
            at = (row + offs_m)[None, :] * T_keys + k_base + offs_n[:, None]
            tl.store(ds_ptr + at, ds, mask=inside[None, :] & (offs_n < Tk)[:, None])
        if SOFTCAP:
            ds = ds * (1.0 - t * t)
    if DV:
        fold = tl.load(do_fold_ptr + row + offs_m, mask=inside, other=0.0)
        p = p * fold[None, :]
        if MASKED:
            p = tl.where(seen, p, 0.0)
        cast, code = cast_blocks(p, False, False, SOFT_CAST)
        dot_code = token_codes(dot_code_ptr + block * (BLOCK_DV + 16), 0, BLOCK_DV, BLOCK_M // 32)
        dv = add_product(dv, cast, code, dot_desc.load([bh * D_padded_v, column]), dot_code)
    if DK:
        fold = tl.load(q_fold_ptr + row + offs_m, mask=inside, other=0.0)
        ds = ds * fold[None, :]
        if MASKED:
            ds = tl.where(seen, ds, 0.0)
        cast, code = cast_blocks(ds, False, False, SOFT_CAST)
        qt_code = token_codes(qt_code_ptr + block * (BLOCK_D + 16), 0, BLOCK_D, BLOCK_M // 32)
        dk = add_product(dk, cast, code, qt_desc.load([bh * D_padded, column]), qt_code)
    return dk, dv
