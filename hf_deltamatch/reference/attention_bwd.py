r"""FP8 attention, backward: five products, and the row correction δ that has to match them.

.. math::
    P = e^{S - lse}, \quad dP = \widehat{dO}\, \hat V^T, \quad dS = P \circ (dP - \delta)

    dV = \hat P^T \widehat{dO}, \quad dQ = \widehat{dS}\, \hat K, \quad dK = \widehat{dS}^T \hat Q

The softmax gradient has zero row sums: Σ_j dS_ij = 0. It holds when

.. math::  \delta_i = \sum_j P_{ij}\, dP_{ij} \Big/ \Big(\sum_j P_{ij} + P_{sink,i}\Big)

is taken from the *same* unquantised P and the *same* dP (``matched``). FlashAttention's
rowsum(dO ∘ O) is equal only in exact arithmetic (``stale``): with e_i = δ_matched − δ_stale it adds
e_i · P_i to dS_i and so e_i · Σ_j P_ij K_j, a mean key, to dQ_i. ``dequantized`` and ``forward`` take
rowsum(dÔ ∘ O); they differ in the forward's O.

A gradient of lse adds P ∘ dlse to dS, which is the same as subtracting dlse from δ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_deltamatch.formats import E5M2, P_SWEEP_CAST_LOG2, TOKENS_PER_TILE
from hf_deltamatch.recipes import AttentionRecipe
from hf_deltamatch.reference.attention import (
    AttentionForward,
    Segment,
    blocks,
    key_width,
    keys_of,
    poisoned,
    reload,
    rows_of,
    segments,
    token_rules,
    visibility,
)
from hf_deltamatch.reference.operands import (
    Operand,
    as_operand,
    has_tile_descales,
    plain_operand,
    quantize_operand,
)
from hf_deltamatch.reference.quantize import round_trip
from hf_deltamatch.reference.softmax import (
    LOG2E,
    cast_backward,
    contract_features,
    logits,
    masked,
)
from hf_deltamatch.reference.visibility import Visibility

DsHook = Callable[[Tensor, Tensor | None], None]


class AttentionBackward(NamedTuple):
    """``dq, dk, dv`` in the dtype of the output; ``dsinks [Hq]`` FP32 (empty without sinks);
    ``delta [B, Hq, Tq]`` FP32, the δ of the recipe."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor
    delta: Tensor


class _Block(NamedTuple):
    """Everything a block of query rows needs; query-side ``[b, h, G, r, …]``."""

    q: Operand
    do: Operand
    k: Operand
    v: Operand
    visible: Tensor | None
    lse: Tensor
    dlse: Tensor | None
    out: Tensor
    do_hp: Tensor
    sink2: Tensor | None


def attention_bwd(
    do: Tensor,
    dlse: Tensor | None,
    fwd: AttentionForward,
    qkv: tuple[Tensor, Tensor, Tensor] | None,
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
    block_n: int = TOKENS_PER_TILE,
    block_m: int = TOKENS_PER_TILE,
    block_m_p: int | None = None,
    one_pass: bool = False,
    ds_hook: DsHook | None = None,
) -> AttentionBackward:
    """Reference backward.

    Args:
        do: ``[B, Hq, Tq, Dv]``, any strides.
        dlse: gradient of lse ``[B, Hq, Tq]`` or None.
        fwd: what the forward returned.
        qkv: the inputs, only without quantisation.
        block_n: keys that share a descale of dS in product 6 (the dQ kernel's key tile).
        block_m: query rows that share a descale of dS in product 7 (the query tile of the dK
            kernel); divides 128.
        block_m_p: the same of P in product 5 (the dV kernel's); default ``block_m``.
        one_pass: product 6 as a kernel multiplies that learns δ at the end of its sweep over the keys
            (``128xD``, matched δ): with P ∘ (dP − z), z an estimate of δ, less (δ − z) times a coarser
            P K.
        ds_hook: called with every block of FP32 dS ``[b, h, G, r, n]``, before its cast and before
            the soft cap's derivative, and with the sink's column ``[b, h, G, r]`` or None.
    """
    q, k, v = qkv if qkv is not None else (fwd.q_fp8, fwd.k_fp8, fwd.v_fp8)
    acc = torch.float64 if do.dtype == torch.float64 else torch.float32
    dq = torch.zeros(q.shape, dtype=acc, device=q.device)
    dk = torch.zeros(k.shape, dtype=acc, device=q.device)
    dv = torch.zeros(v.shape, dtype=acc, device=q.device)
    dsinks = torch.zeros(0 if sinks is None else q.shape[1], dtype=acc, device=q.device)
    delta = torch.zeros(q.shape[:3], dtype=acc, device=q.device)
    tiles = has_tile_descales(recipe, mask)
    for seg in segments(q.shape[2], k.shape[2], cu_seqlens_q, cu_seqlens_k):
        vis = visibility(q, k, seg, mask, is_causal, window)
        rules = {which: token_rules(which, vis) for which in ("q", "k", "v", "do")}
        do_seg = do[:, :, seg.q]
        if recipe.quantize:
            q_op = reload(fwd.q_fp8, fwd.q_descale, seg.q, seg.q_slot, recipe, tiles)
            k_op = reload(fwd.k_fp8, fwd.k_descale, seg.k, seg.k_slot, recipe, tiles)
            v_op = reload(fwd.v_fp8, fwd.v_descale, seg.k, seg.k_slot, recipe, tiles)
            do_fp8 = quantize_operand(do_seg, "do", recipe, **rules["do"])
            do_op = as_operand(do_fp8, recipe, tiles=tiles)
        else:
            q_op, do_op = (plain_operand(x, rules["q"]["hidden"]) for x in (q[:, :, seg.q], do_seg))
            k_op, v_op = (plain_operand(x[:, :, seg.k], rules["k"]["hidden"]) for x in (k, v))
        _backward_segment(
            seg, vis, q_op, k_op, v_op, do_op, do, dlse, fwd, sinks, (dq, dk, dv, dsinks, delta),
            softmax_scale, softcap, recipe, block_n, block_m, block_m_p or block_m, one_pass, ds_hook,
        )  # fmt: skip
    return AttentionBackward(dq.to(do.dtype), dk.to(do.dtype), dv.to(do.dtype), dsinks, delta)


def _backward_segment(
    seg: Segment, vis: Visibility, q: Operand, k: Operand, v: Operand, do: Operand, do_hp: Tensor,
    dlse, fwd: AttentionForward, sinks, grads, softmax_scale: float, softcap, recipe, block_n: int,
    block_m: int, block_m_p: int, one_pass: bool, ds_hook,
) -> None:  # fmt: skip
    dq, dk, dv, dsinks, delta = grads
    G, width = vis.groups, key_width(vis.Tk, recipe, block_n)
    mean_key = _mean_key(k, vis) if recipe.project_row_sum else None
    for b, h, start, stop in blocks(vis.B, vis.Hkv, G, vis.Tq, width, dq.device):
        rows = slice(seg.q.start + start, seg.q.start + stop)
        heads = slice(h.start * G, h.stop * G)

        def cut(t: Tensor | None, b=b, heads=heads, rows=rows) -> Tensor | None:
            return None if t is None else t[b, heads, rows].unflatten(1, (-1, G))

        block = _Block(
            q=rows_of(q, b, h, G, start, stop),
            do=rows_of(do, b, h, G, start, stop),
            k=keys_of(k, b, h, width),
            v=keys_of(v, b, h, width),
            visible=vis.rows(b, h, start, stop, width),
            lse=cut(fwd.lse),
            dlse=cut(dlse),
            out=cut(fwd.o),
            do_hp=cut(do_hp),
            sink2=None if sinks is None else (sinks.to(dq.dtype) * LOG2E).view(-1, G, 1)[h],
        )
        p, dp, ds, ds_sink, delta_b, tanh = _softmax_gradient(block, softmax_scale, softcap, recipe)
        if ds_hook is not None:
            ds_hook(ds[..., : vis.Tk], ds_sink)

        def capped(x: Tensor, tanh=tanh, block=block) -> Tensor:
            if tanh is None:
                return x
            # 0 · NaN where a query or key is NaN that this pair hides.
            return masked(x * (1 - tanh * tanh), block.visible, 0.0)

        ds = first = capped(ds)
        if one_pass:
            first, off = _from_an_estimate(block, p, dp, delta_b, recipe)
            first = capped(first)
        ds_row = cast_backward(first, block.k, recipe, block_n, -1)
        ds_col = cast_backward(ds, block.q, recipe, block_m, -2)
        p_col = cast_backward(p, block.do, recipe, block_m_p, -2)
        dq_b = torch.matmul(ds_row.flatten(2, 3), block.k.tok).unflatten(2, ds.shape[2:4])
        if one_pass:
            coarse = round_trip(capped(p) * 2.0**P_SWEEP_CAST_LOG2, E5M2) * 2.0**-P_SWEEP_CAST_LOG2
            w = torch.matmul(coarse.flatten(2, 3), block.k.tok).unflatten(2, ds.shape[2:4])
            dq_b = dq_b - off[..., None] * w
        if mean_key is not None:
            rounded = ds_row
            if block.k.fold is not None:
                fold = block.k.fold[:, :, None, None, :]
                # Zero keys were left out of the cast; nothing leaks along them.
                rounded = torch.where(fold == 0, ds, rounded / torch.where(fold == 0, 1.0, fold))
            leak = rounded.sum(-1, keepdim=True) - ds.sum(-1, keepdim=True)
            dq_b = dq_b - leak * mean_key[b, h][:, :, None, None]
        dk_b = torch.matmul(ds_col.flatten(2, 3).transpose(-1, -2), block.q.tok.flatten(2, 3))
        dv_b = torch.matmul(p_col.flatten(2, 3).transpose(-1, -2), block.do.tok.flatten(2, 3))
        # P is NaN for whoever sees a NaN in q or k, but `mx` spreads it to other tokens of a block.
        if block.do.poison is not None:
            dv_b = torch.where(_keys_seen_by(block, block.do.poison), torch.nan, dv_b)
        if block.q.poison is not None:
            dk_b = torch.where(_keys_seen_by(block, block.q.poison), torch.nan, dk_b)
        if block.k.poison is not None:
            dq_b = torch.where(poisoned(block.visible, block.k.poison, p), torch.nan, dq_b)
        dq[b, heads, rows] = (dq_b * softmax_scale).flatten(1, 2)
        keys = slice(seg.k.start, seg.k.start + vis.Tk)
        dk[b, h, keys] += dk_b[:, :, : vis.Tk] * softmax_scale
        dv[b, h, keys] += dv_b[:, :, : vis.Tk]
        delta[b, heads, rows] = delta_b.flatten(1, 2)
        if ds_sink is not None:
            dsinks[heads] += ds_sink.sum((0, 3)).flatten()


def _softmax_gradient(
    x: _Block, softmax_scale: float, softcap: float | None, recipe: AttentionRecipe
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """P, dP, dS, dS of the sink's column, δ and the soft cap's tanh of one block."""
    s2, tanh = logits(x.q, x.k, softmax_scale, softcap)
    alive = x.lse != -torch.inf
    lse2 = torch.where(alive, x.lse, 0.0) * LOG2E
    p = masked(torch.exp2(s2 - lse2[..., None]), x.visible, 0.0)
    p = torch.where(alive[..., None], p, 0.0)
    dp = masked(contract_features(x.do.feat, x.do.row, x.v.feat, x.v.row), x.visible, 0.0)
    p_sink = None
    if x.sink2 is not None:
        p_sink = torch.where(alive, torch.exp2(x.sink2 - lse2), 0.0)
    delta = _delta(x, p, dp, p_sink, recipe)
    shifted = delta if x.dlse is None else delta - x.dlse
    # A row that sees nothing has no gradient, whatever its dO holds.
    delta, shifted = (torch.where(alive, d, 0.0) for d in (delta, shifted))
    ds = _gradient_of_logits(x, p, dp, shifted)
    return p, dp, ds, None if p_sink is None else -p_sink * shifted, delta, tanh


def _gradient_of_logits(x: _Block, p: Tensor, dp: Tensor, shifted: Tensor) -> Tensor:
    """P ∘ (dP − shifted), 0 where a pair is not visible."""
    ds = masked(p * (dp - shifted[..., None]), x.visible, 0.0)
    return torch.where((x.lse != -torch.inf)[..., None], ds, 0.0)


def _from_an_estimate(
    x: _Block, p: Tensor, dp: Tensor, delta: Tensor, recipe: AttentionRecipe
) -> tuple[Tensor, Tensor]:
    """P ∘ (dP − z), and δ − z: z is δ of the output, 0 where that is no number."""
    z = _delta_of_output(x, p.dtype, recipe)
    dlse = 0.0 if x.dlse is None else x.dlse
    alive = x.lse != -torch.inf
    z = torch.where(alive, z - dlse, 0.0)
    z = torch.where(z.isfinite(), z, 0.0)
    return _gradient_of_logits(x, p, dp, z), torch.where(alive, delta - dlse, 0.0) - z


def _delta(
    x: _Block, p: Tensor, dp: Tensor, p_sink: Tensor | None, recipe: AttentionRecipe
) -> Tensor:
    if recipe.delta == "matched":
        total = p.sum(-1)
        if p_sink is not None:
            total = total + p_sink
        return (p * dp).sum(-1) / torch.where(total == 0, 1.0, total)
    return _delta_of_output(x, p.dtype, recipe)


def _delta_of_output(x: _Block, dtype: torch.dtype, recipe: AttentionRecipe) -> Tensor:
    out, do = x.out, x.do_hp
    if recipe.quantize:
        out = out.to(torch.bfloat16)
        if recipe.delta != "stale":
            do = x.do.feat if x.do.row is None else x.do.feat * x.do.row[..., None]
    return (do.to(dtype) * out.to(dtype)).sum(-1)


def _keys_seen_by(x: _Block, poison: Tensor) -> Tensor:
    """Keys that a query with a NaN in ``poison [b, h, G, r, 1 or D]`` sees: ``[b, h, n, 1 or D]``."""
    n = x.k.feat.shape[2]
    like = poison.new_ones(*poison.shape[:4], n, dtype=torch.float32)
    seen = (like if x.visible is None else x.visible.expand_as(like).float()).flatten(2, 3)
    return torch.matmul(seen.transpose(-1, -2), poison.flatten(2, 3).float()) > 0


def _mean_key(k: Operand, vis: Visibility) -> Tensor:
    """Mean of the dequantised keys that are visible to any query: ``[B, Hkv, D]``."""
    keys = k.tok if k.fold is None else k.tok * k.fold[..., None]
    if vis.key_hidden is None:
        return keys.sum(2) / max(vis.Tk, 1)
    count = (~vis.key_hidden).sum(-1).clamp_min(1)[..., None]
    return keys.sum(2) / count  # hidden keys are zero
