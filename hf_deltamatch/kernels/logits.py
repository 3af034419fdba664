"""What logits need in every attention kernel: base 2, and the soft cap's tanh."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x, SOFTCAP: tl.constexpr):
    """By exp2: absolute error about 1e-7, which logits multiply by the cap. With ``SOFTCAP`` 2 (a
    large cap) the relative error is about 1e-6, at five instructions more."""
    t = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
    if SOFTCAP == 2:
        y = x * x
        t = tl.where(y < 0.0225, x + x * (y * (y * 0.13333333 - 0.33333334)), t)
    return t


@triton.jit
def positive(c):
    """A factor of logits, kept above zero so that −inf · c stays −inf; NaN stays NaN."""
    return tl.where(c == 0.0, 1.1754943508222875e-38, c)
