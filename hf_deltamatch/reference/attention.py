r"""FP8 attention, forward: the specification that kernels are compared with.

.. math::  S = \hat Q \hat K^T \cdot softmax\_scale, \quad
           O = \hat P \hat V / l, \quad lse = \log \sum_j e^{S_{ij}}

P is cast after the *running* maximum, so the result depends on the key tile ``block_n`` and on the
order in which key tiles are visited; both are arguments, and a comparison passes the kernel's own.
Works in blocks of queries; the scores of all queries are never held at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_deltamatch.formats import ATTENTION_BLOCKS, TOKENS_PER_TILE
from hf_deltamatch.recipes import AttentionRecipe
from hf_deltamatch.reference.operands import (
    Operand,
    as_operand,
    has_tile_descales,
    operand_format,
    plain_operand,
    quantize_operand,
)
from hf_deltamatch.reference.quantize import Quantized
from hf_deltamatch.reference.softmax import LN2, LOG2E, cast_p_forward, logits, masked
from hf_deltamatch.reference.visibility import Visibility

_SCORES_PER_BLOCK = {"cpu": 2**19, "other": 2**26}
"""Scores held at once: in the cache on a CPU, a quarter of a gigabyte per tensor elsewhere."""


class AttentionForward(NamedTuple):
    """Output and what the backward needs.

    ``o [B, Hq, Tq, Dv]`` in the dtype of q, stored as ``BTHD``; ``lse [B, Hq, Tq]`` natural log,
    −inf where a query sees no key (the backward reads ``o`` under an unmatched δ alone, else it may be
    None); payloads and descales as in
    :func:`hf_deltamatch.reference.operands.quantize_operand` (empty without quantisation).
    """

    o: Tensor | None
    lse: Tensor
    q_fp8: Tensor
    q_descale: Tensor
    k_fp8: Tensor
    k_descale: Tensor
    v_fp8: Tensor
    v_descale: Tensor


class Segment(NamedTuple):
    """One packed sequence: query rows ``q``, key rows ``k``, descale slots ``q_slot, k_slot``."""

    q: slice
    k: slice
    q_slot: slice
    k_slot: slice


def segments(
    Tq: int, Tk: int, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> list[Segment]:
    """Each packed sequence in turn, or everything as one.

    Under ``128xD`` tiles start with their segment, so that a packed sequence is quantised as it is
    alone. Segment s owns the descale slots from ``cu[s] // 128 + s`` on.
    """
    if cu_seqlens_q is None:
        return [Segment(slice(0, Tq), slice(0, Tk), slice(None), slice(None))]
    cq, ck = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for name, cu, total in (("cu_seqlens_q", cq, Tq), ("cu_seqlens_k", ck, Tk)):
        if cu[0] != 0 or cu[-1] != total or any(a > b for a, b in zip(cu, cu[1:], strict=False)):
            raise ValueError(
                f"delta_matching_attention: `{name}` is {cu[:8]}{'…' if len(cu) > 8 else ''}; it "
                f"must rise from 0 to the number of tokens, {total}."
            )
    return [
        Segment(slice(cq[s], cq[s + 1]), slice(ck[s], ck[s + 1]), _slots(cq, s), _slots(ck, s))
        for s in range(len(cq) - 1)
    ]


def _slots(cu: list[int], s: int) -> slice:
    first = cu[s] // TOKENS_PER_TILE + s
    return slice(first, first + -(-(cu[s + 1] - cu[s]) // TOKENS_PER_TILE))


def descale_shape(
    x: Tensor, recipe: AttentionRecipe, mask: Tensor | None, segment_count: int
) -> tuple[int, ...]:
    """Shape of the descale that goes with ``x [B, H, T, D]``; ``segment_count`` is 0 without
    ``cu_seqlens``."""
    B, H, T, D = x.shape
    if recipe.block == "mx":
        return B, H, *ATTENTION_BLOCKS["mx"].descale_shape(T, D)
    if not has_tile_descales(recipe, mask):
        return B, H, T
    if segment_count:
        return B, H, T // TOKENS_PER_TILE + segment_count
    return B, H, -(-T // TOKENS_PER_TILE)


def blocks(
    B: int, H: int, G: int, Tq: int, Tk: int, device: torch.device
) -> Iterator[tuple[slice, slice, int, int]]:
    """Blocks (batches, key heads, first row, last row) of bounded size.

    Rows come in multiples of 128 so that query tiles, which dS and P share descales in, stay whole.
    """
    budget = _SCORES_PER_BLOCK.get(device.type, _SCORES_PER_BLOCK["other"])
    rows = max(TOKENS_PER_TILE, budget // max(G * Tk, 1) // TOKENS_PER_TILE * TOKENS_PER_TILE)
    rows = max(1, min(rows, Tq))
    heads = max(1, min(H, budget // max(rows * G * Tk, 1)))
    batches = max(1, min(B, budget // max(rows * G * Tk * H, 1))) if heads == H else 1
    for b in range(0, B, batches):
        for h in range(0, H, heads):
            for t in range(0, Tq, rows):
                yield (
                    slice(b, min(b + batches, B)),
                    slice(h, min(h + heads, H)),
                    t,
                    min(t + rows, Tq),
                )


def rows_of(x: Operand, b: slice, h: slice, G: int, start: int, stop: int) -> Operand:
    """Query-side views of a block: ``[b, h, G, r, …]`` from ``[B, Hq, Tq, …]``."""

    def cut(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        return t[b, :, start:stop].unflatten(1, (-1, G))[:, h]

    return Operand(*(cut(t) for t in x))


def keys_of(x: Operand, b: slice, h: slice, width: int) -> Operand:
    """Key-side views of a block ``[b, h, width, …]``, padded with zero tokens of descale 1."""

    def cut(t: Tensor | None, value: float) -> Tensor | None:
        if t is None:
            return None
        t = t[b, h]
        pad = width - t.shape[2]
        if not pad:
            return t
        return torch.nn.functional.pad(t, (0, 0, 0, pad) if t.dim() == 4 else (0, pad), value=value)

    return Operand(cut(x.feat, 0), cut(x.row, 1), cut(x.tok, 0), cut(x.fold, 0), cut(x.poison, 0))


def poisoned(visible: Tensor | None, poison: Tensor, like: Tensor) -> Tensor:
    """Rows that see a NaN token: ``[b, h, G, r, 1 or D]`` bool."""
    seen = torch.ones_like(like) if visible is None else visible.expand_as(like).to(like.dtype)
    return torch.matmul(seen.flatten(2, 3), poison.to(like.dtype)).unflatten(2, like.shape[2:4]) > 0


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    key_order: str = "descending",
) -> AttentionForward:
    """Reference forward. Arguments are validated by ``ops``; see there for their meaning.

    Args:
        q, k, v: ``[B, Hq, Tq, D]``, ``[B, Hkv, Tk, D]``, ``[B, Hkv, Tk, Dv]``, any strides.
        block_n: keys per tile of the online softmax that is emulated.
        key_order: ``descending`` or ``ascending``.
    """
    B, Hq, Tq, _ = q.shape
    Tk, Dv = v.shape[2:]
    acc_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    o = torch.empty(B, Tq, Hq, Dv, dtype=q.dtype, device=q.device).transpose(1, 2)
    lse = torch.empty(B, Hq, Tq, dtype=acc_dtype, device=q.device)
    saved = empty_saved(q, k, v, mask, cu_seqlens_q, recipe)
    tiles = has_tile_descales(recipe, mask)
    for seg in segments(Tq, Tk, cu_seqlens_q, cu_seqlens_k):
        vis = visibility(q, k, seg, mask, is_causal, window)
        ops = []
        for which, x, s, slots in (
            ("q", q, seg.q, seg.q_slot),
            ("k", k, seg.k, seg.k_slot),
            ("v", v, seg.k, seg.k_slot),
        ):
            rules = token_rules(which, vis)
            if not recipe.quantize:
                ops.append(plain_operand(x[:, :, s], rules["hidden"]))
                continue
            quantized = quantize_operand(x[:, :, s], which, recipe, **rules)
            payload, descale = saved[which]
            payload[:, :, s] = quantized.payload
            descale[:, :, slots if tiles else s] = quantized.descale
            ops.append(as_operand(quantized, recipe, tiles=tiles, tokens=which == "v"))
        _forward_segment(
            *ops, vis, o[:, :, seg.q], lse[:, :, seg.q], sinks, softmax_scale, softcap, recipe,
            block_n, key_order,
        )  # fmt: skip
    return AttentionForward(o, lse, *(t for which in "qkv" for t in saved[which]))


def visibility(
    q: Tensor, k: Tensor, seg: Segment, mask: Tensor | None, is_causal: bool, window: int | None
) -> Visibility:
    """Visibility inside one segment; ``mask`` is cut to it."""
    Tq, Tk = len(range(*seg.q.indices(q.shape[2]))), len(range(*seg.k.indices(k.shape[2])))
    if mask is not None and (Tq, Tk) != (q.shape[2], k.shape[2]):
        if mask.dtype == torch.bool:
            mask = mask.expand(*mask.shape[:-2], q.shape[2], k.shape[2])[..., seg.q, seg.k]
        else:
            mask = mask[..., seg.k].clone()
            mask[:, 2] += seg.q.start
    return Visibility(
        (q.shape[0], q.shape[1], k.shape[1], Tq, Tk),
        is_causal=is_causal,
        window=window,
        mask=mask,
        device=q.device,
    )


def empty_saved(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    recipe: AttentionRecipe,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Payload and descale buffers of q, k, v; also the shapes that the ops promise."""
    if not recipe.quantize:
        return {which: (q.new_empty(0), q.new_empty(0)) for which in "qkv"}
    n = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    out = {}
    for which, x in (("q", q), ("k", k), ("v", v)):
        shape = descale_shape(x, recipe, mask, n)
        payload = torch.empty(x.shape, dtype=operand_format(which, recipe).dtype, device=x.device)
        out[which] = (payload, torch.ones(shape, dtype=torch.float32, device=x.device))
    return out


def token_rules(which: str, vis: Visibility) -> dict[str, Tensor | None]:
    """What visibility means for the quantiser of one operand."""
    if which in ("k", "v"):
        return {"hidden": vis.key_hidden, "cuts": vis.key_cuts}
    if which == "do":
        # Padding that is not trained on has dO = 0; where it is, its gradient counts.
        return {"hidden": vis.query_hidden, "cuts": vis.query_cuts}
    return {"hidden": vis.query_hidden, "counted": vis.query_counted, "cuts": vis.query_cuts}


def reload(
    payload: Tensor, descale: Tensor, seg: slice, slots: slice, recipe: AttentionRecipe, tiles: bool
) -> Operand:
    """Both views of a saved operand of one segment."""
    part = Quantized(payload[:, :, seg], descale[:, :, slots if tiles else seg])
    return as_operand(part, recipe, tiles=tiles)


def key_width(Tk: int, recipe: AttentionRecipe, block_n: int) -> int:
    """Keys padded to whole tiles; without quantisation tiles do not matter."""
    return max(1, -(-Tk // block_n)) * block_n if recipe.quantize else max(Tk, 1)


def _forward_segment(
    q: Operand, k: Operand, v: Operand, vis: Visibility, o, lse, sinks, softmax_scale, softcap,
    recipe: AttentionRecipe, block_n: int, key_order: str,
) -> None:  # fmt: skip
    G, width = vis.groups, key_width(vis.Tk, recipe, block_n)
    for b, h, start, stop in blocks(vis.B, vis.Hkv, G, vis.Tq, width, lse.device):
        qb = rows_of(q, b, h, G, start, stop)
        kb, vb = keys_of(k, b, h, width), keys_of(v, b, h, width)
        visible = vis.rows(b, h, start, stop, width)
        s2, _ = logits(qb, kb, softmax_scale, softcap)
        s2 = masked(s2, visible, -torch.inf)
        if recipe.quantize:
            p, m, l = cast_p_forward(s2, vb, recipe, block_n, key_order)
        else:
            m = s2.amax(-1, keepdim=True)
            m = torch.where(m == -torch.inf, 0.0, m)
            p = torch.exp2(s2 - m)
            l = p.sum(-1, keepdim=True)
        acc = torch.matmul(p.flatten(2, 3), vb.tok).unflatten(2, p.shape[2:4])
        if vb.poison is not None:
            acc = torch.where(poisoned(visible, vb.poison, p), torch.nan, acc)
        seen = l > 0
        if sinks is not None:
            sink2 = (sinks.to(l.dtype) * LOG2E).view(1, -1, G, 1, 1)[:, h]
            top = torch.maximum(m, sink2)
            shrink = torch.exp2(m - top)
            acc, l, m = acc * shrink, l * shrink + torch.exp2(sink2 - top), top
        # A row that sees nothing: O = 0 and lse = −inf. NaN rows have l = NaN and stay NaN.
        seen = seen | l.isnan()
        out = torch.where(seen, acc / torch.where(seen, l, 1.0), 0.0)
        row_lse = torch.where(seen, (m + l.log2()) * LN2, -torch.inf)
        heads = slice(h.start * G, h.stop * G)
        o[b, heads, start:stop] = out.flatten(1, 2).to(o.dtype)
        lse[b, heads, start:stop] = row_lse[..., 0].flatten(1, 2)
