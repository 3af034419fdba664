"""A slice of every attention call of a step: what went into the ops and what came out.

A dispatch mode sees the ops where they are executed, in forward, backward and the recomputation of
checkpointing alike. Nothing is computed here; a slice is one head of one sequence of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_deltamatch.ops.attention_op import attention_bwd, attention_fwd
from hf_deltamatch.recipes import AttentionRecipe


@dataclass
class Slice:
    """One head of an attention call over ``n`` tokens that see nothing outside of them."""

    q: Tensor
    """``[n, D]``, as ``k``; ``v`` is ``[n, Dv]``: what the op was given, and ``o`` what it returned."""
    k: Tensor
    v: Tensor
    o: Tensor
    mask: Tensor | None
    """``[1, 3, 1, n]`` int32 or ``[1, 1, 1 or n, 1 or n]`` bool."""
    sink: Tensor | None
    is_causal: bool
    window: int | None
    softmax_scale: float
    softcap: float | None
    recipe: AttentionRecipe
    where: tuple[int, int, slice]
    do: Tensor | None = None
    """``[n, Dv]``; ``lse``, ``delta`` and ``dlse`` are ``[n]``, ``dq`` is ``[n, D]``."""
    lse: Tensor | None = None
    dlse: Tensor | None = None
    dq: Tensor | None = None
    delta: Tensor | None = None


class Capture(TorchDispatchMode):
    """``done`` has an entry per attention backward, in the order in which they ran: the last layer
    first. None stands for a call that has no slice to look at.

    Args:
        max_tokens: of a slice; a multiple of 128, so that tiles of descales stay whole.
        turn: chooses sequence and head.
    """

    def __init__(self, max_tokens: int, turn: int) -> None:
        super().__init__()
        self.max_tokens, self.turn = max_tokens, turn
        self.done: list[Slice | None] = []
        # By the address of lse, which the backward is handed again.
        self._open: dict[int, Slice | None] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is attention_fwd:
            self._open[out[1].data_ptr()] = self._forward(args, out[0])
        elif func is attention_bwd:
            self.done.append(self._backward(args, out))
        return out

    def _forward(self, args, o: Tensor) -> Slice | None:
        (
            q, k, v, mask, sinks, cu_q, cu_k, is_causal, window, softmax_scale, softcap, recipe, _,
        ) = args  # fmt: skip
        B, H, T, _ = q.shape
        span = self._span(T, k.shape[2], mask, cu_q, cu_k, is_causal)
        if span is None:
            return None
        b, h = self.turn % B, self.turn % H
        kv = h // (H // k.shape[1])
        take = lambda x, head: x[b, head, span].detach().clone()
        return Slice(
            q=take(q, h),
            k=take(k, kv),
            v=take(v, kv),
            o=take(o, h),
            mask=None if mask is None else _cut_mask(mask, b, h, span),
            sink=None if sinks is None else sinks[h].detach().clone(),
            is_causal=is_causal,
            window=window,
            softmax_scale=softmax_scale,
            softcap=softcap,
            recipe=AttentionRecipe.decode(recipe),
            where=(b, h, span),
        )

    def _span(self, Tq: int, Tk: int, mask, cu_q, cu_k, is_causal: bool) -> slice | None:
        """Tokens that see nothing outside of them, None if there are none of a size to look at."""
        if Tq != Tk:
            return None
        if cu_q is not None:
            ends = cu_q.tolist()
            if ends != cu_k.tolist() or mask is not None:
                return None
            lengths = [b - a for a, b in zip(ends, ends[1:], strict=False)]
            longest = max(range(len(lengths)), key=lengths.__getitem__)
            first, n = ends[longest], lengths[longest]
        else:
            first, n = 0, Tq
        if n > self.max_tokens:
            # Only of a causal sequence the beginning stands by itself.
            if not (is_causal or (mask is not None and mask.dtype == torch.int32)):
                return None
            n = self.max_tokens
        return slice(first, first + n) if n else None

    def _backward(self, args, out) -> Slice | None:
        do, dlse, _, lse = args[:4]
        found = self._open.pop(lse.data_ptr(), None)
        if found is None:
            return None
        take = lambda x: None if x is None else x[found.where].detach().clone()
        found.do, found.lse, found.dlse = take(do), take(lse), take(dlse)
        found.dq, found.delta = take(out[0]), take(out[4])
        return found


def _cut_mask(mask: Tensor, b: int, h: int, span: slice) -> Tensor:
    pick = lambda size, at: slice(0, 1) if size == 1 else slice(at, at + 1)
    if mask.dtype != torch.bool:
        return mask[pick(mask.shape[0], b), ..., span].clone()
    mask = mask.view((1,) * (4 - mask.dim()) + tuple(mask.shape))
    mask = mask[pick(mask.shape[0], b), pick(mask.shape[1], h)]
    rows = slice(None) if mask.shape[2] == 1 else span
    columns = slice(None) if mask.shape[3] == 1 else span
    return mask[:, :, rows, columns].clone()
