r"""The numbers of one slice: does δ match, where does the error of dQ go, what do the casts lose.

With P and dP from the same FP8 operands that the backward multiplied,

.. math::
    e_i = \delta^{matched}_i - \delta^{stale}_i, \quad
    \text{residual} = \sum_i |\sum_j dS_{ij}| / \sum_{ij} |dS_{ij}|, \quad dS = P \circ (dP - \delta)

where δ is the one that the backward really used. The error of dQ is that of the op's own dQ against
FP64 attention of the unquantised slice; its share along the mean key :math:`\bar K` is
:math:`\|E \bar K / |\bar K|\|^2 / \|E\|^2`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_deltamatch.formats import TOKENS_PER_TILE
from hf_deltamatch.monitor.capture import Slice
from hf_deltamatch.recipes import AttentionRecipe
from hf_deltamatch.reference.attention import key_width, keys_of, token_rules
from hf_deltamatch.reference.operands import (
    Operand,
    as_operand,
    has_tile_descales,
    operand_format,
    plain_operand,
    quantize_operand,
)
from hf_deltamatch.reference.quantize import Quantized
from hf_deltamatch.reference.softmax import cast_backward
from hf_deltamatch.reference.visibility import Visibility
from hf_deltamatch.testing import row_sum_residual


class Rows(NamedTuple):
    """P, dP ``[n, n]`` and P of the sink ``[n]`` or None, FP64."""

    p: Tensor
    dp: Tensor
    p_sink: Tensor | None
    s: Tensor
    """Logits, −inf where hidden."""
    tanh: Tensor | None

    def matched(self) -> Tensor:
        total = self.p.sum(-1)
        if self.p_sink is not None:
            total = total + self.p_sink
        return (self.p * self.dp).sum(-1) / torch.where(total == 0, 1.0, total)


@torch.no_grad()
def measure(x: Slice) -> dict[str, float]:
    """All numbers of a slice whose backward has run:

    ``row_sum_residual``; ``e_abs`` (mean |e_i|) and ``e_rel`` (‖e‖ / ‖δ matched‖); ``dq_error``
    (relative) and ``dq_error_mean_key`` (its share along the mean key); ``logit_max``; and of the FP8
    operands ``underflow_q | k | v | do | p | ds`` and ``saturated_q | k | v | do``: the shares of
    non-zero values that became 0, and of values at the largest number.
    """
    vis = Visibility(
        (1, 1, 1, len(x.q), len(x.k)),
        is_causal=x.is_causal,
        window=x.window,
        mask=x.mask,
        device=x.q.device,
    )
    shown = vis.rows(slice(0, 1), slice(0, 1), 0, len(x.q), len(x.k))
    visible = None if shown is None else shown[0, 0, 0]
    exact = _rows(x, x.q, x.k, x.v, x.do, visible, None)
    operands, out = _operands(x, vis)
    rows = _rows(x, *(_value(operands[w]) for w in ("q", "k", "v", "do")), visible, x.lse)
    delta = x.delta.double()
    shift = 0.0 if x.dlse is None else x.dlse.double()
    ds = rows.p * (rows.dp - (delta - shift)[:, None])
    ds_sink = None if rows.p_sink is None else -rows.p_sink * (delta - shift)
    out["row_sum_residual"] = row_sum_residual(ds, ds_sink)
    matched = rows.matched()
    o = x.o.to(torch.bfloat16) if x.recipe.quantize else x.o
    e = matched - (x.do.double() * o.double()).sum(-1)
    out["e_abs"] = float(e.abs().mean())
    out["e_rel"] = _ratio(e.norm(), matched.norm())
    out |= _dq_error(x, exact, shift, vis)
    out["logit_max"] = float(exact.s.max())
    if x.recipe.quantize:
        out |= _casts(rows.p, ds, operands, vis, x.recipe)
    return out


def _operands(x: Slice, vis: Visibility) -> tuple[dict[str, Operand], dict[str, float]]:
    """Quantised as the op does it, and what the casts of each lost."""
    operands, lost = {}, {}
    tiles = has_tile_descales(x.recipe, x.mask)
    for which in ("q", "k", "v", "do"):
        value = getattr(x, which)[None, None]
        rules = token_rules(which, vis)
        if not x.recipe.quantize:
            operands[which] = plain_operand(value, rules["hidden"])
            continue
        quantized = quantize_operand(value, which, x.recipe, **rules)
        operands[which] = as_operand(quantized, x.recipe, tiles=tiles)
        lost |= _lost(which, value, quantized, rules["hidden"], x.recipe)
    return operands, lost


def _lost(
    which: str, value: Tensor, quantized: Quantized, hidden: Tensor | None, recipe: AttentionRecipe
) -> dict[str, float]:
    payload = quantized.payload.float()
    given = value.float()
    if hidden is not None:
        given = torch.where(hidden[..., None], 0.0, given)
    counted = given != 0
    n = counted.sum()
    top = operand_format(which, recipe).max
    return {
        f"underflow_{which}": _ratio(((payload == 0) & counted).sum(), n),
        f"saturated_{which}": _ratio(((payload.abs() >= top) & counted).sum(), n),
    }


def _value(x: Operand) -> Tensor:
    """``[n, D]``, dequantised."""
    return (x.feat if x.row is None else x.feat * x.row[..., None])[0, 0]


def _rows(
    x: Slice,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    visible: Tensor | None,
    lse: Tensor | None,
) -> Rows:
    """With ``lse`` of its own if None is given."""
    q, k, v, do = (t.double() for t in (q, k, v, do))
    s, tanh = q @ k.T * x.softmax_scale, None
    if x.softcap is not None:
        tanh = torch.tanh(s / x.softcap)
        s = x.softcap * tanh
    if visible is not None:
        s = torch.where(visible, s, -torch.inf)
    if lse is None:
        parts = s if x.sink is None else torch.cat([s, x.sink.double().expand(len(s), 1)], 1)
        lse = parts.logsumexp(-1)
    lse = lse.double()
    alive = lse != -torch.inf
    safe = torch.where(alive, lse, 0.0)
    p = torch.where(alive[:, None], torch.exp(s - safe[:, None]), 0.0)
    dp = do @ v.T
    if visible is not None:
        dp = torch.where(visible, dp, 0.0)
    p_sink = None
    if x.sink is not None:
        p_sink = torch.where(alive, torch.exp(x.sink.double() - safe), 0.0)
    return Rows(p, dp, p_sink, s, tanh)


def _dq_error(x: Slice, exact: Rows, shift, vis: Visibility) -> dict[str, float]:
    ds = exact.p * (exact.dp - (exact.matched() - shift)[:, None])
    if exact.tanh is not None:
        ds = ds * (1 - exact.tanh * exact.tanh)
    keys = x.k.double()
    dq = ds @ keys * x.softmax_scale
    error = x.dq.double() - dq
    if vis.key_hidden is not None:
        keys = keys[~vis.key_hidden[0, 0]]
    mean = keys.mean(0)
    along = error @ (mean / mean.norm().clamp_min(1e-300))
    return {
        "dq_error": _ratio(error.norm(), dq.norm()),
        "dq_error_mean_key": _ratio(along.square().sum(), error.square().sum()),
    }


def _casts(
    p: Tensor, ds: Tensor, operands: dict[str, Operand], vis: Visibility, recipe: AttentionRecipe
) -> dict[str, float]:
    """P as product 5 reads it and dS as product 6 does, in tiles of 128."""
    one = slice(0, 1)
    width = key_width(vis.Tk, recipe, TOKENS_PER_TILE)
    k = keys_of(operands["k"], one, one, width)
    do = Operand(*(None if t is None else t[:, :, None] for t in operands["do"]))
    out = {}
    for name, value, operand, dim in (("p", p, do, -2), ("ds", ds, k, -1)):
        given = torch.nn.functional.pad(value.float(), (0, width - vis.Tk))[None, None, None]
        cast = cast_backward(given, operand, recipe, TOKENS_PER_TILE, dim)
        alive = (operand.tok != 0).any(-1)  # a token of zeros contributes nothing
        alive = alive[:, :, None, None, :] if dim == -1 else alive[..., None]
        counted = (given != 0) & alive
        out[f"underflow_{name}"] = _ratio(((cast == 0) & counted).sum(), counted.sum())
    return out


def _ratio(a: Tensor, b: Tensor) -> float:
    a, b = float(a), float(b)
    return a / b if b else (0.0 if a == 0 else math.inf)
