"""The three GEMMs of a linear layer on FP8 operands, through torch's own scaled GEMM.

    output      = x Wᵀ        rows of x,     rows of W
    grad_input  = dy W        rows of dy,    columns of W
    grad_weight = dyᵀ x       columns of dy, columns of x

A GEMM here is ``a bᵀ`` of two operands that contract their last axis
(:mod:`hf_deltamatch.kernels.linear_operands`). cuBLAS promotes its sums to FP32 registers
(``use_fast_accum=False``; block-scaled kernels do so after every block).

``1x32`` is a block-scaled instruction on Blackwell; before, its operands are decoded to BF16, which
holds E4M3 and E5M2 times a power of two exactly, and multiplied there: the recipe's numerics, not its
speed. On a CPU (Triton's interpreter) every GEMM is emulated in FP32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from hf_deltamatch.formats import FORMATS
from hf_deltamatch.kernels import NATIVE_MX, capability_of, rowwise_in_cublas
from hf_deltamatch.kernels.linear_operands import (
    MX,
    ROW,
    TILE_128,
    VECTOR,
    Operand,
    dequantize,
    descale_shape,
    payload_shape,
    quantize_matrix,
)
from hf_deltamatch.recipes import LinearRecipe

# Blocks, ``[outer, contracted]``, of activations and gradients where features are contracted, of the
# input where tokens are, and of weights.
_BLOCKS = {"blockwise": (VECTOR, TILE_128, TILE_128), "rowwise": (ROW,) * 3, "mx": (MX,) * 3}


def blocks_of(recipe: LinearRecipe) -> tuple[str, str, str]:
    """Blocks of dy and of x where features are contracted, of x where tokens are, of weights."""
    return _BLOCKS[recipe.scaling]


def quantize(
    x: Tensor, recipe: LinearRecipe, what: str, *, rows: bool = False, columns: bool = False
) -> tuple[Operand, Operand]:
    """``what`` is ``x``, ``dy`` or ``weight``. What is not asked for is None."""
    fmt = FORMATS[recipe.grad_format if what == "dy" else "e4m3"].dtype
    vector, saved, weight = _BLOCKS[recipe.scaling]
    block = weight if what == "weight" else vector
    across = saved if what == "x" else block
    pow2 = recipe.descale == "pow2"
    return quantize_matrix(x, block, fmt, pow2, rows=rows, columns=columns, columns_block=across)


def linear_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, save_input: bool, recipe: LinearRecipe
) -> tuple[Tensor, Operand | None]:
    """``x [tokens, in]``, ``weight [out, in]``, ``bias [out]`` to ``[tokens, out]`` in the dtype of
    x; with ``save_input`` also x as :func:`linear_bwd` reads it."""
    rows, columns = quantize(x, recipe, "x", rows=True, columns=save_input)
    return linear_fwd_quantized(rows, weight, bias, x.dtype, recipe), columns


def linear_fwd_quantized(
    x: Operand, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, recipe: LinearRecipe
) -> Tensor:
    """:func:`linear_fwd` of an input that is quantised already, ``[tokens, out]`` in ``dtype``."""
    return gemm(x, quantize(weight, recipe, "weight", rows=True)[0], dtype, bias)


def linear_bwd(
    dy: Tensor,
    weight: Tensor | None,
    x: Operand | None,
    dtype: torch.dtype | None,
    recipe: LinearRecipe,
) -> tuple[Tensor | None, Tensor | None]:
    """grad_input ``[tokens, in]`` in the dtype of dy where ``weight [out, in]`` is given, and
    grad_weight ``[out, in]`` in ``dtype`` where the saved input is. ``dy`` is read once."""
    rows, columns = quantize(dy, recipe, "dy", rows=weight is not None, columns=x is not None)
    dx = dw = None
    if weight is not None:
        dx = grad_input(rows, weight, dy.dtype, recipe)
    if x is not None:
        dw = gemm(columns, x, dtype)
    return dx, dw


def grad_input(dy: Operand, weight: Tensor, dtype: torch.dtype, recipe: LinearRecipe) -> Tensor:
    """``[tokens, in]`` in ``dtype``, from dy's rows."""
    return gemm(dy, quantize(weight, recipe, "weight", columns=True)[1], dtype)


def grad_weight(dy: Operand, x: Tensor, dtype: torch.dtype, recipe: LinearRecipe) -> Tensor:
    """``[out, in]`` in ``dtype``, from dy's columns and the input in high precision."""
    return gemm(dy, quantize(x, recipe, "x", columns=True)[1], dtype)


def input_shapes(tokens: int, n_in: int, recipe: LinearRecipe) -> tuple[tuple, tuple]:
    """Shapes of payload and descale of the input as the forward's GEMM reads it."""
    block = _BLOCKS[recipe.scaling][0]
    return payload_shape(tokens, n_in), descale_shape(block, tokens, n_in)


def input_operand(
    payload: Tensor, descale: Tensor, tokens: int, n_in: int, recipe: LinearRecipe
) -> Operand:
    """The operand of those, from its tensors."""
    return Operand(payload, descale, _BLOCKS[recipe.scaling][0], tokens, n_in)


def saved_shapes(tokens: int, n_in: int, recipe: LinearRecipe) -> tuple[tuple, tuple]:
    """Shapes of payload and descale of the saved input: one byte an element, padded, tokens last."""
    block = _BLOCKS[recipe.scaling][1]
    return payload_shape(n_in, tokens), descale_shape(block, n_in, tokens)


def saved_input(
    payload: Tensor, descale: Tensor, tokens: int, n_in: int, recipe: LinearRecipe
) -> Operand:
    """The operand that :func:`linear_fwd` returned, from its tensors."""
    return Operand(payload, descale, _BLOCKS[recipe.scaling][1], n_in, tokens)


def gemm(a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """``a bᵀ + bias``, ``[a.outer, b.outer]`` in ``dtype``."""
    M, N = a.outer, b.outer
    if 0 in (M, N, a.contracted):
        return a.payload.new_zeros(M, N, dtype=dtype) + (0 if bias is None else bias.to(dtype))
    if a.payload.is_cpu:
        output = dequantize(a, torch.float32) @ dequantize(b, torch.float32).t()
        return (output if bias is None else output + bias.float()).to(dtype)
    if a.block == MX and capability_of(a.payload.device) not in NATIVE_MX:
        return _decoded(dequantize(a, torch.bfloat16), dequantize(b, torch.bfloat16), dtype, bias)
    return _scaled(a, b, dtype, bias)


def _decoded(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """BF16 product with FP32 sums."""
    if dtype == torch.bfloat16 and bias is None:
        return a @ b.t()
    output = torch.mm(a, b.t(), out_dtype=torch.float32)
    return (output if bias is None else output.add_(bias)).to(dtype)


def _scaled(a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    # FP32 results take no bias in torch, FP16 ones no block scales, and CUTLASS makes no FP32 ones.
    wide = torch.float32 if dtype == torch.float16 else dtype
    if a.block == ROW and not rowwise_in_cublas(a.payload.device):
        wide = torch.bfloat16
    fused = bias is not None and wide == torch.bfloat16
    padding = b.payload.shape[0] - b.outer
    in_epilogue = None
    if fused:
        in_epilogue = bias.to(torch.bfloat16)
        if padding:
            in_epilogue = torch.nn.functional.pad(in_epilogue, (0, padding))
    kind, swizzle = _KINDS[a.block]
    # What torch.nn.functional.scaled_mm calls, without the Python around it.
    output = torch._scaled_mm_v2(
        a.payload,
        b.payload.t(),
        _scale(a, left=True),
        kind,
        swizzle,
        _scale(b, left=False),
        _KINDS[b.block][0],
        swizzle,
        in_epilogue,
        wide,
        (),
        False,
    )
    # Views and casts that change nothing still take the host a microsecond or two each.
    if output.shape[0] != a.outer:
        output = output[: a.outer]
    if padding:
        output = output[:, : b.outer].contiguous()
    if bias is not None and not fused:
        output.add_(bias)
    return output if wide == dtype else output.to(dtype)


# Kind of the descales and their swizzle, as torch's scaled GEMM takes them.
_PLAIN = [SwizzleType.NO_SWIZZLE.value]
_KINDS = {
    ROW: ([ScalingType.RowWise.value], _PLAIN),
    MX: ([ScalingType.BlockWise1x32.value], [SwizzleType.SWIZZLE_32_4_4.value]),
    VECTOR: ([ScalingType.BlockWise1x128.value], _PLAIN),
    TILE_128: ([ScalingType.BlockWise128x128.value], _PLAIN),
}


def _scale(x: Operand, left: bool) -> list[Tensor]:
    if x.block == ROW:
        return [x.descale[:, None] if left else x.descale[None]]
    return [swizzled_e8m0(x.descale) if x.block == MX else x.descale.t()]


def swizzled_e8m0(descale: Tensor) -> Tensor:
    """Power-of-two descales ``[blocks, outer]`` as E8M0 codes in tiles of 128 rows x 4 blocks, each
    stored as 32 x 4 x 4: row ``32 q + r`` and block b at ``16 r + 4 q + b``. Flat."""
    codes = (descale.view(torch.int32) >> 23).to(torch.uint8)
    codes = torch.where(descale.isnan(), 255, codes).to(torch.uint8)
    blocks, outer = codes.shape
    codes = torch.nn.functional.pad(codes, (0, -outer % 128, 0, -blocks % 4))
    codes = codes.view(-1, 4, codes.shape[1] // 128, 4, 32)  # [tile, b, tile, q, r]
    return codes.permute(2, 0, 4, 3, 1).contiguous().view(-1).view(torch.float8_e8m0fnu)
