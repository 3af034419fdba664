"""Q, K, V, dO to FP8: payload and descale in one read, and the transposed copy of a payload.

Reference: :func:`hf_deltamatch.reference.operands.quantize_operand`. A program owns one slot of 128
tokens of one head. Transposed copies hold the same bytes, read back from the payload (Triton 3.6
miscompiles some transpositions of a fresh cast); they are ``[B, H, D, slots · 128]``, tokens reordered inside chunks
of 16 as :func:`hf_deltamatch.kernels.casts.regroup_rows` does; poisoned and missing tokens are 0.

``fold [B, H, T]`` is what a product over tokens multiplies in: the descale, 0 for a token whose
payload is all zero, NaN for a poisoned one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_deltamatch.formats import TOKENS_PER_TILE
from hf_deltamatch.kernels.casts import biased_exponent, cast_fp8, exp2_int, inverse_exp2_int
from hf_deltamatch.kernels.geometry import own_segment
from hf_deltamatch.kernels.launch import SOFT_CAST, Packing, feature_block

WARPS = 8

HIDDEN, UNCOUNTED = 1, 2
"""Token states: stored as zero and left out of every amax; left out of the amax but clamped to it."""


@triton.jit
def _slot_tokens():
    """Tokens of a slot in the order of a transposed copy: ``4t + 2h + e`` holds ``8h + 2t + e``."""
    at = tl.arange(0, 128)
    return at // 16 * 16 + (at // 2 % 2) * 8 + (at % 16 // 4) * 2 + at % 2


@triton.jit
def _store_transposed(payload, out_ptr, slot, stride, D, BLOCK_D: tl.constexpr):
    """Bytes ``[128, BLOCK_D]``, tokens in the order of :func:`_slot_tokens`, to the columns of a
    slot of ``[D, stride]``."""
    offs_d = tl.arange(0, BLOCK_D)
    at = offs_d.to(tl.int64)[:, None] * stride + slot * 128 + tl.arange(0, 128)[None, :]
    tl.store(out_ptr + at, tl.trans(payload), mask=(offs_d < D)[:, None])


@triton.jit(do_not_specialize=["H", "T", "slots", "first_shown"])
def _quantize_kernel(
    x_ptr, payload_ptr, descale_ptr, fold_ptr, state_ptr, hidden_ptr, given_ptr,
    cu_ptr, segment_ptr, H, T, D, D_PADDED, slots, first_shown,
    stride_xb, stride_xh, stride_xt, stride_xd, stride_sb, stride_sh,
    TILE: tl.constexpr, GIVEN: tl.constexpr, HIDE: tl.constexpr, STATE: tl.constexpr,
    FOLD: tl.constexpr, POW2: tl.constexpr, E5M2: tl.constexpr,
    PACKED: tl.constexpr, BLOCK_D: tl.constexpr, SOFT_CAST: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    segment, base, length, _, first = own_segment(slot, T, cu_ptr, segment_ptr, 128, PACKED)
    if first >= length:
        return
    row = (bh * T + base).to(tl.int64)
    offs_t = first + tl.arange(0, 128)
    offs_d = tl.arange(0, BLOCK_D)
    inside = offs_t < length
    x_ptr += b.to(tl.int64) * stride_xb + h.to(tl.int64) * stride_xh
    rows = x_ptr + (base + offs_t).to(tl.int64) * stride_xt
    live = inside
    counted = inside
    if HIDE:
        if PACKED:
            first_shown = tl.load(hidden_ptr + segment)
        live = live & (offs_t >= first_shown)
        counted = live
    if STATE:
        state_ptr += b.to(tl.int64) * stride_sb + h.to(tl.int64) * stride_sh
        state = tl.load(state_ptr + base + offs_t, mask=inside, other=1)
        live = live & (state != 1)
        counted = live & (state == 0)
    x = tl.load(
        rows[:, None] + offs_d.to(tl.int64)[None, :] * stride_xd,
        mask=live[:, None] & (offs_d < D)[None, :],
        other=0.0,
    ).to(tl.float32)
    # As integers, magnitudes sort like numbers and NaN comes last; it is then read as infinity.
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    token_amax = tl.minimum(tl.max(magnitude, 1), 0x7F800000).to(tl.float32, bitcast=True)
    amax = token_amax
    if GIVEN:
        descale = tl.load(given_ptr + row + offs_t, mask=inside, other=1.0)
    else:
        if TILE:
            top = tl.max(tl.where(counted, amax, 0.0), 0)
            if STATE:
                # A tile whose counted tokens are all zero, or none, counts them all.
                top = tl.where(top > 0.0, top, tl.max(amax, 0))
            amax = tl.zeros_like(amax) + top
        if POW2:
            descale = exp2_int(
                biased_exponent(tl.where(amax < float("inf"), amax, 1.0), 15 if E5M2 else 8)
            )
        else:
            descale = tl.maximum(amax / (57344.0 if E5M2 else 448.0), 1.1754943508222875e-38)
        descale = tl.where(amax == 0, 1.0, descale)
        descale = tl.where(amax < float("inf"), descale, float("nan"))
        if TILE:
            # All equal: any reduction gives the one value (NaN must survive it).
            bad = tl.max(amax, 0) == float("inf")
            one = tl.where(bad, float("nan"), tl.max(tl.where(descale == descale, descale, 0.0), 0))
            tl.store(descale_ptr + bh * slots + slot, one)
        else:
            tl.store(descale_ptr + row + offs_t, descale, mask=inside)
    clean = descale == descale
    if POW2:
        bits = tl.where(clean, descale, 1.0).to(tl.int32, bitcast=True)
        factor = inverse_exp2_int(bits >> 23)
    else:
        factor = 1.0 / tl.where(clean, descale, 1.0)
    if TILE and not STATE:
        if one != one:
            x = tl.zeros_like(x)
    else:
        x = tl.where(clean[:, None] & (magnitude < 0x7F800000), x, 0.0)
    x = x * factor[:, None]
    if STATE:
        # A non-finite token under a finite descale (uncounted) keeps its NaN in its own row.
        x = tl.where(clean[:, None] & (magnitude >= 0x7F800000), float("nan"), x)
    payload = cast_fp8(x, E5M2, SOFT_CAST)
    out = (row + offs_t.to(tl.int64))[:, None] * D_PADDED + offs_d[None, :]
    tl.store(payload_ptr + out, payload, mask=inside[:, None] & (offs_d < D_PADDED)[None, :])
    if FOLD:
        # Nothing survives rounding up to half the smallest subnormal, which ties to zero.
        TINY: tl.constexpr = 7.62939453125e-06 if E5M2 else 0.0009765625
        fold = tl.where(token_amax * factor > TINY, descale, 0.0)
        fold = tl.where(clean & (token_amax < float("inf")), fold, float("nan"))
        fold = tl.where(live, fold, 0.0)
        tl.store(fold_ptr + row + offs_t, fold, mask=inside)


@triton.jit(do_not_specialize=["H", "T"])
def _amax_kernel(
    x_ptr, amax_ptr, state_ptr, H, T, D, stride_xb, stride_xh, stride_xt, stride_xd, stride_sb,
    stride_sh, STATE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of each token, infinite if not finite, 0 for hidden tokens."""
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    offs_t = tl.program_id(0) * 128 + tl.arange(0, 128)
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


@triton.jit(do_not_specialize=["T", "slots"])
def _transpose_kernel(
    payload_ptr, descale_ptr, transposed_ptr, fold_ptr, cu_ptr, segment_ptr, T, D_PADDED, slots,
    FOLD: tl.constexpr, E5M2: tl.constexpr, PACKED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Transposed copy of a saved payload (bytes; NaN codes become 0), and its ``fold``."""
    slot = tl.program_id(0)
    bh = tl.program_id(1)
    _, base, length, _, first = own_segment(slot, T, cu_ptr, segment_ptr, 128, PACKED)
    if first >= length:
        return
    row = (bh * T + base).to(tl.int64)
    offs_t = first + _slot_tokens()
    offs_d = tl.arange(0, BLOCK_D)
    inside = (offs_t < length)[:, None] & (offs_d < D_PADDED)[None, :]
    at = (row + offs_t.to(tl.int64))[:, None] * D_PADDED + offs_d[None, :]
    code = tl.load(payload_ptr + at, mask=inside, other=0)
    magnitude = (code & 0x7F).to(tl.int32)
    LARGEST: tl.constexpr = 0x7B if E5M2 else 0x7E
    code = tl.where(magnitude > LARGEST, 0, code).to(tl.uint8)
    _store_transposed(
        code, transposed_ptr + bh.to(tl.int64) * D_PADDED * slots * 128, slot, slots * 128,
        D_PADDED, BLOCK_D,
    )  # fmt: skip
    if FOLD:
        largest = tl.max(magnitude, 1)
        descale = tl.load(descale_ptr + row + offs_t, mask=offs_t < length, other=1.0)
        fold = tl.where(largest > 0, descale, 0.0)
        fold = tl.where((descale != descale) | (largest > LARGEST), float("nan"), fold)
        tl.store(fold_ptr + row + offs_t, fold, mask=offs_t < length)


def quantize(
    x: Tensor,
    payload: Tensor,
    descale: Tensor,
    *,
    pack: Packing,
    tile: bool,
    pow2: bool,
    first_shown: int | Tensor = 0,
    state: Tensor | None = None,
    cuts: Tensor | None = None,
    fold: bool = False,
) -> Tensor | None:
    """Quantise ``x [B, H, T, D]`` (any strides) into ``payload [B, H, T, D_padded]`` and ``descale``.

    Args:
        tile: one descale per slot ``[B, H, slots]``; otherwise one per token ``[B, H, T]``.
        first_shown: earlier tokens (of each segment, if a tensor) are hidden.
        state: ``[B|1, H|1, T]`` uint8 of :data:`HIDDEN` and :data:`UNCOUNTED`.
        cuts: ``[B|1, H|1, T]``, True where a token shares no descale with its predecessor; tiles are
            cut there, and every token carries its run's descale.

    Returns:
        ``fold [B, H, T]``, if asked for.
    """
    B, H, T, D = x.shape
    E5M2 = payload.dtype == torch.float8_e5m2
    D_padded = payload.shape[-1]
    BLOCK_D = feature_block(D)
    strides = () if state is None else state.expand(B, H, T).stride()[:2]
    sb, sh = strides if strides else (0, 0)
    common = dict(STATE=state is not None, BLOCK_D=BLOCK_D)
    given = None
    if cuts is not None:
        amax = torch.empty(B, H, T, device=x.device)
        grid = (-(-T // 128), B * H)
        _amax_kernel[grid](x, amax, state, H, T, D, *x.stride(), sb, sh, **common)
        given = descale_of_runs(amax, cuts, E5M2, pow2)
        descale.copy_(given)
    folds = torch.empty(B, H, T, device=x.device) if fold else None
    packed_first = first_shown if isinstance(first_shown, Tensor) else None
    _quantize_kernel[(pack.slots, B * H)](
        x, payload, descale, folds, state, packed_first, given, pack.cu, pack.segment,
        H, T, D, D_padded, pack.slots, 0 if packed_first is not None else first_shown,
        *x.stride(), sb, sh,
        TILE=tile, GIVEN=given is not None,
        HIDE=packed_first is not None or first_shown > 0, FOLD=fold,
        POW2=pow2, E5M2=E5M2, PACKED=pack.cu is not None, SOFT_CAST=SOFT_CAST,
        num_warps=WARPS if BLOCK_D >= 128 else 4, **common,
    )  # fmt: skip
    return folds


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
        descale = (top / (57344.0 if E5M2 else 448.0)).clamp_min(2.0**-126)
    descale = torch.where(top == 0, 1.0, descale)
    return torch.where(top.isfinite(), descale, float("nan"))


def transpose(
    payload: Tensor, descale: Tensor | None, pack: Packing
) -> tuple[Tensor, Tensor | None]:
    """Transposed copy of a saved payload; with ``descale [B, H, T]`` also its ``fold``."""
    B, H, T, D_padded = payload.shape
    tokens = pack.slots * TOKENS_PER_TILE
    out = torch.empty(B, H, D_padded, tokens, dtype=payload.dtype, device=payload.device)
    fold = None if descale is None else torch.empty_like(descale)
    BLOCK_D = feature_block(D_padded)
    _transpose_kernel[(pack.slots, B * H)](
        payload.view(torch.uint8), descale, out.view(torch.uint8), fold, pack.cu, pack.segment, T,
        D_padded, pack.slots, FOLD=fold is not None, E5M2=payload.dtype == torch.float8_e5m2,
        PACKED=pack.cu is not None, BLOCK_D=BLOCK_D, num_warps=8 if BLOCK_D >= 128 else 4,
    )  # fmt: skip
    return out, fold
