"""FP8 formats and block layouts: the one source of format facts.

Convention used everywhere: ``x ≈ x_fp8 · x_descale``. A descale multiplies to recover; the word
"scale" alone is not used, and ``softmax_scale`` is the temperature of the softmax.

Leaf module: imports torch only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MIN_DESCALE = 2.0**-126
"""Smallest descale: the smallest normal FP32 number, so that its reciprocal is finite."""

P_CAST_LOG2 = 8
"""The forward casts probabilities as ``P · 2**8``: at most 256, below 448, so it never saturates."""

P_REST_CAST_LOG2 = 5
"""What that cast leaves of ``P · 2**8`` is at most 8 (half a unit of E4M3 below 256); a second term is
cast as ``rest · 2**5``, again at most 256. One power more would saturate."""

P_SWEEP_CAST_LOG2 = 15
"""P beside a dS that starts from an estimate of δ is cast to E5M2 as ``P · 2**15``: at most 32768, below
57344, and 2⁻³¹ is not lost."""

TOKENS_PER_TILE = 128
"""Tokens that share one descale under the ``128xD`` block, and the default kernel tile."""

MX_BLOCK = 32
"""Elements that share one E8M0 descale under the OCP microscaling (MX) layout."""


@dataclass(frozen=True)
class Float8Format:
    """One 8-bit floating-point format.

    ``max`` is the largest finite value. Both formats have the significand 1.75 at ``max``, which
    :func:`hf_deltamatch.reference.quantize.pow2_descale` relies on.
    """

    name: str
    dtype: torch.dtype
    max: float
    max_exponent: int
    smallest_normal: float
    smallest_subnormal: float

    def __str__(self) -> str:
        return self.name


E4M3 = Float8Format("E4M3", torch.float8_e4m3fn, 448.0, 8, 2.0**-6, 2.0**-9)
E5M2 = Float8Format("E5M2", torch.float8_e5m2, 57344.0, 15, 2.0**-14, 2.0**-16)

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


@dataclass(frozen=True)
class Block:
    """Which elements of a ``[..., tokens, features]`` tensor share one descale.

    ``tokens`` or ``features`` is ``None`` where a block spans that whole axis.
    """

    name: str
    tokens: int | None
    features: int | None

    def __str__(self) -> str:
        return self.name

    def descale_shape(self, tokens: int, features: int) -> tuple[int, int]:
        """Number of blocks along (tokens, features), the trailing blocks being ragged."""
        rows = 1 if self.tokens is None else -(-tokens // self.tokens)
        cols = 1 if self.features is None else -(-features // self.features)
        return rows, cols


ATTENTION_BLOCKS = {
    "128xD": Block("128xD", TOKENS_PER_TILE, None),
    "1xD": Block("1xD", 1, None),
    "mx": Block("mx", 1, MX_BLOCK),
}
"""Blocks of Q, K, V and dO. ``mx`` operands of a product that contracts over tokens are re-encoded
with ``MX_TOKENS`` from the dequantised values."""

MX_TOKENS = Block("mx_32x1", MX_BLOCK, 1)

ROWWISE = Block("rowwise", 1, None)
COLUMNWISE = Block("columnwise", None, 1)
BLOCKWISE_1X128 = Block("blockwise_1x128", 1, 128)
BLOCKWISE_128X1 = Block("blockwise_128x1", 128, 1)
BLOCKWISE_128X128 = Block("blockwise_128x128", 128, 128)
MX_1X32 = Block("mx_1x32", 1, MX_BLOCK)
