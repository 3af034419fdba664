"""Launchers of the quantisers: operands of an attention call in FP8, and their transposed copies."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_deltamatch.formats import TOKENS_PER_TILE
from hf_deltamatch.kernels.attention_problem import Problem
from hf_deltamatch.kernels.launch import SOFT_CAST, feature_block
from hf_deltamatch.kernels.quantize import (
    _amax_kernel,
    _quantize_do_kernel,
    _quantize_qkv_kernel,
    _transpose_kernel,
    descale_of_runs,
)


def _warps(block: int) -> int:
    return 8 if block >= 128 else 4


def _registers(block: int) -> int | None:
    """A limit that lets two programs share a multiprocessor, which hides one's waits."""
    return 128 if block == 128 and not SOFT_CAST else None


def _columns_of(payload: Tensor, slots: int) -> Tensor:
    """Room for the transposed copy of a payload."""
    B, H, _, D_padded = payload.shape
    shape = (B, H, D_padded, slots * TOKENS_PER_TILE)
    return torch.empty(shape, dtype=payload.dtype, device=payload.device)


def _state_strides(state: Tensor | None, *shape: int) -> tuple[int, ...]:
    return (0, 0) if state is None else state.expand(shape).stride()[:2]


def _give_descales(
    x: Tensor, descale: Tensor, cuts: Tensor | None, state: Tensor | None, E5M2: bool, pow2: bool
) -> bool:
    """Fill ``descale`` where tiles are cut at ``cuts [B|1, H|1, T]`` (True: no descale shared with
    the predecessor); every token carries that of its run. False where nothing is cut."""
    if cuts is None:
        return False
    B, H, T, D = x.shape
    amax = torch.empty(B, H, T, device=x.device)
    _amax_kernel[(-(-T // 128) * B * H,)](
        x, amax, state, H, T, D, *x.stride(), *_state_strides(state, B, H, T),
        STATE=state is not None, BLOCK_D=feature_block(D),
    )  # fmt: skip
    descale.copy_(descale_of_runs(amax, cuts, E5M2, pow2))
    return True


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: dict[str, tuple[Tensor, Tensor]],
    x: Problem,
) -> tuple[Tensor, Tensor | None]:
    """Quantise q, k, v (``BHTD``, any strides) into the payloads and descales of ``saved``.

    Returns:
        V's transposed copy ``[B, Hkv, Dv padded, slots · 128]``, and its ``fold [B, Hkv, Tk]`` where
        descales are per token.
    """
    (q8, qd), (k8, kd), (v8, vd) = (saved[which] for which in "qkv")
    vt = _columns_of(v8, x.pack_k.slots)
    fold = None if x.tile else torch.empty_like(vd)
    state_q, state_k = x.facts.query_state, x.facts.key_state
    cuts_q, cuts_k = x.cuts
    given_q = _give_descales(q, qd, cuts_q, state_q, False, x.pow2)
    given_k = _give_descales(k, kd, cuts_k, state_k, False, x.pow2)
    _give_descales(v, vd, cuts_k, state_k, False, x.pow2)
    programs_q, programs_k = x.B * x.Hq * x.pack_q.slots, x.B * x.Hkv * x.pack_k.slots
    _quantize_qkv_kernel[(programs_q + 2 * programs_k,)](
        q, q8, qd, k, k8, kd, v, v8, vd, fold, vt, state_q, x.hide(keys=False),
        x.pack_q.cu, x.pack_q.segment, state_k, x.hide(keys=True), x.pack_k.cu,
        x.pack_k.segment, programs_q, programs_k, x.Hq, x.Hkv, x.Tq, x.Tk, x.pack_q.slots,
        x.pack_k.slots, x.D, q8.shape[3], x.Dv, v8.shape[3], *q.stride(), *k.stride(), *v.stride(),
        *_state_strides(state_q, x.B, x.Hq, x.Tq), *_state_strides(state_k, x.B, x.Hkv, x.Tk),
        TILE=x.tile, GIVEN_Q=given_q, GIVEN_K=given_k, POW2=x.pow2, BLOCK_D=x.BLOCK_D,
        BLOCK_DV=x.BLOCK_DV, SOFT_CAST=SOFT_CAST, num_warps=_warps(max(x.BLOCK_D, x.BLOCK_DV)),
    )  # fmt: skip
    return vt, fold


def quantize_do(
    do: Tensor,
    o: Tensor | None,
    lse: Tensor,
    dlse: Tensor | None,
    delta: Tensor,
    x: Problem,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Quantise dO ``[B, Hq, Tq, Dv]`` (any strides).

    Where ``o`` is given ``delta [B, Hq, Tq]`` is written too: under an unmatched rule δ, under the matched
    one the estimate that a single pass starts from. Otherwise it is left to the δ pass, as is ``shifted``.

    Returns:
        Payload, descale, transposed copy, ``fold [B, Hq, Tq]`` (None where no kernel reads it),
        ``lse2`` (see :func:`hf_deltamatch.kernels.attention_rows.row_lse2`) and ``shifted``, δ − dlse,
        which dS subtracts; these two ``[B, Hq, slots · 128]``, so that a tile of a packed segment
        starts where TMA can load from.
    """
    do8, dod = x.empty_operand("do")
    pack, state = x.pack_q, x.facts.do_state
    do_t = _columns_of(do8, pack.slots)
    fold = None if x.tile and dlse is None else torch.empty_like(lse)
    lse2, shifted = torch.empty(2, x.B, x.Hq, pack.slots * TOKENS_PER_TILE, device=lse.device)
    o, o_strides = output_of(o, x)
    given = _give_descales(do, dod, x.cuts[0], state, do8.dtype == torch.float8_e5m2, x.pow2)
    _quantize_do_kernel[(x.B * x.Hq * pack.slots,)](
        do, do8, dod, fold, do_t, state, x.hide(keys=False), pack.cu, x.pack_k.cu, pack.segment,
        lse, lse2, o, dlse, delta, shifted, x.Hq, x.Tq, x.Tk, pack.slots, x.Dv,
        do8.shape[3], *do.stride(), *_state_strides(state, x.B, x.Hq, x.Tq), *o_strides,
        TILE=x.tile, GIVEN=given, POW2=x.pow2, STALE=x.recipe.delta == "stale", BLOCK_DV=x.BLOCK_DV,
        SOFT_CAST=SOFT_CAST, num_warps=_warps(x.BLOCK_DV), maxnreg=_registers(x.BLOCK_DV),
    )  # fmt: skip
    return do8, dod, do_t, fold, lse2, shifted


def output_of(o: Tensor | None, x: Problem) -> tuple[Tensor | None, tuple[int, ...]]:
    """What δ (or an estimate of it) is computed from, and its strides."""
    if o is None or (x.recipe.delta == "matched" and not x.one_pass):
        return None, (0,) * 4
    return o, o.stride()


def transpose_qk(
    q8: Tensor, q_descale: Tensor, k8: Tensor, k_descale: Tensor, x: Problem
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Transposed copies of the saved payloads of q and of k, each with its ``fold`` where descales
    are per token."""
    qt, kt = _columns_of(q8, x.pack_q.slots), _columns_of(k8, x.pack_k.slots)
    q_fold = k_fold = None
    if not x.tile:
        q_fold, k_fold = torch.empty_like(q_descale), torch.empty_like(k_descale)
    programs_q, programs_k = x.B * x.Hq * x.pack_q.slots, x.B * x.Hkv * x.pack_k.slots
    _transpose_kernel[(programs_q + programs_k,)](
        q8, q_descale, qt, q_fold, k8, k_descale, kt, k_fold, x.pack_q.cu, x.pack_q.segment,
        x.pack_k.cu, x.pack_k.segment, programs_q, x.Tq, x.Tk, x.pack_q.slots, x.pack_k.slots,
        q8.shape[3], BLOCK_D=x.BLOCK_D, num_warps=_warps(x.BLOCK_D),
    )  # fmt: skip
    return qt, q_fold, kt, k_fold
