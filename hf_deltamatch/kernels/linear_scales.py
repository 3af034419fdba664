"""Descales of blocks of a matrix and the factors that undo them, rounded as IEEE divides."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_deltamatch.kernels.casts import biased_exponent, exp2_int, inverse_exp2_int


@triton.jit
def _over_largest(amax, E5M2: tl.constexpr, SOFT_CAST: tl.constexpr):
    """``amax`` over the largest value of the format, rounded to nearest as IEEE divides (a quarter
    of the instructions; checked for every significand)."""
    LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
    largest = tl.zeros_like(amax) + LARGEST
    if SOFT_CAST:  # the interpreter's fma rounds twice
        return tl.div_rn(amax, largest)
    else:
        INVERSE: tl.constexpr = 1.0 / LARGEST
        inverse = tl.zeros_like(amax) + INVERSE
        quotient = amax * inverse
        # Not -quotient, which Triton subtracts from 0.
        return tl.fma(tl.fma(quotient, -LARGEST + tl.zeros_like(amax), amax), inverse, quotient)


@triton.jit
def _reciprocal(x, SOFT_CAST: tl.constexpr, SHORT: tl.constexpr):
    """``1 / x`` of a normal number in [2⁻¹²⁶, 2¹²⁵), rounded to nearest as IEEE divides."""
    if SOFT_CAST:
        return tl.div_rn(tl.zeros_like(x) + 1.0, x)
    else:
        # One Newton step.
        y = tl.inline_asm_elementwise(
            "{.reg .f32 n, r, y; rcp.approx.ftz.f32 y, $1; neg.f32 n, $1;"
            "fma.rn.f32 r, n, y, 0f3F800000; fma.rn.f32 $0, r, y, y;}",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        if SHORT:
            return y
        # The step rounds right from any approximation within a unit, but for this significand.
        bits = x.to(tl.int32, bitcast=True)
        special = (((253 - (bits >> 23)) << 23) | 1).to(tl.float32, bitcast=True)
        return tl.where((bits & 0x7FFFFF) == 0x7FFFFF, special, y)


@triton.jit
def scales(
    top,
    E5M2: tl.constexpr,
    POW2: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    FINITE: tl.constexpr = False,
    SHORT: tl.constexpr = False,
):
    """Descale and factor of blocks whose largest magnitude has the bits ``top``.

    As integers, magnitudes sort like numbers and NaN comes last. A block that is not finite has
    descale NaN; its factor is 0 and that of no other block is (``FINITE``: whatever it may be).
    ``SHORT``: magnitudes have at most 11 significant bits, as those of BF16 and FP16 do.
    """
    if not FINITE:
        bad = top >= 0x7F800000
        top = tl.where(bad, 0, top)
    amax = top.to(tl.float32, bitcast=True)
    if POW2:
        e = biased_exponent(amax, 15 if E5M2 else 8)
        descale = exp2_int(e)
        factor = inverse_exp2_int(e)
    else:
        descale = tl.maximum(_over_largest(amax, E5M2, SOFT_CAST), 1.1754943508222875e-38)
        descale = tl.where(top == 0, 1.0, descale)
        factor = _reciprocal(descale, SOFT_CAST, SHORT)
    if not FINITE:
        descale = tl.where(bad, float("nan"), descale)
        factor = tl.where(bad, 0.0, factor)
    return descale, factor
