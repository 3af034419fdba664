"""The three GEMMs of an FP8 linear layer, emulated: the specification.

    output      = x Wᵀ        x along in_features,  W along in_features
    grad_input  = dy W        dy along out_features, W along out_features
    grad_weight = dyᵀ x       both along tokens

Every operand is quantised in blocks (``LinearRecipe``), products and sums are FP32. ``x`` is kept for grad_weight as FP8, quantised from the high-precision ``x`` along tokens;
with ``grad_weight_hp`` as it is, and that product is of unquantised operands.
"""

from __future__ import annotations

from torch import Tensor

from hf_deltamatch.formats import E4M3, FORMATS, Block, Float8Format
from hf_deltamatch.recipes import LinearRecipe
from hf_deltamatch.reference.quantize import Quantized, dequantize, quantize


def _rounded(x: Tensor, fmt: Float8Format, block: Block, recipe: LinearRecipe) -> Tensor:
    return dequantize(*quantize(x, fmt, block, recipe.descale), block)


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: LinearRecipe) -> Tensor:
    """``x [tokens, in]``, ``weight [out, in]``, ``bias [out]`` to FP32 ``[tokens, out]``."""
    w_block = recipe.weight_blocks[0]
    output = _rounded(x, E4M3, recipe.row_block, recipe) @ _rounded(weight, E4M3, w_block, recipe).T
    return output if bias is None else output + bias.float()


def linear_save_input(x: Tensor, recipe: LinearRecipe) -> Quantized:
    """``x [tokens, in]`` as grad_weight reads it."""
    return quantize(x, E4M3, recipe.token_blocks[1], recipe.descale)


def linear_bwd_input(dy: Tensor, weight: Tensor, recipe: LinearRecipe) -> Tensor:
    """``dy [tokens, out]``, ``weight [out, in]`` to FP32 grad_input ``[tokens, in]``."""
    fmt = FORMATS[recipe.grad_format]
    w_block = recipe.weight_blocks[1]
    return _rounded(dy, fmt, recipe.row_block, recipe) @ _rounded(weight, E4M3, w_block, recipe)


def linear_bwd_weight(dy: Tensor, x: Quantized, recipe: LinearRecipe) -> Tensor:
    """``dy [tokens, out]`` and the saved input to FP32 grad_weight ``[out, in]``."""
    fmt = FORMATS[recipe.grad_format]
    dy_block, x_block = recipe.token_blocks
    return _rounded(dy, fmt, dy_block, recipe).T @ dequantize(*x, x_block)


def linear_bwd_weight_hp(dy: Tensor, x: Tensor) -> Tensor:
    """``dy [tokens, out]``, ``x [tokens, in]``, neither quantised, to FP32 grad_weight."""
    return dy.float().T @ x.float()
