"""Shared by the attention tests: inputs, mask modes with their dense meaning, and a plain oracle.

Visibility is spelled out here as dense booleans and softmax attention as five lines of torch, so
that nothing compared with the package is computed by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_deltamatch import AttentionRecipe, delta_matching_attention, reference
from hf_deltamatch.formats import ATTENTION_BLOCKS

BLOCKS = ("128xD", "1xD", "mx")
EXACT = AttentionRecipe.from_name("bf16")
NO_WINDOW = 2**31 - 1


class Shape(NamedTuple):
    B: int = 2
    Hq: int = 4
    Hkv: int = 2
    Tq: int = 150
    Tk: int = 150
    D: int = 64
    Dv: int = 64

    def __str__(self) -> str:
        T = f"T{self.Tq}" if self.Tq == self.Tk else f"Tq{self.Tq}-Tk{self.Tk}"
        Dv = "" if self.Dv == self.D else f"-Dv{self.Dv}"
        return f"B{self.B}-Hq{self.Hq}-Hkv{self.Hkv}-{T}-D{self.D}{Dv}"


class Result(NamedTuple):
    """Output, statistics and gradients; ``dsinks`` is None without sinks."""

    o: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None


GRADS = ("dq", "dk", "dv")
FIELDS = ("o", "lse", *GRADS)


def make_inputs(shape: Shape, dtype=torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    """``q, k, v, do``, all N(0, 1)."""
    B, Hq, Hkv, Tq, Tk, D, Dv = shape
    g = torch.Generator().manual_seed(seed)
    sizes = ((B, Hq, Tq, D), (B, Hkv, Tk, D), (B, Hkv, Tk, Dv), (B, Hq, Tq, Dv))
    return tuple(torch.randn(size, generator=g).to(dtype) for size in sizes)


def run(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, dlse=None, sinks=None, attention=None, **options
) -> Result:
    """Forward and backward of the public function (or of ``attention``) on leaves of its own."""
    attention = attention or delta_matching_attention
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    leaves = [q, k, v]
    if sinks is not None:
        sinks = sinks.detach().requires_grad_()
        leaves.append(sinks)
    o, lse = attention(q, k, v, sinks=sinks, return_lse=True, **options)
    outs, douts = ([o], [do]) if dlse is None else ([o, lse], [do, dlse])
    torch.autograd.backward(outs, douts)
    return Result(o.detach(), lse.detach(), *(x.grad for x in leaves))


def dense_attention(
    q, k, v, *, visible=None, sinks=None, softmax_scale=None, softcap=None, return_lse=True
) -> tuple[Tensor, Tensor]:
    """Softmax attention as in a textbook; every row of ``visible`` must see a key."""
    G = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(G, 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if visible is not None:
        s = s.masked_fill(~visible, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    p = torch.softmax(s, -1)[..., : k.shape[2]]
    return p @ v, torch.logsumexp(s, -1)


def exact(q, k, v, do, **options) -> Result:
    """FP64 truth of the same inputs, from the package's unquantised recipe (itself compared with
    SDPA and gradcheck in test_reference_masks.py)."""
    if options.get("sinks") is not None:
        options["sinks"] = options["sinks"].double()
    return run(*(x.double() for x in (q, k, v, do)), **{**options, "recipe": EXACT})


def hooked(q, k, v, do, recipe: AttentionRecipe, *, sinks=None, softcap=None, **tiles):
    """Causal forward and backward of the reference, and every (dS, dS of the sink)."""
    options = {
        "mask": None, "sinks": sinks, "cu_seqlens_q": None, "cu_seqlens_k": None,
        "is_causal": True, "window": None, "softmax_scale": q.shape[-1] ** -0.5,
        "softcap": softcap, "recipe": recipe,
    }  # fmt: skip
    blocks: list[tuple[Tensor, Tensor | None]] = []
    fwd = reference.attention_fwd(q, k, v, **options)
    hook = lambda ds, sink: blocks.append((ds, sink))
    return (
        fwd,
        reference.attention_bwd(do, None, fwd, None, **options, **tiles, ds_hook=hook),
        blocks,
    )


def dequantized(fwd: reference.AttentionForward, which: str, block: str) -> Tensor:
    """Q̂, K̂ or V̂ in FP32."""
    payload, descale = getattr(fwd, f"{which}_fp8"), getattr(fwd, f"{which}_descale")
    descale = descale if block == "mx" else descale[..., None]
    return reference.dequantize(payload, descale, ATTENTION_BLOCKS[block])


# --- mask modes -------------------------------------------------------------------------------


def causal(Tq: int, Tk: int, window: int = NO_WINDOW) -> Tensor:
    """``[Tq, Tk]``, bottom-right aligned; ``window`` counts the query's own key."""
    i, j = torch.arange(Tq)[:, None] + Tk - Tq, torch.arange(Tk)
    return (j <= i) & (i - j < window)


def compact(positions: Tensor, offset: int | list[int] = 0, window: int = NO_WINDOW) -> Tensor:
    """The compact mask from key positions ``[B, Tk]`` (−1 = hidden)."""
    B, Tk = positions.shape
    offsets = torch.tensor([offset] * B if isinstance(offset, int) else offset)
    rows = [positions, torch.full((B, Tk), window), offsets[:, None].expand(B, Tk)]
    return torch.stack(rows, 1)[:, :, None].int()


def padded_positions(lengths: list[int], total: int, side: str) -> Tensor:
    """Key positions of a padded batch: the slot's number, −1 in the padding."""
    slot = torch.arange(total)
    lengths = torch.tensor(lengths)[:, None]
    real = slot >= total - lengths if side == "left" else slot < lengths
    return torch.where(real, slot, -1)


def compact_visible(mask: Tensor, Tq: int) -> Tensor:
    position, window, offset = (mask[:, r, 0].long() for r in range(3))
    query = (offset[:, :1] + torch.arange(Tq))[:, None, :, None]
    position, window = position[:, None, None], window[:, None, None]
    return (position >= 0) & (position <= query) & (query - position < window)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed_visible(lq: list[int], lk: list[int], is_causal: bool, window: int = NO_WINDOW):
    visible = torch.zeros(sum(lq), sum(lk), dtype=torch.bool)
    r = c = 0
    for a, b in zip(lq, lk, strict=True):
        visible[r : r + a, c : c + b] = causal(a, b, window) if is_causal else True
        r, c = r + a, c + b
    return visible


class Mode(NamedTuple):
    """A mask mode: options of the public function and the dense visibility they mean."""

    shape: Shape
    options: dict
    visible: Tensor | None


def _random(*size: int) -> Tensor:
    """About 60 % visible, key 0 always, so that every row sees something."""
    visible = torch.rand(*size, generator=torch.Generator().manual_seed(1)) < 0.6
    visible[..., 0] = True
    return visible


def _bool(*size: int, is_causal: bool = False) -> Mode:
    mask = _random(*size)
    visible = mask & causal(150, 150) if is_causal else mask
    return Mode(Shape(), {"mask": mask, "is_causal": is_causal}, visible)


def _compact(mask: Tensor, Tq: int = 150) -> Mode:
    shape = Shape(Tq=Tq, Tk=mask.shape[-1])
    return Mode(shape, {"mask": mask}, compact_visible(mask, Tq))


def _packed(lq: list[int], lk: list[int] | None = None, mask=None, **options) -> Mode:
    cu = offsets(lq) if lk is None else (offsets(lq), offsets(lk))
    lk = lk or lq
    visible = packed_visible(lq, lk, options.get("is_causal", False), options.get("window", 2**31))
    options["cu_seqlens"] = cu
    if mask is not None:
        options["mask"] = mask
        visible = visible & (mask if mask.dtype == torch.bool else compact_visible(mask, sum(lq)))
    return Mode(Shape(B=1, Tq=sum(lq), Tk=sum(lk)), options, visible)


def _causal(Tq: int, Tk: int, window: int | None = None) -> Mode:
    options = {"is_causal": True, "window": window}
    return Mode(Shape(Tq=Tq, Tk=Tk), options, causal(Tq, Tk, window or NO_WINDOW))


_STATIC_CACHE = torch.where(torch.arange(200) < 150, torch.arange(200), -1).expand(2, -1)

MODES: dict[str, Callable[[], Mode]] = {
    "full": lambda: Mode(Shape(Tq=70, Tk=150), {}, None),
    "causal": lambda: _causal(150, 150),
    "causal-short-q": lambda: _causal(70, 200),
    "causal-long-q": lambda: _causal(200, 70),
    "window": lambda: _causal(200, 200, 40),
    "window-short-q": lambda: _causal(70, 200, 40),
    "bool-2d": lambda: _bool(150, 150),
    "bool-batch": lambda: _bool(2, 1, 150, 150),
    "bool-head": lambda: _bool(2, 4, 150, 150),
    "bool-key-causal": lambda: _bool(2, 1, 1, 150, is_causal=True),
    "compact-left-pad": lambda: _compact(compact(padded_positions([150, 61], 150, "left"))),
    "compact-right-pad": lambda: _compact(compact(padded_positions([150, 61], 150, "right"))),
    "compact-window": lambda: _compact(
        compact(padded_positions([150, 61], 150, "left"), window=20)
    ),
    "compact-static-cache": lambda: _compact(compact(_STATIC_CACHE, offset=140), Tq=10),
    "packed-causal": lambda: _packed([100, 30, 140], is_causal=True),
    "packed-full": lambda: _packed([100, 30, 140]),
    "packed-window": lambda: _packed([100, 30, 140], is_causal=True, window=20),
    "packed-pair": lambda: _packed([10, 130, 1], [40, 150, 7], is_causal=True),
    "packed-empty": lambda: _packed([0, 60, 0, 90, 5], [0, 70, 9, 90, 0], is_causal=True),
    "packed-bool": lambda: _packed([100, 50], mask=_random(1, 4, 150, 150), is_causal=True),
    "packed-compact": lambda: _packed(
        [100, 50], mask=compact(padded_positions([140], 150, "right"))
    ),
}
