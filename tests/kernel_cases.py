"""Shared by the kernel tests: one call through the kernels and through the reference that emulates
their tiles, on the device at hand (the interpreter on a CPU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from attention_cases import Shape
from torch import Tensor
from torch._subclasses import FakeTensor

from hf_deltamatch import AttentionRecipe, reference
from hf_deltamatch.kernels import attention as kernels
from hf_deltamatch.ops import attention_kernels
from hf_deltamatch.testing import rel_rms

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FWD = kernels.Forward._fields
BWD = ("dq", "dk", "dv", "dsinks", "delta")


def on(x: torch.Tensor) -> torch.Tensor:
    return x.to(DEVICE)


def holes(heads: int = 1) -> torch.Tensor:
    return on(torch.rand(1, heads, 150, 150, generator=torch.Generator().manual_seed(1)) > 0.3)


def compact(T: int, padding: int, window: int = 2**31 - 1) -> torch.Tensor:
    """Left padding, as ``[B, 3, 1, Tk]``."""
    position = torch.arange(T, dtype=torch.int32)
    position[:padding] = -1
    rows = torch.stack([position, torch.full_like(position, window), torch.zeros_like(position)])
    return on(rows[None, :, None])


def segments(*ends: int) -> torch.Tensor:
    return on(torch.tensor([0, *ends], dtype=torch.int32))


class Call(NamedTuple):
    """Inputs ``BHTD`` stored as ``BTHD``, as models send them, and the options of the ops."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor | None
    options: dict[str, Any]


def make_call(
    shape: Shape,
    recipe: str = "delta_matching",
    *,
    dtype: torch.dtype = torch.float32,
    dlse: bool = False,
    fields: dict[str, Any] | None = None,
    device: torch.device = DEVICE,
    **options: Any,
) -> Call:
    """Q, K, V, dO ~ N(0, 1); ``fields`` of the recipe; options left out are the plain ones."""
    B, Hq, Hkv, Tq, Tk, D, Dv = shape
    g = torch.Generator().manual_seed(0)

    def normal(h: int, t: int, d: int) -> Tensor:
        return torch.randn(B, t, h, d, generator=g).to(device, dtype).transpose(1, 2)

    q, k, v, do = normal(Hq, Tq, D), normal(Hkv, Tk, D), normal(Hkv, Tk, Dv), normal(Hq, Tq, Dv)
    grad_lse = torch.randn(B, Hq, Tq, generator=g).to(device) / 10 if dlse else None
    plain = dict(
        mask=None, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None, is_causal=True, window=None,
        softmax_scale=D**-0.5, softcap=None,
    )  # fmt: skip
    cu = options.pop("cu_seqlens", None)
    if cu is not None:
        plain["cu_seqlens_q"], plain["cu_seqlens_k"] = cu, cu
    unknown = set(options) - set(plain)
    assert not unknown, unknown
    recipe = AttentionRecipe.from_name(recipe, **(fields or {}))
    return Call(q, k, v, do, grad_lse, {**plain, **options, "recipe": recipe})


def through_kernels(c: Call, **debug: bool) -> tuple[kernels.Forward, kernels.Backward]:
    fwd = attention_kernels.attention_fwd(c.q, c.k, c.v, **c.options)
    x = attention_kernels.problem(c.q.shape, c.k.shape, c.v.shape[-1], c.q.device, **c.options)
    return fwd, kernels.attention_bwd(c.do, c.dlse, fwd, x, **debug)


def through_reference(c: Call) -> tuple[reference.AttentionForward, reference.AttentionBackward]:
    """The reference with the tiles of the kernels."""
    mask = c.options["mask"]
    forward, backward = attention_kernels.reference_blocks(
        c.q.shape[-1],
        c.v.shape[-1],
        c.q.device,
        c.options["recipe"],
        boolean_mask=mask is not None and mask.dtype == torch.bool,
    )
    fwd = reference.attention_fwd(c.q, c.k, c.v, **c.options, **forward)
    bwd = reference.attention_bwd(c.do, c.dlse, fwd, None, **c.options, **backward)
    return fwd, bwd


def exact(c: Call) -> tuple[reference.AttentionForward, reference.AttentionBackward]:
    """FP64 attention of the same inputs, unquantised."""
    q, k, v, do = (x.double() for x in (c.q, c.k, c.v, c.do))
    options = {**c.options, "recipe": AttentionRecipe.from_name("bf16")}
    if options["sinks"] is not None:
        options["sinks"] = options["sinks"].double()
    fwd = reference.attention_fwd(q, k, v, **options)
    dlse = None if c.dlse is None else c.dlse.double()
    return fwd, reference.attention_bwd(do, dlse, fwd, (q, k, v), **options)


def difference(a: Tensor, b: Tensor) -> float:
    """Relative RMS; −inf (a row that sees nothing) has to be in the same places."""
    assert a.shape == b.shape
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    dead = b == -torch.inf
    assert torch.equal(a == -torch.inf, dead)
    return rel_rms(a.masked_fill(dead, 0), b.masked_fill(dead, 0))


MARGIN = 4096
"""Bytes before and after a fresh buffer that nothing may write to."""


def poison_empty(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Every fresh buffer holds NaN (or a huge index), so that nothing unwritten goes unseen, and lies
    between margins. Returns what fails if something was written there."""
    made: list[tuple[Tensor, int, str]] = []
    new = torch.empty

    def guarded(like: Tensor) -> Tensor:
        """Another buffer of the same shape and strides."""
        span = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) + 1
        size = span * like.dtype.itemsize if like.numel() else 0
        room = -(-size // 16) * 16 + 2 * MARGIN
        raw = new(room, dtype=torch.uint8, device=like.device).fill_(0xA5)
        made.append((raw, size, f"{like.dtype} {tuple(like.shape)}"))
        whole = raw.view(like.dtype)
        first = whole.storage_offset() + MARGIN // like.dtype.itemsize
        return whole.as_strided(like.shape, like.stride(), first)

    for name in ("empty", "empty_like", "empty_strided"):
        plain = getattr(torch, name)

        def poisoned(*args, plain=plain, **kwargs):
            x = plain(*args, **kwargs)
            if isinstance(x, FakeTensor) or x.is_meta:  # torch.compile asks for shapes
                return x
            x = guarded(x)
            if x.dtype.is_floating_point and x.dtype.itemsize == 1:
                x.view(torch.uint8).fill_(0x7F)
            elif x.dtype.is_floating_point:
                x.fill_(float("nan"))
            elif x.dtype == torch.uint8:
                x.fill_(255)
            elif x.dtype == torch.int32:
                x.fill_(2**30)
            return x

        monkeypatch.setattr(torch, name, poisoned)

    def check() -> None:
        for raw, size, what in made:
            for margin in (raw[:MARGIN], raw[MARGIN + size :]):
                assert bool((margin == 0xA5).all()), f"written outside of a buffer: {what}"

    return check
