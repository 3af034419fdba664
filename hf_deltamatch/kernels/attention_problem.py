"""One attention call in the words of the kernels: shapes, masks, packing, buffers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_deltamatch.formats import FORMATS, MX_BLOCK, TOKENS_PER_TILE
from hf_deltamatch.kernels.geometry import _bounds_kernel
from hf_deltamatch.kernels.launch import SOFT_CAST, Packing, packing, padded_features
from hf_deltamatch.kernels.quantize import quantize
from hf_deltamatch.kernels.quantize_mx import code_columns, quantize_mx
from hf_deltamatch.recipes import AttentionRecipe


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


@dataclass(frozen=True)
class Problem:
    """Shapes, visibility and recipe of one call, in the words of the kernels."""

    B: int
    Hq: int
    Hkv: int
    Tq: int
    Tk: int
    D: int
    Dv: int
    mask: Tensor | None
    facts: TokenFacts
    sinks: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    is_causal: bool
    window: int | None
    softmax_scale: float
    softcap: float | None
    recipe: AttentionRecipe
    device: torch.device

    @cached_property
    def pack_q(self) -> Packing:
        return packing(self.Tq, self.cu_q)

    @cached_property
    def pack_k(self) -> Packing:
        return packing(self.Tk, self.cu_k)

    @property
    def segments(self) -> int:
        return 1 if self.cu_q is None else self.cu_q.numel() - 1

    @property
    def tile(self) -> bool:
        """One descale per tile; a boolean mask may cut tiles, so there every token has its own."""
        return self.recipe.block == "128xD" and self.mask_kind != 2

    @property
    def mask_kind(self) -> int:
        if self.mask is None:
            return 0
        return 2 if self.mask.dtype == torch.bool else 1

    @cached_property
    def mask_bytes(self) -> Tensor | None:
        """The mask as ``[B, H|1, Tq, Tk]`` bytes, or contiguous compact rows."""
        if self.mask_kind == 0:
            return None
        if self.mask_kind == 1:
            return self.mask.contiguous()
        m = self.mask
        m = m.view((1,) * (4 - m.dim()) + tuple(m.shape)).view(torch.uint8)
        return m.expand(self.B, m.shape[1], self.Tq, self.Tk)

    @property
    def mask_heads(self) -> int:
        return self.mask_bytes.shape[1] if self.mask_kind == 2 else 1

    @cached_property
    def mask_strides(self) -> tuple[int, int, int, int]:
        m = self.mask_bytes
        if self.mask_kind == 0:
            return 0, 0, 0, 0
        if self.mask_kind == 1:
            return (m.stride(0) if m.shape[0] > 1 else 0), 0, 0, 0
        sb, sh, sq, sk = m.stride()
        return sb, (sh if m.shape[1] > 1 else 0), sq, sk

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
        _bounds_kernel[(tiles, self.B * heads)](
            m, out, self.Tq, self.Tk, self.window or 0, heads, *strides, BY_KEY=by_key, BLOCK=128,
            **self.shape_flags(),
        )  # fmt: skip
        return out

    def shape_flags(self) -> dict[str, Any]:
        return dict(CAUSAL=self.is_causal, WINDOW=self.window is not None, MASK=self.mask_kind)

    def flags(self) -> dict[str, Any]:
        return dict(
            **self.shape_flags(),
            SOFTCAP=self.softcap is not None,
            TILE=self.tile,
            PACKED=self.cu_q is not None,
            SOFT_CAST=SOFT_CAST,
        )

    def hidden_before(self, keys: bool) -> int | Tensor:
        """Tokens at the start (of each segment) that nothing attends to or that see nothing."""
        if self.mask is not None or not self.is_causal or (keys and self.window is None):
            return 0
        if self.cu_q is None:
            offset = self.Tk - self.Tq
            return max(0, offset - self.window + 1) if keys else max(0, -offset)
        offset = self.cu_k.diff() - self.cu_q.diff()
        first = offset - self.window + 1 if keys else -offset
        return first.clamp_min(0).to(torch.int32)

    def quantize(self, x: Tensor, which: str, payload: Tensor, descale: Tensor, **out: bool):
        keys = which in ("k", "v")
        facts = self.facts
        cuts = facts.key_cuts if keys else facts.query_cuts
        state = {"q": facts.query_state, "do": facts.do_state}.get(which, facts.key_state)
        return quantize(
            x,
            payload,
            descale,
            pack=self.pack_k if keys else self.pack_q,
            tile=self.tile,
            pow2=self.recipe.descale == "pow2",
            first_shown=self.hidden_before(keys),
            state=state,
            cuts=cuts if self.recipe.block == "128xD" else None,
            **out,
        )

    def quantize_mx(self, x: Tensor, which: str, payload: Tensor, codes: Tensor) -> None:
        keys = which in ("k", "v")
        facts = self.facts
        quantize_mx(
            x,
            payload,
            codes,
            pack=self.pack_k if keys else self.pack_q,
            first_shown=self.hidden_before(keys),
            state={"q": facts.query_state, "do": facts.do_state}.get(which, facts.key_state),
        )

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
    return payload[..., :D], descale


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
