"""What logits need in every attention kernel: base 2, and the soft cap's tanh."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """By exp2; absolute error about 1e-7, which is all that logits need."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))


@triton.jit
def positive(c):
    """A factor of logits, kept above zero so that −inf · c stays −inf; NaN stays NaN."""
    return tl.where(c == 0.0, 1.1754943508222875e-38, c)
