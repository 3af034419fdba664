"""Two neighbours of a BF16 or FP16 matrix in one 32-bit word, for :mod:`linear_quantize_pairs`.

Half the loads, comparisons and shuffles of what works on FP32; the left neighbour is the low half.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_deltamatch.kernels.casts import cast_fp8, cast_fp8_words


@triton.jit
def low(x, HALF: tl.constexpr):
    """Left neighbours, FP32. ``HALF``: of FP16, else of BF16."""
    if HALF:
        return (x & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (x << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(x, HALF: tl.constexpr):
    if HALF:
        return (x >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (x & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _larger_bf16(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1
    )


@triton.jit
def _larger_fp16(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1
    )


@triton.jit
def _joined(first, second):
    return (second << 16) | first


@triton.jit
def larger(a, b, HALF: tl.constexpr, SOFT_CAST: tl.constexpr):
    """The larger magnitudes of both halves, with signs that mean nothing. NaN wins."""
    if SOFT_CAST:
        first = tl.maximum(a & 0x7FFF, b & 0x7FFF)
        return _joined(first, tl.maximum((a >> 16) & 0x7FFF, (b >> 16) & 0x7FFF))
    elif HALF:
        return _larger_fp16(a, b)
    else:
        return _larger_bf16(a, b)


@triton.jit
def largest(x, AXIS: tl.constexpr, HALF: tl.constexpr, SOFT_CAST: tl.constexpr):
    """:func:`larger` along an axis."""
    if SOFT_CAST:
        return _joined(tl.max(x & 0x7FFF, AXIS), tl.max((x >> 16) & 0x7FFF, AXIS))
    elif HALF:
        return tl.reduce(x, AXIS, _larger_fp16)
    else:
        return tl.reduce(x, AXIS, _larger_bf16)


@triton.jit
def larger_of_each(a, b, HALF: tl.constexpr, SOFT_CAST: tl.constexpr):
    """The larger half of ``a`` as low half, that of ``b`` as high one."""
    if SOFT_CAST:
        first, second = (a & 0xFFFF) | (b << 16), ((a >> 16) & 0xFFFF) | (b & -65536)
    else:
        first = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], tl.int32, True, 1
        )
        second = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], tl.int32, True, 1
        )
    return larger(first, second, HALF, SOFT_CAST)


@triton.jit
def low_bits(x, HALF: tl.constexpr):
    """Bits of the magnitude of :func:`low`."""
    return low(x, HALF).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def high_bits(x, HALF: tl.constexpr):
    return high(x, HALF).to(tl.int32, bitcast=True) & 0x7FFFFFFF


def _two_pairs_to(fmt: str) -> tl.constexpr:
    """Assembly: left and right neighbours of two words, FP32, to the bytes of one register."""
    convert = f"cvt.rn.satfinite.{fmt}x2.f32"
    return tl.constexpr(
        f"{{.reg .b16 lo, hi; {convert} lo, $3, $1; {convert} hi, $4, $2; mov.b32 $0, {{lo, hi}};}}"
    )


_PAIRS_TO_E4M3, _PAIRS_TO_E5M2 = _two_pairs_to("e4m3"), _two_pairs_to("e5m2")


def _both_ways_to(fmt: str, half: bool) -> tl.constexpr:
    """Assembly: two words of each of four rows, the factors of rows and columns, to the bytes of each
    row and of each column. One unpacking for both, and nothing unpacked outlives it."""
    convert = f"cvt.rn.satfinite.{fmt}x2.f32"
    rows, sides = range(4), range(2)
    lines = [".reg .b16 lo, hi;", ".reg .f32 a, b, c, d;"]
    lines += [f".reg .f32 x{j}{e}{h};" for j in rows for e in sides for h in sides]
    x = lambda j, e: f"${8 + 2 * j + e}"
    row_factor = lambda j, e: f"${16 + 2 * j + e}"
    column_factor = lambda e, h: f"${24 + 2 * h + e}"
    for j in rows:
        for e in sides:
            if half:
                lines += [f"mov.b32 {{lo, hi}}, {x(j, e)};"]
                lines += [f"cvt.f32.f16 x{j}{e}0, lo;", f"cvt.f32.f16 x{j}{e}1, hi;"]
            else:
                lines += [f".reg .b32 t{j}{e}0, t{j}{e}1;", f"shl.b32 t{j}{e}0, {x(j, e)}, 16;"]
                lines += [f"and.b32 t{j}{e}1, {x(j, e)}, 0xffff0000;"]
                lines += [f"mov.b32 x{j}{e}{h}, t{j}{e}{h};" for h in sides]
    for j in rows:
        for e, part in zip(sides, ("lo", "hi"), strict=True):
            lines += [f"mul.f32 a, x{j}{e}0, {row_factor(j, e)};"]
            lines += [f"mul.f32 b, x{j}{e}1, {row_factor(j, e)};", f"{convert} {part}, b, a;"]
        lines += [f"mov.b32 ${j}, {{lo, hi}};"]
    for h in sides:
        for e in sides:
            f = column_factor(e, h)
            lines += [f"mul.f32 {y}, x{j}{e}{h}, {f};" for j, y in zip(rows, "abcd", strict=True)]
            lines += [f"{convert} lo, b, a;", f"{convert} hi, d, c;"]
            lines += [f"mov.b32 ${4 + 2 * h + e}, {{lo, hi}};"]
    return tl.constexpr("{" + " ".join(lines) + "}")


_BOTH_WAYS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8 + ["f"] * 12))
_BF16_TO_E4M3, _BF16_TO_E5M2 = _both_ways_to("e4m3", False), _both_ways_to("e5m2", False)
_FP16_TO_E4M3, _FP16_TO_E5M2 = _both_ways_to("e4m3", True), _both_ways_to("e5m2", True)


@triton.jit
def cast_fp8_both_ways(
    x0, x1, x2, x3, f0, f1, f2, f3, left, right,
    E5M2: tl.constexpr, HALF: tl.constexpr, SOFT_CAST: tl.constexpr,
):  # fmt: skip
    """:func:`cast_fp8_pairs` of four rows times their factors, and :func:`casts.cast_fp8_words` of
    the left and of the right columns times theirs."""
    if SOFT_CAST:
        c0 = cast_fp8_pairs(low(x0, HALF) * f0, high(x0, HALF) * f0, E5M2, True)
        c1 = cast_fp8_pairs(low(x1, HALF) * f1, high(x1, HALF) * f1, E5M2, True)
        c2 = cast_fp8_pairs(low(x2, HALF) * f2, high(x2, HALF) * f2, E5M2, True)
        c3 = cast_fp8_pairs(low(x3, HALF) * f3, high(x3, HALF) * f3, E5M2, True)
        even, odd = cast_fp8_columns(x0, x1, x2, x3, left, right, E5M2, HALF, True)
        return c0, c1, c2, c3, even, odd
    else:
        if HALF:
            ASM: tl.constexpr = _FP16_TO_E5M2 if E5M2 else _FP16_TO_E4M3
        else:
            ASM: tl.constexpr = _BF16_TO_E5M2 if E5M2 else _BF16_TO_E4M3
        return tl.inline_asm_elementwise(
            ASM,
            _BOTH_WAYS,
            [x0, x1, x2, x3, f0, f1, f2, f3, left, right],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int32, tl.int32),
            is_pure=True,
            pack=2,
        )


@triton.jit
def cast_fp8_columns(
    x0, x1, x2, x3, left, right, E5M2: tl.constexpr, HALF: tl.constexpr, SOFT_CAST: tl.constexpr
):  # fmt: skip
    """:func:`casts.cast_fp8_words` of the left and of the right columns times their factors."""
    even = cast_fp8_words(
        low(x0, HALF) * left, low(x1, HALF) * left, low(x2, HALF) * left, low(x3, HALF) * left,
        E5M2, SOFT_CAST,
    )  # fmt: skip
    odd = cast_fp8_words(
        high(x0, HALF) * right, high(x1, HALF) * right, high(x2, HALF) * right,
        high(x3, HALF) * right, E5M2, SOFT_CAST,
    )  # fmt: skip
    return even, odd


@triton.jit
def cast_fp8_pairs(left, right, E5M2: tl.constexpr, SOFT_CAST: tl.constexpr):
    """Neighbours as FP32 to their bytes, int16, as :func:`casts.cast_fp8` casts. A thread must have
    an even number."""
    if SOFT_CAST:
        first = cast_fp8(left, E5M2, True).to(tl.uint8, bitcast=True).to(tl.int16)
        second = cast_fp8(right, E5M2, True).to(tl.uint8, bitcast=True).to(tl.int16)
        return first | (second << 8)
    else:
        return tl.inline_asm_elementwise(
            _PAIRS_TO_E5M2 if E5M2 else _PAIRS_TO_E4M3,
            "=r,f,f,f,f",
            [left, right],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
