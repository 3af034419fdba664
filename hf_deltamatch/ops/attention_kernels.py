"""The attention ops through the kernels: what a mask means for the quantisers, and the call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_deltamatch.kernels import attention as kernels
from hf_deltamatch.kernels import attention_config as config
from hf_deltamatch.kernels.attention_problem import (
    Problem,
    TokenFacts,
    empty_operand,
    saved_views,
)
from hf_deltamatch.kernels.launch import feature_block
from hf_deltamatch.kernels.quantize import HIDDEN, UNCOUNTED
from hf_deltamatch.recipes import AttentionRecipe
from hf_deltamatch.reference.operands import has_tile_descales
from hf_deltamatch.reference.visibility import Visibility


def problem(
    q_shape: tuple[int, int, int, int],
    k_shape: tuple[int, int, int, int],
    Dv: int,
    device: torch.device,
    *,
    mask: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    is_causal: bool,
    window: int | None,
    softmax_scale: float,
    softcap: float | None,
    recipe: AttentionRecipe,
) -> Problem:
    """One call in the words of the kernels."""
    B, Hq, Tq, D = q_shape
    _, Hkv, Tk, _ = k_shape
    if window is not None and window >= Tk:
        window = None  # sees every key; and sums with it stay within 32 bits
    facts = TokenFacts()
    if mask is not None:
        vis = Visibility(
            (B, Hq, Hkv, Tq, Tk), is_causal=is_causal, window=window, mask=mask, device=device
        )
        facts = TokenFacts(
            _state(vis.key_hidden, None),
            _state(vis.query_hidden, vis.query_counted),
            _state(vis.query_hidden, None),
            vis.key_cuts,
            vis.query_cuts,
        )
    return Problem(
        B=B, Hq=Hq, Hkv=Hkv, Tq=Tq, Tk=Tk, D=D, Dv=Dv, mask=mask, facts=facts, sinks=sinks,
        cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, is_causal=is_causal, window=window,
        softmax_scale=softmax_scale, softcap=softcap, recipe=recipe, device=device,
    )  # fmt: skip


def reference_blocks(
    D: int, Dv: int, device: torch.device, recipe: AttentionRecipe, *, boolean_mask: bool = False
) -> tuple[dict[str, int], dict[str, int]]:
    """``block_n``, ``block_m``, ``block_m_p`` and ``one_pass`` with which the reference's forward and
    backward emulate the kernels."""
    tile = recipe.block == "128xD" and not boolean_mask
    at = feature_block(D), feature_block(Dv), device
    if recipe.block == "mx":  # the backward's blocks are the format's own 32
        return {"block_n": config.mx_fwd_config(*at).BLOCK_N}, {}
    one_pass = config.has_one_pass(recipe, D, Dv, tile=tile)
    c = config.one_pass_config(*at) if one_pass else config.dq_config(*at, tile=tile)
    backward = {"block_n": c.BLOCK_N, "one_pass": one_pass}
    for c, wants_dk, wants_dv in config.dkdv_configs(*at, tile=tile):
        if wants_dk:
            backward["block_m"] = c.BLOCK_M
        if wants_dv:
            backward["block_m_p"] = c.BLOCK_M
    return {"block_n": config.fwd_config(*at, tile=tile).BLOCK_N}, backward


def _state(hidden: Tensor | None, counted: Tensor | None) -> Tensor | None:
    """Token states of ``kernels.quantize``."""
    if hidden is None:
        return None
    state = hidden.to(torch.uint8) * HIDDEN
    if counted is not None:
        state = torch.where(hidden | counted, state, UNCOUNTED).to(torch.uint8)
    return state


def empty_saved(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    recipe: AttentionRecipe,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Payload and descale of q, k, v as the kernels store them."""
    tile = has_tile_descales(recipe, mask)
    out = {}
    for which, x in (("q", q), ("k", k), ("v", v)):
        payload, descale = empty_operand(*x.shape, which, recipe, tile, cu_seqlens, x.device)
        out[which] = saved_views(payload, descale, x.shape[-1], recipe.block)
    return out


def attention_fwd(q: Tensor, k: Tensor, v: Tensor, **options) -> kernels.Forward:
    """Arguments as :func:`hf_deltamatch.reference.attention_fwd`."""
    return kernels.attention_fwd(
        q, k, v, problem(q.shape, k.shape, v.shape[-1], q.device, **options)
    )


def attention_bwd(
    do: Tensor,
    dlse: Tensor | None,
    fwd: tuple[Tensor, ...],
    *,
    parts_hook: Callable[[tuple[float, float]], None] | None = None,
    **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``dq, dk, dv, dsinks, delta``; ``parts_hook`` gets Σ|row sum| and Σ|dS|, sink included."""
    fwd = kernels.Forward(*fwd)
    x = problem(fwd.q_fp8.shape, fwd.k_fp8.shape, do.shape[-1], do.device, **options)
    out = kernels.attention_bwd(do, dlse, fwd, x, row_sums=parts_hook is not None)
    if parts_hook is not None:
        parts_hook(_parts(out.row_sums, out.ds_sink))
    return tuple(out[:5])


def _parts(row_sums: Tensor, ds_sink: Tensor | None) -> tuple[float, float]:
    rows, magnitude = row_sums
    if ds_sink is not None:
        ds_sink = ds_sink.double()
        rows, magnitude = rows + ds_sink, magnitude + ds_sink.abs()
    return rows.abs().sum().item(), magnitude.sum().item()
