"""Kernels: matrices to FP8 operands of a scaled GEMM, along either axis or along both in one read.

Reference: :func:`hf_deltamatch.reference.quantize.quantize`. Launched by
:mod:`hf_deltamatch.kernels.linear_operands`. FP8 tensor cores of Hopper contract the
last axis of both operands, so a matrix ``x [R, C]`` is needed as itself where C is contracted and
transposed where R is: ``rows`` is ``[R, C]`` with scales along C, ``columns`` ``[C, R]`` with scales
along R. A program owns a tile of 128 x 128, read once. Any dtype and strides;
:mod:`hf_deltamatch.kernels.linear_quantize_pairs` is faster where it can be used.

Payloads are padded with zeros, the outer axis to a multiple of 16, the contracted one to a multiple
of 128; descales lie as torch's scaled GEMM wants them, see ``linear_operands.Operand``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_deltamatch.kernels.casts import (
    cast_fp8_packed,
    cast_fp8_words,
)
from hf_deltamatch.kernels.linear_scales import scales


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _words(x0, x1, x2, x3, factor, E5M2: tl.constexpr, SOFT_CAST: tl.constexpr):
    """Four tensors times ``factor`` to the bytes of words, lowest first; 0 in a block that is not
    finite (there ``x`` may be NaN)."""
    words = cast_fp8_words(x0 * factor, x1 * factor, x2 * factor, x3 * factor, E5M2, SOFT_CAST)
    return tl.where(factor == 0.0, 0, words)


@triton.jit
def _load_rows(x_ptr, first, first_column, j, R, C, stride_r, stride_c, EVEN: tl.constexpr):
    """Rows ``first + 4i + j`` of a tile, FP32 ``[32, 128]``: four of them make one word each of the
    transposed payload without leaving a thread. ``EVEN``: the tile is whole."""
    r = first + 4 * tl.arange(0, 32) + j
    c = first_column + tl.arange(0, 128)
    at = r.to(tl.int64)[:, None] * stride_r + c.to(tl.int64)[None, :] * stride_c
    if EVEN:
        return tl.load(x_ptr + at).to(tl.float32)
    else:
        inside = (r < R)[:, None] & (c < C)[None, :]
        return tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _write_rows(
    x, top, tile_factor, payload_ptr, descale_ptr, amax_ptr, first, column_tile, j,
    outer, column_tiles,
    BLOCK: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr, SOFT_CAST: tl.constexpr,
    EVEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One in four rows of a tile to ``rows``; ``outer`` is their padded number, ``top`` holds the
    bits of each row's largest magnitude. Not ``MASKED``: blocks that are not finite come out wrong."""
    r = first + 4 * tl.arange(0, 32) + j
    live = (r < outer) | EVEN
    if BLOCK == "128x128":
        factor = tile_factor
    elif BLOCK == "1x32":
        top = tl.max(tl.reshape(_magnitude(x), [32, 4, 32]), 2)
        descale, block_factor = scales(top, E5M2, POW2, SOFT_CAST, not MASKED)
        factor = tl.reshape(tl.broadcast_to(block_factor[:, :, None], [32, 4, 32]), [32, 128])
        block = column_tile * 4 + tl.arange(0, 4)
        at = block.to(tl.int64)[None, :] * outer + r[:, None]
        tl.store(descale_ptr + at, descale, mask=live[:, None])
    elif BLOCK == "row":
        row_top = tl.load(amax_ptr + r, mask=live, other=0)
        descale, row_factor = scales(row_top, E5M2, POW2, SOFT_CAST)
        factor = row_factor[:, None]
        if column_tile == 0:
            tl.store(descale_ptr + r, descale, mask=live)
    else:
        descale, row_factor = scales(top, E5M2, POW2, SOFT_CAST, not MASKED)
        factor = row_factor[:, None]
        tl.store(descale_ptr + column_tile.to(tl.int64) * outer + r, descale, mask=live)
    FORMAT: tl.constexpr = tl.float8e5 if E5M2 else tl.float8e4nv
    if MASKED and BLOCK == "128x128":
        # Stored as such: ptxas 12.8 joins the halves of a converted 0 with a register nothing wrote.
        code = tl.zeros([32, 128], tl.uint8).to(FORMAT, bitcast=True)
    else:
        y = x * factor
        if MASKED:  # 0, where it may be NaN
            y = tl.where(factor == 0.0, 0.0, y)
        code = cast_fp8_packed(y, E5M2, SOFT_CAST)
    at = r.to(tl.int64)[:, None] * (column_tiles * 128) + column_tile * 128
    tl.store(
        payload_ptr + at + tl.arange(0, 128)[None, :],
        code,
        mask=live[:, None],
    )


@triton.jit
def _column_factors(
    top, descale_ptr, amax_ptr, row_tile, first_column, outer,
    BLOCK: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr, SOFT_CAST: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Factors of the columns of a tile, ``[1 or 32, 128]``; stores their descales."""
    c = first_column + tl.arange(0, 128)
    live = (c < outer) | EVEN
    if BLOCK == "row":
        descale, factor = scales(tl.load(amax_ptr + c, mask=live, other=0), E5M2, POW2, SOFT_CAST)
        if row_tile == 0:
            tl.store(descale_ptr + c, descale, mask=live)
        return factor[None, :]
    if BLOCK == "1x32":
        descale, factor = scales(tl.max(tl.reshape(top, [4, 8, 128]), 1), E5M2, POW2, SOFT_CAST)
        at = (row_tile * 4 + tl.arange(0, 4)).to(tl.int64)[:, None] * outer + c[None, :]
        tl.store(descale_ptr + at, descale, mask=live[None, :])
        factor = tl.broadcast_to(factor[:, None, :], [4, 8, 128])
        return tl.reshape(factor, [32, 128])
    else:
        descale, factor = scales(tl.max(top, 0), E5M2, POW2, SOFT_CAST)
        tl.store(descale_ptr + row_tile.to(tl.int64) * outer + c, descale, mask=live)
        return factor[None, :]


@triton.jit(do_not_specialize=["R", "row_tiles"])
def _quantize_matrix_kernel(
    x_ptr, rows_ptr, rows_descale_ptr, rows_amax_ptr, columns_ptr, columns_descale_ptr,
    columns_amax_ptr, R, C: tl.int32, row_tiles, column_tiles, stride_r, stride_c,
    ROWS_BLOCK: tl.constexpr, COLUMNS_BLOCK: tl.constexpr, POW2: tl.constexpr,
    SOFT_CAST: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One tile of ``x [R, C]`` to ``rows``, ``columns`` or both (None: not asked for)."""
    # C has a type, so that Triton knows it as a multiple of 16 but never as 1: then most columns
    # are zeros to the compiler, and where both halves of a word are one conversion ptxas 12.8 joins
    # them with a register that nothing wrote.
    ROWS: tl.constexpr = rows_ptr is not None
    COLUMNS: tl.constexpr = columns_ptr is not None
    if ROWS:
        E5M2: tl.constexpr = rows_ptr.dtype.element_ty == tl.float8e5
    else:
        E5M2: tl.constexpr = columns_ptr.dtype.element_ty == tl.float8e5
    pid = tl.program_id(0)
    row_tile = pid // column_tiles
    column_tile = pid % column_tiles
    first = row_tile * 128
    first_column = column_tile * 128
    ROWS_TILE: tl.constexpr = ROWS_BLOCK == "128x128"
    COLUMNS_TILE: tl.constexpr = COLUMNS_BLOCK == "128x128"
    WHOLE_ROWS: tl.constexpr = ROWS_BLOCK == "row"  # what is not finite may lie in another tile
    # Of a tile of its own columns, only the largest element of each row is ever needed.
    BY_ROW: tl.constexpr = COLUMNS_TILE or not COLUMNS
    # Read once from memory: a second look, which finds the tile in L1, takes fewer registers than
    # keeping it does, and so leaves room for a second program.
    LOOK_FIRST: tl.constexpr = (ROWS and ROWS_TILE) or (COLUMNS and not ROWS)
    top = tl.zeros([32] if BY_ROW else [32, 128], tl.int32)
    tile_factor = 0.0
    if LOOK_FIRST:
        for j in tl.static_range(4):
            m = _magnitude(
                _load_rows(x_ptr, first, first_column, j, R, C, stride_r, stride_c, EVEN)
            )
            top = tl.maximum(top, tl.max(m, 1) if BY_ROW else m)
        if ROWS_TILE or COLUMNS_TILE:
            descale, tile_factor = scales(_largest(top), E5M2, POW2, SOFT_CAST)
    if ROWS:
        outer = (R + 15) // 16 * 16
        if ROWS_TILE:
            row = (column_tiles + 3) // 4 * 4
            tl.store(rows_descale_ptr + row_tile * row + column_tile, descale)
        for j in tl.range(4):
            x = _load_rows(x_ptr, first, first_column, j, R, C, stride_r, stride_c, EVEN)
            m = _magnitude(x)
            row_top = tl.max(m, 1)
            _write_rows(
                x, row_top, tile_factor, rows_ptr, rows_descale_ptr, rows_amax_ptr, first,
                column_tile, j, outer, column_tiles, ROWS_BLOCK, E5M2, POW2, SOFT_CAST, EVEN, WHOLE_ROWS,
            )  # fmt: skip
            if not LOOK_FIRST:
                top = tl.maximum(top, row_top if BY_ROW else m)
        # Rare: again, with a mask that costs as much as the cast.
        if not WHOLE_ROWS and _largest(top) >= 0x7F800000:
            tl.debug_barrier()
            for j in tl.range(4):
                x = _load_rows(x_ptr, first, first_column, j, R, C, stride_r, stride_c, EVEN)
                _write_rows(
                    x, tl.max(_magnitude(x), 1), tile_factor, rows_ptr, rows_descale_ptr,
                    rows_amax_ptr, first, column_tile, j, outer, column_tiles, ROWS_BLOCK, E5M2,
                    POW2, SOFT_CAST, EVEN, True,
                )  # fmt: skip
    if COLUMNS:
        outer_c = (C + 15) // 16 * 16
        if COLUMNS_TILE:
            if not LOOK_FIRST:
                descale, tile_factor = scales(_largest(top), E5M2, POW2, SOFT_CAST)
            row = (row_tiles + 3) // 4 * 4
            tl.store(columns_descale_ptr + column_tile * row + row_tile, descale)
            factor = tile_factor
        else:
            factor = _column_factors(
                top, columns_descale_ptr, columns_amax_ptr, row_tile, first_column, outer_c,
                COLUMNS_BLOCK, E5M2, POW2, SOFT_CAST, EVEN,
            )  # fmt: skip
        x0 = _load_rows(x_ptr, first, first_column, 0, R, C, stride_r, stride_c, EVEN)
        x1 = _load_rows(x_ptr, first, first_column, 1, R, C, stride_r, stride_c, EVEN)
        x2 = _load_rows(x_ptr, first, first_column, 2, R, C, stride_r, stride_c, EVEN)
        x3 = _load_rows(x_ptr, first, first_column, 3, R, C, stride_r, stride_c, EVEN)
        words = _words(x0, x1, x2, x3, factor, E5M2, SOFT_CAST)
        c = first_column + tl.arange(0, 128)
        at = c.to(tl.int64)[:, None] * (row_tiles * 32) + row_tile * 32 + tl.arange(0, 32)[None, :]
        out = columns_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(out + at, tl.trans(words), mask=((c < outer_c) | EVEN)[:, None])


@triton.jit
def _largest(top):
    """Over all of ``top [32]`` or ``[32, 128]``."""
    if len(top.shape) == 2:
        top = tl.max(top, 0)
    return tl.max(top, 0)


@triton.jit(do_not_specialize=["R"])
def _tile_amax_kernel(
    x_ptr, rows_ptr, columns_ptr, R, C, column_tiles, stride_r, stride_c,
):  # fmt: skip
    """Bits of the largest magnitude of each row, ``[R padded]``, and of each column, ``[C padded]``;
    they start at 0."""
    pid = tl.program_id(0)
    row_tile = pid // column_tiles
    column_tile = pid % column_tiles
    outer = (R + 15) // 16 * 16
    outer_c = (C + 15) // 16 * 16
    top = tl.zeros([32, 128], tl.int32)
    for j in tl.static_range(4):
        m = _magnitude(
            _load_rows(x_ptr, row_tile * 128, column_tile * 128, j, R, C, stride_r, stride_c, False)
        )
        if rows_ptr is not None:
            r = row_tile * 128 + 4 * tl.arange(0, 32) + j
            tl.atomic_max(rows_ptr + r, tl.max(m, 1), mask=r < outer, sem="relaxed")
        top = tl.maximum(top, m)
    if columns_ptr is not None:
        c = column_tile * 128 + tl.arange(0, 128)
        tl.atomic_max(columns_ptr + c, tl.max(top, 0), mask=c < outer_c, sem="relaxed")
