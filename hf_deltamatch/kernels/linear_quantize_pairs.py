"""Kernels: as :mod:`hf_deltamatch.kernels.linear_quantize`, for BF16 and FP16 in rows.

The same outputs bit for bit, of matrices whose rows are read as words of two neighbours
(:mod:`hf_deltamatch.kernels.linear_pairs`). A program reads its tile of 128 x 128 once and keeps it
in registers, where both casts share one unpacking.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_deltamatch.kernels.linear_pairs import (
    cast_fp8_both_ways,
    cast_fp8_columns,
    cast_fp8_pairs,
    high,
    high_bits,
    larger,
    larger_of_each,
    largest,
    low,
    low_bits,
)
from hf_deltamatch.kernels.linear_scales import scales


# Rows of a tile are held as four tensors j of 32 rows. Row i of them, i = k (32 / K) + n, is row
# 4 (K n + k) + j of the tile: where a thread has rows n of all k, these are 4 K neighbours, which
# make K words of the transposed payload without leaving it.
@triton.jit
def _in_order(x, K: tl.constexpr):
    """Rows ``i`` of ``x [32, n]`` to the order of the tile's."""
    x = tl.reshape(x, [K, 32 // K, x.shape[1]])
    return tl.reshape(tl.permute(x, (1, 0, 2)), [32, x.shape[2]])


@triton.jit
def _out_of_order(x, K: tl.constexpr):
    """Inverse of :func:`_in_order`."""
    x = tl.reshape(x, [32 // K, K, x.shape[1]])
    return tl.reshape(tl.permute(x, (1, 0, 2)), [32, x.shape[2]])


@triton.jit
def _rows(j, K: tl.constexpr):
    i = tl.arange(0, 32)
    return 4 * (i % (32 // K) * K + i // (32 // K)) + j


@triton.jit
def _load(tile, j, rows, words, stride, K: tl.constexpr, EVEN: tl.constexpr):
    r = _rows(j, K)
    w = tl.arange(0, 64)
    at = tile + (r[:, None] * stride + w[None, :])
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=(r < rows)[:, None] & (w < words)[None, :], other=0)


@triton.jit
def load_tile(
    x_ptr, row_tile, column_tile, R, C, stride_r, K: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Four times int32 ``[32, 64]``. ``EVEN``: the tile is whole."""
    stride = stride_r // 2
    tile = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tile += (row_tile * 128).to(tl.int64) * stride + column_tile * 64
    rows, words = R - row_tile * 128, C // 2 - column_tile * 64  # from the tile on
    x0 = _load(tile, 0, rows, words, stride, K, EVEN)
    x1 = _load(tile, 1, rows, words, stride, K, EVEN)
    x2 = _load(tile, 2, rows, words, stride, K, EVEN)
    x3 = _load(tile, 3, rows, words, stride, K, EVEN)
    return x0, x1, x2, x3


@triton.jit
def _load_tops(amax_ptr, tile, n, EVEN: tl.constexpr):
    at = tile * 128 + tl.arange(0, 128)
    return tl.load(amax_ptr + at, mask=(at < (n + 15) // 16 * 16) | EVEN, other=0)


@triton.jit
def _largest_of_four(x0, x1, x2, x3, HALF: tl.constexpr, SOFT_CAST: tl.constexpr):
    a, b = larger(x0, x1, HALF, SOFT_CAST), larger(x2, x3, HALF, SOFT_CAST)
    return larger(a, b, HALF, SOFT_CAST)


@triton.jit
def _row_tops(x0, x1, x2, x3, PARTS: tl.constexpr, HALF: tl.constexpr, SOFT_CAST: tl.constexpr):
    """Largest magnitudes of each row, or of each of ``PARTS`` parts of it: of tensors 0 and 1 in the
    halves of a word, and of 2 and 3. ``[32, PARTS]`` each."""
    x0 = largest(tl.reshape(x0, [32, 8, 8]), 2, HALF, SOFT_CAST)
    x1 = largest(tl.reshape(x1, [32, 8, 8]), 2, HALF, SOFT_CAST)
    x2 = largest(tl.reshape(x2, [32, 8, 8]), 2, HALF, SOFT_CAST)
    x3 = largest(tl.reshape(x3, [32, 8, 8]), 2, HALF, SOFT_CAST)
    a = tl.reshape(larger_of_each(x0, x1, HALF, SOFT_CAST), [32, PARTS, 8 // PARTS])
    b = tl.reshape(larger_of_each(x2, x3, HALF, SOFT_CAST), [32, PARTS, 8 // PARTS])
    return largest(a, 2, HALF, SOFT_CAST), largest(b, 2, HALF, SOFT_CAST)


@triton.jit
def _four(a, b, HALF: tl.constexpr):
    """Of words as :func:`_row_tops` has them the bits of all four tensors, ``[..., 4]``."""
    x = tl.join(a, b)
    return tl.reshape(tl.join(low_bits(x, HALF), high_bits(x, HALF)), [a.shape[0], a.shape[1], 4])


@triton.jit
def _lines(x, K: tl.constexpr):
    """``[32, PARTS, 4]``, of :func:`_four`, to ``[PARTS, 128]`` in the order of the tile's rows."""
    PARTS: tl.constexpr = x.shape[1]
    x = tl.reshape(_in_order(tl.reshape(x, [32, PARTS * 4]), K), [32, PARTS, 4])
    return tl.reshape(tl.permute(x, (1, 0, 2)), [PARTS, 128])


@triton.jit
def _split_four(x):
    """Inverse of the joins of :func:`_four`."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _spread(factor, PARTS: tl.constexpr):
    """``[32, PARTS]`` to words, ``[32, 64]``. By a reshape even of one part: Triton would rather
    convert the words to the layout of a plain broadcast."""
    factor = tl.broadcast_to(factor[:, :, None], [32, PARTS, 64 // PARTS])
    return tl.reshape(factor, [32, 64])


@triton.jit
def _row_factors(
    a, b, descale_ptr, first, column_tile, outer,
    BLOCK: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr, HALF: tl.constexpr,
    SOFT_CAST: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """Factors of the four tensors, ``[32, 64]``; stores descales. ``a, b``: :func:`_row_tops`, or the
    bits of whole rows' largest, ``[128]``, and None."""
    PARTS: tl.constexpr = 4 if BLOCK == "1x32" else 1
    r = tl.arange(0, 128)
    live = (first + r < outer) | EVEN
    if BLOCK == "row":
        descale, factor = scales(a, E5M2, POW2, SOFT_CAST, FINITE, True)
        if column_tile == 0:
            tl.store(descale_ptr + first + r, descale, mask=live)
        factor = tl.reshape(_out_of_order(tl.reshape(factor, [32, 4]), K), [32, 1, 4])
    else:
        descale, factor = scales(_four(a, b, HALF), E5M2, POW2, SOFT_CAST, FINITE, True)
        descale_ptr += (column_tile * PARTS).to(tl.int64) * outer + first
        at = descale_ptr + (tl.arange(0, PARTS)[:, None] * outer + r[None, :])
        tl.store(at, _lines(descale, K), mask=live[None, :])
    f0, f1, f2, f3 = _split_four(factor)
    return _spread(f0, PARTS), _spread(f1, PARTS), _spread(f2, PARTS), _spread(f3, PARTS)


@triton.jit
def _row_codes(
    x, factor, E5M2: tl.constexpr, HALF: tl.constexpr, SOFT_CAST: tl.constexpr, FINITE: tl.constexpr
):  # fmt: skip
    if not FINITE:
        x = x & tl.where(factor == 0.0, 0, -1)
    return cast_fp8_pairs(low(x, HALF) * factor, high(x, HALF) * factor, E5M2, SOFT_CAST)


@triton.jit
def _write_rows(codes, j, out, row, live_rows, EVEN: tl.constexpr, K: tl.constexpr):
    r = _rows(j, K)
    at = out + (r[:, None] * row + tl.arange(0, 64)[None, :])
    tl.store(at, codes, mask=((r < live_rows) | EVEN)[:, None])


@triton.jit
def _column_factors(
    top, descale_ptr, row_tile, first, outer,
    BLOCK: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr, HALF: tl.constexpr,
    SOFT_CAST: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """Factors of left and of right neighbours, ``[1 or 32, 64]``; stores descales. ``top``: the
    largest of the four tensors, as words ``[32, 64]``, or the bits of whole columns' largest."""
    PARTS: tl.constexpr = 4 if BLOCK == "1x32" else 1
    c = tl.arange(0, 128)
    live = (first + c < outer) | EVEN
    if BLOCK == "row":
        descale, factor = scales(top, E5M2, POW2, SOFT_CAST, FINITE, True)
        if row_tile == 0:
            tl.store(descale_ptr + first + c, descale, mask=live)
    else:
        if PARTS == 1:
            top = largest(top, 0, HALF, SOFT_CAST)[None, :]
        else:
            top = tl.reshape(_in_order(top, K), [PARTS, 32 // PARTS, 64])
            top = largest(top, 1, HALF, SOFT_CAST)
        top = tl.reshape(tl.join(low_bits(top, HALF), high_bits(top, HALF)), [PARTS, 128])
        descale, factor = scales(top, E5M2, POW2, SOFT_CAST, FINITE, True)
        descale_ptr += (row_tile * PARTS).to(tl.int64) * outer + first
        at = descale_ptr + (tl.arange(0, PARTS)[:, None] * outer + c[None, :])
        tl.store(at, descale, mask=live[None, :])
    left, right = tl.split(tl.reshape(factor, [PARTS, 64, 2]))
    if PARTS == 1:
        return left, right
    else:
        left = tl.broadcast_to(left[:, None, :], [PARTS, 32 // PARTS, 64])
        right = tl.broadcast_to(right[:, None, :], [PARTS, 32 // PARTS, 64])
        left, right = tl.reshape(left, [32, 64]), tl.reshape(right, [32, 64])
        return _out_of_order(left, K), _out_of_order(right, K)


@triton.jit
def _write(
    x0, x1, x2, x3, row_a, row_b, column_top, tile_top,
    rows_ptr, rows_descale_ptr, columns_ptr, columns_descale_ptr, R, C, row_tile, column_tile,
    row_tiles, column_tiles,
    ROWS_BLOCK: tl.constexpr, COLUMNS_BLOCK: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr,
    HALF: tl.constexpr, SOFT_CAST: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr,
    FINITE: tl.constexpr,
):  # fmt: skip
    """Payloads and descales of a tile."""
    ROWS: tl.constexpr = rows_ptr is not None
    COLUMNS: tl.constexpr = columns_ptr is not None
    first, first_c = row_tile * 128, column_tile * 128
    outer, outer_c = (R + 15) // 16 * 16, (C + 15) // 16 * 16
    if (ROWS and ROWS_BLOCK == "128x128") or (COLUMNS and COLUMNS_BLOCK == "128x128"):
        tile_descale, tile_factor = scales(tile_top, E5M2, POW2, SOFT_CAST, FINITE, True)
    if ROWS:
        if ROWS_BLOCK == "128x128":
            blocks = (column_tiles + 3) // 4 * 4
            tl.store(rows_descale_ptr + row_tile * blocks + column_tile, tile_descale)
            f0, f1, f2, f3 = tile_factor, tile_factor, tile_factor, tile_factor
        else:
            f0, f1, f2, f3 = _row_factors(
                row_a, row_b, rows_descale_ptr, first, column_tile, outer,
                ROWS_BLOCK, E5M2, POW2, HALF, SOFT_CAST, EVEN, K, FINITE,
            )  # fmt: skip
    if COLUMNS:
        if COLUMNS_BLOCK == "128x128":
            blocks_c = (row_tiles + 3) // 4 * 4
            tl.store(columns_descale_ptr + column_tile * blocks_c + row_tile, tile_descale)
            left, right = tile_factor, tile_factor
        else:
            left, right = _column_factors(
                column_top, columns_descale_ptr, row_tile, first_c, outer_c,
                COLUMNS_BLOCK, E5M2, POW2, HALF, SOFT_CAST, EVEN, K, FINITE,
            )  # fmt: skip
    if FINITE and (ROWS and COLUMNS):
        c0, c1, c2, c3, even, odd = cast_fp8_both_ways(
            x0, x1, x2, x3, f0, f1, f2, f3, left, right, E5M2, HALF, SOFT_CAST
        )
    else:
        # A tile that is not finite is all zeros, and known as such to the compiler: ptxas 12.8 joins
        # the halves of a converted 0 with a register nothing wrote.
        if ROWS and (FINITE or ROWS_BLOCK != "128x128"):
            c0 = _row_codes(x0, f0, E5M2, HALF, SOFT_CAST, FINITE)
            c1 = _row_codes(x1, f1, E5M2, HALF, SOFT_CAST, FINITE)
            c2 = _row_codes(x2, f2, E5M2, HALF, SOFT_CAST, FINITE)
            c3 = _row_codes(x3, f3, E5M2, HALF, SOFT_CAST, FINITE)
        elif ROWS:
            c0 = tl.zeros([32, 64], tl.int16)
            c1, c2, c3 = c0, c0, c0
        if COLUMNS and not FINITE and COLUMNS_BLOCK == "128x128":
            even = tl.zeros([32, 64], tl.int32)
            odd = even
        elif COLUMNS:
            if not FINITE:
                keep = tl.where(left == 0.0, 0, 0xFFFF) | tl.where(right == 0.0, 0, -65536)
                x0, x1, x2, x3 = x0 & keep, x1 & keep, x2 & keep, x3 & keep
            even, odd = cast_fp8_columns(x0, x1, x2, x3, left, right, E5M2, HALF, SOFT_CAST)
    if ROWS:
        out = rows_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        row = column_tiles * 64
        out += first.to(tl.int64) * row + column_tile * 64
        live = outer - first
        _write_rows(c0, 0, out, row, live, EVEN, K)
        _write_rows(c1, 1, out, row, live, EVEN, K)
        _write_rows(c2, 2, out, row, live, EVEN, K)
        _write_rows(c3, 3, out, row, live, EVEN, K)
    if COLUMNS:
        words = tl.trans(_in_order(tl.reshape(tl.join(even, odd), [32, 128]), K))
        out_c = columns_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        row_c = row_tiles * 32
        out_c += first_c.to(tl.int64) * row_c + row_tile * 32
        c = tl.arange(0, 128)
        at = out_c + (c[:, None] * row_c + tl.arange(0, 32)[None, :])
        tl.store(at, words, mask=((first_c + c < outer_c) | EVEN)[:, None])


@triton.jit(do_not_specialize=["R", "row_tiles"])
def _quantize_pairs_kernel(
    x_ptr, rows_ptr, rows_descale_ptr, rows_amax_ptr, columns_ptr, columns_descale_ptr,
    columns_amax_ptr, R, C, row_tiles, column_tiles, stride_r, stride_c,
    ROWS_BLOCK: tl.constexpr, COLUMNS_BLOCK: tl.constexpr, POW2: tl.constexpr,
    SOFT_CAST: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One tile of ``x [R, C]`` to ``rows``, ``columns`` or both (None: not asked for)."""
    pid = tl.program_id(0)
    row_tile = pid // column_tiles
    column_tile = pid % column_tiles
    x0, x1, x2, x3 = load_tile(x_ptr, row_tile, column_tile, R, C, stride_r, K, EVEN)
    quantize_tile(
        x0, x1, x2, x3, rows_ptr, rows_descale_ptr, rows_amax_ptr, columns_ptr, columns_descale_ptr,
        columns_amax_ptr, R, C, row_tile, column_tile, row_tiles, column_tiles, ROWS_BLOCK,
        COLUMNS_BLOCK, POW2, x_ptr.dtype.element_ty == tl.float16, SOFT_CAST, EVEN, K,
    )  # fmt: skip


@triton.jit
def quantize_tile(
    x0, x1, x2, x3, rows_ptr, rows_descale_ptr, rows_amax_ptr, columns_ptr, columns_descale_ptr,
    columns_amax_ptr, R, C, row_tile, column_tile, row_tiles, column_tiles,
    ROWS_BLOCK: tl.constexpr, COLUMNS_BLOCK: tl.constexpr, POW2: tl.constexpr, HALF: tl.constexpr,
    SOFT_CAST: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile's words (:func:`load_tile`) to payloads and descales."""
    ROWS: tl.constexpr = rows_ptr is not None
    COLUMNS: tl.constexpr = columns_ptr is not None
    if ROWS:
        E5M2: tl.constexpr = rows_ptr.dtype.element_ty == tl.float8e5
    else:
        E5M2: tl.constexpr = columns_ptr.dtype.element_ty == tl.float8e5
    BY_ROW: tl.constexpr = ROWS and (ROWS_BLOCK == "1x128" or ROWS_BLOCK == "1x32")
    BY_COLUMN: tl.constexpr = COLUMNS and (COLUMNS_BLOCK == "1x128" or COLUMNS_BLOCK == "1x32")
    row_a, row_b, column_top = None, None, None
    if ROWS_BLOCK == "row":  # and so is the other
        tile_top = 0
        if ROWS:
            row_a = _load_tops(rows_amax_ptr, row_tile, R, EVEN)
            tile_top = tl.max(row_a, 0)
        if COLUMNS:
            column_top = _load_tops(columns_amax_ptr, column_tile, C, EVEN)
            tile_top = tl.maximum(tile_top, tl.max(column_top, 0))
    else:
        if BY_ROW:
            PARTS: tl.constexpr = 4 if ROWS_BLOCK == "1x32" else 1
            row_a, row_b = _row_tops(x0, x1, x2, x3, PARTS, HALF, SOFT_CAST)
            top = larger(row_a, row_b, HALF, SOFT_CAST)
        if BY_COLUMN or not BY_ROW:
            column_top = _largest_of_four(x0, x1, x2, x3, HALF, SOFT_CAST)
        if not BY_ROW:
            top = column_top
        top = largest(tl.reshape(top, [top.shape[0] * top.shape[1]]), 0, HALF, SOFT_CAST)
        tile_top = tl.maximum(low_bits(top, HALF), high_bits(top, HALF))
    if tile_top < 0x7F800000:
        _write(
            x0, x1, x2, x3, row_a, row_b, column_top, tile_top, rows_ptr, rows_descale_ptr,
            columns_ptr, columns_descale_ptr, R, C, row_tile, column_tile, row_tiles, column_tiles,
            ROWS_BLOCK, COLUMNS_BLOCK, E5M2, POW2, HALF, SOFT_CAST, EVEN, K, True,
        )  # fmt: skip
    else:  # rare, and slower
        _write(
            x0, x1, x2, x3, row_a, row_b, column_top, tile_top, rows_ptr, rows_descale_ptr,
            columns_ptr, columns_descale_ptr, R, C, row_tile, column_tile, row_tiles, column_tiles,
            ROWS_BLOCK, COLUMNS_BLOCK, E5M2, POW2, HALF, SOFT_CAST, EVEN, K, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["R"])
def _pairs_amax_kernel(
    x_ptr, rows_ptr, columns_ptr, R, C, column_tiles, stride_r, stride_c,
    SOFT_CAST: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """As :func:`linear_quantize._tile_amax_kernel`."""
    HALF: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    pid = tl.program_id(0)
    row_tile = pid // column_tiles
    column_tile = pid % column_tiles
    x0, x1, x2, x3 = load_tile(x_ptr, row_tile, column_tile, R, C, stride_r, K, EVEN)
    i = tl.arange(0, 128)
    if rows_ptr is not None:
        outer = (R + 15) // 16 * 16
        a, b = _row_tops(x0, x1, x2, x3, 1, HALF, SOFT_CAST)
        r = row_tile * 128 + i
        top = tl.reshape(_lines(_four(a, b, HALF), K), [128])
        tl.atomic_max(rows_ptr + r, top, mask=(r < outer) | EVEN, sem="relaxed")
    if columns_ptr is not None:
        outer_c = (C + 15) // 16 * 16
        top_c = largest(_largest_of_four(x0, x1, x2, x3, HALF, SOFT_CAST), 0, HALF, SOFT_CAST)
        top_c = tl.reshape(tl.join(low_bits(top_c, HALF), high_bits(top_c, HALF)), [128])
        c = column_tile * 128 + i
        tl.atomic_max(columns_ptr + c, top_c, mask=(c < outer_c) | EVEN, sem="relaxed")
