"""Golden values of E4M3 and E5M2, worked by hand, and the facts in their descriptors."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from hf_deltamatch import formats
from hf_deltamatch.formats import E4M3, E5M2, Block, Float8Format
from hf_deltamatch.reference.quantize import cast, round_trip
from hf_deltamatch.testing import assert_bitwise_equal

BOTH = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
# (exponent bits, mantissa bits, exponent bias), from the OCP FP8 paper.
LAYOUT = {"E4M3": (4, 3, 7), "E5M2": (5, 2, 15)}


def decode(byte: int, fmt: Float8Format) -> float:
    """The value of one byte, from the layout alone."""
    exponent_bits, mantissa_bits, bias = LAYOUT[fmt.name]
    sign = -1.0 if byte >> 7 else 1.0
    exponent = (byte >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = byte & (2**mantissa_bits - 1)
    if fmt.name == "E4M3" and byte & 0x7F == 0x7F:
        return math.nan  # the only NaN; there is no Inf
    if fmt.name == "E5M2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def finite_positive(fmt: Float8Format) -> list[float]:
    """0 and every positive finite value, in the order of their bytes."""
    values = [decode(byte, fmt) for byte in range(128)]
    return [v for v in values if math.isfinite(v)]


@BOTH
def test_descriptor_facts(fmt: Float8Format) -> None:
    info = torch.finfo(fmt.dtype)
    values = finite_positive(fmt)
    assert fmt.max == info.max == values[-1]
    assert fmt.smallest_normal == info.smallest_normal
    assert fmt.smallest_subnormal == values[1]
    # max = 1.75 · 2**max_exponent; frexp's significand lies in [0.5, 1).
    assert math.frexp(fmt.max) == (1.75 / 2, fmt.max_exponent + 1)


def test_formats_by_name() -> None:
    assert formats.FORMATS == {"e4m3": E4M3, "e5m2": E5M2}
    assert [str(f) for f in formats.FORMATS.values()] == ["E4M3", "E5M2"]
    assert E4M3.dtype is torch.float8_e4m3fn and E5M2.dtype is torch.float8_e5m2


@BOTH
def test_decode_all_bytes(fmt: Float8Format) -> None:
    ours = torch.tensor([decode(byte, fmt) for byte in range(256)])
    torchs = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    assert_bitwise_equal(torchs, ours)


# E4M3: 3 mantissa bits, so the spacing in [2**k, 2**(k+1)) is 2**(k-3). "Even" is the value whose
# mantissa field ends in 0.
GOLDEN_E4M3 = [
    (448.0, 448.0, "max = 1.75 · 2**8, mantissa 110"),
    (2.0**-6, 2.0**-6, "smallest normal"),
    (2.0**-9, 2.0**-9, "smallest subnormal"),
    (1.0625, 1.0, "tie of 1.000 (even) and 1.001: down"),
    (1.1875, 1.25, "tie of 1.001 and 1.010 (even): up"),
    (1.0626, 1.125, "just above the tie"),
    (17.0, 16.0, "spacing 2 in [16, 32): tie of 16 (even) and 18"),
    (19.0, 20.0, "tie of 18 (001) and 20 (010, even)"),
    (1.99, 2.0, "between 1.875 (111) and 2: the mantissa overflows into the exponent"),
    (1.9375, 2.0, "tie of 1.875 (111, odd) and 2 (000, even)"),
    (126.52, 128.0, "spacing 8 below 128: nearer to 128 than to 120, carries"),
    (2.0**-10, 0.0, "tie of 0 (even) and the smallest subnormal 2**-9"),
    (1.5 * 2.0**-9, 2.0**-8, "tie of subnormals 001 and 010 (even)"),
    (2.5 * 2.0**-9, 2.0**-8, "tie of subnormals 010 (even) and 011"),
    (7.5 * 2.0**-9, 2.0**-6, "tie of the last subnormal 111 and the first normal (000, even)"),
    (1.001 * 2.0**-10, 2.0**-9, "just above half the smallest subnormal"),
    (2.0**-11, 0.0, "underflow"),
    (1e-40, 0.0, "FP32 subnormal"),
    (432.0, 448.0, "tie of 416 (101, odd) and 448 (110, even)"),
    (464.0, 448.0, "tie of 448 and the missing 480: clamped first"),
    (1e4, 448.0, "far above: clamped, not NaN"),
    (math.inf, 448.0, "Inf is clamped too; the quantiser has handled it before"),
]
# E5M2: 2 mantissa bits, spacing 2**(k-2).
GOLDEN_E5M2 = [
    (57344.0, 57344.0, "max = 1.75 · 2**15, mantissa 11"),
    (2.0**-14, 2.0**-14, "smallest normal"),
    (2.0**-16, 2.0**-16, "smallest subnormal"),
    (1.125, 1.0, "tie of 1.00 (even) and 1.01: down"),
    (1.375, 1.5, "tie of 1.01 and 1.10 (even): up"),
    (1.875, 2.0, "tie of 1.11 and 2 (00, even): carries"),
    (1.99, 2.0, "carries"),
    (126.52, 128.0, "spacing 16 below 128: carries"),
    (2.0**-17, 0.0, "tie of 0 (even) and the smallest subnormal"),
    (1.5 * 2.0**-16, 2.0**-15, "tie of subnormals 01 and 10 (even)"),
    (3.5 * 2.0**-16, 2.0**-14, "tie of the last subnormal 11 and the first normal"),
    (61440.0, 57344.0, "tie of max and the missing 65536: clamped, where torch gives Inf"),
    (1e6, 57344.0, "far above: clamped, not Inf"),
    (math.inf, 57344.0, "Inf is clamped too"),
]
GOLDEN = [(E4M3, *row) for row in GOLDEN_E4M3] + [(E5M2, *row) for row in GOLDEN_E5M2]


@pytest.mark.parametrize("fmt,value,expected,why", GOLDEN)
def test_cast_golden(fmt: Float8Format, value: float, expected: float, why: str) -> None:
    both_signs = torch.tensor([value, -value])
    assert_bitwise_equal(round_trip(both_signs, fmt), torch.tensor([expected, -expected]), why)


@BOTH
def test_cast_special_values(fmt: Float8Format) -> None:
    negative_zero, nan = cast(torch.tensor([-0.0, math.nan]), fmt)
    assert negative_zero.view(torch.uint8).item() == 0x80
    assert math.isnan(nan.float().item())


@BOTH
def test_cast_every_tie_and_its_neighbours(fmt: Float8Format) -> None:
    """Between each two consecutive values: the midpoint goes to the even byte, one FP32 step to
    either side of it goes to the nearer value."""
    values = torch.tensor(finite_positive(fmt))
    low, high = values[:-1], values[1:]
    tie = (low + high) / 2
    even = torch.where(torch.arange(len(low)) % 2 == 0, low, high)
    for sign in (1.0, -1.0):
        assert_bitwise_equal(round_trip(sign * tie, fmt), sign * even, "ties")
        below = torch.nextafter(tie, torch.tensor(0.0))
        above = torch.nextafter(tie, torch.tensor(math.inf))
        assert_bitwise_equal(round_trip(sign * below, fmt), sign * low, "below the tie")
        assert_bitwise_equal(round_trip(sign * above, fmt), sign * high, "above the tie")


@BOTH
def test_cast_keeps_representable_values(fmt: Float8Format) -> None:
    payload = torch.arange(256, dtype=torch.uint8).view(fmt.dtype)
    payload = payload[payload.float().isfinite()]
    assert_bitwise_equal(cast(payload.float(), fmt), payload)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cast_agrees_with_torch_in_range(fmt: Float8Format, dtype: torch.dtype) -> None:
    x = (torch.randn(20_000) * torch.exp2(torch.empty(20_000).uniform_(-20, 14))).to(dtype)
    x = x[x.abs() <= fmt.max]
    assert len(x) > 10_000
    assert_bitwise_equal(cast(x, fmt), x.to(fmt.dtype))


def test_constants() -> None:
    assert torch.finfo(torch.float32).smallest_normal == formats.MIN_DESCALE
    assert math.isfinite(1 / formats.MIN_DESCALE)
    # P · 2**8 must not saturate, and the next power of two would.
    assert 2**formats.P_CAST_LOG2 <= E4M3.max < 2 ** (formats.P_CAST_LOG2 + 1)
    assert (formats.TOKENS_PER_TILE, formats.MX_BLOCK) == (128, 32)


def test_descriptors_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        E4M3.max = 240.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        formats.ROWWISE.tokens = 2
    assert hash(E4M3) != hash(E5M2)


@pytest.mark.parametrize(
    "block,tokens,features,name",
    [
        (formats.ATTENTION_BLOCKS["128xD"], 128, None, "128xD"),
        (formats.ATTENTION_BLOCKS["1xD"], 1, None, "1xD"),
        (formats.ATTENTION_BLOCKS["mx"], 1, 32, "mx"),
        (formats.MX_TOKENS, 32, 1, "mx_32x1"),
        (formats.ROWWISE, 1, None, "rowwise"),
        (formats.COLUMNWISE, None, 1, "columnwise"),
        (formats.BLOCKWISE_1X128, 1, 128, "blockwise_1x128"),
        (formats.BLOCKWISE_128X1, 128, 1, "blockwise_128x1"),
        (formats.BLOCKWISE_128X128, 128, 128, "blockwise_128x128"),
        (formats.MX_1X32, 1, 32, "mx_1x32"),
    ],
)
def test_named_blocks(block: Block, tokens: int | None, features: int | None, name: str) -> None:
    assert (block.tokens, block.features, block.name, str(block)) == (tokens, features, name, name)


@pytest.mark.parametrize(
    "block,shape,expected",
    [
        (formats.BLOCKWISE_128X128, (256, 128), (2, 1)),
        (formats.BLOCKWISE_128X128, (257, 129), (3, 2)),  # ragged tails count
        (formats.BLOCKWISE_128X128, (1, 1), (1, 1)),
        (formats.BLOCKWISE_128X128, (0, 128), (0, 1)),
        (formats.BLOCKWISE_1X128, (5, 300), (5, 3)),
        (formats.BLOCKWISE_128X1, (300, 5), (3, 5)),
        (formats.MX_1X32, (3, 33), (3, 2)),
        (formats.MX_TOKENS, (31, 4), (1, 4)),
        (formats.ROWWISE, (7, 64), (7, 1)),
        (formats.COLUMNWISE, (7, 64), (1, 64)),
        (formats.COLUMNWISE, (0, 64), (1, 64)),
        (formats.ATTENTION_BLOCKS["128xD"], (129, 80), (2, 1)),
    ],
    ids=lambda v: str(v),
)
def test_descale_shape(block: Block, shape: tuple[int, int], expected: tuple[int, int]) -> None:
    assert block.descale_shape(*shape) == expected
