"""Hypothesis strategies of attention and linear calls; a case prints as what reproduces it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from attention_cases import causal, compact_visible, offsets, packed_visible
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_deltamatch import AttentionRecipe, LinearRecipe

DATA = (
    "normal", "zeros", "equal", "one-hot", "negative-zero", "offset", "wide", "subnormal", "huge",
    "large", "small",
)  # fmt: skip
STRIDES = ("contiguous", "bthd", "step", "expanded", "tail")
BAD = (math.nan, math.inf, -math.inf)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fuzz(share: float) -> Callable:
    """Settings of a fuzz test that takes ``share`` of ``--fuzz-examples``: the same examples in
    every run, no database, no deadline; a failure prints how to reproduce it."""
    return settings(
        max_examples=max(1, round(share * settings.get_profile("fuzz").max_examples)),
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


class _Printed:
    """Hypothesis prints the plain ``repr``, which reproduces the case."""

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        printer.text(repr(self))


def peak(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def place(x: Tensor, where: float) -> tuple[int, ...]:
    """Index of the element ``where`` (0 to 1) of the way through ``x``."""
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(int(where * x.numel())), x.shape))


def values(kind: str, size: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Data of one ``kind``; huge is 3e38, or what FP16 holds. A large V with a small dO has gradients of the order of
    one."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=g)
    if kind == "zeros":
        x = torch.zeros(size)
    elif kind == "negative-zero":
        x = torch.where(x < 0, -0.0, x)
    elif kind == "equal":
        x = torch.full(size, 1.375)
    elif kind == "one-hot":
        x = torch.zeros(size)
        if x.numel():
            at = torch.randint(size[-1], (*size[:-1], 1), generator=g)
            x.scatter_(-1, at, 8.0)
    elif kind == "offset":
        x = x + 6 * torch.randn(*size[:-2], 1, size[-1], generator=g)
    elif kind == "wide":
        x = x * torch.exp2(torch.randint(-12, 13, (*size[:-1], 1), generator=g))
    elif kind == "subnormal":
        x = x.clamp(-4, 4) * (1e-6 if dtype == torch.float16 else 1e-39)
    elif kind in ("large", "small"):
        factor = 1e3 if dtype == torch.float16 else 1e36
        x = x * (factor if kind == "large" else 1 / factor)
    elif kind == "huge":
        x = torch.where(x.abs() < 1, x, x.sign() * (6e4 if dtype == torch.float16 else 3e38))
    return x.to(dtype)


def strided(x: Tensor, how: str) -> Tensor:
    """The same values (of batch 0 in every batch for ``expanded``) in other strides."""
    if how == "bthd" and x.dim() > 2:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "bthd":
        return x.t().contiguous().t()
    if how == "step":
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)
        wide[..., ::2] = x
        return wide[..., ::2]
    if how == "expanded":
        return x[:1].expand_as(x)
    if how == "tail":
        more = x.new_full((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1]), math.nan)
        more[..., 3:, :] = x
        return more[..., 3:, :]
    return x


@dataclass
class Attention(_Printed):
    """One call of ``delta_matching_attention`` by what was drawn."""

    B: int
    Hkv: int
    G: int
    Tq: int
    Tk: int
    D: int
    Dv: int
    dtype: torch.dtype
    data: tuple[str, str, str, str]
    strides: tuple[str, str, str, str]
    seed: int
    recipe: AttentionRecipe
    mask: tuple
    """Name of the mask mode and its numbers."""
    softcap: float | None
    softmax_scale: float | None
    sinks: float | None
    """Size of the sinks, or None."""
    dlse: bool
    bad: tuple[str, float, float] | None
    """Tensor, where in it (0 to 1) and what non-finite value."""

    def inputs(self) -> tuple[Tensor, ...]:
        """``q, k, v, do`` before the non-finite value."""
        H = self.Hkv * self.G
        sizes = [(H, self.Tq, self.D), (self.Hkv, self.Tk, self.D), (self.Hkv, self.Tk, self.Dv)]
        sizes.append((H, self.Tq, self.Dv))
        made = (
            values(kind, (self.B, *size), self.dtype, self.seed + i)
            for i, (kind, size) in enumerate(zip(self.data, sizes, strict=True))
        )
        return tuple(strided(x, how) for x, how in zip(made, self.strides, strict=True))

    def options(self) -> tuple[dict, Tensor, Tensor, list[int], list[int]]:
        """Options of the mask mode, dense visibility ``[B, Hq, Tq, Tk]``, queries of padding whose
        own values may be clamped ``[B, Tq]``, and the packed sequences' first tokens (q, k)."""
        mode, *n = self.mask
        B, H, Tq, Tk = self.B, self.Hkv * self.G, self.Tq, self.Tk
        padding = torch.zeros(B, Tq, dtype=torch.bool)
        seen = torch.ones(Tq, Tk, dtype=torch.bool)
        options: dict = {}
        starts = [0], [0]
        if mode == "causal":
            options, seen = {"is_causal": True}, causal(Tq, Tk)
        elif mode == "window":
            options, seen = {"is_causal": True, "window": n[0]}, causal(Tq, Tk, n[0])
        elif mode == "compact":
            left, right, window, offset = n
            position = torch.arange(Tk) - left
            position[max(Tk - right, 0) :] = -1
            position = position.clamp_min(-1)
            shape = B, Tk
            rows = [position, torch.full((Tk,), window), torch.full((Tk,), offset)]
            mask = torch.stack([r.expand(shape) for r in rows], 1)[:, :, None].int()
            options = {"mask": mask}
            seen = compact_visible(mask, Tq) if Tk else torch.zeros(Tq, 0, dtype=torch.bool)
            shown = (position >= 0).nonzero()
            own = offset + torch.arange(Tq) + left
            newest = int(shown[-1]) if len(shown) else -1
            padding = ((own > newest) & (own < Tk)).expand(B, Tq)
            if not len(shown):
                padding = torch.ones_like(padding)
        elif mode == "bool":
            share, heads, is_causal = n
            g = torch.Generator().manual_seed(self.seed)
            mask = torch.rand(B, H if heads else 1, Tq, Tk, generator=g) < share
            options, seen = {"mask": mask, "is_causal": is_causal}, mask
            if is_causal:
                seen = mask & causal(Tq, Tk)
        elif mode == "packed":
            lq, lk, is_causal, window = n
            cu = offsets(lq), offsets(lk)
            options = {"cu_seqlens": cu if lq != lk else cu[0], "is_causal": is_causal}
            if is_causal:
                options["window"] = window
            seen = packed_visible(lq, lk, is_causal, window or 2**31 - 1)
            starts = cu[0].tolist()[:-1], cu[1].tolist()[:-1]
        return options, seen.expand(B, H, Tq, Tk), padding, *starts


@st.composite
def attention_cases(draw, small: bool = False, quantize: bool | None = None) -> Attention:
    """Any allowed call; ``small`` is for the interpreter."""
    lengths = st.one_of(st.integers(1, 9), st.sampled_from((0, 1, 31, 32, 33)))
    if not small:
        lengths = st.one_of(lengths, st.sampled_from((64, 127, 128, 129, 150, 257)))
    dims = st.one_of(st.integers(1, 9), st.sampled_from((16, 32, 33) + (() if small else (64, 80))))
    B = draw(st.integers(1, 2))
    Tq, Tk, D = draw(lengths), draw(lengths), draw(dims)
    Tk = draw(st.sampled_from((Tq, Tk)))
    Dv = draw(st.one_of(st.just(D), dims))
    modes = ["full", "causal", "window", "compact", "bool", "packed"]
    mode = draw(st.sampled_from(modes))
    mask: tuple = (mode,)
    if mode == "window":
        mask = mode, draw(st.one_of(st.integers(1, 40), st.just(2**40)))
    elif mode == "compact":
        left, right = draw(st.integers(0, Tk)), draw(st.integers(0, 5))
        window = draw(st.sampled_from((2**31 - 1, 1, 3, 40)))
        mask = mode, left, right, window, draw(st.one_of(st.just(-left), st.integers(-3, Tk)))
    elif mode == "bool":
        share = draw(st.sampled_from((0.6, 0.1, 0.0, 1.0)))
        mask = mode, share, draw(st.booleans()), draw(st.booleans())
    elif mode == "packed":
        B = 1
        lq = draw(st.lists(st.integers(0, 20), min_size=1, max_size=4))
        lk = draw(st.one_of(st.just(lq), st.permutations(lq)))
        if not small and draw(st.booleans()):
            lq, lk = [*lq, 130], [*lk, 140]
        Tq, Tk = sum(lq), sum(lk)
        mask = mode, lq, lk, draw(st.booleans()), draw(st.sampled_from((None, 1, 7)))
    if quantize is None:
        quantize = draw(st.sampled_from((True, True, True, True, False)))
    block = draw(st.sampled_from(("128xD", "1xD", "mx")))
    fp32 = (
        block == "1xD"
        or (block == "128xD" and mode == "full")
        or (block == "128xD" and mode == "packed" and not mask[3])
    )
    deltas = [d for d in AttentionRecipe.DELTAS if (block, d) != ("mx", "forward")]
    recipe = AttentionRecipe(
        block=block,
        descale=draw(st.sampled_from(("pow2", "fp32"))) if fp32 else "pow2",
        delta=draw(st.sampled_from(("matched", *deltas))),
        do_format=draw(st.sampled_from(("e4m3", "e5m2"))),
        project_row_sum=draw(st.booleans()),
        quantize=quantize,
    )
    dtypes = DTYPES if quantize else (*DTYPES, torch.float64)
    kinds = st.one_of(st.just("normal"), st.sampled_from(DATA))
    scale = st.sampled_from((None, None, 1.0, 1e-3) + (() if small else (0.0, -0.5)))
    where = st.floats(0, 1, exclude_max=True)
    bad = st.tuples(st.sampled_from(("q", "k", "v", "do")), where, st.sampled_from(BAD))
    return Attention(
        B, draw(st.integers(1, 2)), draw(st.integers(1, 3)), Tq, Tk, D, Dv,
        dtype=draw(st.sampled_from(dtypes)),
        data=tuple(draw(kinds) for _ in range(4)),
        strides=tuple(draw(st.sampled_from(STRIDES)) for _ in range(4)),
        seed=draw(st.integers(0, 2**16)),
        recipe=recipe,
        mask=mask,
        softcap=draw(st.sampled_from((None, None, 30.0, 0.5))),
        softmax_scale=draw(scale),
        sinks=draw(st.sampled_from((None, None, 1.0, 100.0))),
        dlse=draw(st.booleans()),
        bad=draw(st.one_of(st.none(), bad)),
    )  # fmt: skip


@dataclass
class Linear(_Printed):
    """One call of ``fp8_linear`` by what was drawn."""

    batch: tuple[int, ...]
    n_in: int
    n_out: int
    dtype: torch.dtype
    data: tuple[str, str, str]
    strides: tuple[str, str, str]
    bias: bool
    seed: int
    recipe: LinearRecipe
    bad: tuple[str, float, float] | None

    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """``x, weight, bias, dy`` before the non-finite value."""
        T = math.prod(self.batch)
        sizes = (T, self.n_in), (self.n_out, self.n_in), (T, self.n_out)
        made = zip(self.data, sizes, self.strides, strict=True)
        x, w, dy = (
            strided(
                values(kind, size, self.dtype, self.seed + i),
                "contiguous" if how == "expanded" else how,
            )
            for i, (kind, size, how) in enumerate(made)
        )
        bias = values("normal", (self.n_out,), self.dtype, self.seed + 3) if self.bias else None
        return x.unflatten(0, self.batch), w, bias, dy.unflatten(0, self.batch)


@st.composite
def linear_cases(draw) -> Linear:
    """Any allowed call."""
    sizes = st.one_of(st.integers(1, 9), st.sampled_from((31, 32, 33, 127, 128, 129, 200)))
    batch = draw(st.one_of(st.tuples(sizes), st.tuples(st.integers(1, 3), st.integers(0, 40))))
    kinds = st.one_of(st.just("normal"), st.sampled_from(DATA))
    scaling = draw(st.sampled_from(("blockwise", "rowwise", "mx")))
    descale = "pow2" if scaling == "mx" else draw(st.sampled_from(("fp32", "pow2")))
    where = st.floats(0, 1, exclude_max=True)
    bad = st.tuples(st.sampled_from(("x", "weight", "dy")), where, st.sampled_from(BAD))
    return Linear(
        batch,
        draw(sizes),
        draw(sizes),
        draw(st.sampled_from(DTYPES)),
        tuple(draw(kinds) for _ in range(3)),
        tuple(draw(st.sampled_from(STRIDES)) for _ in range(3)),
        draw(st.booleans()),
        draw(st.integers(0, 2**16)),
        LinearRecipe(
            scaling=scaling, descale=descale, grad_format=draw(st.sampled_from(("e4m3", "e5m2")))
        ),
        draw(st.one_of(st.none(), bad)),
    )
