"""FP8 operands of a scaled GEMM: what they look like, and how matrices become them.

The kernels are in :mod:`hf_deltamatch.kernels.linear_quantize` and, for BF16 and FP16 in rows, in
:mod:`hf_deltamatch.kernels.linear_quantize_pairs`. What a call allocates and launches
follows from shapes, strides, dtypes and the recipe alone, and is worked out once for each: a layer
that is small takes the host longer than the device.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from hf_deltamatch.formats import MX_BLOCK
from hf_deltamatch.kernels.launch import SOFT_CAST, launch
from hf_deltamatch.kernels.linear_quantize import _quantize_matrix_kernel, _tile_amax_kernel
from hf_deltamatch.kernels.linear_quantize_pairs import _pairs_amax_kernel, _quantize_pairs_kernel

TILE = 128
PROGRAM = {"num_warps": 4}
"""Launch options of the quantisers that take any matrix."""
PAIRS = {"num_warps": 4, "maxnreg": 96}
"""Of those that read words of two neighbours: five programs a multiprocessor."""
PAIRS_BOTH = {"num_warps": 4, "maxnreg": 128}
"""With blocks of their own along rows and columns, which would spill: four programs."""
WORDS_OF_WARP = {True: 8, False: 16}
"""By whether rows are written: 32 over the rows of a tile that a warp reads at once."""
OUTER_ALIGN = 16
"""torch's scaled GEMM takes multiples of 16."""

VECTOR, TILE_128, ROW, MX = "1x128", "128x128", "row", "1x32"
"""Which elements of ``[outer, contracted]`` share a descale."""


class Operand(NamedTuple):
    """One side of a GEMM that contracts the last axis of both, in FP8.

    ``payload [outer padded to 16, contracted padded to 128]``. ``descale`` FP32, by ``block``:
    ``1x128`` and ``1x32`` ``[blocks, outer padded]``; ``128x128`` ``[outer blocks, contracted blocks
    padded to 4]``; ``row`` ``[outer padded]``. ``outer`` and ``contracted`` are the true sizes.
    """

    payload: Tensor
    descale: Tensor
    block: str
    outer: int
    contracted: int


def padded(n: int, to: int) -> int:
    return -(-n // to) * to


def descale_shape(block: str, outer: int, contracted: int) -> tuple[int, ...]:
    """Shape of :attr:`Operand.descale`."""
    if block == ROW:
        return (padded(outer, OUTER_ALIGN),)
    if block == TILE_128:
        return (-(-outer // TILE), padded(-(-contracted // TILE), 4))
    return (padded(contracted, TILE) // group_of(block), padded(outer, OUTER_ALIGN))


def payload_shape(outer: int, contracted: int) -> tuple[int, int]:
    return padded(outer, OUTER_ALIGN), padded(contracted, TILE)


def group_of(block: str) -> int:
    return MX_BLOCK if block == MX else TILE


class Side(NamedTuple):
    """How to allocate an :class:`Operand`."""

    payload: tuple[int, int]
    payload_strides: tuple[int, int]
    descale: tuple[int, ...]
    descale_strides: tuple[int, ...]
    filled: bool
    block: str
    outer: int
    contracted: int

    @classmethod
    def of(cls, block: str, outer: int, contracted: int) -> Side:
        payload, descale = payload_shape(outer, contracted), descale_shape(block, outer, contracted)
        # Blocks that only pad are not written; 0 rows or columns leave all of them so.
        pads = block == TILE_128 and -(-contracted // TILE) % 4 != 0
        return cls(
            payload, (payload[1], 1), descale, (1,) if len(descale) == 1 else (descale[1], 1),
            pads or 0 in (outer, contracted), block, outer, contracted,
        )  # fmt: skip

    def empty(self, fmt: torch.dtype, device: torch.device) -> Operand:
        # Not torch.empty, whose many signatures take it half as long again.
        new = torch.empty_strided
        payload = new(self.payload, self.payload_strides, dtype=fmt, device=device)
        if self.filled:
            descale = torch.ones(self.descale, dtype=torch.float32, device=device)
        else:
            descale = new(self.descale, self.descale_strides, dtype=torch.float32, device=device)
        return Operand(payload, descale, self.block, self.outer, self.contracted)


class _Plan(NamedTuple):
    """What :func:`quantize_matrix` does with its like.

    ``swapped``: the transpose is read, so the sides are exchanged. ``args``: of the kernel, after its
    pointers. ``amax_args``: of the one that collects the largest magnitudes first, if one does. ``pairs``: by the kernels of :mod:`linear_quantize_pairs`. ``seen``: of that
    kernel and of the other (:func:`launch`).
    """

    sides: tuple[Side | None, Side | None]
    swapped: bool
    programs: int
    pairs: bool
    args: tuple
    options: dict[str, int]
    amax_args: tuple | None
    seen: tuple[dict, dict]


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    block: str,
    columns_block: str,
    fmt: torch.dtype,
    pow2: bool,
    rows: bool,
    columns: bool,
    aligned: bool,
) -> _Plan:
    """``aligned``: the matrix starts at a multiple of 4 bytes."""
    swapped = strides[1] != 1 and strides[0] == 1
    if swapped:
        # Its transpose is what lies in rows: the same kernel, with the two outputs exchanged.
        shape, strides = shape[::-1], strides[::-1]
        block, columns_block, rows, columns = columns_block, block, columns, rows
    R, C = shape
    row_tiles, column_tiles = -(-R // TILE), -(-C // TILE)
    sides = (
        Side.of(block, R, C) if rows else None,
        Side.of(columns_block, C, R) if columns else None,
    )
    programs = row_tiles * column_tiles if rows or columns else 0
    even = R % TILE == 0 and C % TILE == 0
    constants = (block, columns_block, pow2, SOFT_CAST, even)
    amax_args = (R, C, column_tiles, *strides)
    options = PROGRAM
    # Offsets inside a tile have 32 bits there.
    pairs = aligned and dtype.itemsize == 2 and max(R, C, strides[0]) < 2**24
    pairs = pairs and strides[1] == 1 and strides[0] % 2 == 0 and C % 2 == 0
    if pairs:
        both = rows and columns and TILE_128 not in (block, columns_block)
        options = PAIRS_BOTH if both else PAIRS
        words = WORDS_OF_WARP[rows] // options["num_warps"]
        constants += (words,)
        amax_args += (SOFT_CAST, even, words)
    seen = tuple(
        # R and row_tiles are not specialised.
        _seen(
            name, dtype, fmt, rows, columns, pairs, R < 2**31, C, column_tiles, *strides, *constants
        )
        for name in ("amax", "quantize")
    )
    args = (R, C, row_tiles, column_tiles, *strides, *constants)
    amax_args = amax_args if block == ROW else None
    return _Plan(sides, swapped, programs, pairs, args, options, amax_args, seen)


@functools.lru_cache(maxsize=4096)
def _seen(*like: object) -> dict:
    """What was compiled for launches of one kind (:func:`launch`), over all numbers of rows."""
    return {}


def quantize_matrix(
    x: Tensor,
    block: str,
    fmt: torch.dtype,
    pow2: bool,
    *,
    rows: bool = False,
    columns: bool = False,
    columns_block: str | None = None,
) -> tuple[Operand | None, Operand | None]:
    """``x [R, C]`` (FP32, BF16, FP16; any strides) as ``rows``, contracting C, and ``columns``,
    contracting R; None for one not asked for. ``columns_block``: of the columns, if another than
    ``block``; 128x128 beside 1x128 or the other way round. ``x`` is read once, twice with ``row``."""
    plan = _plan(
        x.shape, x.stride(), x.dtype, block, columns_block or block, fmt, pow2, rows, columns,
        x.data_ptr() % 4 == 0,
    )  # fmt: skip
    device = x.device
    a, b = plan.sides
    a = a and a.empty(fmt, device)
    b = b and b.empty(fmt, device)
    if plan.programs:
        tops = (None, None) if plan.amax_args is None else _row_amax(x, a, b, plan)
        pointers = (
            x,
            *((None, None) if a is None else a[:2]), tops[0],
            *((None, None) if b is None else b[:2]), tops[1],
        )  # fmt: skip
        kernel = _quantize_pairs_kernel if plan.pairs else _quantize_matrix_kernel
        launch(kernel, plan.programs, pointers, plan.args, plan.seen[1], **plan.options)
    return (b, a) if plan.swapped else (a, b)


def _row_amax(x: Tensor, a: Operand | None, b: Operand | None, plan: _Plan) -> list[Tensor | None]:
    """Bits of the largest magnitude of each row and of each column; None where there is no side."""
    sizes = [0 if o is None else o.payload.shape[0] for o in (a, b)]
    tops = torch.zeros(sum(sizes), dtype=torch.int32, device=x.device).split(sizes)
    tops = [None if o is None else t for o, t in zip((a, b), tops, strict=True)]
    kernel = _pairs_amax_kernel if plan.pairs else _tile_amax_kernel
    launch(kernel, plan.programs, (x, *tops), plan.amax_args, plan.seen[0], **plan.options)
    return tops


def dequantize(x: Operand, dtype: torch.dtype) -> Tensor:
    """``[outer, contracted]`` in ``dtype``: exact in BF16 for power-of-two descales (down to 2⁻¹³³),
    in FP32 always. A block that was not finite is NaN."""
    outer, contracted = x.payload.shape
    value = x.payload.to(dtype)
    if x.block == ROW:
        scale = x.descale[:, None]
    elif x.block == TILE_128:
        scale = x.descale.repeat_interleave(TILE, 0)[:outer].repeat_interleave(TILE, 1)
        scale = scale[:, :contracted]
    else:
        scale = x.descale.t().repeat_interleave(group_of(x.block), 1)
    return (value * scale.to(dtype))[: x.outer, : x.contracted]
