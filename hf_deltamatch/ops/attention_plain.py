"""Attention of an unquantised recipe on a device: torch's SDPA, and softmax in torch where a soft cap or
sinks are asked for, which SDPA does not know.

The same meaning of every argument as the reference, without its emulation of tiles and of casts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_deltamatch.reference.attention import segments
from hf_deltamatch.reference.visibility import NO_WINDOW, Visibility


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    is_causal: bool,
    window: int | None,
    softmax_scale: float,
    softcap: float | None,
) -> Tensor:
    """``o [B, Hq, Tq, Dv]``, differentiable; arguments as ``delta_matching_attention`` has checked
    them. A query that sees no key gets 0 and sends no gradient."""
    Hq, Tq, Hkv, Tk = q.shape[1], q.shape[2], k.shape[1], k.shape[2]
    if cu_q is not None and mask is None and not torch.compiler.is_compiling():
        # One after the other: a mask over all of them would take Tq x Tk.
        rest = (None, sinks, None, None, is_causal, window, softmax_scale, softcap)
        parts = [
            plain_attention(q[:, :, s.q], k[:, :, s.k], v[:, :, s.k], *rest)
            for s in segments(Tq, Tk, cu_q, cu_k)
        ]
        return torch.cat(parts, 2)
    if Tk == 0:
        return q.new_zeros(*q.shape[:-1], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum())
    square = is_causal and window is None and mask is None and cu_q is None and Tq == Tk
    newest = is_causal and window is None and mask is None and cu_q is None and Tq == 1
    visible = None
    if not newest and (not square or sinks is not None or softcap is not None):
        visible = _visible(q, k, mask, cu_q, cu_k, is_causal, window)
    hidden = None
    if visible is not None:
        hidden = ~visible.any(-1, keepdim=True)
        visible = visible | hidden  # softmax over no key is NaN, and so would be its gradient
    if sinks is None and softcap is None:
        if visible is not None and Hq != Hkv:
            # With a mask and fewer key heads SDPA has but its slowest path.
            k, v = (x.repeat_interleave(Hq // Hkv, 1) for x in (k, v))
        o = F.scaled_dot_product_attention(
            q,
            k,
            v,
            visible,
            is_causal=square,
            scale=softmax_scale,
            enable_gqa=k.shape[1] != Hq,
        )
    else:
        o = _softmax(q, k, v, visible, sinks, softmax_scale, softcap)
    return o if hidden is None else o.masked_fill(hidden, 0.0)


def _softmax(q, k, v, visible, sinks, softmax_scale: float, softcap: float | None) -> Tensor:
    Hq, Hkv = q.shape[1], k.shape[1]
    group = lambda x: x.unflatten(1, (Hkv, Hq // Hkv)).flatten(2, 3)
    s = (group(q) @ k.transpose(-1, -2)).unflatten(2, (Hq // Hkv, -1)).flatten(1, 2)
    s = s.to(torch.promote_types(s.dtype, torch.float32)) * softmax_scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.to(s.dtype)[:, None, None].expand(*s.shape[:-1], 1)
        s = torch.cat((s, column), -1)
    p = s.softmax(-1)
    p = p if sinks is None else p[..., :-1]
    return (group(p.to(v.dtype)) @ v).unflatten(2, (Hq // Hkv, -1)).flatten(1, 2)


def _visible(q, k, mask, cu_q, cu_k, is_causal: bool, window: int | None) -> Tensor | None:
    """``[B|1, Hq|1, Tq, Tk]``, True = attend; None where every query sees every key."""
    (B, Hq, Tq, _), (_, Hkv, Tk, _) = q.shape, k.shape
    if cu_q is None:
        return Visibility(
            (B, Hq, Hkv, Tq, Tk), is_causal=is_causal, window=window, mask=mask, device=q.device
        ).dense()
    at_q, of_q, many_q = _within(cu_q, Tq)
    at_k, of_k, many_k = _within(cu_k, Tk)
    visible = of_q[:, None] == of_k
    if is_causal:
        distance = (at_q + (many_k - many_q)[of_q])[:, None] - at_k
        visible = visible & (distance >= 0)
        visible = visible & (distance < (NO_WINDOW if window is None else window))
    if mask is None:
        return visible[None, None]
    return (
        visible
        & Visibility(
            (B, Hq, Hkv, Tq, Tk), is_causal=False, window=None, mask=mask, device=q.device
        ).dense()
    )


def _within(cu: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Position of every token in its sequence, the sequence's index, and the sequences' lengths."""
    cu = cu.long()
    at = torch.arange(tokens, device=cu.device)
    of = torch.searchsorted(cu[1:].contiguous(), at, right=True)
    return at - cu[of], of, cu.diff()
