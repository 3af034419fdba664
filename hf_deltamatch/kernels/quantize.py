"""Q, K, V, dO to FP8 in one read: payload, descale and, where asked for, the transposed copy.

Reference: :func:`hf_deltamatch.reference.operands.quantize_operand`. A program owns one slot of 128
tokens of one head. A transposed copy holds the same bytes, ``[B, H, D, slots · 128]``, tokens
reordered inside chunks of 16 as :func:`hf_deltamatch.kernels.casts.regroup_rows` does; NaN codes
and missing tokens are 0 in it. V's and dO's are made here; Q's and K's, which only the backward
reads, are rebuilt there from the saved payload.

``fold [B, H, T]`` is what a product over tokens multiplies in: the descale, 0 for a token whose
payload is all zero, NaN for a poisoned one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_deltamatch.formats import TOKENS_PER_TILE
from hf_deltamatch.kernels.attention_rows import store_row_statistics
from hf_deltamatch.kernels.casts import (
    biased_exponent,
    cast_fp8,
    cast_fp8_words,
    exp2_int,
    from_cast,
    inverse_exp2_int,
    unknown_zero,
    widen,
)
from hf_deltamatch.kernels.geometry import own_segment, segment_of

HIDDEN, UNCOUNTED = 1, 2
"""Token states: stored as zero and left out of every amax; left out of the amax but clamped to it."""


@triton.jit
def _slot_tokens():
    """Tokens of a slot, ``[32, 4]``: ``[i, j]`` is the one in column ``4i + j`` of a transposed copy
    (column ``4t + 2h + e`` of a chunk of 16 holds token ``8h + 2t + e``). A thread holds all four of
    a row, which make one word."""
    i = tl.arange(0, 32)[:, None]
    j = tl.arange(0, 4)[None, :]
    return i // 4 * 16 + j // 2 * 8 + i % 4 * 2 + j % 2


@triton.jit
def _store_transposed(words, out_ptr, bh, slot, slots, D_PADDED, BLOCK_D: tl.constexpr):
    """Words ``[32, BLOCK_D]`` of four tokens, ordered as in :func:`_slot_tokens`, to a slot of a
    transposed copy."""
    offs_d = tl.arange(0, BLOCK_D)
    row = (bh.to(tl.int64) * D_PADDED + offs_d) * (slots * 32)
    at = row[:, None] + slot * 32 + tl.arange(0, 32)[None, :]
    out_ptr = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(out_ptr + at, tl.trans(words), mask=(offs_d < D_PADDED)[:, None])


@triton.jit
def _quantize_slot(
    x_ptr, payload_ptr, descale_ptr, fold_ptr, transposed_ptr, state_ptr, hide, slot, bh, H, T,
    base, length, first, length_other, D, D_PADDED, slots, stride_xb, stride_xh, stride_xt,
    stride_xd, stride_sb, stride_sh,
    TILE: tl.constexpr, GIVEN: tl.constexpr, POW2: tl.constexpr, FOLDS: tl.constexpr,
    BLOCK_D: tl.constexpr, SOFT_CAST: tl.constexpr,
):  # fmt: skip
    """Quantise the 128 tokens from ``first`` of a segment, as :func:`_slot_tokens` arranges them.

    ``fold``, ``transposed`` and ``state`` may be None; ``hide`` too, or tokens before ``length −
    length_other + hide`` are hidden. ``GIVEN``: the descales are read, not chosen. Returns the
    tokens, the values, the payload and, with ``FOLDS``, the fold.
    """
    E5M2: tl.constexpr = payload_ptr.dtype.element_ty == tl.float8e5
    STATE: tl.constexpr = state_ptr is not None
    b = bh // H
    h = bh % H
    row = bh.to(tl.int64) * T + base
    offs_t = first + _slot_tokens()
    offs_d = tl.arange(0, BLOCK_D)[None, None, :]
    inside = offs_t < length
    live = inside
    counted = inside
    if hide is not None:
        live = live & (offs_t >= length - length_other + hide)
        counted = live
    if STATE:
        state_ptr += b.to(tl.int64) * stride_sb + h.to(tl.int64) * stride_sh
        state = tl.load(state_ptr + base + offs_t, mask=inside, other=1)
        live = live & (state != 1)
        counted = live & (state == 0)
    x_ptr += b.to(tl.int64) * stride_xb + h.to(tl.int64) * stride_xh
    rows = x_ptr + (base + offs_t).to(tl.int64) * stride_xt
    raw = tl.load(
        rows[:, :, None] + offs_d.to(tl.int64) * stride_xd,
        mask=live[:, :, None] & (offs_d < D),
        other=0.0,
    )
    raw = widen(raw, SOFT_CAST)
    x = raw
    # As integers, magnitudes sort like numbers and NaN comes last; it is then read as infinity.
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    token_amax = tl.minimum(tl.max(magnitude, 2), 0x7F800000).to(tl.float32, bitcast=True)
    amax = token_amax
    if GIVEN:
        descale = tl.load(descale_ptr + row + offs_t, mask=inside, other=1.0)
    else:
        if TILE:
            top = tl.max(tl.max(tl.where(counted, amax, 0.0), 1), 0)
            if STATE:
                # A tile whose counted tokens are all zero, or none, counts all that are finite.
                finite = tl.where(amax < float("inf"), amax, 0.0)
                top = tl.where(top > 0.0, top, tl.max(tl.max(finite, 1), 0))
            amax = tl.zeros_like(amax) + top
        if POW2:
            descale = exp2_int(
                biased_exponent(tl.where(amax < float("inf"), amax, 1.0), 15 if E5M2 else 8)
            )
        else:
            largest = tl.full(amax.shape, 57344.0 if E5M2 else 448.0, tl.float32)
            descale = tl.maximum(tl.div_rn(amax, largest), 1.1754943508222875e-38)
        descale = tl.where(amax == 0, 1.0, descale)
        descale = tl.where(amax < float("inf"), descale, float("nan"))
        if TILE:
            # All equal: any reduction gives the one value (NaN must survive it).
            bad = tl.max(tl.max(amax, 1), 0) == float("inf")
            one = tl.max(tl.max(tl.where(descale == descale, descale, 0.0), 1), 0)
            one = tl.where(bad, float("nan"), one)
            tl.store(descale_ptr + bh * slots + slot, one)
        else:
            tl.store(descale_ptr + row + offs_t, descale, mask=inside)
    clean = descale == descale
    if POW2:
        bits = tl.where(clean, descale, 1.0).to(tl.int32, bitcast=True)
        factor = inverse_exp2_int(bits >> 23)
    else:
        ones = tl.full(descale.shape, 1.0, tl.float32)
        factor = tl.div_rn(ones, tl.where(clean, descale, 1.0))
    if not TILE or STATE:
        x = tl.where(clean[:, :, None] & (magnitude < 0x7F800000), x, 0.0)
    x = x * factor[:, :, None]
    payload = cast_fp8(x, E5M2, SOFT_CAST)
    if transposed_ptr is not None:
        # [token pair, token, …]: the four values of a word, one tensor each.
        even, odd = tl.split(tl.permute(tl.reshape(x, [32, 2, 2, BLOCK_D]), (0, 3, 1, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        words = cast_fp8_words(x0, x1, x2, x3, E5M2, SOFT_CAST)
        _store_transposed(words, transposed_ptr, bh, slot, slots, D_PADDED, BLOCK_D)
    if STATE:
        # A non-finite token under a finite descale (uncounted) keeps its NaN in its own row, and is
        # 0 in the transposed copy (ptxas 12.8 and 12.9 crash on a test of freshly cast codes).
        x = tl.where(clean[:, :, None] & (magnitude >= 0x7F800000), float("nan"), x)
        payload = cast_fp8(x, E5M2, SOFT_CAST)
    out = (row + offs_t)[:, :, None] * D_PADDED + offs_d
    use = inside[:, :, None] & (offs_d < D_PADDED)
    tl.store(payload_ptr + out, payload, mask=use)
    if TILE and not STATE:
        if one != one:  # seldom, so written again and not selected
            tl.store(payload_ptr + out, tl.zeros_like(x).to(payload.dtype), mask=use)
            if transposed_ptr is not None:
                nothing = tl.zeros([32, BLOCK_D], tl.int32)
                _store_transposed(nothing, transposed_ptr, bh, slot, slots, D_PADDED, BLOCK_D)
    fold = token_amax
    if FOLDS:
        # Nothing survives rounding up to half the smallest subnormal, which ties to zero.
        TINY: tl.constexpr = 7.62939453125e-06 if E5M2 else 0.0009765625
        fold = tl.where(token_amax * factor > TINY, descale, 0.0)
        fold = tl.where(clean & (token_amax < float("inf")), fold, float("nan"))
        fold = tl.where(live, fold, 0.0)
        if fold_ptr is not None:
            tl.store(fold_ptr + row + offs_t, fold, mask=inside)
    return offs_t, raw, payload, fold


# D and Dv are int32: Triton makes an argument of 1 a constant, most features are then zeros to the
# compiler, and ptxas 12.8 goes wrong where both halves of a word are one conversion.
@triton.jit(
    do_not_specialize=[
        "programs_q", "programs_k", "Hq", "Hkv", "Tq", "Tk", "slots_q", "slots_k", "hide_q",
        "hide_k",
    ]
)  # fmt: skip
def _quantize_qkv_kernel(
    q_ptr, q_fp8_ptr, q_descale_ptr, k_ptr, k_fp8_ptr, k_descale_ptr,
    v_ptr, v_fp8_ptr, v_descale_ptr, v_fold_ptr, vt_ptr,
    q_state_ptr, hide_q, cu_q_ptr, segment_q_ptr, k_state_ptr, hide_k, cu_k_ptr, segment_k_ptr,
    programs_q, programs_k, Hq, Hkv, Tq, Tk, slots_q, slots_k, D: tl.int32, D_PADDED, Dv: tl.int32,
    D_PADDED_V,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_qsb, stride_qsh, stride_ksb, stride_ksh,
    TILE: tl.constexpr, GIVEN_Q: tl.constexpr, GIVEN_K: tl.constexpr, POW2: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SOFT_CAST: tl.constexpr,
):  # fmt: skip
    """One slot of one head of Q, then of K, then of V (with its transposed copy)."""
    PACKED: tl.constexpr = cu_q_ptr is not None
    pid = tl.program_id(0)
    if pid < programs_q:
        bh = pid // slots_q
        slot = pid % slots_q
        segment, base, length, _, first = own_segment(
            slot, Tq, cu_q_ptr, segment_q_ptr, 128, PACKED
        )
        if first < length:
            _, other, _ = segment_of(segment, Tk, cu_k_ptr, PACKED)
            _quantize_slot(
                q_ptr, q_fp8_ptr, q_descale_ptr, None, None, q_state_ptr, hide_q, slot, bh, Hq, Tq,
                base, length, first, other, D, D_PADDED, slots_q, stride_qb, stride_qh, stride_qt,
                stride_qd, stride_qsb, stride_qsh, TILE, GIVEN_Q, POW2, False, BLOCK_D, SOFT_CAST,
            )  # fmt: skip
    else:
        pid -= programs_q
        is_v = pid >= programs_k
        pid = tl.where(is_v, pid - programs_k, pid)
        bh = pid // slots_k
        slot = pid % slots_k
        segment, base, length, _, first = own_segment(
            slot, Tk, cu_k_ptr, segment_k_ptr, 128, PACKED
        )
        if first < length:
            _, other, _ = segment_of(segment, Tq, cu_q_ptr, PACKED)
            if is_v:
                _quantize_slot(
                    v_ptr, v_fp8_ptr, v_descale_ptr, v_fold_ptr, vt_ptr, k_state_ptr, hide_k, slot,
                    bh, Hkv, Tk, base, length, first, other, Dv, D_PADDED_V, slots_k, stride_vb,
                    stride_vh, stride_vt, stride_vd, stride_ksb, stride_ksh, TILE, GIVEN_K, POW2,
                    v_fold_ptr is not None, BLOCK_DV, SOFT_CAST,
                )  # fmt: skip
            else:
                _quantize_slot(
                    k_ptr, k_fp8_ptr, k_descale_ptr, None, None, k_state_ptr, hide_k, slot, bh, Hkv,
                    Tk, base, length, first, other, D, D_PADDED, slots_k, stride_kb, stride_kh,
                    stride_kt, stride_kd, stride_ksb, stride_ksh, TILE, GIVEN_K, POW2, False,
                    BLOCK_D, SOFT_CAST,
                )  # fmt: skip


@triton.jit(do_not_specialize=["H", "T", "T_keys", "slots", "hide"])
def _quantize_do_kernel(
    do_ptr, do_fp8_ptr, descale_ptr, fold_ptr, do_t_ptr, state_ptr, hide, cu_ptr, cu_k_ptr,
    segment_ptr, lse_ptr, lse2_ptr, o_ptr, dlse_ptr, delta_ptr, shifted_ptr, H, T, T_keys, slots,
    Dv: tl.int32, D_PADDED_V,
    stride_dob, stride_doh, stride_dot, stride_dod, stride_sb, stride_sh,
    stride_ob, stride_oh, stride_ot, stride_od,
    TILE: tl.constexpr, GIVEN: tl.constexpr, POW2: tl.constexpr, STALE: tl.constexpr,
    BLOCK_DV: tl.constexpr, SOFT_CAST: tl.constexpr,
):  # fmt: skip
    """One slot of one head of dO with its transposed copy, and what else a row of it decides:
    ``lse2`` and, where ``o`` is given, ``delta`` and ``delta − dlse``."""
    PACKED: tl.constexpr = cu_ptr is not None
    pid = tl.program_id(0)
    bh = pid // slots
    slot = pid % slots
    segment, base, length, _, first = own_segment(slot, T, cu_ptr, segment_ptr, 128, PACKED)
    if first >= length:
        return
    _, other, _ = segment_of(segment, T_keys, cu_k_ptr, PACKED)
    # Asked for before the tile, or its way from memory would be waited for at the end.
    offs_t = first + _slot_tokens()
    inside = offs_t < length
    row = bh.to(tl.int64) * T + base + offs_t
    lse = tl.load(lse_ptr + row, mask=inside, other=0.0)
    _, do, do_fp8, fold = _quantize_slot(
        do_ptr, do_fp8_ptr, descale_ptr, fold_ptr, do_t_ptr, state_ptr, hide, slot, bh, H, T, base,
        length, first, other, Dv, D_PADDED_V, slots, stride_dob, stride_doh, stride_dot, stride_dod,
        stride_sb, stride_sh, TILE, GIVEN, POW2, True, BLOCK_DV, SOFT_CAST,
    )  # fmt: skip
    stat = (bh.to(tl.int64) * slots + slot) * 128 + offs_t - first
    if o_ptr is not None:
        o_ptr += (bh // H).to(tl.int64) * stride_ob + (bh % H).to(tl.int64) * stride_oh
        if not STALE:
            # With its descale before the sum: codes times a large O overflow where δ does not.
            do = from_cast(do_fp8, unknown_zero(slots, SOFT_CAST), SOFT_CAST) * fold[:, :, None]
    store_row_statistics(
        do, lse, fold, base + offs_t, inside, row, stat, o_ptr, dlse_ptr, lse2_ptr, delta_ptr,
        shifted_ptr, Dv, stride_ot, stride_od, SOFT_CAST,
    )  # fmt: skip


@triton.jit
def _transpose_slot(
    payload_ptr, descale_ptr, transposed_ptr, fold_ptr, slot, bh, T, base, length, first, D_PADDED,
    slots, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = bh.to(tl.int64) * T + base
    offs_t = first + _slot_tokens()
    offs_d = tl.arange(0, BLOCK_D)[None, None, :]
    rows = offs_t < length
    at = (row + offs_t)[:, :, None] * D_PADDED + offs_d
    payload = tl.load(payload_ptr + at, mask=rows[:, :, None] & (offs_d < D_PADDED), other=0.0)
    code = payload.to(tl.uint8, bitcast=True)
    magnitude = (code & 0x7F).to(tl.int32)
    LARGEST: tl.constexpr = 0x7B if payload.dtype == tl.float8e5 else 0x7E
    code = tl.where(magnitude > LARGEST, 0, code)
    words = tl.sum(code.to(tl.int32) << (8 * tl.arange(0, 4)[None, :, None]), 1)
    _store_transposed(words, transposed_ptr, bh, slot, slots, D_PADDED, BLOCK_D)
    if fold_ptr is not None:
        largest = tl.max(magnitude, 2)
        descale = tl.load(descale_ptr + row + offs_t, mask=rows, other=1.0)
        fold = tl.where(largest > 0, descale, 0.0)
        fold = tl.where((descale != descale) | (largest > LARGEST), float("nan"), fold)
        tl.store(fold_ptr + row + offs_t, fold, mask=rows)


@triton.jit(do_not_specialize=["programs_q", "Tq", "Tk", "slots_q", "slots_k"])
def _transpose_kernel(
    q_fp8_ptr, q_descale_ptr, qt_ptr, q_fold_ptr, k_fp8_ptr, k_descale_ptr, kt_ptr, k_fold_ptr,
    cu_q_ptr, segment_q_ptr, cu_k_ptr, segment_k_ptr, programs_q, Tq, Tk, slots_q, slots_k,
    D_PADDED, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Transposed copies of the saved payloads of Q and of K, and their ``fold`` (None: not asked
    for; the payload tells NaN and zero tokens)."""
    PACKED: tl.constexpr = cu_q_ptr is not None
    pid = tl.program_id(0)
    if pid < programs_q:
        slot = pid % slots_q
        _, base, length, _, first = own_segment(slot, Tq, cu_q_ptr, segment_q_ptr, 128, PACKED)
        if first < length:
            _transpose_slot(
                q_fp8_ptr, q_descale_ptr, qt_ptr, q_fold_ptr, slot, pid // slots_q, Tq, base,
                length, first, D_PADDED, slots_q, BLOCK_D,
            )  # fmt: skip
    else:
        pid -= programs_q
        slot = pid % slots_k
        _, base, length, _, first = own_segment(slot, Tk, cu_k_ptr, segment_k_ptr, 128, PACKED)
        if first < length:
            _transpose_slot(
                k_fp8_ptr, k_descale_ptr, kt_ptr, k_fold_ptr, slot, pid // slots_k, Tk, base,
                length, first, D_PADDED, slots_k, BLOCK_D,
            )  # fmt: skip


@triton.jit(do_not_specialize=["H", "T"])
def _amax_kernel(
    x_ptr, amax_ptr, state_ptr, H, T, D, stride_xb, stride_xh, stride_xt, stride_xd, stride_sb,
    stride_sh, STATE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of each token, infinite if not finite, 0 for hidden tokens."""
    tiles = (T + 127) // 128
    bh = tl.program_id(0) // tiles
    b = bh // H
    h = bh % H
    offs_t = tl.program_id(0) % tiles * 128 + tl.arange(0, 128)
    offs_d = tl.arange(0, BLOCK_D)
    live = offs_t < T
    if STATE:
        at = b.to(tl.int64) * stride_sb + h.to(tl.int64) * stride_sh
        live = live & (tl.load(state_ptr + at + offs_t, mask=live, other=1) != 1)
    x_ptr += b.to(tl.int64) * stride_xb + h.to(tl.int64) * stride_xh
    at = offs_t.to(tl.int64)[:, None] * stride_xt + offs_d.to(tl.int64)[None, :] * stride_xd
    x = tl.abs(
        tl.load(x_ptr + at, mask=live[:, None] & (offs_d < D)[None, :], other=0.0).to(tl.float32)
    )
    x = tl.where(x <= 3.4028234663852886e38, x, float("inf"))
    tl.store(amax_ptr + bh.to(tl.int64) * T + offs_t, tl.max(x, 1), mask=offs_t < T)


def descale_of_runs(amax: Tensor, cuts: Tensor, E5M2: bool, pow2: bool) -> Tensor:
    """Descale of the run of tokens between cuts and slot boundaries, given to each token."""
    T = amax.shape[-1]
    start = torch.arange(T, device=amax.device) % TOKENS_PER_TILE == 0
    run = ((cuts | start).long().cumsum(-1) - 1).expand_as(amax)
    top = torch.zeros_like(amax).scatter_reduce(-1, run, amax, "amax").gather(-1, run)
    if pow2:
        bits = top.view(torch.int32)
        e = (bits >> 23) - (15 if E5M2 else 8) + ((bits & 0x7FFFFF) > 0x600000).int()
        descale = (e.clamp_min(1) << 23).view(torch.float32)
    else:
        # By a tensor: a GPU divides by a Python number by multiplying with its reciprocal.
        descale = (top / torch.full_like(top, 57344.0 if E5M2 else 448.0)).clamp_min(2.0**-126)
    descale = torch.where(top == 0, 1.0, descale)
    return torch.where(top.isfinite(), descale, float("nan"))
