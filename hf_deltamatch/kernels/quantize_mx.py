r"""Q, K, V, dO to FP8 with one E8M0 descale per 32 elements (OCP MX), and their re-encoded copies.

Reference: :func:`hf_deltamatch.reference.operands.quantize_operand` and ``as_operand``. A program
owns one slot of 128 tokens of one head. An E8M0 code ``e`` stands for ``2**(e − 127)``, 255 for NaN.

* along the features: payload ``[B, H, T, D_padded]``, codes ``[B, H, T, BLOCK_D / 32]``; a block with
  NaN or Inf has payload 0 and code 255.
* along the tokens, transposed, from the dequantised values: payload ``[B, H, D_padded, slots · 128]``
  in plain token order and codes ``[B, H, slots · 4, BLOCK_D + 16]``, a row per 32 tokens. A block
  that holds a poisoned value has payload 0 and code 127; that any feature of the 32 tokens is
  poisoned is marked by 255 in column ``BLOCK_D`` of their row, so that the kernels can keep the NaN
  from whoever does not see the tokens.

``fold [B, H, T]`` is 1, 0 for a token whose re-encoded payload is all zero, NaN for a poisoned one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_deltamatch.kernels.attention_rows import store_row_statistics
from hf_deltamatch.kernels.casts import (
    biased_exponent,
    cast_fp8,
    cast_fp8_words,
    exp2_int,
    from_cast,
    inverse_exp2_int,
    unknown_zero,
)
from hf_deltamatch.kernels.geometry import own_segment, segment_of

FLAG_COLUMNS = 16
"""Columns after the codes of a re-encoded copy: the poison flag, and room to keep rows aligned."""


@triton.jit
def block_max(x):
    """Maximum of each 32 neighbours of a row: ``[M, N / 32]``."""
    return tl.max(tl.reshape(x, [x.shape[0], x.shape[1] // 32, 32]), 2)


@triton.jit
def spread_blocks(x, N: tl.constexpr):
    """``[M, N / 32]`` to ``[M, N]``, each value 32 times."""
    x = tl.broadcast_to(tl.expand_dims(x, 2), [x.shape[0], N // 32, 32])
    return tl.reshape(x, [x.shape[0], N])


@triton.jit
def scale_blocks(x, E5M2: tl.constexpr, ZERO_BAD: tl.constexpr):
    """FP32 ``[M, N]`` divided by a power of two per 32 of a row, ready for a cast to FP8, and the
    E8M0 codes of those ``[M, N / 32]`` (int32). A block with NaN or Inf has code 255, and is 0 with
    ``ZERO_BAD`` (else anything)."""
    N: tl.constexpr = x.shape[1]
    # As integers, magnitudes sort like numbers, infinity and NaN last.
    top = block_max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    finite = top < 0x7F800000
    e = biased_exponent(top.to(tl.float32, bitcast=True), 15 if E5M2 else 8)
    e = tl.where(finite, e, 127)
    x = x * spread_blocks(inverse_exp2_int(e), N)
    if ZERO_BAD:
        x = tl.where(spread_blocks(finite.to(tl.int32), N) != 0, x, 0.0)
    return x, tl.where(finite, e, 255)


@triton.jit
def cast_blocks(x, E5M2: tl.constexpr, ZERO_BAD: tl.constexpr, SOFT_CAST: tl.constexpr):
    """:func:`scale_blocks` and the cast: payload and codes."""
    x, code = scale_blocks(x, E5M2, ZERO_BAD)
    return cast_fp8(x, E5M2, SOFT_CAST), code


@triton.jit
def row_codes(code_ptr, rows, inside, COLUMNS: tl.constexpr):
    """Codes ``[M, COLUMNS]`` of tokens ``rows``; 127 where not ``inside``."""
    at = rows.to(tl.int64)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return tl.load(code_ptr + at, mask=inside[:, None], other=127)


@triton.jit
def token_codes(code_ptr, first, BLOCK_D: tl.constexpr, BLOCKS: tl.constexpr):
    """Codes ``[BLOCK_D, BLOCKS]`` of a re-encoded copy from row ``first`` on."""
    row = (first + tl.arange(0, BLOCKS)) * (BLOCK_D + 16)
    return tl.load(code_ptr + row[None, :] + tl.arange(0, BLOCK_D)[:, None])


@triton.jit
def token_flags(code_ptr, first, BLOCK_D: tl.constexpr, BLOCKS: tl.constexpr):
    """255 for each 32 tokens that hold a poisoned value, else 0: ``[BLOCKS]`` int32."""
    row = (first + tl.arange(0, BLOCKS)) * (BLOCK_D + 16)
    return tl.load(code_ptr + row + BLOCK_D).to(tl.int32)


@triton.jit
def _quantize_mx_slot(
    x_ptr, payload_ptr, code_ptr, state_ptr, hide, bh, H, T, base, length, first, length_other, D,
    D_PADDED, stride_xb, stride_xh, stride_xt, stride_xd, stride_sb, stride_sh,
    BLOCK_D: tl.constexpr, SOFT_CAST: tl.constexpr,
):  # fmt: skip
    """Quantise the 128 tokens from ``first`` of a segment; ``state`` and ``hide`` as in
    ``quantize._quantize_slot``. Returns the tokens, the values, and the dequantised values."""
    E5M2: tl.constexpr = payload_ptr.dtype.element_ty == tl.float8e5
    b = bh // H
    h = bh % H
    row = bh.to(tl.int64) * T + base
    offs_t = first + tl.arange(0, 128)
    offs_d = tl.arange(0, BLOCK_D)
    inside = offs_t < length
    live = inside
    if hide is not None:
        live = live & (offs_t >= length - length_other + hide)
    if state_ptr is not None:
        state_ptr += b.to(tl.int64) * stride_sb + h.to(tl.int64) * stride_sh
        live = live & (tl.load(state_ptr + base + offs_t, mask=inside, other=1) != 1)
    x_ptr += b.to(tl.int64) * stride_xb + h.to(tl.int64) * stride_xh
    at = (base + offs_t).to(tl.int64)[:, None] * stride_xt
    x = tl.load(
        x_ptr + at + offs_d.to(tl.int64)[None, :] * stride_xd,
        mask=live[:, None] & (offs_d < D)[None, :],
        other=0.0,
    ).to(tl.float32)
    payload, code = cast_blocks(x, E5M2, True, SOFT_CAST)
    out = (row + offs_t)[:, None] * D_PADDED + offs_d[None, :]
    tl.store(payload_ptr + out, payload, mask=inside[:, None] & (offs_d < D_PADDED)[None, :])
    columns = tl.arange(0, BLOCK_D // 32)
    out = (row + offs_t)[:, None] * (BLOCK_D // 32) + columns[None, :]
    tl.store(code_ptr + out, code.to(tl.uint8), mask=inside[:, None])
    fresh = from_cast(payload, unknown_zero(T, SOFT_CAST), SOFT_CAST)
    return offs_t, x, _dequantize(fresh, code)


@triton.jit
def _dequantize(payload, code):
    """2¹²⁸, which code 255 would be, is infinity: times the payload, which is 0 there, it is NaN."""
    return payload * spread_blocks(exp2_int(code), payload.shape[1])


@triton.jit
def _reencode_slot(
    x, out_ptr, code_ptr, fold_ptr, slot, bh, T, base, length, first, D_PADDED, slots,
    E5M2: tl.constexpr, BLOCK_D: tl.constexpr, SOFT_CAST: tl.constexpr,
):  # fmt: skip
    """Transposed copy of 128 dequantised tokens ``x [128, BLOCK_D]`` with codes along the tokens, and
    its ``fold`` unless that is None."""
    offs_d = tl.arange(0, BLOCK_D)
    x, code = scale_blocks(tl.trans(x), E5M2, True)
    # [token pair, token]: the four values of a word, one tensor each.
    even, odd = tl.split(tl.reshape(x, [BLOCK_D, 32, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    words = cast_fp8_words(x0, x1, x2, x3, E5M2, SOFT_CAST)
    out_ptr = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    out = (bh.to(tl.int64) * D_PADDED + offs_d) * (slots * 32)
    out = out[:, None] + slot * 32 + tl.arange(0, 32)[None, :]
    tl.store(out_ptr + out, words, mask=(offs_d < D_PADDED)[:, None])
    flag = tl.max(tl.where(code == 255, 255, 0), 0)
    code = tl.where(code == 255, 127, code).to(tl.uint8)
    row = ((bh * slots + slot).to(tl.int64) * 4 + tl.arange(0, 4)) * (BLOCK_D + 16)
    tl.store(code_ptr + row[None, :] + offs_d[:, None], code)
    tl.store(code_ptr + row + BLOCK_D, flag.to(tl.uint8))
    if fold_ptr is not None:
        # Nothing survives up to half the smallest subnormal, which ties to zero.
        TINY: tl.constexpr = 7.62939453125e-06 if E5M2 else 0.0009765625
        fold = tl.where(tl.max(tl.abs(x), 0) > TINY, 1.0, 0.0)
        bad = tl.broadcast_to(tl.expand_dims(flag, 1), [4, 32])
        fold = tl.where(tl.reshape(bad, [128]) != 0, float("nan"), fold)
        offs_t = first + tl.arange(0, 128)
        tl.store(fold_ptr + bh.to(tl.int64) * T + base + offs_t, fold, mask=offs_t < length)


@triton.jit(do_not_specialize=["H", "T", "T_other", "slots", "hide"])
def _quantize_mx_kernel(
    x_ptr, payload_ptr, code_ptr, out_ptr, out_code_ptr, state_ptr, hide, cu_ptr, cu_other_ptr,
    segment_ptr, H, T, T_other, slots, D: tl.int32, D_PADDED, stride_xb, stride_xh, stride_xt,
    stride_xd, stride_sb, stride_sh, BLOCK_D: tl.constexpr, SOFT_CAST: tl.constexpr,
):  # fmt: skip
    """One slot of one head of Q, K or V, with its transposed copy if that has a place."""
    E5M2: tl.constexpr = payload_ptr.dtype.element_ty == tl.float8e5
    PACKED: tl.constexpr = cu_ptr is not None
    pid = tl.program_id(0)
    bh = pid // slots
    slot = pid % slots
    segment, base, length, _, first = own_segment(slot, T, cu_ptr, segment_ptr, 128, PACKED)
    if first >= length:
        return
    _, other, _ = segment_of(segment, T_other, cu_other_ptr, PACKED)
    _, _, back = _quantize_mx_slot(
        x_ptr, payload_ptr, code_ptr, state_ptr, hide, bh, H, T, base, length, first, other, D,
        D_PADDED, stride_xb, stride_xh, stride_xt, stride_xd, stride_sb, stride_sh, BLOCK_D,
        SOFT_CAST,
    )  # fmt: skip
    if out_ptr is not None:
        _reencode_slot(
            back, out_ptr, out_code_ptr, None, slot, bh, T, base, length, first, D_PADDED, slots,
            E5M2, BLOCK_D, SOFT_CAST,
        )  # fmt: skip


@triton.jit(do_not_specialize=["H", "T", "T_keys", "slots", "hide"])
def _quantize_do_mx_kernel(
    do_ptr, do_fp8_ptr, code_ptr, do_t_ptr, do_t_code_ptr, fold_ptr, state_ptr, hide, cu_ptr,
    cu_k_ptr, segment_ptr, lse_ptr, lse2_ptr, o_ptr, dlse_ptr, delta_ptr, shifted_ptr, H, T, T_keys,
    slots, Dv: tl.int32, D_PADDED_V,
    stride_dob, stride_doh, stride_dot, stride_dod, stride_sb, stride_sh,
    stride_ob, stride_oh, stride_ot, stride_od,
    STALE: tl.constexpr, BLOCK_DV: tl.constexpr, SOFT_CAST: tl.constexpr,
):  # fmt: skip
    """One slot of one head of dO with its transposed copy, and the row statistics that
    ``quantize._quantize_do_kernel`` writes. ``lse2`` is plain: what is zero or poisoned shows in the
    operands."""
    E5M2: tl.constexpr = do_fp8_ptr.dtype.element_ty == tl.float8e5
    PACKED: tl.constexpr = cu_ptr is not None
    pid = tl.program_id(0)
    bh = pid // slots
    slot = pid % slots
    segment, base, length, _, first = own_segment(slot, T, cu_ptr, segment_ptr, 128, PACKED)
    if first >= length:
        return
    _, other, _ = segment_of(segment, T_keys, cu_k_ptr, PACKED)
    offs_t, do, back = _quantize_mx_slot(
        do_ptr, do_fp8_ptr, code_ptr, state_ptr, hide, bh, H, T, base, length, first, other, Dv,
        D_PADDED_V, stride_dob, stride_doh, stride_dot, stride_dod, stride_sb, stride_sh, BLOCK_DV,
        SOFT_CAST,
    )  # fmt: skip
    _reencode_slot(
        back, do_t_ptr, do_t_code_ptr, fold_ptr, slot, bh, T, base, length, first, D_PADDED_V, slots,
        E5M2, BLOCK_DV, SOFT_CAST,
    )  # fmt: skip
    if not STALE:
        do = back
    inside = offs_t < length
    row = bh.to(tl.int64) * T + base + offs_t
    stat = (bh.to(tl.int64) * slots + slot) * 128 + offs_t - first
    if o_ptr is not None:
        o_ptr += (bh // H).to(tl.int64) * stride_ob + (bh % H).to(tl.int64) * stride_oh
    lse = tl.load(lse_ptr + row, mask=inside, other=0.0)
    store_row_statistics(
        do, lse, tl.full(lse.shape, 1.0, tl.float32), base + offs_t, inside, row, stat, o_ptr, dlse_ptr,
        lse2_ptr, delta_ptr, shifted_ptr, Dv, stride_ot, stride_od, SOFT_CAST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "slots"])
def _reencode_kernel(
    payload_ptr, code_ptr, out_ptr, out_code_ptr, fold_ptr, cu_ptr, segment_ptr, T, D_PADDED, slots,
    BLOCK_D: tl.constexpr, SOFT_CAST: tl.constexpr,
):  # fmt: skip
    """Transposed copy of a saved payload with codes along the tokens, and its ``fold``."""
    E5M2: tl.constexpr = payload_ptr.dtype.element_ty == tl.float8e5
    pid = tl.program_id(0)
    bh = pid // slots
    slot = pid % slots
    _, base, length, _, first = own_segment(slot, T, cu_ptr, segment_ptr, 128, cu_ptr is not None)
    if first >= length:
        return
    row = bh.to(tl.int64) * T + base
    offs_t = first + tl.arange(0, 128)
    offs_d = tl.arange(0, BLOCK_D)
    inside = offs_t < length
    at = (row + offs_t)[:, None] * D_PADDED + offs_d[None, :]
    use = inside[:, None] & (offs_d < D_PADDED)[None, :]
    payload = tl.load(payload_ptr + at, mask=use, other=0.0)
    code = row_codes(code_ptr, row + offs_t, inside, BLOCK_D // 32).to(tl.int32)
    _reencode_slot(
        _dequantize(payload.to(tl.float32), code), out_ptr, out_code_ptr, fold_ptr, slot, bh, T, base, length,
        first, D_PADDED, slots, E5M2, BLOCK_D, SOFT_CAST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["H", "T", "T_queries", "slots", "segments", "hide"])
def _mean_key_mx_kernel(
    kt_ptr, code_ptr, state_ptr, mean_ptr, cu_ptr, cu_q_ptr, H, T, T_queries, D, D_PADDED, slots,
    segments, hide, stride_sb, stride_sh, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Mean of the re-encoded keys of a segment that any query sees, ``[B·Hkv, segments, D]``;
    ``state`` and ``hide`` as in ``quantize._quantize_slot``."""
    segment = tl.program_id(0) % segments
    bh = tl.program_id(0) // segments
    base, length, slot = segment_of(segment, T, cu_ptr, cu_ptr is not None)
    _, other, _ = segment_of(segment, T_queries, cu_q_ptr, cu_q_ptr is not None)
    if state_ptr is not None:
        state_ptr += (bh // H).to(tl.int64) * stride_sb + (bh % H).to(tl.int64) * stride_sh
    offs_d = tl.arange(0, BLOCK_D)
    use = (offs_d < D)[:, None]
    code_ptr += (bh * slots + slot).to(tl.int64) * (4 * (BLOCK_D + 16))
    kt_ptr += (bh.to(tl.int64) * D_PADDED + offs_d)[:, None] * (slots * 128) + slot * 128
    total = tl.zeros([BLOCK_D], tl.float32)
    count = 0
    for start in range(0, length, 128):
        offs = start + tl.arange(0, 128)
        live = offs < length
        if hide is not None:
            live = live & (offs >= length - other + hide)
        if state_ptr is not None:
            live = live & (tl.load(state_ptr + base + offs, mask=live, other=1) != 1)
        k = tl.load(kt_ptr + offs[None, :], mask=use, other=0.0).to(tl.float32)  # hidden ones are 0
        descale = exp2_int(token_codes(code_ptr, start // 32, BLOCK_D, 4).to(tl.int32))
        total += tl.sum(k * spread_blocks(descale, 128), 1)
        count += tl.sum(live.to(tl.int32), 0)
    mean = total / tl.maximum(count, 1).to(tl.float32)
    tl.store(mean_ptr + (bh * segments + segment) * D + offs_d, mean, mask=offs_d < D)
