"""What the Gluon kernels for Hopper share: TMA descriptors, register operands, coalesced stores.

Gluon has no interpreter: these kernels are compared with the plain ones and the reference on a GPU.

Two warpgroups of a program work on one tile each, so that the tensor cores work for one while the other
computes. A kernel makes no barrier that it does not wait for: Triton gives the memory of such a one to what
it hands to the specialised warps, over a barrier that is valid still, and where processes share a GPU such
kernels went wrong.
"""

from __future__ import annotations

from torch import Tensor, float32
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hf_deltamatch.kernels.casts import cast_fp8_packed, regroup_rows

# Triton 3.6 calls it by its longer name.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

ROWS = gl.constexpr(64)
"""Rows of a warpgroup's tile."""


@gluon.jit
def to_operand(x, layout: gl.constexpr, E5M2: gl.constexpr = False):
    """FP32 accumulator to an FP8 register operand, saturating."""
    x = gl.convert_layout(regroup_rows(x), layout, assert_trivial=True)
    # A plain cast packs byte by byte, with about 80 more instructions a tile.
    return cast_fp8_packed(x, E5M2, False)


@gluon.jit
def load_negated_pairs(at):
    """``−x`` of the FP32 numbers at ``at``, in a layout where a thread has pairs of neighbours; the
    compiler would negate each number where an addition can."""
    return gl.inline_asm_elementwise(
        "{.reg .f32 x, y; ld.global.v2.f32 {x, y}, [$2]; neg.f32 $0, x; neg.f32 $1, y;}",
        "=f,=f,l,l", [at], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def add_product(total, a, b_t, factor):
    """``total + (a b) · factor``: a product over one tile of tokens, added in FP32 registers."""
    zero = gl.zeros_like(total)
    part = warpgroup_mma(a, b_t.permute((1, 0)), zero, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=[part])
    return total + part * factor[:, None]


@gluon.jit
def add_products(total, coarse, a, c, b_t, factor):
    """``total + (a b) · factor`` as :func:`add_product`, and ``coarse + c b`` in the tensor cores."""
    zero = gl.zeros_like(total)
    b = b_t.permute((1, 0))
    part = warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
    coarse = warpgroup_mma(c, b, coarse, is_async=True)
    part = warpgroup_mma_wait(1, deps=[part])
    total = total + part * factor[:, None]
    coarse = warpgroup_mma_wait(0, deps=[coarse])
    return total, coarse


@gluon.jit
def store_rows(out_ptr, x, first, base, length, D, stride_t):
    """``x [64, features]`` of the tokens of a warpgroup, in rows of whole sectors."""
    coalesced: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    tokens = first + gl.arange(0, ROWS, gl.SliceLayout(1, coalesced))
    offs_d = gl.arange(0, x.shape[1], gl.SliceLayout(0, coalesced))
    at = (base + tokens).to(gl.int64)[:, None] * stride_t + offs_d[None, :]
    out = gl.convert_layout(x.to(out_ptr.dtype.element_ty), coalesced)
    gl.store(out_ptr + at, out, mask=(tokens < length)[:, None] & (offs_d < D)[None, :])


def rows_descriptor(x: Tensor, rows: int, BLOCK_D: int) -> TensorDescriptor:
    """Tiles of a payload ``[B, H, T, D padded]`` or a statistic ``[B, H, T]``."""
    D = x.shape[-1]
    if x.dtype == float32:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        return TensorDescriptor(
            x, [x.shape[0] * x.shape[1], D], [x.stride(1), 1], [1, rows], layout
        )
    layout = gl.NVMMASharedLayout(swizzle_byte_width=BLOCK_D, element_bitwidth=8, rank=2)
    return TensorDescriptor(x, [x.numel() // D, D], [D, 1], [rows, BLOCK_D], layout)


def columns_descriptor(x: Tensor, BLOCK_D: int, tokens: int) -> TensorDescriptor:
    """Tiles of a transposed copy ``[B, H, D padded, tokens]``."""
    T = x.shape[-1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=tokens, element_bitwidth=8, rank=2)
    return TensorDescriptor(x, [x.numel() // T, T], [T, 1], [BLOCK_D, tokens], layout)
