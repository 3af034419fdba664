"""Casts to FP8 and power-of-two descales, inside kernels.

``SOFT_CAST`` replaces the hardware conversion by integer arithmetic that gives the same bits (round
to nearest even, subnormals included): Triton's interpreter rounds FP8 wrongly.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _four_to(fmt: str) -> tl.constexpr:
    """Assembly: four FP32 registers to the bytes of one, saturating."""
    convert = f"cvt.rn.satfinite.{fmt}x2.f32"
    return tl.constexpr(
        f"{{.reg .b16 lo, hi; {convert} lo, $2, $1; {convert} hi, $4, $3; mov.b32 $0, {{lo, hi}};}}"
    )


FOUR_TO_E4M3, FOUR_TO_E5M2 = _four_to("e4m3"), _four_to("e5m2")


def _four_to_e4m3_and_rest(signed: bool) -> tl.constexpr:
    """Assembly: four FP32 registers to the bytes of one, and four of what that leaves.

    ptxas 12.8 reads another register, or one of the round before, where it finds that what is
    converted back has just been cast. So bytes are decoded by hand (to FP16, 2⁸ times smaller) from a
    word that it cannot know: ``$9`` is 0.
    """
    lines = [
        ".reg .b16 lo, hi, h0, h1, h2, h3",
        ".reg .b32 word, seen, a, b, sign_a, sign_b",
        ".reg .f32 f0, f1, f2, f3",
        "cvt.rn.satfinite.e4m3x2.f32 lo, $6, $5",
        "cvt.rn.satfinite.e4m3x2.f32 hi, $8, $7",
        "mov.b32 word, {lo, hi}",
        "xor.b32 seen, word, $9",
    ]
    for half, low, high in ("a", 0, 1), ("b", 2, 3):
        if signed:  # each byte on top of 16 bits
            lines += [
                f"prmt.b32 {half}, seen, 0, 0x{high}4{low}4",
                f"and.b32 sign_{half}, {half}, 0x80008000",
                f"shr.b32 {half}, {half}, 1",
                f"and.b32 {half}, {half}, 0x3f803f80",
                f"or.b32 {half}, {half}, sign_{half}",
            ]
        else:
            lines += [
                f"prmt.b32 {half}, seen, 0, 0x4{high}4{low}",
                f"shl.b32 {half}, {half}, 7",
            ]
        lines.append(f"mov.b32 {{h{low}, h{high}}}, {half}")
    minus_256 = "0fC3800000"
    lines += [f"cvt.f32.f16 f{i}, h{i}" for i in range(4)]
    lines += [f"fma.rn.f32 f{i}, f{i}, {minus_256}, ${5 + i}" for i in range(4)]
    lines += ["mov.b32 $0, word", *(f"mov.f32 ${1 + i}, f{i}" for i in range(4))]
    return tl.constexpr("{" + "; ".join(lines) + ";}")


def _four_from(fmt: str) -> tl.constexpr:
    """Assembly: the four bytes of a word to FP32 registers. ``$5`` is 0, see above."""
    lines = [
        ".reg .b16 lo, hi, h0, h1, h2, h3",
        ".reg .b32 word, a, b",
        "xor.b32 word, $4, $5",
        "mov.b32 {lo, hi}, word",
        f"cvt.rn.f16x2.{fmt}x2 a, lo",
        f"cvt.rn.f16x2.{fmt}x2 b, hi",
        "mov.b32 {h0, h1}, a",
        "mov.b32 {h2, h3}, b",
        *(f"cvt.f32.f16 ${i}, h{i}" for i in range(4)),
    ]
    return tl.constexpr("{" + "; ".join(lines) + ";}")


FOUR_FROM_E4M3, FOUR_FROM_E5M2 = _four_from("e4m3"), _four_from("e5m2")
FOUR_TO_E4M3_AND_REST = _four_to_e4m3_and_rest(True)
FOUR_POSITIVE_TO_E4M3_AND_REST = _four_to_e4m3_and_rest(False)


@triton.jit
def cast_e4m3(x, SOFT_CAST: tl.constexpr):
    """FP32 to E4M3, saturating; NaN stays NaN."""
    if SOFT_CAST:
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
        return _soft_cast(x, 3, -6, 0x7F).to(tl.float8e4nv, bitcast=True)
    else:
        return x.to(tl.float8e4nv)


@triton.jit
def cast_fp8(x, E5M2: tl.constexpr, SOFT_CAST: tl.constexpr):
    """FP32 to E4M3 or E5M2, saturating; NaN stays NaN."""
    if E5M2:  # the cast to E4M3 saturates by itself
        x = tl.where(x > 57344.0, 57344.0, tl.where(x < -57344.0, -57344.0, x))
        return cast_e5m2(x, SOFT_CAST)
    else:
        return cast_e4m3(x, SOFT_CAST)


@triton.jit
def cast_fp8_words(x0, x1, x2, x3, E5M2: tl.constexpr, SOFT_CAST: tl.constexpr):
    """Four FP32 tensors to the bytes of an int32 each, lowest first, as :func:`cast_fp8` casts.

    The instruction writes two bytes; ptxas 12.8 and 12.9 go wrong where single bytes are taken out
    of what it wrote (they crash, or give other bytes).
    """
    if SOFT_CAST:
        word = cast_fp8(x3, E5M2, True).to(tl.uint8, bitcast=True).to(tl.int32)
        for x in (x2, x1, x0):
            byte = cast_fp8(x, E5M2, True).to(tl.uint8, bitcast=True)
            word = (word << 8) | byte.to(tl.int32)
        return word
    else:
        return tl.inline_asm_elementwise(
            FOUR_TO_E5M2 if E5M2 else FOUR_TO_E4M3,
            "=r,f,f,f,f",
            [x0, x1, x2, x3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def cast_fp8_packed(x, E5M2: tl.constexpr, SOFT_CAST: tl.constexpr):
    """As :func:`cast_fp8`, four elements of a thread (it must have as many) to one register."""
    if SOFT_CAST:
        return cast_fp8(x, E5M2, True)
    else:
        return tl.inline_asm_elementwise(
            FOUR_TO_E5M2 if E5M2 else FOUR_TO_E4M3,
            "=r,f,f,f,f",
            [x],
            dtype=tl.float8e5 if E5M2 else tl.float8e4nv,
            is_pure=True,
            pack=4,
        )


@triton.jit
def cast_e5m2(x, SOFT_CAST: tl.constexpr):
    """FP32 to E5M2, saturating from above; NaN stays NaN."""
    if SOFT_CAST:
        x = tl.where(x > 57344.0, 57344.0, x)
        return _soft_cast(x, 2, -14, 0x7E).to(tl.float8e5, bitcast=True)
    else:
        return x.to(tl.float8e5)


@triton.jit
def _soft_cast(x, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, NAN_CODE: tl.constexpr):
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Normal: rebias, then round to nearest even by adding half less one plus the last kept bit.
    rebias: tl.constexpr = (126 + MIN_EXPONENT) << 23
    half: tl.constexpr = (1 << (SHIFT - 1)) - 1
    normal = (magnitude - rebias + half + ((magnitude >> SHIFT) & 1)) >> SHIFT
    # Subnormal: the FP32 addition of a number whose last bit is the smallest subnormal rounds.
    magic_exponent: tl.constexpr = (127 + MIN_EXPONENT - MANTISSA + 23) << 23
    magic = tl.full(x.shape, magic_exponent, tl.int32).to(tl.float32, bitcast=True)
    tiny = (magnitude.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True)
    tiny = tiny - magic_exponent
    smallest_normal: tl.constexpr = (127 + MIN_EXPONENT) << 23
    code = tl.where(magnitude >= smallest_normal, normal, tiny)
    code = tl.where(magnitude > 0x7F800000, NAN_CODE, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def pow2_exponent(amax):
    """Biased exponent of the smallest power of two with ``amax / 2**(e − 127) <= 448``; at least 1
    (2⁻¹²⁶), and 127 where amax is 0. Read off the bits, see ``reference.quantize.pow2_descale``."""
    return biased_exponent(amax, 8)


@triton.jit
def biased_exponent(amax, MAX_EXPONENT: tl.constexpr):
    bits = amax.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    e = (bits >> 23) - MAX_EXPONENT + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    e = tl.where(e < 1, 1, e)
    return tl.where(bits == 0, 127, e)


@triton.jit
def exp2_int(e):
    """``2**(e − 127)`` for a biased exponent in [1, 254]."""
    return (e << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_exp2_int(e):
    """``2**(127 − e)`` for a biased exponent in [1, 253]."""
    return ((254 - e) << 23).to(tl.float32, bitcast=True)


@triton.jit
def regroup_rows(x):
    """Columns of ``x [M, N]`` reordered inside chunks of 16: ``8h + 2t + e`` goes to ``4t + 2h + e``.

    A thread then holds, in the accumulator layout of the tensor cores, just the four neighbours
    that an FP8 operand packs into one register, so P and dS turn from result to operand without a
    shuffle. The transposed copies of Q, K, V, dO are stored in the same order.
    """
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    x = tl.reshape(x, [M, N // 16, 2, 4, 2])
    x = tl.permute(x, (0, 1, 3, 2, 4))
    return tl.reshape(x, [M, N])


@triton.jit
def cast_and_rest(x, zero, POSITIVE: tl.constexpr, SOFT_CAST: tl.constexpr):
    """FP32 with ``|x| <= 448`` to E4M3, and FP32 ``x − cast(x)``; NaN stays NaN in both.

    ``zero``: int32 0 that the compiler does not know (:func:`unknown_zero`); ``POSITIVE``: no x < 0.
    A thread must have four elements or more.
    """
    if SOFT_CAST:
        cast = cast_e4m3(x, True)
        return cast, x - cast.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            FOUR_POSITIVE_TO_E4M3_AND_REST if POSITIVE else FOUR_TO_E4M3_AND_REST,
            "=r,=f,=f,=f,=f,f,f,f,f,r,r,r,r",
            [x, zero],
            dtype=(tl.float8e4nv, tl.float32),
            is_pure=True,
            pack=4,
        )


@triton.jit
def from_cast(x, zero, SOFT_CAST: tl.constexpr):
    """FP8 that this program has cast itself, back to FP32; ``zero`` as in :func:`cast_and_rest`.

    ptxas 12.8 may read other registers for ``x.to(tl.float32)`` there. A thread must have four elements
    or more.
    """
    if SOFT_CAST:
        return x.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            FOUR_FROM_E5M2 if x.dtype == tl.float8e5 else FOUR_FROM_E4M3,
            "=f,=f,=f,=f,r,r,r,r,r",
            [x, zero],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )


@triton.jit
def unknown_zero(positive, SOFT_CAST: tl.constexpr):
    """0 from a positive argument of the kernel, FP32 or an int32 that is not specialised."""
    if SOFT_CAST:
        return 0
    elif positive.dtype.is_floating():
        return positive.to(tl.int32, bitcast=True) >> 31
    else:
        return positive >> 31


@triton.jit
def nan_to_zero(x):
    return tl.where(x == x, x, 0.0)


@triton.jit
def widen(x, SOFT_CAST: tl.constexpr):
    """BF16, FP16 or FP32 to FP32. Of a word of two BF16 the compiler makes three instructions and more where
    two do."""
    if x.dtype == tl.bfloat16 and not SOFT_CAST:
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.int32,
            is_pure=True, pack=2,
        )  # fmt: skip
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def round_bf16(x):
    """FP32 rounded to BF16 (nearest even) and back; by its bits, as the interpreter truncates."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def load_negated(at, SOFT_CAST: tl.constexpr):
    """``−x`` of the FP32 numbers at ``at``, unmasked.

    In assembly: Triton's pipeline copies such loads to shared memory number by number, and the
    compiler negates every one of them where an addition would do it.
    """
    if SOFT_CAST:
        return -tl.load(at)
    else:
        return tl.inline_asm_elementwise(
            "{.reg .f32 x; ld.global.f32 x, [$1]; neg.f32 $0, x;}",
            "=f,l",
            [at],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def load_scalar(at, SOFT_CAST: tl.constexpr):
    """FP32 at ``at``, past Triton's pipeline, which would bring it in through shared memory and a barrier."""
    if SOFT_CAST:
        return tl.load(at)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.f32 $0, [$1];", "=f,l", [at], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def reciprocal(x, SOFT_CAST: tl.constexpr):
    """``1 / x`` of a normal FP32 scalar to its last bit or the one before, in one instruction."""
    if SOFT_CAST:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
