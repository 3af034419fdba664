"""Kernels: ``silu(gate) · up`` and its backward straight to FP8 operands.

What :mod:`hf_deltamatch.kernels.gated` computes, rounded to the dtype of gate, and what the quantisers of
linears make of it, bit for bit, without the matrices between: 5 bytes an element read and written instead of 9,
and in the backward 11 instead of 23.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from hf_deltamatch.formats import FORMATS
from hf_deltamatch.kernels import SMALL_SHARED_MEMORY, capability_of, multiprocessors
from hf_deltamatch.kernels.casts import round_bf16
from hf_deltamatch.kernels.gated import dgate_of, dup_of, product_of, sigmoid
from hf_deltamatch.kernels.launch import SOFT_CAST
from hf_deltamatch.kernels.linear import blocks_of
from hf_deltamatch.kernels.linear_operands import ROW, TILE, Operand, Side
from hf_deltamatch.kernels.linear_pairs import high, low
from hf_deltamatch.kernels.linear_quantize_pairs import load_tile, quantize_tile
from hf_deltamatch.recipes import LinearRecipe

PROGRAM = {"K": 2, "num_warps": 16, "maxnreg": 128}
"""Launch options of the backward: one program a multiprocessor, that fills its registers."""
STAGES = 3
"""Tiles on their way or worked on: 213 KB of shared memory. 1, where that is more than there is."""
FORWARD_PROGRAM = {"num_warps": 8}
"""32768 x 8192: 0.33 ms, with 4 warps 0.35."""


@triton.jit
def _pack(a, b, HALF: tl.constexpr, SOFT_CAST: tl.constexpr):
    """FP32 neighbours, rounded to nearest even, as a word."""
    if SOFT_CAST and HALF:
        a = a.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        return (b.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16) | (a & 0xFFFF)
    elif SOFT_CAST:
        a = round_bf16(a).to(tl.int32, bitcast=True)
        return (round_bf16(b).to(tl.int32, bitcast=True) & -65536) | ((a >> 16) & 0xFFFF)
    elif HALF:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], tl.int32, True, 1
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], tl.int32, True, 1
        )


@triton.jit
def _product_words(g, u, HALF: tl.constexpr, SOFT_CAST: tl.constexpr):
    gl, gh = low(g, HALF), high(g, HALF)
    a = product_of(gl, low(u, HALF), sigmoid(gl, SOFT_CAST))
    b = product_of(gh, high(u, HALF), sigmoid(gh, SOFT_CAST))
    return _pack(a, b, HALF, SOFT_CAST)


@triton.jit
def _all_words(d, g, u, HALF: tl.constexpr, SOFT_CAST: tl.constexpr):
    """dgate, dup and the product; their sigmoid is worked out once."""
    dl, gl, ul = low(d, HALF), low(g, HALF), low(u, HALF)
    dh, gh, uh = high(d, HALF), high(g, HALF), high(u, HALF)
    sl, sh = sigmoid(gl, SOFT_CAST), sigmoid(gh, SOFT_CAST)
    dgate = _pack(dgate_of(dl, gl, ul, sl), dgate_of(dh, gh, uh, sh), HALF, SOFT_CAST)
    dup = _pack(dup_of(dl, gl, sl), dup_of(dh, gh, sh), HALF, SOFT_CAST)
    return dgate, dup, _pack(product_of(gl, ul, sl), product_of(gh, uh, sh), HALF, SOFT_CAST)


@triton.jit(do_not_specialize=["R", "row_tiles", "tiles"])
def _gated_bwd_quantize_kernel(
    dh_ptr, gate_ptr, up_ptr, dgate_ptr, dgate_descale_ptr, dgate_t_ptr, dgate_t_descale_ptr, dup_ptr,
    dup_descale_ptr, dup_t_ptr, dup_t_descale_ptr, h_t_ptr, h_t_descale_ptr, R, C, row_tiles,
    column_tiles, tiles, stride_dh, stride_gate, stride_up,
    BLOCK: tl.constexpr, SAVED_BLOCK: tl.constexpr, POW2: tl.constexpr, SOFT_CAST: tl.constexpr,
    EVEN: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles of ``[R, C]``, every so many: gradients of gate and up by rows and by columns, the product by columns.
    A tile's inputs arrive while the one before is worked on."""
    HALF: tl.constexpr = gate_ptr.dtype.element_ty == tl.float16
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row_tile = tile // column_tiles
        column_tile = tile % column_tiles
        g0, g1, g2, g3 = load_tile(gate_ptr, row_tile, column_tile, R, C, stride_gate, K, EVEN)
        u0, u1, u2, u3 = load_tile(up_ptr, row_tile, column_tile, R, C, stride_up, K, EVEN)
        d0, d1, d2, d3 = load_tile(dh_ptr, row_tile, column_tile, R, C, stride_dh, K, EVEN)
        dg0, du0, h0 = _all_words(d0, g0, u0, HALF, SOFT_CAST)
        dg1, du1, h1 = _all_words(d1, g1, u1, HALF, SOFT_CAST)
        dg2, du2, h2 = _all_words(d2, g2, u2, HALF, SOFT_CAST)
        dg3, du3, h3 = _all_words(d3, g3, u3, HALF, SOFT_CAST)
        if h_t_ptr is not None:
            quantize_tile(
                h0, h1, h2, h3, None, None, None, h_t_ptr, h_t_descale_ptr, None, R, C, row_tile,
                column_tile, row_tiles, column_tiles, SAVED_BLOCK, SAVED_BLOCK, POW2, HALF,
                SOFT_CAST, EVEN, K,
            )  # fmt: skip
        quantize_tile(
            dg0, dg1, dg2, dg3, dgate_ptr, dgate_descale_ptr, None, dgate_t_ptr,
            dgate_t_descale_ptr, None, R, C, row_tile, column_tile, row_tiles, column_tiles, BLOCK,
            BLOCK, POW2, HALF, SOFT_CAST, EVEN, K,
        )  # fmt: skip
        quantize_tile(
            du0, du1, du2, du3, dup_ptr, dup_descale_ptr, None, dup_t_ptr, dup_t_descale_ptr, None,
            R, C, row_tile, column_tile, row_tiles, column_tiles, BLOCK, BLOCK, POW2, HALF,
            SOFT_CAST, EVEN, K,
        )  # fmt: skip


@triton.jit(do_not_specialize=["R", "row_tiles"])
def _gated_quantize_kernel(
    gate_ptr, up_ptr, h_ptr, h_descale_ptr, R, C, row_tiles, column_tiles, stride_gate, stride_up,
    BLOCK: tl.constexpr, POW2: tl.constexpr, SOFT_CAST: tl.constexpr, EVEN: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """One tile of the product ``[R, C]``, by rows."""
    HALF: tl.constexpr = gate_ptr.dtype.element_ty == tl.float16
    row_tile = tl.program_id(0) // column_tiles
    column_tile = tl.program_id(0) % column_tiles
    g0, g1, g2, g3 = load_tile(gate_ptr, row_tile, column_tile, R, C, stride_gate, K, EVEN)
    u0, u1, u2, u3 = load_tile(up_ptr, row_tile, column_tile, R, C, stride_up, K, EVEN)
    x0 = _product_words(g0, u0, HALF, SOFT_CAST)
    x1 = _product_words(g1, u1, HALF, SOFT_CAST)
    x2 = _product_words(g2, u2, HALF, SOFT_CAST)
    x3 = _product_words(g3, u3, HALF, SOFT_CAST)
    quantize_tile(
        x0, x1, x2, x3, h_ptr, h_descale_ptr, None, None, None, None, R, C, row_tile, column_tile,
        row_tiles, column_tiles, BLOCK, BLOCK, POW2, HALF, SOFT_CAST, EVEN, K,
    )  # fmt: skip


def fits(gate: Tensor, up: Tensor, recipe: LinearRecipe) -> bool:
    """True where the functions below take these: rows of BF16 or FP16 that are whole words, and
    blocks that need no look at whole rows first."""
    R, C = gate.shape
    rows = all(
        x.stride(1) == 1 and x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0 for x in (gate, up)
    )
    small = max(R, C, gate.stride(0), up.stride(0)) < 2**24 and min(R, C) > 0
    return rows and small and C % 2 == 0 and gate.itemsize == 2 and ROW not in blocks_of(recipe)


@functools.lru_cache(maxsize=512)
def _sides(R: int, C: int, recipe: LinearRecipe) -> tuple[Side, Side, Side]:
    block, saved, _ = blocks_of(recipe)
    return Side.of(block, R, C), Side.of(block, C, R), Side.of(saved, C, R)


def gated_quantize(gate: Tensor, up: Tensor, recipe: LinearRecipe) -> Operand:
    """``silu(gate) · up`` of ``gate, up [tokens, features]`` that fit, by rows."""
    R, C = gate.shape
    found = _sides(R, C, recipe)[0].empty(FORMATS["e4m3"].dtype, gate.device)
    row_tiles, column_tiles = -(-R // TILE), -(-C // TILE)
    _gated_quantize_kernel[(row_tiles * column_tiles,)](
        gate, up, *found[:2], R, C, row_tiles, column_tiles, gate.stride(0), up.stride(0),
        BLOCK=blocks_of(recipe)[0], POW2=recipe.descale == "pow2", SOFT_CAST=SOFT_CAST,
        EVEN=R % TILE == 0 and C % TILE == 0, K=2, **FORWARD_PROGRAM,
    )  # fmt: skip
    return found


def gated_bwd_quantize(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    recipe: LinearRecipe,
    *,
    rows: bool,
    columns: bool,
    product: bool,
) -> tuple[Operand | None, ...]:
    """Of ``dh, gate, up [tokens, features]`` that fit: dgate by rows and by columns, dup by rows and by
    columns, ``silu(gate) · up`` by columns; None where not asked for."""
    R, C = gate.shape
    by_row, by_column, saved_side = _sides(R, C, recipe)
    gradient, e4m3 = FORMATS[recipe.grad_format].dtype, FORMATS["e4m3"].dtype
    device = gate.device
    found = [
        side.empty(fmt, device) if wanted else None
        for side, fmt, wanted in (
            (by_row, gradient, rows), (by_column, gradient, columns),
            (by_row, gradient, rows), (by_column, gradient, columns),
            (saved_side, e4m3, product),
        )
    ]  # fmt: skip
    row_tiles, column_tiles = -(-R // TILE), -(-C // TILE)
    block, saved, _ = blocks_of(recipe)
    pointers = [t for o in found for t in ((None, None) if o is None else o[:2])]
    tiles = row_tiles * column_tiles
    stages = 1 if capability_of(device) in SMALL_SHARED_MEMORY else STAGES
    _gated_bwd_quantize_kernel[(min(tiles, multiprocessors(device)),)](
        dh, gate, up, *pointers, R, C, row_tiles, column_tiles, tiles, dh.stride(0), gate.stride(0),
        up.stride(0), BLOCK=block, SAVED_BLOCK=saved, POW2=recipe.descale == "pow2",
        SOFT_CAST=SOFT_CAST, EVEN=R % TILE == 0 and C % TILE == 0, STAGES=stages, **PROGRAM,
    )  # fmt: skip
    return tuple(found)
