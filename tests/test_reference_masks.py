"""Which key a query sees, in every mask mode, without quantisation; and what padding and packing
must not do, with it.

Unquantised results are compared with SDPA given the dense mask of attention_cases.py, and with
``gradcheck``. Padding and packing are compared bit by bit.
"""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from attention_cases import (
    BLOCKS,
    EXACT,
    FIELDS,
    GRADS,
    MODES,
    NO_WINDOW,
    Mode,
    Result,
    Shape,
    causal,
    compact,
    dense_attention,
    exact,
    make_inputs,
    offsets,
    packed_visible,
    padded_positions,
    run,
)

from hf_deltamatch import AttentionRecipe, delta_matching_attention
from hf_deltamatch.testing import assert_bitwise_equal, assert_close, rel_rms

# Measured over all modes: 4.6e-7 in FP32, 1e-15 in FP64.
RMS = {torch.float32: 1e-6, torch.float64: 4e-15}


def sdpa(q, k, v, *, visible, **_):
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    return o, o.new_zeros(o.shape[:3])


def dense(q, k, v, *, visible, **options):
    """The textbook oracle; a row that sees nothing gives 0 and lse −inf, sinks or not."""
    if visible is None:
        return dense_attention(q, k, v, **options)
    alive = visible.any(-1, keepdim=True)
    o, lse = dense_attention(q, k, v, visible=visible | ~alive, **options)
    return torch.where(alive, o, 0.0), torch.where(alive[..., 0], lse, -math.inf)


def check(actual: Result, expected: Result, rms: float, fields=FIELDS) -> None:
    for field in fields:
        assert_close(getattr(actual, field), getattr(expected, field), rms=rms, what=field)


@pytest.mark.parametrize("dtype", RMS, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("mode", MODES)
def test_delta_matching_attention_bf16_against_sdpa(mode: str, dtype: torch.dtype) -> None:
    m = MODES[mode]()
    q, k, v, do = make_inputs(m.shape)
    wide = [x.double() for x in (q, k, v, do)]
    actual = run(*(x.to(dtype) for x in (q, k, v, do)), recipe="bf16", **m.options)
    check(actual, run(*wide, attention=sdpa, visible=m.visible), RMS[dtype], ("o", *GRADS))
    assert_close(actual.lse, dense(*wide[:3], visible=m.visible)[1], rms=RMS[dtype], what="lse")
    assert actual.lse.dtype == dtype


SHAPES = [
    Shape(B=1, Hq=4, Hkv=4),
    Shape(B=3, Hq=4, Hkv=1),
    Shape(Hq=6, Hkv=2, D=40, Dv=40),
    Shape(D=72, Dv=24),
    Shape(D=1, Dv=3, Tq=5, Tk=9),
    Shape(Tq=1, Tk=130, D=80, Dv=96),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_delta_matching_attention_bf16_shapes(shape: Shape) -> None:
    q, k, v, do = make_inputs(shape, torch.float64)
    visible = causal(shape.Tq, shape.Tk)
    actual = run(q, k, v, do, recipe="bf16", is_causal=True)
    check(actual, run(q, k, v, do, attention=sdpa, visible=visible), 4e-15, ("o", *GRADS))


OPTIONS = {
    "softmax-scale": {"softmax_scale": 0.3},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -2.0, 3.0, 0.0])},
    "all": {"softmax_scale": 0.3, "softcap": 2.0, "sinks": torch.tensor([0.5, -2.0, 3.0, 0.0])},
}


@pytest.mark.parametrize("dtype", RMS, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("mode", ["full", "causal", "causal-long-q", "bool-head", "packed-causal"])
@pytest.mark.parametrize("options", OPTIONS)
def test_delta_matching_attention_bf16_against_dense(options: str, mode: str, dtype) -> None:
    """Value, lse and every gradient, that of the sinks and the one through lse included."""
    m, options = MODES[mode](), dict(OPTIONS[options])
    sinks = options.pop("sinks", None)
    x = make_inputs(m.shape)
    dlse = torch.randn(x[0].shape[:3])
    if m.visible is not None:  # the gradient of a −inf lse means nothing
        dlse = dlse * m.visible.any(-1)
    results = []
    for to, kind, which in ((dtype, None, m.options), (torch.float64, dense, {})):
        extra = {"recipe": EXACT} if kind is None else {"visible": m.visible}
        if sinks is not None:
            extra["sinks"] = sinks.to(to)
        leaves = [t.to(to) for t in x]
        results.append(run(*leaves, dlse=dlse.to(to), attention=kind, **extra, **which, **options))
    check(*results, RMS[dtype])
    if sinks is not None:  # a sum over all rows that cancels: 1.6e-6 in FP32
        check(*results, 2 * RMS[dtype], ("dsinks",))


_SIX = torch.tensor([-1, -1, 2, 3, 4, 5])
GRADCHECKS = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 2},
    "bool": {"mask": causal(6, 6) & (torch.arange(6) != 1)},
    "compact": {"mask": compact(_SIX.expand(1, -1), offset=2)},
    "packed": {"is_causal": True, "cu_seqlens": offsets([2, 0, 4])},
    "softcap": {"softcap": 1.5},
    "sinks": {"is_causal": True, "sinks": True},
    "softcap-sinks": {"is_causal": True, "softcap": 1.5, "sinks": True},
}


@pytest.mark.parametrize("return_lse", [False, True], ids=["o", "o-lse"])
@pytest.mark.parametrize("case", GRADCHECKS)
def test_delta_matching_attention_gradcheck(case: str, return_lse: bool) -> None:
    options = {**GRADCHECKS[case], "recipe": EXACT, "return_lse": return_lse}
    q, k, v, _ = make_inputs(Shape(B=1, Hq=2, Hkv=1, Tq=6, Tk=6, D=3, Dv=2), torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if options.pop("sinks", False):
        leaves.append(torch.randn(2, dtype=torch.float64, requires_grad=True))

    def attention(q, k, v, sinks=None):
        return delta_matching_attention(q, k, v, sinks=sinks, **options)

    assert torch.autograd.gradcheck(attention, leaves)


@pytest.mark.parametrize("delta", ["stale", "dequantized", "forward"])
def test_delta_matching_attention_gradcheck_other_deltas(delta: str) -> None:
    """In exact arithmetic every δ rule is the same number, and the projection removes nothing."""
    recipe = AttentionRecipe(delta=delta, quantize=False, project_row_sum=True)
    x = make_inputs(Shape(Tq=50, Tk=50, D=16, Dv=16), torch.float64)
    options = {"is_causal": True, "softcap": 3.0, "sinks": torch.randn(4, dtype=torch.float64)}
    check(run(*x, recipe=recipe, **options), exact(*x, **options), 1e-14)


@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, -2.0])], ids=["no-sinks", "sinks"])
@pytest.mark.parametrize("recipe", [*BLOCKS, "stale_delta", "forward_delta", "bf16"])
def test_delta_matching_attention_fully_masked_row(recipe: str, sinks: torch.Tensor | None) -> None:
    """Rows 0 to 9 see nothing, keys 290 on are seen by nobody; what they hold is NaN."""
    mask = causal(300, 300)
    mask[:10], mask[:, 290:] = False, False
    q, k, v, do = make_inputs(Shape(1, 2, 1, 300, 300, 64, 64))
    q[:, :, :10], do[:, :, :10], k[:, :, 290:], v[:, :, 290:] = (math.nan,) * 4
    recipe = AttentionRecipe(block=recipe) if recipe in BLOCKS else recipe
    dlse = torch.randn(1, 2, 300)
    dlse[:, :, :10] = math.nan
    r = run(q, k, v, do, dlse=dlse, recipe=recipe, mask=mask, sinks=sinks)
    assert not r.o[:, :, :10].any() and (r.lse[:, :, :10] == -math.inf).all()
    assert not r.dq[:, :, :10].any() and not r.dk[:, :, 290:].any() and not r.dv[:, :, 290:].any()
    assert all(getattr(r, f).isfinite().all() for f in ("o", *GRADS))
    assert r.lse[:, :, 10:].isfinite().all() and (sinks is None or r.dsinks.isfinite().all())


# --- padding ----------------------------------------------------------------------------------

LENGTHS, PADDED = [200, 150], 300


def padded(side: str) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """Inputs with zero dO in the padding, the compact mask, and True for padding ``[B, 1, T, 1]``."""
    positions = padded_positions(LENGTHS, PADDED, side)
    hidden = (positions < 0)[:, None, :, None]
    q, k, v, do = make_inputs(Shape(Tq=PADDED, Tk=PADDED))
    return (q, k, v, do.masked_fill(hidden, 0.0)), compact(positions), hidden


def assert_real_tokens_equal(actual: Result, expected: Result, hidden: torch.Tensor) -> None:
    for field in FIELDS:
        a, e = getattr(actual, field), getattr(expected, field)
        real = ~hidden[..., 0] if field == "lse" else ~hidden
        assert_bitwise_equal(torch.where(real, a, 0.0), torch.where(real, e, 0.0), field)


@pytest.mark.parametrize("garbage", [1e3, math.inf, math.nan])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("block", BLOCKS)
def test_delta_matching_attention_hidden_keys(block: str, side: str, garbage: float) -> None:
    x, mask, hidden = padded(side)
    q, k, v, do = x
    options = {"recipe": AttentionRecipe(block=block), "mask": mask}
    k, v = k.masked_fill(hidden, garbage), v.masked_fill(hidden, -garbage)
    if side == "left":  # these queries see nothing: neither they nor their dO may matter
        q, do = q.masked_fill(hidden, garbage), do.masked_fill(hidden, garbage)
    actual = run(q, k, v, do, **options)
    assert_real_tokens_equal(actual, run(*x, **options), hidden)
    for grad in (actual.dk, actual.dv, *((actual.dq, actual.o) if side == "left" else ())):
        assert not grad.masked_select(hidden).any()


# Not `mx`: its copies along tokens share a descale among 32 neighbours, so there it is a bound.
@pytest.mark.parametrize("garbage", [3.0, 1e3, 1e30])
@pytest.mark.parametrize("block", ["128xD", "1xD"])
def test_delta_matching_attention_right_padding_queries(block: str, garbage: float) -> None:
    """They see real keys, but what they hold moves no descale of real tokens."""
    x, mask, hidden = padded("right")
    q, k, v, do = x
    options = {"recipe": AttentionRecipe(block=block), "mask": mask}
    actual = run(torch.where(hidden, q * garbage, q), k, v, do, **options)
    assert_real_tokens_equal(actual, run(*x, **options), hidden)


@pytest.mark.parametrize("recipe", [*BLOCKS, "bf16"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_delta_matching_attention_padded_against_alone(side: str, recipe: str) -> None:
    """Left padding shifts which keys share a tile, so P is cast after another running maximum (o
    differs by 0.009). The backward has no running maximum: its differences are FP32 rounding, 8e-7.
    """
    bounds = {"o": 0.012 if side == "left" else 1e-7, "lse": 1e-7, **dict.fromkeys(GRADS, 2e-6)}
    x, mask, hidden = padded(side)
    if recipe == "bf16":
        recipe, x, bounds = EXACT, tuple(t.double() for t in x), dict.fromkeys(FIELDS, 1e-10)
    else:
        recipe = AttentionRecipe(block=recipe)
    together = run(*x, recipe=recipe, mask=mask)
    for b in range(2):
        real = ~hidden[b, 0, :, 0]
        alone = run(*(t[b : b + 1, :, real] for t in x), recipe=recipe, is_causal=True)
        for field, bound in bounds.items():
            part = getattr(together, field)[b : b + 1, :, real]
            error = rel_rms(part, getattr(alone, field))
            assert error <= bound, f"{field} of sequence {b}: {error:.2e}"


# --- packing ----------------------------------------------------------------------------------

# Boundaries inside tiles of 128; the second sequence lies within one tile with both neighbours.
PACKINGS = {
    "causal": ([100, 20, 180], [100, 20, 180], True),
    "causal-longer-k": ([60, 20, 150], [90, 30, 150], True),
    "full": ([100, 20, 180], [70, 140, 1], False),
}


def packed(packing: str) -> tuple[Mode, list[int], list[int], tuple[torch.Tensor, ...]]:
    lq, lk, is_causal = PACKINGS[packing]
    shape = Shape(B=1, Tq=sum(lq), Tk=sum(lk))
    options = {"cu_seqlens": (offsets(lq), offsets(lk)), "is_causal": is_causal}
    return Mode(shape, options, packed_visible(lq, lk, is_causal)), lq, lk, make_inputs(shape)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("block", BLOCKS)
def test_delta_matching_attention_packed_equals_alone(block: str, packing: str) -> None:
    m, lq, lk, (q, k, v, do) = packed(packing)
    recipe, is_causal = AttentionRecipe(block=block), m.options["is_causal"]
    together = run(q, k, v, do, recipe=recipe, **m.options)
    parts_q = [x.split(lq, 2) for x in (q, do, together.o, together.lse, together.dq)]
    parts_k = [x.split(lk, 2) for x in (k, v, together.dk, together.dv)]
    for s in range(len(lq)):
        q_s, do_s, *out_q = (p[s] for p in parts_q)
        k_s, v_s, *out_k = (p[s] for p in parts_k)
        alone = run(q_s, k_s, v_s, do_s, recipe=recipe, is_causal=is_causal)
        for field, a, e in zip(FIELDS, (*out_q, *out_k), alone, strict=False):
            assert_bitwise_equal(a, e, f"{field} of sequence {s}")


@pytest.mark.parametrize("factor", [1e3, math.nan])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    ("block", "by"),
    # Not `mx` with a boolean mask: 32 neighbouring tokens share a descale in its copies along tokens.
    [
        (block, by)
        for block in BLOCKS
        for by in ("cu-seqlens", "bool")
        if (block, by) != ("mx", "bool")
    ],
)
def test_delta_matching_attention_packed_neighbour(block, by, packing, factor) -> None:
    """What one sequence holds changes no bit of the others, also without ``cu_seqlens``: tiles are
    cut where nobody sees both sides."""
    m, lq, lk, x = packed(packing)
    options = m.options if by == "cu-seqlens" else {"mask": m.visible}
    options = {**options, "recipe": AttentionRecipe(block=block)}
    lengths = (lq, lk, lk, lq)
    changed = [t.clone() for t in x]
    for t, n in zip(changed, lengths, strict=True):
        t[:, :, n[0] : n[0] + n[1]] *= factor
    actual, expected = run(*changed, **options), run(*x, **options)
    for field in FIELDS:
        n = lk if field in ("dk", "dv") else lq
        for s in (0, 2):
            a, e = (getattr(r, field).split(n, 2)[s] for r in (actual, expected))
            assert_bitwise_equal(a, e, f"{field} of sequence {s}")


def test_queries_whose_own_key_is_hidden_keep_their_gradient() -> None:
    """A hole in the middle of a sequence, and padding that carries a gradient all the same: the only
    rows with dO. Errors as with one descale per token (measured 0.04 to 0.07, 1 where lost)."""
    T = 128
    q, k, v, do = make_inputs(Shape(1, 2, 2, T, T, 32, 32))
    for hidden in (slice(30, 50), slice(100, T)):
        position = torch.arange(T, dtype=torch.int32)
        position[hidden] = -1
        rows = [position, torch.full_like(position, NO_WINDOW), torch.zeros_like(position)]
        mask = torch.stack(rows)[None, :, None]
        only = torch.zeros_like(do)
        only[:, :, hidden] = do[:, :, hidden] * 1e-4
        for grad in (only, do + 20e4 * only):
            truth = run(q.double(), k.double(), v.double(), grad.double(), mask=mask, recipe=EXACT)
            ours = run(q, k, v, grad, mask=mask)
            for field in GRADS:
                error = rel_rms(getattr(ours, field), getattr(truth, field))
                assert error < 0.1, (hidden, field, error)


def test_huge_window_is_no_window() -> None:
    q, k, v, do = make_inputs(Shape())
    plain = run(q, k, v, do, is_causal=True)
    for window in (150, 2**31 - 1, sys.maxsize, 2**63):
        assert_bitwise_equal(run(q, k, v, do, is_causal=True, window=window).dk, plain.dk)
