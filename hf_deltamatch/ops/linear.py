"""Public FP8 linear: three GEMMs with FP8 operands, high-precision master weight.

Saved for the backward: one byte per input element (FP8, quantised along tokens, with its descales),
and the weight itself, which is quantised again. The high-precision input is not kept.

Annotations are evaluated here (the op schemas are inferred from them).
"""

import torch
from torch import Tensor

from hf_deltamatch import reference
from hf_deltamatch.ops import observe
from hf_deltamatch.ops.attention_args import (
    HIGH_PRECISION,
    autocast_dtype,
    refuse_double_backward,
    require_tensors,
)
from hf_deltamatch.ops.backend import choose
from hf_deltamatch.ops.library import NAMESPACE, define_op
from hf_deltamatch.recipes import LinearRecipe


@define_op
def linear_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, save_input: bool, recipe: str, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """``output [tokens, out]`` in the dtype of x; with ``save_input`` the FP8 input and its
    descale as grad_weight reads them, else two empty tensors."""
    assert backend == "reference", backend
    observe.CALLS["linear_fwd"] += 1
    decoded = LinearRecipe.decode(recipe)
    with torch.autocast(x.device.type, enabled=False):
        output = reference.linear_fwd(x, weight, bias, decoded).to(x.dtype)
        if save_input:
            return output, *reference.linear_save_input(x, decoded)
    return output, x.new_empty(0), x.new_empty(0)


@torch.library.register_fake(f"{NAMESPACE}::linear_fwd")
def _(x, weight, bias, save_input, recipe, backend):
    output = x.new_empty(x.shape[0], weight.shape[0])
    if not save_input:
        return output, x.new_empty(0), x.new_empty(0)
    shape = LinearRecipe.decode(recipe).token_block.descale_shape(*x.shape)
    payload = torch.empty_like(x, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    return output, payload, x.new_empty(shape, dtype=torch.float32)


@define_op
def linear_bwd_input(dy: Tensor, weight: Tensor, recipe: str, backend: str) -> Tensor:
    """grad_input ``[tokens, in]`` in the dtype of dy."""
    assert backend == "reference", backend
    observe.CALLS["linear_bwd_input"] += 1
    with torch.autocast(dy.device.type, enabled=False):
        return reference.linear_bwd_input(dy, weight, LinearRecipe.decode(recipe)).to(dy.dtype)


@torch.library.register_fake(f"{NAMESPACE}::linear_bwd_input")
def _(dy, weight, recipe, backend):
    return dy.new_empty(dy.shape[0], weight.shape[1])


@define_op
def linear_bwd_weight(
    dy: Tensor, x_fp8: Tensor, x_descale: Tensor, dtype: torch.dtype, recipe: str, backend: str
) -> Tensor:
    """grad_weight ``[out, in]`` in ``dtype``."""
    assert backend == "reference", backend
    observe.CALLS["linear_bwd_weight"] += 1
    saved = reference.Quantized(x_fp8, x_descale)
    with torch.autocast(dy.device.type, enabled=False):
        return reference.linear_bwd_weight(dy, saved, LinearRecipe.decode(recipe)).to(dtype)


@torch.library.register_fake(f"{NAMESPACE}::linear_bwd_weight")
def _(dy, x_fp8, x_descale, dtype, recipe, backend):
    return dy.new_empty(dy.shape[1], x_fp8.shape[1], dtype=dtype)


class LinearFunction(torch.autograd.Function):
    """Saves and forwards; ``x [tokens, in]``."""

    @staticmethod
    def forward(ctx, x, weight, bias, save_input, recipe, backend):
        output, x_fp8, x_descale = linear_fwd(x, weight, bias, save_input, recipe, backend)
        ctx.save_for_backward(weight, x_fp8, x_descale)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.options = (recipe, backend)
        return output

    @staticmethod
    def backward(ctx, dy):
        refuse_double_backward("fp8_linear")
        weight, x_fp8, x_descale = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = linear_bwd_input(dy, weight, *ctx.options)
        if ctx.needs_input_grad[1]:
            dw = linear_bwd_weight(dy, x_fp8, x_descale, weight.dtype, *ctx.options)
        if ctx.needs_input_grad[2]:
            db = dy.float().sum(0).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: str | LinearRecipe = "blockwise",
    backend: str | None = None,
) -> Tensor:
    """``x Wᵀ + bias`` with FP8 operands in the forward and both gradients.

    Args:
        x: ``[..., in]``, FP32, BF16 or FP16; any number of tokens, zero included.
        weight: ``[out, in]``, the high-precision master weight; quantised in every call, so it
            cannot go stale.
        bias: ``[out]`` or None, added in FP32.
        recipe: a name or a :class:`LinearRecipe`.
        backend: ``None`` (by device) or one of ``ops.backend.BACKENDS`` by name.

    Returns:
        ``[..., out]`` in the dtype of x (under autocast, in autocast's dtype).

    >>> fp8_linear(torch.randn(2, 5, 64), torch.randn(32, 64)).shape
    torch.Size([2, 5, 32])
    """
    recipe = LinearRecipe.resolve(recipe)
    require_tensors("fp8_linear", x=x, weight=weight)
    if bias is not None:
        require_tensors("fp8_linear", bias=bias)
    autocast = autocast_dtype(x)
    _validate(x, weight, bias, autocast is not None)
    if autocast is not None:
        x = x.to(autocast)
    chosen = choose("linear", x.device, backend)
    # Asked here: inside the Function gradients are always off.
    save_input = torch.is_grad_enabled() and weight.requires_grad
    output = LinearFunction.apply(
        x.reshape(-1, x.shape[-1]), weight, bias, save_input, recipe.encoded, chosen
    )
    # As nn.Linear does: the result is no view, which FSDP2 and in-place users would trip over.
    return torch.ops.aten._unsafe_view(output, [*x.shape[:-1], weight.shape[0]])


def _validate(x: Tensor, weight: Tensor, bias: Tensor | None, autocast: bool) -> None:
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1] or 0 in weight.shape:
        raise ValueError(
            f"fp8_linear: x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit; x is "
            "[..., in] and weight [out, in], both at least 1."
        )
    allowed = HIGH_PRECISION
    if x.dtype not in allowed or weight.dtype not in allowed:
        raise ValueError(
            f"fp8_linear: x is {x.dtype}, weight {weight.dtype}; both must be one of "
            f"{', '.join(str(d) for d in allowed)} (high precision: the op quantises)."
        )
    if x.dtype != weight.dtype and not autocast:
        raise ValueError(
            f"fp8_linear: x is {x.dtype}, weight {weight.dtype}; cast one of them, or run under "
            "torch.autocast."
        )
    if bias is not None and (bias.shape != (weight.shape[0],) or bias.dtype not in allowed):
        raise ValueError(
            f"fp8_linear: bias is {bias.dtype} {tuple(bias.shape)}; it must be [out] = "
            f"({weight.shape[0]},), one of {', '.join(str(d) for d in allowed)}."
        )
    if bias is not None and bias.device != weight.device:
        raise ValueError(
            f"fp8_linear: bias is on {bias.device}, weight on {weight.device}; move them to one "
            "device."
        )
    if x.device != weight.device:
        raise ValueError(
            f"fp8_linear: x is on {x.device}, weight on {weight.device}; move them to one device."
        )
