"""Launchers of the quantisers under ``mx``: operands with E8M0 codes, and their re-encoded copies."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_deltamatch.formats import MX_BLOCK, TOKENS_PER_TILE
from hf_deltamatch.kernels.attention_operands import (
    _columns_of,
    _state_strides,
    _warps,
    output_of,
)
from hf_deltamatch.kernels.attention_problem import Problem
from hf_deltamatch.kernels.launch import SOFT_CAST, Packing
from hf_deltamatch.kernels.quantize_mx import (
    FLAG_COLUMNS,
    _mean_key_mx_kernel,
    _quantize_do_mx_kernel,
    _quantize_mx_kernel,
    _reencode_kernel,
)


class Copy(NamedTuple):
    """A transposed copy ``[B, H, D padded, slots · 128]`` re-encoded along the tokens, its ``codes
    [B, H, slots · 4, BLOCK_D + 16]``, and its ``fold [B, H, T]`` where asked for."""

    payload: Tensor
    codes: Tensor
    fold: Tensor | None


def _empty_copy(payload: Tensor, codes: Tensor, slots: int, fold: bool) -> Copy:
    B, H, T, columns = codes.shape
    shape = (B, H, slots * (TOKENS_PER_TILE // MX_BLOCK), columns * MX_BLOCK + FLAG_COLUMNS)
    return Copy(
        _columns_of(payload, slots),
        torch.empty(shape, dtype=torch.uint8, device=payload.device),
        torch.empty(B, H, T, device=payload.device) if fold else None,
    )


def quantize_mx(
    t: Tensor, which: str, payload: Tensor, codes: Tensor, x: Problem, *, copy: bool = False
) -> Copy | None:
    """Quantise ``t [B, H, T, D]`` (any strides), which is ``q``, ``k`` or ``v``, into ``payload
    [B, H, T, D padded]`` and uint8 ``codes [B, H, T, BLOCK_D / 32]``; its copy, without a fold, if
    asked for."""
    keys = which != "q"
    pack, other = (x.pack_k, x.pack_q) if keys else (x.pack_q, x.pack_k)
    state = x.facts.key_state if keys else x.facts.query_state
    B, H, T, D = t.shape
    BLOCK_D = codes.shape[3] * MX_BLOCK
    out = _empty_copy(payload, codes, pack.slots, False) if copy else Copy(None, None, None)
    _quantize_mx_kernel[(B * H * pack.slots,)](
        t, payload, codes, out.payload, out.codes, state, x.hide(keys), pack.cu, other.cu,
        pack.segment, H, T, x.Tq if keys else x.Tk, pack.slots, D, payload.shape[3], *t.stride(),
        *_state_strides(state, B, H, T), BLOCK_D=BLOCK_D, SOFT_CAST=SOFT_CAST,
        num_warps=_warps(BLOCK_D),
    )  # fmt: skip
    return out if copy else None


def quantize_do_mx(
    do: Tensor, o: Tensor | None, lse: Tensor, dlse: Tensor | None, delta: Tensor, x: Problem
) -> tuple[Tensor, Tensor, Copy, Tensor, Tensor]:
    """Quantise dO ``[B, Hq, Tq, Dv]``; arguments as ``attention_operands.quantize_do``.

    Returns:
        Payload, codes, copy (with fold), and ``lse2`` and ``shifted`` as there.
    """
    do8, codes = x.empty_operand("do")
    pack, state = x.pack_q, x.facts.do_state
    copy = _empty_copy(do8, codes, pack.slots, True)
    lse2, shifted = torch.empty(2, x.B, x.Hq, pack.slots * TOKENS_PER_TILE, device=lse.device)
    o, o_strides = output_of(o, x)
    _quantize_do_mx_kernel[(x.B * x.Hq * pack.slots,)](
        do, do8, codes, copy.payload, copy.codes, copy.fold, state, x.hide(keys=False), pack.cu,
        x.pack_k.cu, pack.segment, lse, lse2, o, dlse, delta, shifted,
        x.Hq, x.Tq, x.Tk, pack.slots, x.Dv, do8.shape[3], *do.stride(),
        *_state_strides(state, x.B, x.Hq, x.Tq), *o_strides, STALE=x.recipe.delta == "stale",
        BLOCK_DV=x.BLOCK_DV, SOFT_CAST=SOFT_CAST, num_warps=_warps(x.BLOCK_DV),
    )  # fmt: skip
    return do8, codes, copy, lse2, shifted


def reencode(payload: Tensor, codes: Tensor, pack: Packing, *, fold: bool = False) -> Copy:
    """Copy of a saved payload."""
    B, H, T, D_padded = payload.shape
    BLOCK_D = codes.shape[3] * MX_BLOCK
    copy = _empty_copy(payload, codes, pack.slots, fold)
    _reencode_kernel[(B * H * pack.slots,)](
        payload, codes, copy.payload, copy.codes, copy.fold, pack.cu, pack.segment, T, D_padded,
        pack.slots, BLOCK_D=BLOCK_D, SOFT_CAST=SOFT_CAST, num_warps=_warps(BLOCK_D),
    )  # fmt: skip
    return copy


def mean_key_mx(kt: Copy, x: Problem) -> Tensor:
    """Mean of the re-encoded visible keys, ``[B · Hkv, segments, D]``."""
    mean = torch.empty(x.B * x.Hkv, x.segments, x.D, device=kt.payload.device)
    state = x.facts.key_state
    _mean_key_mx_kernel[(x.segments * x.B * x.Hkv,)](
        kt.payload, kt.codes, state, mean, x.pack_k.cu, x.pack_q.cu, x.Hkv, x.Tk, x.Tq, x.D,
        kt.payload.shape[2], x.pack_k.slots, x.segments, x.hide(keys=True),
        *_state_strides(state, x.B, x.Hkv, x.Tk), BLOCK_D=x.BLOCK_D,
    )  # fmt: skip
    return mean
