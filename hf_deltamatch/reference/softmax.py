"""Scores, probabilities and casts of P and dS: the element-wise half of attention.

Shapes: ``s, p, dp, ds [b, h, G, r, n]`` for ``b`` batches, ``h`` key heads, ``G`` query heads per
key head, ``r`` query rows and ``n`` keys. Logits are kept in base 2 (``s2 = s · log2 e``), as
kernels keep them, so that exponentials are ``exp2``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_deltamatch.formats import E4M3, MX_BLOCK, P_CAST_LOG2, P_REST_CAST_LOG2
from hf_deltamatch.recipes import AttentionRecipe
from hf_deltamatch.reference.operands import Operand
from hf_deltamatch.reference.quantize import round_trip, round_trip_blocks

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


def contract_features(a: Tensor, a_row: Tensor | None, b: Tensor, b_row: Tensor | None) -> Tensor:
    """``a [b, h, G, r, D]`` times ``b [b, h, n, D]`` transposed, descales applied to the result."""
    B, H, G, R, D = a.shape
    out = torch.matmul(a.reshape(B, H, G * R, D), b.transpose(-1, -2)).view(B, H, G, R, -1)
    if a_row is None:
        return out
    # The descales first: one may be near the top of FP32 and the other bring it back.
    return out * (a_row[..., None] * b_row[:, :, None, None, :])


def logits(
    q: Operand, k: Operand, softmax_scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Base-2 logits of a block and, with a soft cap, ``tanh`` of the capped argument.

    ``q`` views are ``[b, h, G, r, …]``. S = softmax_scale · q·k; capped: ``cap · tanh(S / cap)``.
    """
    s = contract_features(q.feat, q.row, k.feat, k.row)
    if softcap is None:
        return s * (softmax_scale * LOG2E), None
    t = torch.tanh(s * (softmax_scale / softcap))
    return t * (softcap * LOG2E), t


def masked(x: Tensor, visible: Tensor | None, fill: float) -> Tensor:
    """``x`` where visible, ``fill`` elsewhere, also where ``x`` is NaN."""
    return x if visible is None else torch.where(visible, x, fill)


def running_max(s2: Tensor, block_n: int, key_order: str) -> tuple[Tensor, Tensor]:
    """Running maximum as an online softmax sees it when it visits key tiles in ``key_order``.

    Args:
        s2: ``[..., n]`` with n a multiple of ``block_n``; −inf where invisible.
        key_order: ``descending`` (from the diagonal backwards) or ``ascending``.

    Returns:
        the maximum up to and including each tile ``[..., n / block_n]`` and the final one
        ``[..., 1]``; 0 in place of −inf, so that ``exp2(−inf − 0) = 0``.
    """
    tile = s2.unflatten(-1, (-1, block_n)).amax(-1)
    if key_order == "descending":
        run = tile.flip(-1).cummax(-1).values.flip(-1)
        final = run[..., :1]
    else:
        run = tile.cummax(-1).values
        final = run[..., -1:]
    return _no_inf(run), _no_inf(final)


def _no_inf(m: Tensor) -> Tensor:
    return torch.where(m == -torch.inf, 0.0, m)


def cast_p_forward(
    s2: Tensor, v: Operand, recipe: AttentionRecipe, block_n: int, key_order: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Unnormalised P as product 2 reads it, and the softmax statistics.

    Each tile's P is cast after the running maximum at that tile and then rescaled to the final
    one, which is what an online softmax does step by step. Where the recipe has two terms, ``p_cast``
    is their sum, which FP32 holds exactly: product 2 is then two FP8 products.

    Returns:
        ``p_cast [..., n]`` with ``O = p_cast @ v.tok / l``; the final base-2 maximum ``m`` and
        normaliser ``l`` (both ``[..., 1]``, FP32, from unquantised exponentials).
    """
    run, m = running_max(s2, block_n, key_order)
    p = torch.exp2(_minus(s2, run, block_n))
    # A tile without a visible key has no maximum (0 stands in), and P = 0 whatever it is.
    rescale = torch.exp2((run - m).clamp_max(0.0))
    per_tile = p.unflatten(-1, (-1, block_n)).sum(-1)
    l = (per_tile * rescale).sum(-1, keepdim=True)
    if recipe.block == "mx":
        p_cast = round_trip_blocks(p, E4M3, MX_BLOCK, -1)
        return _times(p_cast, rescale, block_n), m, l
    if v.fold is None:
        p_cast = _cast_terms(p * 2.0**P_CAST_LOG2, recipe)
        return _times(p_cast, rescale * 2.0**-P_CAST_LOG2, block_n), m, l
    # One descale per token: that of V varies along the contraction; fold it under its own running maximum,
    # relative to m, so that a large logit does not absorb it. A zero token folds as 0.
    folded = (s2 - m) + v.fold.log2()[:, :, None, None, :]
    run, _ = running_max(folded, block_n, key_order)
    p_cast = _cast_terms(torch.exp2(_minus(folded, run, block_n) + P_CAST_LOG2), recipe)
    return _times(p_cast, torch.exp2(run - P_CAST_LOG2), block_n), m, l


def _cast_terms(p: Tensor, recipe: AttentionRecipe) -> Tensor:
    """``p <= 256`` as one E4M3 term, or as two."""
    first = round_trip(p, E4M3)
    if not recipe.two_terms:
        return first
    rest = round_trip((p - first) * 2.0**P_REST_CAST_LOG2, E4M3)
    return first + rest * 2.0**-P_REST_CAST_LOG2


def _minus(s2: Tensor, per_tile: Tensor, block_n: int) -> Tensor:
    return (s2.unflatten(-1, (-1, block_n)) - per_tile[..., None]).flatten(-2)


def _times(p: Tensor, per_tile: Tensor, block_n: int) -> Tensor:
    return (p.unflatten(-1, (-1, block_n)) * per_tile[..., None]).flatten(-2)


def cast_backward(
    x: Tensor, operand: Operand, recipe: AttentionRecipe, size: int, dim: int
) -> Tensor:
    """P or dS as products 5 to 7 read it: power-of-two block descales that leave the product.

    Args:
        x: ``[b, h, G, r, n]``, P or dS (FP32).
        operand: the other factor, whose descale is folded in if it varies by token: by key (``dim=-1``,
            fold ``[b, h, n]``) or by query (``dim=-2``, fold ``[b, h, G, r]``). Tokens that are
            zero contribute nothing and are left out, so that they do not raise a block's amax.
        size: elements along ``dim`` that share a descale: the kernel's tile along the contraction.
        dim: the contraction: −1 (product 6) or −2 (products 5 and 7).

    Returns:
        FP32 such that the product is ``result @ operand.tok``.
    """
    if not recipe.quantize:
        return x
    if recipe.block == "mx":
        size = MX_BLOCK
    fold = operand.fold
    if fold is None and dim == -2:
        fold = (operand.tok != 0).any(-1).to(x.dtype)
    if fold is not None:
        x = x * (fold[:, :, None, None, :] if dim == -1 else fold[..., None])
    return round_trip_blocks(x, E4M3, size, dim)
