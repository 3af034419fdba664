"""Right before fast: no speed is printed for numbers that were not checked in the same run.

Two comparisons: in small with the reference that emulates the kernels' tiles (tight), and at the
full length with FP64 (loose), which also catches what only shows at length: offsets, skipped tiles,
sums over many tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_deltamatch import reference
from hf_deltamatch.benchmarks.shapes import Shape, make_inputs
from hf_deltamatch.ops import attention_kernels
from hf_deltamatch.recipes import AttentionRecipe
from hf_deltamatch.testing import rel_rms

MAX_DIFFERENCE = 0.015
"""Kernels against the reference; FP8 itself costs 3 to 8 %."""
MAX_ERROR = {"matched": 0.09, "fp8": 0.2, "bf16": 0.01}
"""Sampled rows against FP64. Measured (``examples/benchmarks/attention_h200.json``), T 2048 to 32768, head
dimensions 64 to 256, causal, full and window: matched δ 0.081 at most, stale 0.196 (it grows with T), BF16
0.0037."""
QUERIES, KEYS, CHUNK = 64, 32, 1024


class WrongNumbers(RuntimeError):
    """A comparison failed; the message has the numbers."""


def against_reference(
    s: Shape, recipe: AttentionRecipe, device: torch.device | str = "cuda", tokens: int = 1024
) -> float:
    """Largest relative difference of o, dq, dk, dv between the kernels and the reference that
    emulates their tiles, on two groups of heads and up to ``tokens`` tokens.

    Raises:
        WrongNumbers: above :data:`MAX_DIFFERENCE`, or NaN.
    """
    small = s._replace(B=1, Hq=2 * s.Hq // s.Hkv, Hkv=2, T=min(s.T, tokens))
    q, k, v, do = (x.detach() for x in make_inputs(small, device))
    options = dict(
        mask=None, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None, is_causal=s.causal,
        window=s.window, softmax_scale=s.D**-0.5, softcap=None, recipe=recipe,
    )  # fmt: skip
    forward, backward = attention_kernels.reference_blocks(s.D, s.D, q.device, recipe)
    fwd = attention_kernels.attention_fwd(q, k, v, **options)
    ours = (fwd.o, *attention_kernels.attention_bwd(do, None, fwd, **options)[:3])
    ref = reference.attention_fwd(q, k, v, **options, **forward)
    theirs = (ref.o, *reference.attention_bwd(do, None, ref, None, **options, **backward)[:3])
    errors = {
        name: rel_rms(a, b)
        for name, a, b in zip(("o", "dq", "dk", "dv"), ours, theirs, strict=True)
    }
    if not all(e < MAX_DIFFERENCE for e in errors.values()):
        raise WrongNumbers(
            f"kernels and reference differ by {_text(errors)} for {small}, recipe {recipe.name}; "
            f"allowed is {MAX_DIFFERENCE}"
        )
    return max(errors.values())


class Rows(NamedTuple):
    """Which rows are compared: ``queries [n, 3]`` (batch, head, token) of o and dq; ``keys`` of
    batch ``b`` and key head ``h`` of dk and dv."""

    queries: Tensor
    b: int
    h: int
    keys: Tensor


class Expected(NamedTuple):
    """FP64 rows of o, dq ``[n, D]`` and dk, dv ``[m, D]``."""

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def sample(s: Shape) -> Rows:
    """The same rows every time: :data:`QUERIES` queries over four heads, with the first and the
    last token, and :data:`KEYS` keys of the last head."""
    g = torch.Generator().manual_seed(1)
    draw = lambda high, n: torch.randint(high, (n,), generator=g)
    heads = torch.stack([draw(s.B, 4), draw(s.Hq, 4)], 1).repeat_interleave(QUERIES // 4, 0)
    heads[-1] = torch.tensor([s.B - 1, s.Hq - 1])
    tokens = draw(s.T, QUERIES)
    tokens[0], tokens[-1] = 0, s.T - 1
    keys = draw(s.T, KEYS)
    keys[0], keys[-1] = 0, s.T - 1
    return Rows(torch.cat([heads, tokens[:, None]], 1), s.B - 1, s.Hkv - 1, keys)


def expected(s: Shape, rows: Rows, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Expected:
    """Textbook attention in FP64 for the sampled rows, from the unquantised inputs."""
    G, device = s.Hq // s.Hkv, q.device
    o, dq = [], []
    for b, h in rows.queries[:, :2].unique(dim=0).tolist():
        at = ((rows.queries[:, 0] == b) & (rows.queries[:, 1] == h)).nonzero().flatten()
        t = rows.queries[at, 2].to(device)
        part = _rows(s, q[b, h, t], k[b, h // G], v[b, h // G], do[b, h, t], t)
        o.append((at, part.o))
        dq.append((at, part.ds @ k[b, h // G].double()))
    keys = rows.keys.to(device)
    dk, dv = 0.0, 0.0
    for h in range(rows.h * G, rows.h * G + G):
        for start in range(0, s.T, CHUNK):
            t = torch.arange(start, min(start + CHUNK, s.T), device=device)
            x, g = q[rows.b, h, t], do[rows.b, h, t]
            part = _rows(s, x, k[rows.b, rows.h], v[rows.b, rows.h], g, t)
            dk = dk + part.ds[:, keys].T @ x.double()
            dv = dv + part.p[:, keys].T @ g.double()
    return Expected(_in_order(o), _in_order(dq), dk, dv)


class _Part(NamedTuple):
    """``o [n, D]``, ``p [n, T]`` and ``ds [n, T]``, which has the softmax scale in it."""

    o: Tensor
    p: Tensor
    ds: Tensor


def _rows(s: Shape, q: Tensor, k: Tensor, v: Tensor, do: Tensor, t: Tensor) -> _Part:
    """Queries ``q [n, D]`` at tokens ``t`` against all keys of a head."""
    scale = s.D**-0.5
    q, k, v, do = (x.double() for x in (q, k, v, do))
    logits = q @ k.T * scale
    if s.causal:
        back = t[:, None] - torch.arange(s.T, device=t.device)
        logits.masked_fill_((back < 0) | (back >= (s.window or s.T)), -torch.inf)
    p = logits.softmax(-1)
    dp = do @ v.T
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    return _Part(p @ v, p, ds)


def _in_order(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    at = torch.cat([index for index, _ in parts])
    return torch.cat([x for _, x in parts])[at.argsort().to(parts[0][1].device)]


def against_fp64(
    rows: Rows, truth: Expected, o: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, allowed: float
) -> dict[str, float]:
    """Relative error of the sampled rows of an attention's results at the full length.

    Raises:
        WrongNumbers: above ``allowed``, or NaN.
    """
    b, h, t = (rows.queries[:, i].to(o.device) for i in range(3))
    keys = rows.keys.to(o.device)
    got = Expected(o[b, h, t], dq[b, h, t], dk[rows.b, rows.h, keys], dv[rows.b, rows.h, keys])
    errors = {
        name: rel_rms(a.detach(), e)
        for name, a, e in zip(Expected._fields, got, truth, strict=True)
    }
    if not all(e < allowed for e in errors.values()):
        raise WrongNumbers(
            f"sampled rows are {_text(errors)} away from FP64 at the full length; allowed is {allowed}"
        )
    return errors


def _text(errors: dict[str, float]) -> str:
    return ", ".join(f"{name} {e:.3g}" for name, e in errors.items())
