"""Block quantisation: exact descales, payloads against a slow loop, error bounds, poisoned blocks."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_deltamatch import formats
from hf_deltamatch.formats import E4M3, E5M2, MIN_DESCALE, Block, Float8Format
from hf_deltamatch.reference.quantize import (
    block_amax,
    cast,
    decode,
    dequantize,
    descale_of,
    fp32_descale,
    pow2_descale,
    quantize,
    round_trip_blocks,
)
from hf_deltamatch.testing import assert_bitwise_equal, rel_rms

BOTH = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
KINDS = pytest.mark.parametrize("kind", ["pow2", "fp32"])
BLOCKS = [
    formats.ATTENTION_BLOCKS["128xD"],
    formats.ATTENTION_BLOCKS["1xD"],
    formats.COLUMNWISE,
    formats.BLOCKWISE_1X128,
    formats.BLOCKWISE_128X1,
    formats.BLOCKWISE_128X128,
    formats.MX_1X32,
    formats.MX_TOKENS,
    Block("whole", None, None),
    Block("8x20", 8, 20),
]
EVERY_BLOCK = pytest.mark.parametrize("block", BLOCKS, ids=str)
FLT_MAX = torch.finfo(torch.float32).max
HYPOTHESIS = settings(max_examples=100, deadline=None, derandomize=True)
amaxes = st.floats(min_value=0.0, max_value=FLT_MAX, width=32)


def smallest_power_of_two(amax: float, fmt: Float8Format) -> Fraction:
    """Smallest 2**k >= 2**-126 with amax / 2**k <= fmt.max, in exact arithmetic; 1 for zero."""
    if amax == 0:
        return Fraction(1)
    k = max(-126, math.frexp(amax)[1] - fmt.max_exponent - 5)  # a start that is too small
    assert k == -126 or Fraction(amax) > Fraction(fmt.max) * Fraction(2) ** k
    while Fraction(amax) > Fraction(fmt.max) * Fraction(2) ** k:
        k += 1
    return Fraction(2) ** k


def spread(*shape: int, low: int = -12, high: int = 12) -> Tensor:
    """Normal values times powers of two drawn per element."""
    return torch.randn(*shape) * torch.exp2(torch.randint(low, high, shape).float())


class Tile(NamedTuple):
    """Place of one block in the grid of descales, and the elements it covers."""

    row: int
    col: int
    rows: range
    cols: range

    def of(self, x: Tensor) -> Tensor:
        return x[self.rows.start : self.rows.stop, self.cols.start : self.cols.stop]


def tiles(block: Block, tokens: int, features: int) -> list[Tile]:
    bt, bd = block.tokens or max(tokens, 1), block.features or max(features, 1)
    return [
        Tile(i, j, range(t, min(t + bt, tokens)), range(d, min(d + bd, features)))
        for i, t in enumerate(range(0, tokens, bt))
        for j, d in enumerate(range(0, features, bd))
    ]


@BOTH
def test_pow2_descale_exact(fmt: Float8Format) -> None:
    """max · 2**k and its neighbours for every k that FP32 holds, random amax, subnormals, FLT_MAX."""
    edges = fmt.max * torch.exp2(torch.arange(-140.0, 121.0))
    edges = edges[edges.isfinite() & (edges > 0)]
    up, down = torch.tensor(math.inf), torch.tensor(0.0)
    values = [edges, torch.nextafter(edges, up), torch.nextafter(edges, down)]
    values += [
        torch.exp2(torch.empty(500).uniform_(-149, 128)),
        torch.exp2(torch.arange(-149.0, 0)),
    ]
    values.append(torch.tensor([0.0, 1e-45, 1e-40, 2.0**-126, 448.0, 449.0, 3.4e38, FLT_MAX]))
    amax = torch.cat([v[v.isfinite()] for v in values])
    expected = [smallest_power_of_two(a, fmt) for a in amax.tolist()]
    assert pow2_descale(amax, fmt).tolist() == [float(e) for e in expected]


@HYPOTHESIS
@given(amax=amaxes)
def test_pow2_descale_exact_hypothesis(amax: float) -> None:
    for fmt in (E4M3, E5M2):
        assert pow2_descale(torch.tensor(amax), fmt).item() == smallest_power_of_two(amax, fmt)


@HYPOTHESIS
@given(amax=amaxes)
def test_fp32_descale(amax: float) -> None:
    for fmt in (E4M3, E5M2):
        descale = fp32_descale(torch.tensor(amax), fmt)
        exact = 1.0 if amax == 0 else max(amax / fmt.max, MIN_DESCALE)  # FP64
        assert descale.item() == torch.tensor(exact, dtype=torch.float32).item()


@BOTH
@KINDS
def test_descale_special_values(fmt: Float8Format, kind: str) -> None:
    amax = torch.tensor([0.0, 1e-45, math.inf, math.nan])
    zero, tiny, inf, nan = descale_of(amax, fmt, kind).tolist()
    assert (zero, tiny) == (1.0, MIN_DESCALE)
    assert math.isnan(inf) and math.isnan(nan)


def test_pow2_descale_is_e8m0() -> None:
    descale = pow2_descale(torch.exp2(torch.empty(1000).uniform_(-149, 128)), E4M3)
    assert_bitwise_equal(descale.to(torch.float8_e8m0fnu).float(), descale)


@EVERY_BLOCK
@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (0, 64), (3, 0), (5, 7), (130, 33)], ids=str)
@KINDS
def test_quantize_against_loop(block: Block, shape: tuple[int, int], kind: str) -> None:
    """Each block by itself: the descale from its own amax, the payload from its own descale."""
    x = spread(*shape)
    payload, descale = quantize(x, E4M3, block, kind)
    assert payload.shape == x.shape and payload.dtype == torch.float8_e4m3fn
    assert descale.shape == block.descale_shape(*shape) and descale.dtype == torch.float32
    expected = torch.full(shape, math.nan)
    for tile in tiles(block, *shape):
        amax = tile.of(x).abs().max().item()
        exact = float(smallest_power_of_two(amax, E4M3)) if kind == "pow2" else amax / 448
        assert descale[tile.row, tile.col] == torch.tensor(exact).float()
        scaled = tile.of(x) * (1 / descale[tile.row, tile.col])
        tile.of(expected).copy_(scaled.clamp(-448, 448))
    assert_bitwise_equal(payload, expected.to(torch.float8_e4m3fn))


@EVERY_BLOCK
def test_quantize_batched_and_strided(block: Block) -> None:
    x = spread(2, 3, 130, 24)
    payload, descale = quantize(x, E4M3, block)
    assert descale.shape == (2, 3, *block.descale_shape(130, 24))
    one = quantize(x[1, 2], E4M3, block)
    assert_bitwise_equal(payload[1, 2], one.payload)
    assert_bitwise_equal(descale[1, 2], one.descale)
    strided = quantize(x.transpose(-1, -2).contiguous().transpose(-1, -2), E4M3, block)
    assert_bitwise_equal(strided.payload, payload)
    assert_bitwise_equal(strided.descale, descale)


@EVERY_BLOCK
@pytest.mark.parametrize("tokens", [0, 1, 130])
def test_quantize_zeros(block: Block, tokens: int) -> None:
    payload, descale = quantize(torch.zeros(tokens, 40), E4M3, block)
    assert bool((descale == 1).all()) and bool((payload.float() == 0).all())
    assert dequantize(payload, descale, block).shape == (tokens, 40)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_quantize_takes_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.randn(40, 40).to(dtype)
    ours, fp32 = (quantize(v, E4M3, formats.MX_1X32) for v in (x, x.float()))
    assert_bitwise_equal(ours.payload, fp32.payload)
    assert_bitwise_equal(ours.descale, fp32.descale)


@EVERY_BLOCK
@BOTH
@KINDS
def test_dequantize_error(block: Block, fmt: Float8Format, kind: str) -> None:
    """Half a unit in the last place: 2**-4 |x| in E4M3 (3 mantissa bits), 2**-3 |x| in E5M2, and
    half a subnormal below the smallest normal. FP32 descales round twice more, 2**-24 each."""
    x = spread(130, 35, low=-20, high=1)
    payload, descale = quantize(x, fmt, block, kind)
    values = dequantize(payload, descale, block)
    half_ulp = 2.0**-4 if fmt is E4M3 else 2.0**-3
    for tile in tiles(block, *x.shape):
        size, error = tile.of(x).abs(), tile.of(x - values).abs()
        unit = descale[tile.row, tile.col]
        bound = torch.maximum(half_ulp * size, unit * fmt.smallest_subnormal / 2)
        assert bool((error <= bound * (1 + 2.0**-20)).all())
        # Saturates by rounding at most; and a power of two half as large would saturate.
        assert size.max() <= fmt.max * unit * (1 + 2.0**-22)
        if kind == "pow2":
            assert size.max() > fmt.max * unit / 2


@BOTH
@KINDS
def test_dequantize_relative_rms(fmt: Float8Format, kind: str) -> None:
    # Ten seeds measured: 0.0260 to 0.0267 (E4M3), 0.0517 to 0.0532 (E5M2).
    x = torch.randn(256, 256)
    error = rel_rms(dequantize(*quantize(x, fmt, formats.ROWWISE, kind), formats.ROWWISE), x)
    assert error < (0.0275 if fmt is E4M3 else 0.055)


@pytest.mark.parametrize("kind,top", [("pow2", math.inf), ("fp32", FLT_MAX)])
def test_dequantize_near_the_end_of_fp32(kind: str, top: float) -> None:
    """With powers of two the last binade rounds to multiples of 2**124, so from 248 · 2**120 on
    (248: the tie of 240 and 256) a value rounds to 2**128, as a BF16 cast of it does."""
    below = torch.nextafter(torch.tensor(248.0), torch.tensor(0.0)) * 2.0**120
    x = torch.tensor([[below, 0.0], [248 * 2.0**120, 0.0], [FLT_MAX, 0.0]])
    values = dequantize(*quantize(x, E4M3, formats.ROWWISE, kind), formats.ROWWISE)[:, 0]
    assert values[0].isfinite()
    assert values[2] == top
    assert (values[1] == math.inf) == (kind == "pow2")


@HYPOTHESIS
@given(shift=st.integers(-100, 100), seed=st.integers(0, 2**16), block=st.sampled_from(BLOCKS))
def test_quantize_power_of_two_invariance(shift: int, seed: int, block: Block) -> None:
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(seed))
    one, scaled = quantize(x, E4M3, block), quantize(x * 2.0**shift, E4M3, block)
    assert_bitwise_equal(scaled.payload, one.payload)
    assert_bitwise_equal(scaled.descale, one.descale * 2.0**shift)


@HYPOTHESIS
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8))
def test_quantize_any_floats(values: list[float]) -> None:
    """Finite everywhere or poisoned, never a NaN payload, a zero descale or an error beyond half an
    ulp."""
    x = torch.tensor([values])
    for kind in ("pow2", "fp32"):
        payload, descale = quantize(x, E4M3, formats.ROWWISE, kind)
        assert bool(payload.float().isfinite().all())
        if not bool(x.isfinite().all()):
            assert bool(descale.isnan().all()) and bool((payload.float() == 0).all())
            continue
        assert bool((descale >= MIN_DESCALE).all())
        error = (payload.double() * descale.double() - x.double()).abs()
        bound = torch.maximum(2.0**-4 * x.double().abs(), descale.double() * 2.0**-10)
        assert bool((error <= bound * (1 + 2.0**-20)).all())


@HYPOTHESIS
@given(seed=st.integers(0, 2**16), block=st.sampled_from(BLOCKS))
def test_quantize_is_idempotent_pow2(seed: int, block: Block) -> None:
    """Dequantised values quantise to themselves: with powers of two nothing moves."""
    x = torch.randn(6, 36, generator=torch.Generator().manual_seed(seed))
    values = dequantize(*quantize(x, E4M3, block), block)
    assert_bitwise_equal(dequantize(*quantize(values, E4M3, block), block), values)


@EVERY_BLOCK
@KINDS
def test_quantize_poison_stays_in_its_block(block: Block, kind: str) -> None:
    clean = spread(140, 72)
    payload, descale = quantize(clean, E4M3, block, kind)
    at = (129, 37)
    (hit,) = (t for t in tiles(block, 140, 72) if at[0] in t.rows and at[1] in t.cols)
    inside = torch.zeros(140, 72, dtype=torch.bool)
    inside[hit.rows.start : hit.rows.stop, hit.cols.start : hit.cols.stop] = True
    payload = torch.where(inside, 0.0, payload.float()).to(payload.dtype)
    descale[hit.row, hit.col] = math.nan
    for bad in (math.nan, math.inf, -math.inf):
        x = clean.clone()
        x[at] = bad
        poisoned = quantize(x, E4M3, block, kind)
        assert_bitwise_equal(poisoned.payload, payload)
        assert_bitwise_equal(poisoned.descale, descale)
        assert_bitwise_equal(dequantize(*poisoned, block).isnan(), inside)


@BOTH
def test_decode_every_code(fmt: Float8Format) -> None:
    """Bitwise torch's own conversion (whose values test_formats works by hand), NaN included, also
    where no NaN is among the codes, in any shape and stride."""
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype)
    finite = codes[codes.float().isfinite()]
    for payload in (codes, finite, codes.view(4, 64).T, codes[:0], codes[77]):
        assert_bitwise_equal(decode(payload), payload.float())


def test_block_amax_propagates_nan() -> None:
    x = torch.ones(4, 4)
    x[1, 1] = math.nan
    amax = block_amax(x, Block("2x2", 2, 2))
    assert amax.isnan().tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_mx_reencoding_along_tokens(fmt: Float8Format) -> None:
    """32 features x 1 token, then 32 tokens x 1 feature of the dequantised values: the same values
    wherever they stay normal under the new descale, half a subnormal of error elsewhere."""
    x = torch.randn(70, 80) * torch.exp2(4 * torch.randn(70, 1))
    values = dequantize(*quantize(x, fmt, formats.MX_1X32), formats.MX_1X32)
    payload, descale = quantize(values, fmt, formats.MX_TOKENS)
    again = dequantize(payload, descale, formats.MX_TOKENS)
    unit = descale.repeat_interleave(32, 0)[:70]
    normal = values.abs() >= fmt.smallest_normal * unit
    assert_bitwise_equal(again[normal], values[normal])
    assert bool(((again - values).abs() <= unit * fmt.smallest_subnormal / 2).all())
    # Both cases occur: with E4M3's narrow range some values are lost, with E5M2's next to none.
    share = (again != values).float().mean().item()
    assert (0.01 < share < 0.25) if fmt is E4M3 else share < 0.01
    # Rows of like size lose nothing at all.
    values = dequantize(*quantize(x[:1].expand(70, -1), fmt, formats.MX_1X32), formats.MX_1X32)
    again = dequantize(*quantize(values, fmt, formats.MX_TOKENS), formats.MX_TOKENS)
    assert_bitwise_equal(again, values)


@BOTH
@pytest.mark.parametrize("length,size", [(128, 32), (70, 32), (5, 8), (1, 1), (300, 128)])
def test_round_trip_blocks(fmt: Float8Format, length: int, size: int) -> None:
    """Every run of ``size`` elements by itself, along the last axis and along the one before."""
    x = spread(2, 3, length)
    expected = torch.empty_like(x)
    for start in range(0, length, size):
        part = x[..., start : start + size]
        descale = pow2_descale(part.abs().amax(-1, keepdim=True), fmt)
        expected[..., start : start + size] = cast(part / descale, fmt).float() * descale
    assert_bitwise_equal(round_trip_blocks(x, fmt, size, -1), expected)
    assert_bitwise_equal(round_trip_blocks(x.mT, fmt, size, -2), expected.mT)
