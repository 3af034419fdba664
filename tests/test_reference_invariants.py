"""What δ is for, and what must not depend on what: row sums, mean keys, causality, NaN."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import (
    BLOCKS,
    FIELDS,
    Result,
    Shape,
    causal,
    dequantized,
    exact,
    hooked,
    make_inputs,
    run,
)
from torch import Tensor

from hf_deltamatch import AttentionRecipe, numerics
from hf_deltamatch.formats import ATTENTION_BLOCKS, E4M3
from hf_deltamatch.ops.observe import record_row_sum
from hf_deltamatch.reference import attention, dequantize, quantize
from hf_deltamatch.testing import assert_bitwise_equal, assert_close, rel_rms, row_sum_residual

SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0])

# --- the row sum --------------------------------------------------------------------------------

ROW_SUM_CASES = {
    "causal": {"is_causal": True},
    "full": {},
    "window": {"is_causal": True, "window": 60},
    "softcap": {"is_causal": True, "softcap": 3.0},
    "sinks": {"is_causal": True, "sinks": SINKS},
    "softcap-sinks": {"is_causal": True, "softcap": 3.0, "sinks": SINKS},
}


@pytest.mark.parametrize("case", ROW_SUM_CASES)
@pytest.mark.parametrize("block", BLOCKS)
def test_delta_matching_attention_row_sum(block: str, case: str) -> None:
    """2e-8 to 3e-8 with a matched δ; 2e-4 to 5e-4 from an O of two terms of P; 3e-3 to 5e-3
    dequantised; 5e-3 to 8e-3 stale."""
    x = make_inputs(Shape(B=1, Tq=200, Tk=200), torch.float32 if case == "full" else torch.bfloat16)
    residual = {}
    for delta in ("matched", "forward", "dequantized", "stale"):
        if (block, delta) == ("mx", "forward"):
            continue
        recipe = AttentionRecipe(block=block, delta=delta)
        with record_row_sum() as recorded:
            run(*x, recipe=recipe, **ROW_SUM_CASES[case])
        assert len(recorded.per_call) == 1
        residual[delta] = recorded.value
    assert residual["matched"] <= 1e-7
    assert 1e-3 <= residual["dequantized"] < residual["stale"]
    if "forward" in residual:
        assert 1e-4 < residual["forward"] < 0.12 * residual["dequantized"]


@pytest.mark.parametrize("case", ["causal", "softcap-sinks"])
@pytest.mark.parametrize("block", ["128xD", "1xD"])
def test_attention_bwd_forward_rule_lacks_the_bits_of_o(block: str, case: str) -> None:
    """Its distance to the matched δ is O's rounding to BF16: 1.5e-3 to 1.6e-3; from the FP32 O of the
    same forward it would be 1.0e-4 to 1.1e-4."""
    options = {"softcap": 3.0, "sinks": SINKS[:2]} if "softcap" in case else {}
    x = tuple(t.float() for t in numerics.make_inputs(2.0, seed=0, B=2, H=2, T=256, D=64))
    fwd, forward, _ = hooked(*x, AttentionRecipe(block=block, delta="forward"), **options)
    _, matched, _ = hooked(*x, AttentionRecipe(block=block), **options)
    do = dequantize(*quantize(x[3], E4M3, ATTENTION_BLOCKS[block]), ATTENTION_BLOCKS[block])
    unrounded = (do * fwd.o).sum(-1)
    errors = [rel_rms(d, matched.delta) for d in (forward.delta, unrounded)]
    assert errors[1] < 1.3e-4 and 1e-3 < errors[0] < 2e-3, errors


def test_attention_bwd_row_sum_needs_the_sink_column() -> None:
    """With sinks the rows of dS alone do not sum to zero; with their column they do."""
    q, k, v, do = make_inputs(Shape(Tq=100, Tk=100))
    blocks = hooked(q, k, v, do, AttentionRecipe(), sinks=SINKS)[2]
    assert len(blocks) == 1
    ds, ds_sink = blocks[0]
    assert row_sum_residual(ds) > 0.01
    assert row_sum_residual(ds, ds_sink) < 1e-7


def test_delta_matching_attention_row_sum_lse_gradient() -> None:
    """A gradient of lse adds P · dlse, so the rows of dS sum to dlse and the residual says so."""
    x = make_inputs(Shape(B=1, Tq=100, Tk=100))
    with record_row_sum() as recorded:
        run(*x, dlse=torch.ones(1, 4, 100), recipe="delta_matching", is_causal=True)
    assert recorded.value > 0.1


# --- the mean key -------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS)
def test_attention_bwd_stale_minus_matched(block: str) -> None:
    """dS_stale − dS_matched = e_i · P_i with e = δ_matched − δ_stale, and it goes to the mean key.

    The identity holds to the rounding of dS (5e-8 of it, 1.5e-6 of the difference). Of the stale
    dQ error 99 % (norm) lie along the attention-weighted mean key; of the matched one about 55 %.
    """
    T = 512
    x = numerics.make_inputs(2.0, seed=0, B=2, H=1, T=T, D=128)
    stale_recipe, recipe = AttentionRecipe(block=block, delta="stale"), AttentionRecipe(block=block)
    _, stale, [(ds_stale, _)] = hooked(*x, stale_recipe)
    fwd, matched, [(ds_matched, _)] = hooked(*x, recipe)
    q, k = (dequantized(fwd, which, block).double() for which in "qk")
    p = torch.exp(q @ k.mT * 128**-0.5 - fwd.lse.double()[..., None])
    p = torch.where(causal(T, T), p, 0.0)
    e = (matched.delta.double() - stale.delta.double())[..., None]
    difference = ds_stale[:, :, 0].double() - ds_matched[:, :, 0].double()
    assert_close(difference, e * p, rms=3e-6, what="dS_stale − dS_matched")

    truth = exact(*x, is_causal=True).dq
    mean_key = torch.nn.functional.normalize(p @ k, dim=-1)

    def along_mean_key(error: Tensor) -> float:
        return ((error * mean_key).sum(-1).norm() / error.norm()).item()

    assert along_mean_key(stale.dq.double() - matched.dq.double()) > 0.99
    assert along_mean_key(stale.dq.double() - truth) > 0.97
    assert along_mean_key(matched.dq.double() - truth) < 0.6


def test_delta_matching_attention_constant_key_offset() -> None:
    """Adding one vector to all keys changes no probability and so no dQ; a stale δ lets it in.

    Measured change of dq: matched 0.114, with projection 0.099, stale 0.549.
    """
    q, k, v, do = (x.float() for x in numerics.make_inputs(0.0, seed=0, B=2, H=1, T=512, D=128))
    shifted = k + 2.0 * torch.randn(128, generator=torch.Generator().manual_seed(5))
    unquantised = [exact(q, keys, v, do, is_causal=True).dq for keys in (k, shifted)]
    assert_close(*unquantised, rms=1e-7, what="dq in FP64")  # FP32 rounding of the shifted keys
    change = {}
    for name, recipe in numerics.RULES.items():
        before, after = (run(q, x, v, do, recipe=recipe, is_causal=True).dq for x in (k, shifted))
        change[name] = rel_rms(after, before)
    assert change["matched"] < 0.13
    assert change["matched + row-sum projection"] < change["matched"]
    assert change["stale"] > 4 * change["matched"]


# With the largest ratio of the dq errors, with to without. A cap of 3 saturates nearly every logit
# at offset 6: little is left to gain, and nothing may be lost (measured 0.99 and 1.011).
PROJECTIONS = {
    "plain": ({}, 0.88),
    "softcap": ({"softcap": 30.0}, 0.88),
    "sinks": ({"sinks": SINKS[:2]}, 0.93),
    "softcap-sinks": ({"softcap": 30.0, "sinks": SINKS[:2]}, 0.92),
    "low-softcap": ({"softcap": 3.0}, 1.0),
    "low-softcap-sinks": ({"softcap": 3.0, "sinks": SINKS[:2]}, 1.02),
}


@pytest.mark.parametrize("offset", [2.0, 6.0])
@pytest.mark.parametrize("case", PROJECTIONS)
@pytest.mark.parametrize("block", BLOCKS)
def test_delta_matching_attention_projection(block: str, case: str, offset: float) -> None:
    """What the projection subtracts is the rounding of dS only, so that it helps also where rows of
    dS do not sum to zero (soft cap, sinks); dk and dv are not touched."""
    q, k, v, do = numerics.make_inputs(offset, seed=0, B=2, H=2, T=256, D=64)
    options, ratio = PROJECTIONS[case]
    options = {"is_causal": True, **options}
    truth = exact(q, k, v, do, **options)
    plain, projected = (
        run(q, k, v, do, recipe=AttentionRecipe(block=block, project_row_sum=p), **options)
        for p in (False, True)
    )
    errors = [rel_rms(r.dq, truth.dq) for r in (plain, projected)]
    assert errors[1] <= ratio * errors[0], errors
    for field in ("o", "dk", "dv"):
        assert_bitwise_equal(getattr(projected, field), getattr(plain, field), field)


@pytest.mark.parametrize("block", BLOCKS)
def test_delta_matching_attention_projection_zero_keys(block: str) -> None:
    """Keys that are zero add nothing to dq: they must neither flush the others nor leave a leak."""
    q, k, v, do = numerics.make_inputs(2.0, seed=0, B=2, H=2, T=256, D=64)
    k[:, :, ::3] = 0.0
    truth = exact(q, k, v, do, is_causal=True).dq
    for project, bound in ((False, 0.096), (True, 0.092)):
        recipe = AttentionRecipe(block=block, project_row_sum=project)
        error = rel_rms(run(q, k, v, do, recipe=recipe, is_causal=True).dq, truth)
        assert error <= bound, f"project_row_sum={project}: {error:.4f}"


# --- strides and the split of the work -----------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS)
def test_delta_matching_attention_strided(block: str) -> None:
    x = make_inputs(Shape(Tq=140, Tk=140))
    expected = run(*x, recipe=AttentionRecipe(block=block), is_causal=True)
    q, k, v, do = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in x)  # BTHD storage
    k = torch.stack([k, k], -1)[..., 0]
    do = do.mT.contiguous().mT
    assert not any(t.is_contiguous() for t in (q, k, v, do))
    actual = run(q, k, v, do, recipe=AttentionRecipe(block=block), is_causal=True)
    for field in FIELDS:
        assert_bitwise_equal(getattr(actual, field), getattr(expected, field), field)


@pytest.mark.parametrize("block", BLOCKS)
def test_delta_matching_attention_split(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the reference splits its work changes the order of FP32 sums (5e-8), nothing else."""
    x, recipe = make_inputs(Shape(Tq=300, Tk=300)), AttentionRecipe(block=block)
    expected = run(*x, recipe=recipe, is_causal=True)
    monkeypatch.setattr(attention, "_SCORES_PER_BLOCK", {"cpu": 1, "other": 1})
    actual = run(*x, recipe=recipe, is_causal=True)
    for field in FIELDS:
        assert_close(getattr(actual, field), getattr(expected, field), rms=1e-6, what=field)


# --- causality ----------------------------------------------------------------------------------


def changed_after(x: tuple[Tensor, ...], t: int, factor: float) -> tuple[Tensor, ...]:
    """q, k and v of tokens > t multiplied by ``factor`` (and everything after them)."""
    out = [a.clone() for a in x]
    for a in out[:3]:
        a[:, :, t + 1 :] *= factor
    return tuple(out)


@pytest.mark.parametrize("factor", [0.0, 7.0, 1e4, math.nan])
@pytest.mark.parametrize("descale", ["pow2", "fp32"])
def test_delta_matching_attention_causal_1xD(descale: str, factor: float) -> None:
    """Strictly causal: no bit of earlier outputs moves."""
    x = make_inputs(Shape(B=1, Tq=300, Tk=300))
    recipe = AttentionRecipe(block="1xD", descale=descale)
    expected = run(*x, recipe=recipe, is_causal=True)
    for t in (0, 63, 127, 128, 200):
        actual = run(*changed_after(x, t, factor), recipe=recipe, is_causal=True)
        for field in ("o", "lse"):
            a, e = (getattr(r, field)[:, :, : t + 1] for r in (actual, expected))
            assert_bitwise_equal(a, e, f"{field} up to {t}")


# Largest change of o measured, relative to the earlier tokens of the tile.
TILE_BOUNDS = {
    ("128xD", 7.0): 3e-6,  # 2.2e-6
    ("128xD", 1e3): 0.02,  # 0.018; 0.013 if q stays as it was
    ("mx", 7.0): 2e-7,  # 1.1e-7
    ("mx", 1e3): 1.2e-3,  # 9.9e-4
}


@pytest.mark.parametrize("block, factor", TILE_BOUNDS)
def test_delta_matching_attention_causal_tiles(block: str, factor: float) -> None:
    """A later token of the same tile reaches an earlier one only through elements 2^14 below the
    tile's largest, and never beyond the tile."""
    x = make_inputs(Shape(B=1, Tq=400, Tk=400))
    recipe = AttentionRecipe(block=block)
    expected = run(*x, recipe=recipe, is_causal=True)
    for t in (0, 63, 100, 127, 300):
        actual = run(*changed_after(x, t, factor), recipe=recipe, is_causal=True)
        tile = (t + 1) // 128 * 128
        assert_bitwise_equal(actual.o[:, :, :tile], expected.o[:, :, :tile], f"o up to {tile}")
        error = rel_rms(actual.o[:, :, tile : t + 1], expected.o[:, :, tile : t + 1])
        assert error <= TILE_BOUNDS[block, factor], f"o from {tile} to {t}: {error:.1e}"


def test_delta_matching_attention_fp32_tile_descales_need_no_mask() -> None:
    x = make_inputs(Shape(Tq=60, Tk=60))
    recipe = AttentionRecipe(block="128xD", descale="fp32")
    assert_close(run(*x, recipe=recipe).o, exact(*x).o, rms=0.055)
    for options in ({"is_causal": True}, {"mask": torch.ones(60, 60, dtype=torch.bool)}):
        with pytest.raises(ValueError, match="FP32 descales of 128-token tiles.*'1xD'"):
            run(*x, recipe=recipe, **options)


# --- NaN and Inf --------------------------------------------------------------------------------

BAD_AT = 150
NAN_MODES = {
    "causal": ({"is_causal": True}, causal(300, 300)),
    "window": ({"is_causal": True, "window": 60}, causal(300, 300, 60)),
    "full": ({}, torch.ones(300, 300, dtype=torch.bool)),
    "softcap": ({"is_causal": True, "softcap": 30.0}, causal(300, 300)),
}


def with_bad(x: tuple[Tensor, ...], which: str, bad: float) -> tuple[Tensor, ...]:
    """One element of token BAD_AT of batch 0, head 1 of q, k, v or do."""
    out = [a.clone() for a in x]
    out[("q", "k", "v", "do").index(which)][0, 1, BAD_AT, 5] = bad
    return tuple(out)


def expected_nan(which: str, block: str, visible: Tensor) -> dict[str, Tensor | None]:
    """Tokens ``[300]`` of each result that must be NaN (in the heads concerned); None for none."""
    size = {"128xD": 128, "1xD": 1}[block]
    bad = torch.arange(300) // size == BAD_AT // size
    if which in ("q", "do"):
        rows = bad
    else:
        rows = (visible & bad).any(1)
    keys = visible[rows].any(0)
    o = rows if which != "do" else None
    lse = rows if which in ("q", "k") else None
    return {"o": o, "lse": lse, "dq": rows, "dk": keys, "dv": None if which == "v" else keys}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("mode", NAN_MODES)
@pytest.mark.parametrize("which", ["q", "k", "v", "do"])
@pytest.mark.parametrize("block", ["128xD", "1xD"])
def test_delta_matching_attention_nan(block: str, which: str, mode: str, bad: float) -> None:
    """It reaches every row that sees the token (or its tile) and no bit of anything else."""
    options, visible = NAN_MODES[mode]
    x = make_inputs(Shape(Tq=300, Tk=300))  # Hq 4, Hkv 2
    recipe = AttentionRecipe(block=block)
    clean = run(*x, recipe=recipe, **options)
    actual = run(*with_bad(x, which, bad), recipe=recipe, **options)
    for field, tokens in expected_nan(which, block, visible).items():
        a, e = getattr(actual, field), getattr(clean, field)
        must = torch.zeros(a.shape[:3], dtype=torch.bool)
        if tokens is not None:
            must[0, heads_of(which, field)] = tokens
        must = must if field == "lse" else must[..., None].expand_as(a)
        wrong = must & ~a.isnan()
        assert not wrong.any(), f"{field}: {int(wrong.sum())} elements should be NaN"
        assert_bitwise_equal(torch.where(must, 0.0, a), torch.where(must, 0.0, e), field)


def heads_of(which: str, field: str) -> slice:
    """Heads that head 1 of ``which`` reaches: query head 1 reads key head 0, key head 1 is read by
    query heads 2 and 3."""
    query_side = which in ("q", "do")
    if field in ("dk", "dv"):
        return slice(0, 1) if query_side else slice(1, 2)
    return slice(1, 2) if query_side else slice(2, 4)


@pytest.mark.parametrize("which", ["q", "k", "v", "do"])
@pytest.mark.parametrize("mode", NAN_MODES)
def test_delta_matching_attention_nan_mx(mode: str, which: str) -> None:
    """``mx`` spreads over other blocks in each product, but nothing is laundered into a finite
    value: every element is NaN or as it was."""
    options, visible = NAN_MODES[mode]
    x, recipe = make_inputs(Shape(Tq=300, Tk=300)), AttentionRecipe(block="mx")
    clean = run(*x, recipe=recipe, **options)
    actual = run(*with_bad(x, which, math.nan), recipe=recipe, **options)
    tokens = expected_nan(which, "1xD", visible)
    for field in FIELDS:
        a, e = getattr(actual, field), getattr(clean, field)
        assert_bitwise_equal(torch.where(a.isnan(), 0.0, a), torch.where(a.isnan(), 0.0, e), field)
        if tokens[field] is not None:  # at the least what depends on the token itself
            a = a if field == "lse" else a.isnan().any(-1)
            assert a[0, heads_of(which, field)][:, tokens[field]].bool().all(), field
        assert not getattr(actual, field)[1].isnan().any(), f"{field}: another batch"


@pytest.mark.parametrize("which", ["q", "k", "v", "do"])
def test_delta_matching_attention_nan_bf16(which: str) -> None:
    """Without quantisation the same rows, and only those."""
    options, visible = NAN_MODES["window"]
    x = make_inputs(Shape(Tq=300, Tk=300))
    actual: Result = run(*with_bad(x, which, math.nan), recipe="bf16", **options)
    for field, tokens in expected_nan(which, "1xD", visible).items():
        a = getattr(actual, field)
        must = torch.zeros(a.shape[:3], dtype=torch.bool)
        if tokens is not None:
            must[0, heads_of(which, field)] = tokens
        found = a.isnan() if field == "lse" else a.isnan().any(-1)
        assert torch.equal(found, must), field
