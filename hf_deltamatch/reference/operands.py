"""Q, K, V, dO: from high precision to payload and descale, and to the two views products need.

One quantisation, two layouts: a product that contracts over features and one that contracts over
tokens read the *same* FP8 values. Only ``mx``, whose descales must lie along the contraction,
re-encodes the dequantised values along tokens, which changes nothing but underflow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_deltamatch.formats import (
    ATTENTION_BLOCKS,
    E4M3,
    FORMATS,
    MX_TOKENS,
    TOKENS_PER_TILE,
    Float8Format,
)
from hf_deltamatch.recipes import AttentionRecipe
from hf_deltamatch.reference import quantize as qz


class Operand(NamedTuple):
    """An operand ``[B, H, T, D]`` as the products read it (FP32; FP64 without quantisation)."""

    feat: Tensor
    """``[B, H, T, D]`` with ``x = feat · row``: contracted over features."""
    row: Tensor | None
    """``[B, H, T]`` descale of each token, applied after a product over features."""
    tok: Tensor
    """``[B, H, T, D]`` contracted over tokens; poisoned tokens are 0 here."""
    fold: Tensor | None
    """``[B, H, T]`` descale to fold into P or dS before its cast (one descale per token), 0 for a
    zero token; ``tok`` is then the payload. ``None``: ``tok`` is already dequantised."""
    poison: Tensor | None
    """``[B, H, T, 1 or D]`` bool, NaN tokens; ``None`` if there are none."""


def operand_format(which: str, recipe: AttentionRecipe) -> Float8Format:
    """Format of operand ``q``, ``k``, ``v`` or ``do``."""
    return FORMATS[recipe.do_format] if which == "do" else E4M3


def quantize_operand(
    x: Tensor,
    which: str,
    recipe: AttentionRecipe,
    *,
    hidden: Tensor | None = None,
    counted: Tensor | None = None,
    cuts: Tensor | None = None,
) -> qz.Quantized:
    """Quantise ``x [B, H, T, D]`` as ``recipe`` says.

    Args:
        hidden: ``[B|1, H|1, T]``, tokens stored as zero and left out of every amax.
        counted: ``[B|1, H|1, T]``, False for tokens left out of the amax but not zeroed: they are
            clamped to the descale of the counted ones. A block whose counted tokens are all zero, or
            none, counts all that are finite.
        cuts: ``[B|1, H|1, T]``, True where a tile may not be shared with the previous token.

    Returns:
        payload ``[B, H, T, D]`` and FP32 descale: ``[B, H, ceil(T/128)]`` for ``128xD`` (one per
        token, ``[B, H, T]``, with ``cuts``), ``[B, H, T]`` for ``1xD``,
        ``[B, H, T, ceil(D/32)]`` for ``mx``.
    """
    x = x.float()
    fmt = operand_format(which, recipe)
    if hidden is not None:
        x = torch.where(hidden[..., None], 0.0, x)
    if recipe.block != "128xD":
        q = qz.quantize(x, fmt, ATTENTION_BLOCKS[recipe.block], recipe.descale)
        return q if recipe.block == "mx" else qz.Quantized(q.payload, q.descale[..., 0])
    B, H, T, D = x.shape
    amax = x.abs().amax(-1) if D else x.new_zeros(B, H, T)
    amax = torch.where(amax.isfinite(), amax, torch.inf)
    if cuts is not None:
        amax = _amax_of_runs(amax, cuts)
    else:
        amax = _amax_of_tiles(amax, counted)
    descale = qz.descale_of(amax, fmt, recipe.descale)
    per_token = descale if cuts is not None else _tile_to_token(descale, T)
    payload = qz.apply_descale(x, per_token[..., None], fmt)
    if counted is not None and cuts is None:
        # A padding query left out of the amax may itself be NaN: it poisons its own row only.
        payload = torch.where(x.isfinite() | per_token.isnan()[..., None], payload, _nan(fmt, x))
    return qz.Quantized(payload, descale)


def _nan(fmt: Float8Format, like: Tensor) -> Tensor:
    return torch.full((), float("nan"), device=like.device).to(fmt.dtype)


def _tile_to_token(descale: Tensor, tokens: int) -> Tensor:
    return descale.repeat_interleave(TOKENS_PER_TILE, -1)[..., :tokens]


def _amax_of_tiles(amax: Tensor, counted: Tensor | None) -> Tensor:
    def tiles(a: Tensor) -> Tensor:
        a = torch.nn.functional.pad(a, (0, -a.shape[-1] % TOKENS_PER_TILE))
        return a.unflatten(-1, (-1, TOKENS_PER_TILE)).amax(-1)

    if counted is None:
        return tiles(amax)
    some = tiles(torch.where(counted, amax, 0.0))
    return torch.where(some > 0, some, tiles(torch.where(amax.isfinite(), amax, 0.0)))


def _amax_of_runs(amax: Tensor, cuts: Tensor) -> Tensor:
    """Maximum over the run of tokens between cuts and multiples of 128, given to each token."""
    T = amax.shape[-1]
    start = torch.arange(T, device=amax.device) % TOKENS_PER_TILE == 0
    run = (cuts | start).long().cumsum(-1) - 1
    run = run.expand_as(amax)
    out = torch.zeros_like(amax).scatter_reduce(-1, run, amax, "amax", include_self=True)
    return out.gather(-1, run)


def has_tile_descales(recipe: AttentionRecipe, mask: Tensor | None) -> bool:
    """True where one descale serves 128 tokens; a boolean mask may cut tiles, so there every token
    has its own copy."""
    return recipe.block == "128xD" and (mask is None or mask.dtype != torch.bool)


def as_operand(
    q: qz.Quantized, recipe: AttentionRecipe, *, tiles: bool, tokens: bool = True
) -> Operand:
    """The views of a quantised operand.

    Args:
        tiles: the descale is ``[B, H, ceil(T/128)]`` (:func:`has_tile_descales`).
        tokens: ``False`` leaves out what only products over tokens need (``tok`` is then ``feat``).
    """
    payload = qz.decode(q.payload)
    if recipe.block == "mx":
        feat = qz.dequantize(q.payload, q.descale, ATTENTION_BLOCKS["mx"])
        if not tokens:
            return Operand(feat, None, feat, None, None)
        fmt = next(f for f in FORMATS.values() if f.dtype == q.payload.dtype)
        again = qz.quantize(feat, fmt, MX_TOKENS)
        tok = qz.dequantize(again.payload, again.descale, MX_TOKENS)
        clean, poison = _split_poison(tok)
        return Operand(feat, None, clean, None, poison)
    row = _tile_to_token(q.descale, payload.shape[2]) if tiles else q.descale
    bad = (row.isnan() | payload.isnan().any(-1))[..., None]
    poison = bad if bool(bad.any()) else None
    tok = payload if poison is None else payload.nan_to_num(0.0)
    if recipe.block == "1xD" or not tiles:
        # A descale that varies inside a tile cannot leave a contraction over tokens.
        fold = torch.where((tok != 0).any(-1), row.nan_to_num(1.0), 0.0)
        return Operand(payload, row, tok, fold, poison)
    return Operand(payload, row, tok * row.nan_to_num(0.0)[..., None], None, poison)


def plain_operand(x: Tensor, hidden: Tensor | None) -> Operand:
    """The views of an operand that is not quantised: FP64 stays, everything else becomes FP32."""
    x = x if x.dtype == torch.float64 else x.float()
    if hidden is not None:
        x = torch.where(hidden[..., None], 0.0, x)
    clean, poison = _split_poison(x)
    return Operand(x, None, clean, None, poison)


def _split_poison(x: Tensor) -> tuple[Tensor, Tensor | None]:
    bad = ~x.isfinite()
    if not bool(bad.any()):
        return x, None
    return torch.where(bad, 0.0, x), bad
