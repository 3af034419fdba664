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

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_deltamatch.formats import MX_BLOCK, TOKENS_PER_TILE
from hf_deltamatch.kernels.casts import biased_exponent, cast_fp8, exp2_int, inverse_exp2_int
from hf_deltamatch.kernels.geometry import own_segment
from hf_deltamatch.kernels.launch import SOFT_CAST, Packing, feature_block

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
def cast_blocks(x, E5M2: tl.constexpr, ZERO_BAD: tl.constexpr, SOFT_CAST: tl.constexpr):
    """FP32 ``[M, N]`` to FP8 with one E8M0 code per 32 of a row: payload and codes ``[M, N / 32]``
    (int32). A block with NaN or Inf has code 255, and payload 0 with ``ZERO_BAD`` (else any)."""
    N: tl.constexpr = x.shape[1]
    # As integers, magnitudes sort like numbers, infinity and NaN last.
    top = block_max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    finite = top < 0x7F800000
    e = biased_exponent(top.to(tl.float32, bitcast=True), 15 if E5M2 else 8)
    e = tl.where(finite, e, 127)
    x = x * spread_blocks(inverse_exp2_int(e), N)
    if ZERO_BAD:
        x = tl.where(spread_blocks(finite.to(tl.int32), N) != 0, x, 0.0)
    return cast_fp8(x, E5M2, SOFT_CAST), tl.where(finite, e, 255)


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


@triton.jit(do_not_specialize=["H", "T", "first_shown"])
def _quantize_mx_kernel(
    x_ptr, payload_ptr, code_ptr, state_ptr, hidden_ptr, cu_ptr, segment_ptr, H, T, D, D_PADDED,
    first_shown, stride_xb, stride_xh, stride_xt, stride_xd, stride_sb, stride_sh,
    HIDE: tl.constexpr, STATE: tl.constexpr, E5M2: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_D: tl.constexpr, SOFT_CAST: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    segment, base, length, _, first = own_segment(slot, T, cu_ptr, segment_ptr, 128, PACKED)
    if first >= length:
        return
    row = bh.to(tl.int64) * T + base
    offs_t = first + tl.arange(0, 128)
    offs_d = tl.arange(0, BLOCK_D)
    inside = offs_t < length
    live = inside
    if HIDE:
        if PACKED:
            first_shown = tl.load(hidden_ptr + segment)
        live = live & (offs_t >= first_shown)
    if STATE:
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


@triton.jit(do_not_specialize=["T", "slots"])
def _reencode_kernel(
    payload_ptr, code_ptr, out_ptr, out_code_ptr, fold_ptr, cu_ptr, segment_ptr, T, D_PADDED, slots,
    FOLD: tl.constexpr, E5M2: tl.constexpr, PACKED: tl.constexpr, BLOCK_D: tl.constexpr,
    SOFT_CAST: tl.constexpr,
):  # fmt: skip
    """Transposed copy of a saved payload (bytes) with codes along the tokens, and its ``fold``."""
    slot = tl.program_id(0)
    bh = tl.program_id(1)
    _, base, length, _, first = own_segment(slot, T, cu_ptr, segment_ptr, 128, PACKED)
    if first >= length:
        return
    row = bh.to(tl.int64) * T + base
    offs_t = first + tl.arange(0, 128)
    offs_d = tl.arange(0, BLOCK_D)
    inside = offs_t < length
    at = (row + offs_t)[:, None] * D_PADDED + offs_d[None, :]
    bytes = tl.load(payload_ptr + at, mask=inside[:, None] & (offs_d < D_PADDED)[None, :], other=0)
    code = row_codes(code_ptr, row + offs_t, inside, BLOCK_D // 32).to(tl.int32)
    FP8: tl.constexpr = tl.float8e5 if E5M2 else tl.float8e4nv
    x = tl.trans(bytes).to(FP8, bitcast=True).to(tl.float32)
    # 2¹²⁸, which code 255 would be, is infinity: times the payload, which is 0 there, it is NaN.
    x = x * tl.trans(spread_blocks(exp2_int(code), BLOCK_D))
    payload, new = cast_blocks(x, E5M2, True, SOFT_CAST)
    bits = payload.to(tl.uint8, bitcast=True)
    out = bh.to(tl.int64) * D_PADDED + offs_d
    out = out[:, None] * (slots * 128) + slot * 128 + tl.arange(0, 128)[None, :]
    tl.store(out_ptr + out, bits, mask=(offs_d < D_PADDED)[:, None])
    flag = tl.max(tl.where(new == 255, 255, 0), 0)
    out_row = ((bh * slots + slot).to(tl.int64) * 4 + tl.arange(0, 4)) * (BLOCK_D + 16)
    new = tl.where(new == 255, 127, new).to(tl.uint8)
    tl.store(out_code_ptr + out_row[None, :] + offs_d[:, None], new)
    tl.store(out_code_ptr + out_row + BLOCK_D, flag.to(tl.uint8))
    if FOLD:
        fold = tl.where(tl.max((bits & 0x7F).to(tl.int32), 0) > 0, 1.0, 0.0)
        bad = tl.broadcast_to(tl.expand_dims(flag, 1), [4, 32])
        fold = tl.where(tl.reshape(bad, [128]) != 0, float("nan"), fold)
        tl.store(fold_ptr + row + offs_t, fold, mask=inside)


@triton.jit(do_not_specialize=["H", "T", "slots", "segments", "first_shown"])
def _mean_key_mx_kernel(
    kt_ptr, code_ptr, state_ptr, mean_ptr, cu_ptr, H, T, D, D_padded, slots, segments, hidden_ptr,
    first_shown, stride_sb, stride_sh,
    STATE: tl.constexpr, HIDE: tl.constexpr, PACKED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Mean of the re-encoded keys of a segment that any query sees, ``[B·Hkv, segments, D]``."""
    segment = tl.program_id(0)
    bh = tl.program_id(1)
    base = 0
    length = T
    slot = 0
    if PACKED:
        base = tl.load(cu_ptr + segment)
        length = tl.load(cu_ptr + segment + 1) - base
        slot = base // 128 + segment
    if HIDE:
        if PACKED:
            first_shown = tl.load(hidden_ptr + segment)
    if STATE:
        state_ptr += (bh // H).to(tl.int64) * stride_sb + (bh % H).to(tl.int64) * stride_sh
    offs_d = tl.arange(0, BLOCK_D)
    use = (offs_d < D)[:, None]
    code_ptr += (bh * slots + slot).to(tl.int64) * (4 * (BLOCK_D + 16))
    kt_ptr += (bh.to(tl.int64) * D_padded + offs_d)[:, None] * (slots * 128) + slot * 128
    total = tl.zeros([BLOCK_D], tl.float32)
    count = 0
    for start in range(0, length, 128):
        offs = start + tl.arange(0, 128)
        live = offs < length
        if HIDE:
            live = live & (offs >= first_shown)
        if STATE:
            live = live & (tl.load(state_ptr + base + offs, mask=live, other=1) != 1)
        k = tl.load(kt_ptr + offs[None, :], mask=use, other=0.0).to(tl.float32)  # hidden ones are 0
        descale = exp2_int(token_codes(code_ptr, start // 32, BLOCK_D, 4).to(tl.int32))
        total += tl.sum(k * spread_blocks(descale, 128), 1)
        count += tl.sum(live.to(tl.int32), 0)
    mean = total / tl.maximum(count, 1).to(tl.float32)
    tl.store(mean_ptr + (bh * segments + segment) * D + offs_d, mean, mask=offs_d < D)


def code_columns(D: int) -> int:
    """Codes that are stored for a token; ``ceil(D / 32)`` of them mean something."""
    return feature_block(D) // MX_BLOCK


def quantize_mx(
    x: Tensor,
    payload: Tensor,
    codes: Tensor,
    *,
    pack: Packing,
    first_shown: int | Tensor = 0,
    state: Tensor | None = None,
) -> None:
    """Quantise ``x [B, H, T, D]`` (any strides) into ``payload [B, H, T, D_padded]`` and uint8
    ``codes [B, H, T, BLOCK_D / 32]``.

    Args:
        first_shown: earlier tokens (of each segment, if a tensor) are hidden.
        state: ``[B|1, H|1, T]`` uint8; 1 is hidden, everything else counts.
    """
    B, H, T, D = x.shape
    packed_first = first_shown if isinstance(first_shown, Tensor) else None
    strides = (0, 0) if state is None else state.expand(B, H, T).stride()[:2]
    BLOCK_D = feature_block(D)
    _quantize_mx_kernel[(pack.slots, B * H)](
        x, payload, codes, state, packed_first, pack.cu, pack.segment, H, T, D, payload.shape[-1],
        0 if packed_first is not None else first_shown, *x.stride(), *strides,
        HIDE=packed_first is not None or first_shown > 0, STATE=state is not None,
        E5M2=payload.dtype == torch.float8_e5m2, PACKED=pack.cu is not None, BLOCK_D=BLOCK_D,
        SOFT_CAST=SOFT_CAST, num_warps=8 if BLOCK_D >= 128 else 4,
    )  # fmt: skip


def reencode(
    payload: Tensor, codes: Tensor, pack: Packing, *, fold: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Transposed copy with descales along the tokens: payload, codes, and ``fold`` if asked for."""
    B, H, T, D_padded = payload.shape
    BLOCK_D = codes.shape[-1] * MX_BLOCK
    rows = pack.slots * (TOKENS_PER_TILE // MX_BLOCK)
    make = dict(device=payload.device)
    out = torch.empty(B, H, D_padded, pack.slots * TOKENS_PER_TILE, dtype=payload.dtype, **make)
    out_codes = torch.empty(B, H, rows, BLOCK_D + FLAG_COLUMNS, dtype=torch.uint8, **make)
    folds = torch.empty(B, H, T, **make) if fold else None
    _reencode_kernel[(pack.slots, B * H)](
        payload.view(torch.uint8), codes, out.view(torch.uint8), out_codes, folds, pack.cu,
        pack.segment, T, D_padded, pack.slots, FOLD=fold,
        E5M2=payload.dtype == torch.float8_e5m2, PACKED=pack.cu is not None, BLOCK_D=BLOCK_D,
        SOFT_CAST=SOFT_CAST, num_warps=8 if BLOCK_D >= 128 else 4,
    )  # fmt: skip
    return out, out_codes, folds
