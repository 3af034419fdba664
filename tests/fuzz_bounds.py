"""An independent FP64 oracle of attention and of a linear, and how far FP8 may be from it.

The bounds are a priori and elementwise: every operand and every cast is off by at most half a unit
in the last place of its format (2**-4 of the value in E4M3, 2**-3 in E5M2) plus half a subnormal of
its descale, and these errors are carried through the seven products with absolute values. Nothing
is fitted, so they hold for any data. Over 150 examples the worst error was 0.4 to 0.7 of the bound in
each result; typical data stay far below in dq and dk, whose sharp bounds are in
``test_reference_attention`` and ``test_reference_invariants``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

F32 = 2.0**-23
TINY = 2.0**-126
"""Smallest descale and smallest normal FP32 number."""
UNIT = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}
FLUSH = 2.0**-16
"""Half a subnormal E4M3 (2**-10) of a descale of at most amax / 224, and a second rounding (``mx``
encodes twice; a folded descale is a power of two above)."""


class Bounded(NamedTuple):
    """The exact result and the largest allowed distance from it."""

    exact: Tensor
    bound: Tensor


def operand_error(x: Tensor, fmt: str, per_token: bool, quantize: bool = True) -> Tensor:
    """Largest |x̂ − x| of ``x [..., T, D]``."""
    if not quantize or not x.numel():
        return torch.zeros_like(x)
    amax = x.abs().amax(-1, keepdim=True) if per_token else x.abs().amax((-2, -1), keepdim=True)
    return UNIT[fmt] * x.abs() + FLUSH * amax + TINY * (amax > 0)


def product_error(a: Tensor, da: Tensor, b: Tensor, db: Tensor) -> Tensor:
    """Largest error of ``a @ b`` for operands that are off by ``da`` and ``db``, summed in FP32."""
    n = a.shape[-1]
    a, b = a.abs(), b.abs()
    return da @ b + (a + da) @ db + (n + 16) * F32 * ((a + da) @ (b + db))


def _top(x: Tensor, *dims: int) -> Tensor:
    if x.numel():
        return x.abs().amax(dims, keepdim=True)
    return x.new_zeros([1 if i - x.dim() in dims else n for i, n in enumerate(x.shape)])


def attention_bounds(
    q, k, v, do, visible, recipe, *, softmax_scale, softcap=None, sinks=None, dlse=None,
    out_dtype=torch.float32,
) -> dict[str, Bounded]:  # fmt: skip
    """``o, lse, dq, dk, dv`` (and ``dsinks``) of FP64 inputs without NaN or Inf.

    ``visible [B, Hq, Tq, Tk]``; rows without a visible key give 0 and lse −inf, sinks or not.
    """
    B, Hq, Tq, _ = q.shape
    Hkv, Tk = k.shape[1:3]
    G = Hq // Hkv
    quant = recipe.quantize
    token = recipe.block == "1xD"
    unit = UNIT["e4m3"] if quant else 0.0
    flush = FLUSH if quant else 0.0
    errors = [operand_error(x, "e4m3", token, quant) for x in (q, k, v)]
    eq, ek, ev = errors
    edo = operand_error(do, recipe.do_format, token, quant)
    k, v, ek, ev = (x.repeat_interleave(G, 1) for x in (k, v, ek, ev))
    T = lambda x: x.transpose(-1, -2)
    see = lambda x: torch.where(visible, x, 0.0)

    raw = q @ T(k) * softmax_scale
    es = see(product_error(q, eq, T(k), T(ek)) * abs(softmax_scale))
    slope, eslope = 1.0, 0.0
    s = raw
    if softcap is not None:
        t = torch.tanh(raw / softcap)
        s, slope = softcap * t, 1 - t * t
        eslope = (2 * es / softcap + 8 * F32).clamp_max(1.0)
        es = es.clamp_max(2 * softcap) + 4 * F32 * softcap
    s = s.masked_fill(~visible, -torch.inf)
    columns = s
    if sinks is not None:
        columns = torch.cat([s, sinks.view(1, -1, 1, 1).expand(B, Hq, Tq, 1)], -1)
    alive = visible.any(-1, keepdim=True)
    lse = (
        torch.logsumexp(columns, -1, keepdim=True)
        if columns.shape[-1]
        else s.new_full((B, Hq, Tq, 1), -torch.inf)
    )
    safe = torch.where(alive, lse, 0.0)
    p = torch.exp(s - safe)
    peak = es.amax(-1, keepdim=True) if Tk else es.new_zeros(B, Hq, Tq, 1)
    elsew = peak + 16 * F32 * (1 + safe.abs()) + Tk * F32
    g = torch.expm1((es + elsew).clamp_max(50.0))
    ep = see(torch.where(es + elsew > 50, 1.0, (p * g).clamp_max(1.0)) + TINY)
    pp = p + ep

    # Product 2, after the cast of P.
    ecast = unit * pp
    lost = flush * Tk * _top(pp, -1)
    o = p @ v
    eo = product_error(p, ep + ecast, v, ev) + lost * _top(v, -2, -1)
    half = torch.finfo(out_dtype)
    stored = lambda x, e: Bounded(x, e + half.eps * (x.abs() + e + half.tiny))
    out = {
        "o": stored(o, eo),
        "lse": Bounded(torch.where(alive, lse, -torch.inf)[..., 0], elsew[..., 0]),
    }

    # Product 5.
    lost = flush * Tq * _top(pp, -2) * _top(do, -2, -1) + Tq * 512 * TINY
    edv = product_error(T(p), T(ep + unit * pp), do, edo) + T(lost)
    dv = T(p) @ do

    # Product 4, δ and dS.
    dp = do @ T(v)
    edp = product_error(do, edo, T(v), T(ev))
    delta = (p * dp).sum(-1, keepdim=True)
    size = (pp * (dp.abs() + edp)).sum(-1, keepdim=True)
    if recipe.delta == "matched":
        edelta = (ep * dp.abs() + pp * edp).sum(-1, keepdim=True)
        edelta = 2 * (edelta + delta.abs() * ep.sum(-1, keepdim=True))
        if sinks is not None:
            p_sink = torch.where(alive, torch.exp(sinks.view(1, -1, 1, 1) - safe), 0.0)
            edelta = edelta + 2 * delta.abs() * (
                p_sink * torch.expm1(elsew.clamp_max(700))
            ).clamp_max(1)
        edelta = torch.minimum(edelta, 2 * _top(see(dp.abs() + edp), -1)) if Tk else edelta
    else:
        eout = out["o"].bound + (2.0**-8 if quant else 0.0) * (o.abs() + out["o"].bound)
        given = torch.zeros_like(do) if recipe.delta == "stale" else edo
        edelta = (do.abs() * eout + given * (o.abs() + eout)).sum(-1, keepdim=True)
        size = size + (do.abs() * o.abs()).sum(-1, keepdim=True)
    edelta = edelta + (Tk + do.shape[-1] + 16) * F32 * size
    shifted = delta if dlse is None else delta - dlse[..., None]
    eshift = edelta + (0.0 if dlse is None else 4 * F32 * (dlse.abs()[..., None] + edelta))
    ds = p * (dp - shifted)
    eds = ep * ((dp - shifted).abs() + edp + eshift) + p * (edp + eshift)
    eds = see(eds + 8 * F32 * pp * (dp.abs() + edp + shifted.abs() + eshift))
    eds = eds * (slope + eslope) + ds.abs() * eslope
    ds = ds * slope
    dd = ds.abs() + eds

    # Products 6 and 7.
    cast = unit * dd
    lost = flush * Tk * _top(dd, -1) * _top(k, -2, -1)
    kk = _top(k, -2, -1)
    edq = product_error(ds, eds + cast, k, ek) + lost + Tk * TINY * (512 + kk)
    if recipe.project_row_sum:
        leak = (cast + F32 * Tk * dd).sum(-1, keepdim=True)
        if recipe.block == "1xD":
            # dS times a key's descale is cast: beside a large key, all of a small one's dS may be lost.
            size_k = k.abs().amax(-1)[..., None, :].clamp_min(TINY)
            gone = 4 * flush * _top(dd * size_k, -1) / size_k
            leak = leak + torch.minimum(dd, gone).sum(-1, keepdim=True)
        edq = edq + leak * 2 * kk + lost * 2
    dq = ds @ k
    lost = flush * Tq * _top(dd, -2) * _top(q, -2, -1)
    edk = product_error(T(ds), T(eds + cast), q, eq)
    edk = edk + T(lost) + Tq * TINY * (512 + _top(q, -2, -1))
    dk = T(ds) @ q
    fold = lambda x: x.unflatten(1, (Hkv, G)).sum(2)
    scale = softmax_scale
    out["dq"] = stored(dq * scale, edq * abs(scale))
    out["dk"] = stored(fold(dk) * scale, fold(edk) * abs(scale) * (1 + G * F32))
    out["dv"] = stored(fold(dv), fold(edv) * (1 + G * F32))
    if sinks is not None:
        p_sink = torch.where(alive, torch.exp(sinks.view(1, -1, 1, 1) - safe), 0.0)
        eps = (p_sink * torch.expm1(elsew.clamp_max(700))).clamp_max(1.0)
        error = eps * (shifted.abs() + eshift) + p_sink * eshift
        error = error + (B * Tq + 16) * F32 * (p_sink + eps) * (shifted.abs() + eshift)
        out["dsinks"] = Bounded(-(p_sink * shifted).sum((0, 2, 3)), error.sum((0, 2, 3)) + TINY)
    # What the rounding of dS may leave of a zero row sum: not measured against dS, which may vanish.
    noise = ((Tk + do.shape[-1] + 16) * F32 * size).sum()
    out["noise"] = Bounded(ds.abs().sum(), noise)
    return out


def linear_bounds(x, weight, bias, dy, recipe, out_dtype) -> dict[str, Bounded]:
    """``output, grad_input, grad_weight`` (and ``grad_bias``) of FP64 inputs without NaN or Inf."""
    ex, ew = (operand_error(a, "e4m3", False) for a in (x, weight))
    edy = operand_error(dy, recipe.grad_format, False)
    info = torch.finfo(out_dtype)
    stored = lambda a, e: Bounded(a, e + info.eps * (a.abs() + e + info.tiny))
    y, ey = x @ weight.T, product_error(x, ex, weight.T, ew.T)
    if bias is not None:
        y, ey = y + bias, ey + F32 * (y.abs() + bias.abs() + ey)
    out = {
        "output": stored(y, ey),
        "grad_input": stored(dy @ weight, product_error(dy, edy, weight, ew)),
        "grad_weight": stored(dy.T @ x, product_error(dy.T, edy.T, x, ex)),
    }
    if bias is not None:
        out["grad_bias"] = stored(dy.sum(0), (len(dy) + 4) * F32 * dy.abs().sum(0))
    return out


def check(actual: Tensor, expected: Bounded, unaffected: Tensor, what: str) -> None:
    """Within the bound at ``unaffected``; where it may leave the dtype, nothing is asked."""
    exact, bound = expected
    asked = unaffected & ~(exact.abs() + bound >= torch.finfo(actual.dtype).max * 0.99)
    asked = asked | (unaffected & (exact == -torch.inf))
    a = actual.double()
    wrong = asked & ~(((a - exact).abs() <= bound) | (a == exact))
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what} at {at}: {a[at].item()!r}, exact {exact[at].item()!r}, allowed distance "
            f"{bound[at].item():.3e}; {int(wrong.sum())} of {int(asked.sum())} are wrong"
        )
