"""The emulated FP8 linear: against a slow emulation by tiles, against FP64, and at the edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_deltamatch import reference
from hf_deltamatch.formats import E4M3, FORMATS, Block, Float8Format
from hf_deltamatch.recipes import LinearRecipe
from hf_deltamatch.reference.quantize import dequantize, quantize
from hf_deltamatch.testing import assert_bitwise_equal, assert_close, rel_rms

RECIPES = [
    LinearRecipe("blockwise", "fp32"),
    LinearRecipe("blockwise", "pow2", "e5m2"),
    LinearRecipe("rowwise", "fp32", "e5m2"),
    LinearRecipe("rowwise", "pow2"),
    LinearRecipe("mx", "pow2"),
    LinearRecipe("mx", "pow2", "e5m2"),
]
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
NAMED = [LinearRecipe.from_name(name) for name in LinearRecipe.NAMES]
EVERY_NAME = pytest.mark.parametrize("recipe", NAMED, ids=lambda r: r.name)

NAMES = ("output", "grad_input", "grad_weight")

# Elements (tokens, features) that share a descale, by what is contracted; None spans the axis.
# Written out here, not read from the recipe.
X_OR_DY = {
    "features": {"blockwise": (1, 128), "rowwise": (1, None), "mx": (1, 32)},
    "tokens": {"blockwise": (128, 1), "rowwise": (None, 1), "mx": (32, 1)},  # dy
}
SAVED = {
    "blockwise": (128, 128),
    "rowwise": (None, 1),
    "mx": (32, 1),
}  # x where tokens are contracted
WEIGHT = {
    "in": {"blockwise": (128, 128), "rowwise": (1, None), "mx": (1, 32)},
    "out": {"blockwise": (128, 128), "rowwise": (None, 1), "mx": (32, 1)},
}


def nearest(x: Tensor, fmt: Float8Format) -> Tensor:
    """Nearest value of the format by table look-up in FP64, ties to the even byte, saturating."""
    table = torch.arange(128, dtype=torch.uint8).view(fmt.dtype).double()
    table = table[table.isfinite()]
    high = torch.searchsorted(table, x.abs()).clamp(1, len(table) - 1)
    low = high - 1
    to_low, to_high = x.abs() - table[low], table[high] - x.abs()
    up = (to_high < to_low) | ((to_high == to_low) & (high % 2 == 0))
    return torch.where(up, table[high], table[low]).copysign(x)


def emulate(x: Tensor, fmt: Float8Format, block: tuple, descale: str) -> Tensor:
    """``x`` after quantisation tile by tile, FP64. Divides by multiplying with the FP32 reciprocal,
    as a kernel does."""
    x = x.float()
    bt, bd = block[0] or max(len(x), 1), block[1] or max(x.shape[1], 1)
    units = torch.ones_like(x)
    for t in range(0, x.shape[0], bt):
        for d in range(0, x.shape[1], bd):
            amax = x[t : t + bt, d : d + bd].abs().max().item()
            if amax > 0:
                unit = amax / fmt.max
                if descale == "pow2":
                    mantissa, exponent = math.frexp(unit)
                    unit = 2.0 ** (exponent - (mantissa == 0.5))
                units[t : t + bt, d : d + bd] = max(unit, 2.0**-126)
    return nearest((x * (1 / units)).double(), fmt) * units.double()


def emulated_gemms(x, weight, dy, recipe: LinearRecipe) -> tuple[Tensor, Tensor, Tensor]:
    """output, grad_input, grad_weight in FP64 products of emulated operands."""
    grad, s, d = FORMATS[recipe.grad_format], recipe.scaling, recipe.descale
    features, tokens = X_OR_DY["features"][s], X_OR_DY["tokens"][s]
    return (
        emulate(x, E4M3, features, d) @ emulate(weight, E4M3, WEIGHT["in"][s], d).T,
        emulate(dy, grad, features, d) @ emulate(weight, E4M3, WEIGHT["out"][s], d),
        emulate(dy, grad, tokens, d).T @ emulate(x, E4M3, SAVED[s], d),
    )


def gemms(x, weight, dy, recipe: LinearRecipe) -> tuple[Tensor, Tensor, Tensor]:
    return (
        reference.linear_fwd(x, weight, None, recipe),
        reference.linear_bwd_input(dy, weight, recipe),
        reference.linear_bwd_weight(dy, reference.linear_save_input(x, recipe), recipe),
    )


def inputs(tokens: int, n_in: int, n_out: int, dtype=torch.float32) -> tuple[Tensor, ...]:
    """x, weight, dy with a few channels and rows of other sizes, as activations have."""
    x = torch.randn(tokens, n_in) * torch.exp2(2 * torch.randn(n_in))
    weight = 0.05 * torch.randn(n_out, n_in)
    dy = 1e-3 * torch.randn(tokens, n_out) * torch.exp(torch.randn(tokens, 1))
    return x.to(dtype), weight.to(dtype), dy.to(dtype)


SHAPES = [(130, 200, 72), (1, 128, 32), (37, 33, 5), (64, 16, 260), (0, 64, 48)]


@EVERY_RECIPE
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_against_emulation(recipe: LinearRecipe, shape: tuple[int, int, int]) -> None:
    x, weight, dy = inputs(*shape)
    ours, expected = gemms(x, weight, dy, recipe), emulated_gemms(x, weight, dy, recipe)
    for name, a, e in zip(NAMES, ours, expected, strict=True):
        assert a.dtype == torch.float32
        # FP32 sums of up to 260 products, measured 2.3e-7 and 4.6e-7; a wrong payload gives 1e-5.
        assert_close(a, e, rms=1e-6, max_rel=2e-6, what=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@EVERY_RECIPE
def test_linear_against_fp64(recipe: LinearRecipe, dtype: torch.dtype) -> None:
    x, weight, dy = inputs(256, 320, 192, dtype)
    xd, wd, dyd = x.double(), weight.double(), dy.double()
    ours = gemms(x, weight, dy, recipe)
    exact = (xd @ wd.T, dyd @ wd, dyd.T @ xd)
    # Eight seeds measured at most 0.038 (output), 0.039 (gradients, E4M3) and 0.061 (E5M2).
    grads = 0.041 if recipe.grad_format == "e4m3" else 0.064
    for name, bound, a, e in zip(NAMES, (0.040, grads, grads), ours, exact, strict=True):
        assert_close(a, e, rms=bound, what=name)


@EVERY_NAME
def test_linear_fwd_bias(recipe: LinearRecipe) -> None:
    x, weight, _ = inputs(9, 40, 24)
    plain = reference.linear_fwd(x, weight, None, recipe)
    for dtype in (torch.float32, torch.bfloat16):
        bias = torch.randn(24).to(dtype)
        expected = plain + bias.float()
        assert_bitwise_equal(reference.linear_fwd(x, weight, bias, recipe), expected)


@EVERY_NAME
def test_linear_save_input(recipe: LinearRecipe) -> None:
    """One byte an element, quantised from the high-precision input along tokens."""
    x, _, _ = inputs(130, 70, 1)
    payload, descale = reference.linear_save_input(x, recipe)
    block = SAVED[recipe.scaling]
    rows, columns = -(-130 // (block[0] or 130)), -(-70 // block[1])
    assert payload.dtype == torch.float8_e4m3fn and payload.shape == (130, 70)
    assert descale.dtype == torch.float32 and descale.shape == (rows, columns)
    per_element = descale.double().repeat_interleave(block[0] or 130, 0)[:130]
    per_element = per_element.repeat_interleave(block[1], 1)[:, :70]
    expected = emulate(x, E4M3, block, recipe.descale)
    assert_bitwise_equal(payload.double() * per_element, expected)


def test_weight_direction() -> None:
    """blockwise reads the same values of the weight in output and grad_input; mx and rowwise
    quantise it along the contraction of each, so they do not."""
    _, weight, _ = inputs(1, 200, 140)
    weight = weight * torch.exp2(2 * torch.randn(140, 200))
    for recipe in NAMED:
        read_fwd = reference.linear_fwd(torch.eye(200), weight, None, recipe).T
        read_bwd = reference.linear_bwd_input(torch.eye(140), weight, recipe)
        # 1 is exact in FP8 up to its FP32 descale, (1 / 448) · 448.
        for name, read in (("in", read_fwd), ("out", read_bwd)):
            block = WEIGHT[name][recipe.scaling]
            assert_close(read, emulate(weight, E4M3, block, recipe.descale), rms=1e-7, max_rel=1e-7)
        assert torch.equal(read_fwd, read_bwd) == (recipe.scaling == "blockwise")


def truncated_sum(products: Tensor, bits: int) -> Tensor:
    """Sum over the last axis in chunks of 32 (one FP8 wgmma), cut to ``bits`` after each."""
    total = torch.zeros(products.shape[:-1], dtype=torch.float64)
    for chunk in products.unflatten(-1, (-1, 32)).sum(-1).unbind(-1):
        mantissa, exponent = torch.frexp(total + chunk)
        total = torch.ldexp((mantissa * 2**bits).trunc(), exponent - bits)
    return total


@EVERY_NAME
def test_long_contraction_is_summed_in_fp32(recipe: LinearRecipe) -> None:
    """65536 positive products. One chain of FP32 additions was measured at 5e-5 (rowwise, the rest
    less); Hopper's accumulator of 14 bits, never promoted, is far outside the bound."""
    a, b = torch.rand(4, 65536) + 0.5, torch.rand(8, 65536) + 0.5
    at, bt = a.T.contiguous(), b.T.contiguous()

    def rounded(x: Tensor, block: Block) -> Tensor:
        return dequantize(*quantize(x, E4M3, block, recipe.descale), block).double()

    w_out, w_in = recipe.weight_blocks
    dy_block, x_block = recipe.token_blocks
    saved = reference.linear_save_input(bt, recipe)
    for name, actual, x, y in (
        (
            "output",
            reference.linear_fwd(a, b, None, recipe),
            rounded(a, recipe.row_block),
            rounded(b, w_out),
        ),
        (
            "grad_input",
            reference.linear_bwd_input(a, bt, recipe),
            rounded(a, recipe.row_block),
            rounded(bt, w_in).T,
        ),
        (
            "grad_weight",
            reference.linear_bwd_weight(at, saved, recipe),
            rounded(at, dy_block).T,
            rounded(bt, x_block).T,
        ),
    ):
        exact = x @ y.T
        assert_close(actual, exact, rms=2e-4, max_rel=2e-4, what=name)
    assert rel_rms(truncated_sum(x[:, None] * y, 14), exact) > 1e-2


# What a bad element of x, weight or dy [tokens 140, in 200, out 150] at (135, 130) reaches. Rows or
# columns of output [tokens, out], grad_input [tokens, in], grad_weight [out, in].
TAIL = slice(128, None)
POISON = {
    "x": {
        "output": {name: (135, slice(None)) for name in LinearRecipe.NAMES},
        "grad_weight": {
            "blockwise": (slice(None), TAIL),
            "rowwise": (slice(None), 130),
            "mx": (slice(None), 130),
        },
    },
    "weight": {
        # Both tiles of a 128x128 block are the ragged last ones here.
        "output": {
            "blockwise": (slice(None), TAIL),
            "rowwise": (slice(None), 135),
            "mx": (slice(None), 135),
        },
        "grad_input": {
            "blockwise": (slice(None), TAIL),
            "rowwise": (slice(None), 130),
            "mx": (slice(None), 130),
        },
    },
    "dy": {
        "grad_input": {name: (135, slice(None)) for name in LinearRecipe.NAMES},
        "grad_weight": {name: (130, slice(None)) for name in LinearRecipe.NAMES},
    },
}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", list(POISON))
@EVERY_NAME
def test_linear_poison(recipe: LinearRecipe, where: str, bad: float) -> None:
    """NaN in what depends on the bad element's block, the same bits as without it elsewhere."""
    operands = dict(zip(("x", "weight", "dy"), inputs(140, 200, 150), strict=True))
    clean = gemms(**operands, recipe=recipe)
    operands[where][135, 130] = bad
    for name, actual, expected in zip(NAMES, gemms(**operands, recipe=recipe), clean, strict=True):
        if name in POISON[where]:
            expected[POISON[where][name][recipe.scaling]] = math.nan
        assert_bitwise_equal(actual, expected, name)


@EVERY_NAME
def test_linear_zeros(recipe: LinearRecipe) -> None:
    x, weight, dy = inputs(140, 200, 150)
    zero_x, zero_w, zero_dy = (torch.zeros_like(t) for t in (x, weight, dy))
    # A zero operand gives exact zeros, never NaN.
    for operands, zeros in (
        ((zero_x, weight, dy), ("output", "grad_weight")),
        ((x, zero_w, dy), ("output", "grad_input")),
        ((x, weight, zero_dy), ("grad_input", "grad_weight")),
    ):
        for name, result in zip(NAMES, gemms(*operands, recipe), strict=True):
            assert bool(result.isfinite().all())
            assert bool((result == 0).all()) == (name in zeros)
    # Zero rows and whole zero blocks change nothing for the rest.
    clean = gemms(x, weight, dy, recipe)[0]
    x[5] = 0
    x[:, 64:] = 0
    output = gemms(x, weight, dy, recipe)[0]
    assert bool((output[5] == 0).all()) and bool(output.isfinite().all())
    assert_close(output, emulated_gemms(x, weight, dy, recipe)[0], rms=1e-6, max_rel=2e-6)
    assert rel_rms(output, clean) > 0.1


@EVERY_NAME
def test_linear_outlier(recipe: LinearRecipe) -> None:
    """One element of 3e38: everything finite, other tokens untouched, its own product right."""
    x, weight, dy = inputs(140, 200, 150)
    weight, dy = weight.clamp(-0.2, 0.2), dy.clamp(-0.01, 0.01)
    clean = gemms(x, weight, dy, recipe)
    x[7, 3] = 3e38
    output, grad_input, grad_weight = gemms(x, weight, dy, recipe)
    assert all(bool(r.isfinite().all()) for r in (output, grad_input, grad_weight))
    others = torch.arange(140) != 7
    assert_bitwise_equal(output[others], clean[0][others])
    assert_bitwise_equal(grad_input, clean[1])
    # blockwise quantises x in tiles for grad_weight: next to 3e38 the rest of its tile is nothing.
    apart = torch.arange(200) >= 128 if recipe.scaling == "blockwise" else torch.arange(200) != 3
    assert_bitwise_equal(grad_weight[:, apart], clean[2][:, apart])
    # Rounding of the outlier and of the weights, 2**-4 each at most.
    exact = 3e38 * weight[:, 3].double()
    assert_close(output[7], exact, rms=0.05, max_rel=0.13)


@EVERY_NAME
def test_outlier_channels(recipe: LinearRecipe) -> None:
    """Channels 1000 times the rest, as the residual streams of trained models have, cost the other
    channels of their tile nothing: E4M3 keeps its precision 2**14 below a tile's largest."""
    x = torch.randn(256, 256)
    x[:, ::61] *= 1000
    _, weight, dy = inputs(256, 256, 192)
    *_, grad_weight = gemms(x, weight, dy, recipe)
    exact = dy.double().T @ x.double()
    rest = torch.arange(256) % 61 != 0
    assert_close(grad_weight[:, rest], exact[:, rest], rms=0.041)  # as without such channels


@EVERY_NAME
def test_linear_subnormals(recipe: LinearRecipe) -> None:
    """Operands below the smallest normal FP32 number keep the smallest descale and stay finite."""
    x, weight, dy = inputs(40, 70, 50)
    x = 1e-39 * x
    output, _, grad_weight = gemms(x, weight * 1e3, dy * 1e6, recipe)
    expected = emulated_gemms(x, weight * 1e3, dy * 1e6, recipe)
    for actual, e in ((output, expected[0]), (grad_weight, expected[2])):
        assert bool(actual.isfinite().all()) and bool((e != 0).any())
        # Sums near 1e-38: FP32 keeps multiples of 2**-149, some 1e-7 of them.
        assert_close(actual, e, rms=1e-5, max_rel=1e-5)
    everything = gemms(
        1e-40 * torch.ones(3, 40), 1e-40 * torch.ones(5, 40), 1e-40 * torch.ones(3, 5), recipe
    )
    assert all(bool(r.isfinite().all()) for r in everything)
