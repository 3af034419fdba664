"""Tiles of the operands by plain pointers.

A tile that TMA brings in costs a thread block some 25 instructions and a barrier; with four of them
an iteration of dK/dV had 870 instructions and spilled. Copied by its threads (``cp.async``, which the
compiler's pipeline makes of these loads) it has 690, and nothing is spilled.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(
    ptr, row, start, length, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, STORED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Tokens from ``start`` on of a payload ``[rows, STORED]``: ``[BLOCK, BLOCK_D]``.

    ``row``: that of the segment's first token; ``length``: its tokens, the last of which stands in for
    those past it, unless the tile is ``WHOLE``. Features past ``STORED`` are 0.
    """
    token = tl.arange(0, BLOCK)
    if not WHOLE:
        token = tl.minimum(token, tl.maximum(length - 1 - start, 0))
    offs_d = tl.arange(0, BLOCK_D)
    ptr += (row + start).to(tl.int64) * STORED
    at = ptr + (token[:, None] * STORED + offs_d[None, :])
    if BLOCK_D == STORED:
        return tl.load(at)
    else:
        return tl.load(at, mask=(offs_d < STORED)[None, :], other=0.0)


@triton.jit
def load_columns(
    ptr, row, slot, start, slots, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, STORED: tl.constexpr
):  # fmt: skip
    """The same tokens of a transposed copy ``[rows, slots · 128]``: ``[BLOCK_D, BLOCK]``.

    ``row``: that of the first feature; ``slot``: the segment's first. BLOCK divides 128, ``start`` is
    a multiple of it, and the copy has zeros past the segment.
    """
    offs_d = tl.arange(0, BLOCK_D)
    tokens = slot * 128 + start + tl.arange(0, BLOCK)
    at = (row + offs_d).to(tl.int64)[:, None] * (slots * 128) + tokens[None, :]
    at = ptr + tl.max_contiguous(tl.multiple_of(at, (1, BLOCK)), (1, BLOCK))
    if BLOCK_D == STORED:
        return tl.load(at)
    else:
        return tl.load(at, mask=(offs_d < STORED)[:, None], other=0.0)
