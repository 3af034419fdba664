"""One attention call in the words of the kernels: shapes, masks, packing, buffers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_deltamatch.formats import FORMATS, MX_BLOCK, TOKENS_PER_TILE
from hf_deltamatch.kernels import attention_config, multiprocessors
from hf_deltamatch.kernels.geometry import _bounds_kernel
from hf_deltamatch.kernels.launch import (
    SOFT_CAST,
    code_columns,
    feature_block,
    packings,
    padded_features,
)
from hf_deltamatch.recipes import AttentionRecipe

LARGE_SOFTCAP = 500.0
"""Above, an error of 1e-7 in tanh would be seen in the logits."""


class TokenFacts(NamedTuple):
    """What a mask means for the quantisers; every field may be None.

    ``key_state [B|1, Hkv|1, Tk]``, ``query_state, do_state [B|1, Hq|1, Tq]``: uint8, 1 hidden, 2
    uncounted.
    ``key_cuts``, ``query_cuts``: True where a tile may not be shared with the previous token.
    """

    key_state: Tensor | None = None
    query_state: Tensor | None = None
    do_state: Tensor | None = None
    key_cuts: Tensor | None = None
    query_cuts: Tensor | None = None


class Problem:
    """Shapes, visibility and recipe of one call, in the words of the kernels.

    Attributes beside the arguments: ``tile`` (one descale per tile; a boolean mask may cut tiles, so
    there every token has its own), ``one_pass`` (δ and dQ of one sweep), ``pow2``, ``mask_kind`` (0 none,
    1 compact, 2 boolean), ``mask_bytes`` (``[B, H|1, Tq, Tk]``, or contiguous compact rows) with ``mask_heads`` and
    ``mask_strides``, ``pack_q`` and ``pack_k``, ``segments``, ``BLOCK_D`` and ``BLOCK_DV``, and
    ``cuts`` of queries and keys.
    """

    def __init__(
        self, *, B: int, Hq: int, Hkv: int, Tq: int, Tk: int, D: int, Dv: int, mask: Tensor | None,
        facts: TokenFacts, sinks: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None,
        is_causal: bool, window: int | None, softmax_scale: float, softcap: float | None,
        recipe: AttentionRecipe, device: torch.device,
    ) -> None:  # fmt: skip
        self.B, self.Hq, self.Hkv, self.Tq, self.Tk, self.D, self.Dv = B, Hq, Hkv, Tq, Tk, D, Dv
        self.facts, self.cu_q, self.cu_k = facts, cu_q, cu_k
        self.sinks = None if sinks is None else sinks.contiguous()  # read without a stride
        self.is_causal, self.window = is_causal, window
        self.softmax_scale, self.softcap = softmax_scale, softcap
        self.recipe, self.device = recipe, device
        self.BLOCK_D, self.BLOCK_DV = feature_block(D), feature_block(Dv)
        self.pow2 = recipe.descale == "pow2"
        self.pack_q, self.pack_k = packings(Tq, Tk, cu_q, cu_k)
        self.segments = 1 if cu_q is None else cu_q.numel() - 1
        self._set_mask(mask)
        self.tile = recipe.block == "128xD" and self.mask_kind != 2
        self.one_pass = attention_config.has_one_pass(recipe, D, Dv, tile=self.tile)
        tiled = recipe.block == "128xD"
        self.cuts = (facts.query_cuts, facts.key_cuts) if tiled else (None, None)
        self._shape_flags = dict(CAUSAL=is_causal, WINDOW=window is not None, MASK=self.mask_kind)
        self._flags = dict(
            **self._shape_flags,
            SOFTCAP=0 if softcap is None else 1 + (softcap > LARGE_SOFTCAP),
            TILE=self.tile,
            PACKED=cu_q is not None,
            SOFT_CAST=SOFT_CAST,
        )

    def _set_mask(self, mask: Tensor | None) -> None:
        self.mask_kind, self.mask_bytes, self.mask_heads = 0, None, 1
        self.mask_strides = (0, 0, 0, 0)
        if mask is None:
            return
        if mask.dtype != torch.bool:
            self.mask_kind, self.mask_bytes = 1, mask.contiguous()
            stride = self.mask_bytes.stride(0) if mask.shape[0] > 1 else 0
            self.mask_strides = (stride, 0, 0, 0)
            return
        m = mask.view((1,) * (4 - mask.dim()) + tuple(mask.shape)).view(torch.uint8)
        m = m.expand(self.B, m.shape[1], self.Tq, self.Tk)
        sb, sh, sq, sk = m.stride()
        self.mask_kind, self.mask_bytes, self.mask_heads = 2, m, m.shape[1]
        self.mask_strides = (sb, (sh if m.shape[1] > 1 else 0), sq, sk)

    def bounds(self, by_key: bool) -> Tensor | None:
        """First and one past the last token that each tile of 128 sees on the other axis."""
        if self.mask_kind == 0:
            return None
        m, heads, strides = self.mask_bytes, self.mask_heads, self.mask_strides
        if by_key and heads > 1:
            m = m.unflatten(1, (self.Hkv, -1)).amax(2)
            heads, strides = self.Hkv, m.stride()
        tiles = self.pack_k.slots if by_key else self.pack_q.slots
        out = torch.empty(self.B, heads, tiles, 2, dtype=torch.int32, device=m.device)
        _bounds_kernel[(tiles * self.B * heads,)](
            m, out, tiles, self.Tq, self.Tk, self.window or 0, heads, *strides, BY_KEY=by_key,
            BLOCK=128, **self._shape_flags,
        )  # fmt: skip
        return out

    def programs(
        self, block: int, residents: int | None = None, *, by_key: bool = False
    ) -> tuple[tuple[int], tuple[int, int]]:
        """Grid of a kernel with a program for ``block`` queries of a query head, or keys of a key head, and what
        ``geometry.own_program`` takes. ``residents``: programs of it that a multiprocessor holds, where some
        heads at once are faster than one after another."""
        T, pack, heads = (
            (self.Tk, self.pack_k, self.Hkv) if by_key else (self.Tq, self.pack_q, self.Hq)
        )
        tiles = -(-T // block) if self.cu_q is None else pack.slots * (TOKENS_PER_TILE // block)
        heads *= self.B
        return (tiles * heads,), (self.heads_at_once(tiles, heads, residents), tiles)

    def heads_at_once(self, tiles: int, heads: int, residents: int | None) -> int:
        """Causal heads whose programs are twice what the device holds, as one head's longest program is twice as
        long as the mean. Started head by head, the longest ones of the last head would run on when all others
        have ended."""
        causal = self.window is None and (self.is_causal or self.mask_kind)
        if residents is None or not causal:
            return 1
        return max(1, min(heads, 2 * residents * multiprocessors(self.device) // tiles))

    def flags(self) -> dict[str, Any]:
        """What every attention kernel is compiled for."""
        return self._flags

    def blocks(self) -> dict[str, int]:
        """Features of a tile and of a stored row, of Q and K and of V and dO."""
        return dict(
            BLOCK_D=self.BLOCK_D,
            BLOCK_DV=self.BLOCK_DV,
            D_STORED=padded_features(self.D),
            DV_STORED=padded_features(self.Dv),
        )

    def hide(self, keys: bool) -> int | None:
        """Tokens at the start (of each segment) that nothing attends to, or that see nothing, are
        those before ``own length − other length + hide``; None if there are none."""
        if self.mask_kind != 0 or not self.is_causal or (keys and self.window is None):
            return None
        hide = 1 - self.window if keys else 0
        own, other = (self.Tk, self.Tq) if keys else (self.Tq, self.Tk)
        return hide if self.cu_q is not None or own - other + hide > 0 else None

    def features(self, which: str) -> int:
        return self.D if which in ("q", "k") else self.Dv

    def empty_operand(self, which: str) -> tuple[Tensor, Tensor]:
        """Payload ``[B, H, T, D padded]`` and descale of ``q``, ``k``, ``v`` or ``do``."""
        keys = which in ("k", "v")
        H, T = (self.Hkv, self.Tk) if keys else (self.Hq, self.Tq)
        D = self.features(which)
        return empty_operand(self.B, H, T, D, which, self.recipe, self.tile, self.cu_q, self.device)


def saved_views(payload: Tensor, descale: Tensor, D: int, block: str) -> tuple[Tensor, Tensor]:
    """What the ops return of the buffers of an operand, without the padding of their rows."""
    if block == "mx":
        descale = descale[..., : -(-D // MX_BLOCK)]
    return payload if payload.shape[-1] == D else payload[..., :D], descale


def empty_operand(
    B: int, H: int, T: int, D: int, which: str, recipe: AttentionRecipe, tile: bool,
    cu: Tensor | None, device: torch.device,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Buffers of one operand; also the shapes and strides that the ops promise."""
    dtype = FORMATS[recipe.do_format].dtype if which == "do" else torch.float8_e4m3fn
    payload = torch.empty(B, H, T, padded_features(D), dtype=dtype, device=device)
    if recipe.block == "mx":
        codes = torch.empty(B, H, T, code_columns(D), dtype=torch.uint8, device=device)
        return payload, codes
    if not tile:
        return payload, torch.empty(B, H, T, device=device)
    slots = -(-T // TOKENS_PER_TILE) if cu is None else T // TOKENS_PER_TILE + cu.numel() - 1
    # Packed: some slots stay unused, and what is saved must not differ between runs.
    make = torch.empty if cu is None else torch.ones
    return payload, make(B, H, slots, device=device)
