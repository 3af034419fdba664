"""Public FP8 linear: three GEMMs with FP8 operands, high-precision master weight.

Saved for the backward: one byte per input element (FP8, for the contraction over tokens, with its
descales: 4 bytes per 128 x 128 elements for ``blockwise``), and the weight itself, which is quantised again. The
high-precision input is kept only with ``grad_weight_hp``, in place of the FP8 one.

Annotations are evaluated here (the op schemas are inferred from them).
"""

import functools

import torch
from torch import Tensor

from hf_deltamatch import kernels, reference
from hf_deltamatch.ops import observe
from hf_deltamatch.ops.attention_args import (
    HIGH_PRECISION,
    autocast_dtype,
    refuse_double_backward,
    refuse_transforms,
    require_tensors,
)
from hf_deltamatch.ops.backend import choose, refuse_unsupported
from hf_deltamatch.ops.library import NAMESPACE, define_op
from hf_deltamatch.ops.saved import distinct, kept
from hf_deltamatch.recipes import LinearRecipe


@functools.cache
def linear_kernels():
    """The launchers, imported where they run: only they need Triton."""
    from hf_deltamatch.kernels import linear

    return linear


@define_op
def linear_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, save_input: bool, recipe: str, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """``output [tokens, out]`` in the dtype of x; with ``save_input`` the FP8 input and its
    descale as grad_weight reads them, else two empty tensors. The reference stores that input as
    ``[tokens, in]``, the kernels padded and with the tokens last."""
    observe.CALLS["linear_fwd"] += 1
    decoded = LinearRecipe.decode(recipe)
    if backend == "triton":
        output, saved = linear_kernels().linear_fwd(x, weight, bias, save_input, decoded)
        saved = saved and saved[:2]
    else:
        assert backend == "reference", backend
        output = reference.linear_fwd(x, weight, bias, decoded).to(x.dtype)
        saved = reference.linear_save_input(x, decoded) if save_input else None
    return output, *(saved or (x.new_empty(0), x.new_empty(0)))


@torch.library.register_fake(f"{NAMESPACE}::linear_fwd")
def _(x, weight, bias, save_input, recipe, backend):
    output = x.new_empty(x.shape[0], weight.shape[0])
    if not save_input:
        return output, x.new_empty(0), x.new_empty(0)
    shape, descale = saved_shapes(*x.shape, recipe, backend)
    payload = x.new_empty(shape, dtype=torch.float8_e4m3fn)
    return output, payload, x.new_empty(descale, dtype=torch.float32)


def saved_shapes(tokens: int, n_in: int, recipe: str, backend: str) -> tuple[tuple, tuple]:
    """Shapes of the FP8 input that :func:`linear_fwd` saves, and of its descale."""
    decoded = LinearRecipe.decode(recipe)
    if backend == "triton":
        return linear_kernels().saved_shapes(tokens, n_in, decoded)
    return (tokens, n_in), decoded.token_blocks[1].descale_shape(tokens, n_in)


@define_op
def linear_quantize(
    x: Tensor, save_input: bool, recipe: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Payload and descale of ``x [tokens, in]`` as the forward reads it and, with ``save_input``, as
    grad_weight does (else two empty tensors); for kernels only. Apart from the product, so that
    torch.compile makes one of the equal calls of linears that share their input."""
    rows, columns = linear_kernels().quantize(
        x, LinearRecipe.decode(recipe), "x", rows=True, columns=save_input
    )
    saved = (x.new_empty(0), x.new_empty(0)) if columns is None else columns[:2]
    return *rows[:2], *saved


@torch.library.register_fake(f"{NAMESPACE}::linear_quantize")
def _(x, save_input, recipe):
    shapes = linear_kernels().input_shapes(*x.shape, LinearRecipe.decode(recipe))
    saved = saved_shapes(*x.shape, recipe, "triton") if save_input else None
    empty = lambda shape, dtype: x.new_empty(shape, dtype=dtype)
    made = [empty(s, t) for s, t in zip(shapes, (torch.float8_e4m3fn, torch.float32), strict=True)]
    if saved is None:
        return *made, x.new_empty(0), x.new_empty(0)
    return *made, empty(saved[0], torch.float8_e4m3fn), empty(saved[1], torch.float32)


@define_op
def linear_fwd_quantized(
    x_fp8: Tensor,
    x_descale: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: int,
    dtype: torch.dtype,
    recipe: str,
) -> Tensor:
    """``output [tokens, out]`` in ``dtype`` from what :func:`linear_quantize` returned first."""
    observe.CALLS["linear_fwd"] += 1
    decoded, k = LinearRecipe.decode(recipe), linear_kernels()
    rows = k.input_operand(x_fp8, x_descale, tokens, weight.shape[1], decoded)
    return k.linear_fwd_quantized(rows, weight, bias, dtype, decoded)


@torch.library.register_fake(f"{NAMESPACE}::linear_fwd_quantized")
def _(x_fp8, x_descale, weight, bias, tokens, dtype, recipe):
    return weight.new_empty(tokens, weight.shape[0], dtype=dtype)


@define_op
def linear_bwd_input(dy: Tensor, weight: Tensor, recipe: str, backend: str) -> Tensor:
    """grad_input ``[tokens, in]`` in the dtype of dy."""
    observe.CALLS["linear_bwd_input"] += 1
    decoded = LinearRecipe.decode(recipe)
    if backend == "triton":
        return linear_kernels().linear_bwd(dy, weight, None, None, decoded)[0]
    assert backend == "reference", backend
    return reference.linear_bwd_input(dy, weight, decoded).to(dy.dtype)


@torch.library.register_fake(f"{NAMESPACE}::linear_bwd_input")
def _(dy, weight, recipe, backend):
    return dy.new_empty(dy.shape[0], weight.shape[1])


@define_op
def linear_bwd_weight(
    dy: Tensor,
    x_fp8: Tensor,
    x_descale: Tensor,
    n_in: int,
    dtype: torch.dtype,
    recipe: str,
    backend: str,
) -> Tensor:
    """grad_weight ``[out, n_in]`` in ``dtype``."""
    observe.CALLS["linear_bwd_weight"] += 1
    decoded = LinearRecipe.decode(recipe)
    if backend == "triton":
        k = linear_kernels()
        saved = k.saved_input(x_fp8, x_descale, dy.shape[0], n_in, decoded)
        return k.linear_bwd(dy, None, saved, dtype, decoded)[1]
    assert backend == "reference", backend
    saved = reference.Quantized(x_fp8, x_descale)
    return reference.linear_bwd_weight(dy, saved, decoded).to(dtype)


@torch.library.register_fake(f"{NAMESPACE}::linear_bwd_weight")
def _(dy, x_fp8, x_descale, n_in, dtype, recipe, backend):
    return dy.new_empty(dy.shape[1], n_in, dtype=dtype)


@define_op
def linear_bwd(
    dy: Tensor,
    weight: Tensor,
    x_fp8: Tensor,
    x_descale: Tensor,
    dtype: torch.dtype,
    recipe: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """grad_input and grad_weight, ``dy`` read once; for kernels only."""
    assert backend == "triton", backend
    observe.CALLS["linear_bwd_input"] += 1
    observe.CALLS["linear_bwd_weight"] += 1
    decoded, k = LinearRecipe.decode(recipe), linear_kernels()
    saved = k.saved_input(x_fp8, x_descale, dy.shape[0], weight.shape[1], decoded)
    return k.linear_bwd(dy, weight, saved, dtype, decoded)


@torch.library.register_fake(f"{NAMESPACE}::linear_bwd")
def _(dy, weight, x_fp8, x_descale, dtype, recipe, backend):
    return dy.new_empty(dy.shape[0], weight.shape[1]), dy.new_empty(weight.shape, dtype=dtype)


@define_op
def linear_bwd_weight_hp(dy: Tensor, x: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """grad_weight ``[out, in]`` in ``dtype`` from unquantised operands, FP32 sums."""
    observe.CALLS["linear_bwd_weight"] += 1
    if backend == "triton" and dy.device.type == "cuda" and dy.dtype != torch.float32:
        out = None if dtype == dy.dtype else torch.float32
        product = dy.t() @ x if out is None else torch.mm(dy.t(), x, out_dtype=out)
        return product.to(dtype)
    return reference.linear_bwd_weight_hp(dy, x).to(dtype)


@torch.library.register_fake(f"{NAMESPACE}::linear_bwd_weight_hp")
def _(dy, x, dtype, backend):
    return dy.new_empty(dy.shape[1], x.shape[1], dtype=dtype)


def gradients(
    dy: Tensor, weight: Tensor, saved: tuple[Tensor, ...], wants: tuple[bool, bool], hp: bool,
    recipe: str, backend: str,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """grad_input and grad_weight, each None where it is not wanted; ``saved`` is the FP8 input and
    its descale, or with ``hp`` the input itself."""
    wants_dx, wants_dw = wants
    if wants_dx and wants_dw and not hp and backend == "triton":
        return linear_bwd(dy, weight, *saved, weight.dtype, recipe, backend)
    dx = dw = None
    if wants_dx:
        dx = linear_bwd_input(dy, weight, recipe, backend)
    if wants_dw and hp:
        dw = linear_bwd_weight_hp(dy, *saved, weight.dtype, backend)
    elif wants_dw:
        dw = linear_bwd_weight(dy, *saved, weight.shape[1], weight.dtype, recipe, backend)
    return dx, dw


class LinearFunction(torch.autograd.Function):
    """Saves and forwards; ``x [..., in]``. Leading axes are folded in here, so that autograd holds
    no nodes for that."""

    @staticmethod
    def forward(ctx, x, weight, bias, save_input, hp, recipe, backend):
        leading = x.shape[:-1]
        if len(leading) != 1:
            x = x.reshape(-1, x.shape[-1])
        save_fp8 = save_input and not hp
        if backend == "triton" and torch.compiler.is_compiling():
            *rows, x_fp8, x_descale = linear_quantize(x, save_fp8, recipe)
            output = linear_fwd_quantized(*rows, weight, bias, x.shape[0], x.dtype, recipe)
        else:
            output, x_fp8, x_descale = linear_fwd(x, weight, bias, save_fp8, recipe, backend)
        if save_input and hp:
            ctx.save_for_backward(weight, kept(x))
        else:
            ctx.save_for_backward(weight, x_fp8, x_descale)
        ctx.options = hp, recipe, backend, None if bias is None else bias.dtype
        # As nn.Linear does: the result is no view, which FSDP2 and in-place users would trip over.
        return torch.ops.aten._unsafe_view(output, [*leading, output.shape[1]])

    @staticmethod
    def backward(ctx, dy):
        refuse_double_backward("fp8_linear")
        weight, *saved = ctx.saved_tensors
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad[:3]
        leading = dy.shape[:-1]
        if len(leading) != 1:
            dy = dy.reshape(-1, dy.shape[-1])
        *options, bias_dtype = ctx.options
        db = None
        dx, dw = gradients(dy, weight, saved, (wants_dx, wants_dw), *options)
        if wants_db:
            db = dy.sum(0, dtype=torch.float32).to(bias_dtype)
        if wants_dx and len(leading) != 1:
            dx = dx.reshape(*leading, dx.shape[1])
        return dx, dw, db, None, None, None, None


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
        bias: ``[out]`` or None, added in FP32 (the kernels round it to the dtype of the result
            first, where that is BF16).
        recipe: a name or a :class:`LinearRecipe`.
        backend: ``None`` (by device) or one of ``ops.backend.BACKENDS`` by name.

    Returns:
        ``[..., out]`` in the dtype of x (under autocast, in autocast's dtype).

    Raises:
        ValueError, TypeError: arguments that do not fit, with what was given and what is allowed.
        NotImplementedError: no kernel for the device, or not for this recipe there; nothing falls
            back by itself.

    >>> fp8_linear(torch.randn(2, 5, 64), torch.randn(32, 64)).shape
    torch.Size([2, 5, 32])
    """
    recipe = LinearRecipe.resolve(recipe)
    refuse_transforms("fp8_linear")
    require_tensors("fp8_linear", x=x, weight=weight)
    if bias is not None:
        require_tensors("fp8_linear", bias=bias)
    autocast = autocast_dtype(x)
    check_linear("fp8_linear", x, weight, bias, autocast is not None)
    x, chosen = cast_and_choose(x, autocast, recipe, backend)
    # Asked here: inside the Function gradients are always off.
    save_input = torch.is_grad_enabled() and weight.requires_grad
    x, weight = distinct(x, weight)
    return LinearFunction.apply(
        x, weight, bias, save_input, recipe.grad_weight_hp, recipe.encoded, chosen
    )


def cast_and_choose(
    x: Tensor, autocast: torch.dtype | None, recipe: LinearRecipe, backend: str | None
) -> tuple[Tensor, str]:
    """``x`` in autocast's dtype, where there is one, and the backend of a linear on its device.

    Raises:
        NotImplementedError: no kernel for the device, or not for this recipe there.
    """
    if autocast is not None:
        x = x.to(autocast)
    chosen = choose("linear", x.device, backend)
    if chosen == "triton":
        refuse_unsupported("linear", unsupported(recipe.encoded, x.device))
    return x, chosen


@torch.compiler.assume_constant_result
def unsupported(recipe: str, device: torch.device) -> str | None:
    """A fact of the machine and the recipe: not for torch.compile to trace. Takes the encoded
    recipe: torch 2.11 makes no constant of a dataclass."""
    return kernels.unsupported_linear(LinearRecipe.decode(recipe), device)


def check_linear(what: str, x: Tensor, weight: Tensor, bias: Tensor | None, autocast: bool) -> None:
    shape = weight.shape
    if len(shape) != 2 or x.dim() < 1 or x.shape[-1] != shape[1] or 0 in shape:
        raise ValueError(
            f"{what}: x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit; x is "
            "[..., in] and weight [out, in], both at least 1."
        )
    allowed = HIGH_PRECISION
    if x.dtype not in allowed or weight.dtype not in allowed:
        raise ValueError(
            f"{what}: x is {x.dtype}, weight {weight.dtype}; both must be one of "
            f"{', '.join(str(d) for d in allowed)} (high precision: the op quantises)."
        )
    if x.dtype != weight.dtype and not autocast:
        raise ValueError(
            f"{what}: x is {x.dtype}, weight {weight.dtype}; cast one of them, or run under "
            "torch.autocast."
        )
    if bias is not None and (bias.shape != (weight.shape[0],) or bias.dtype not in allowed):
        raise ValueError(
            f"{what}: bias is {bias.dtype} {tuple(bias.shape)}; it must be [out] = "
            f"({weight.shape[0]},), one of {', '.join(str(d) for d in allowed)}."
        )
    if bias is not None and bias.device != weight.device:
        raise ValueError(
            f"{what}: bias is on {bias.device}, weight on {weight.device}; move them to one device."
        )
    if x.device != weight.device:
        raise ValueError(
            f"{what}: x is on {x.device}, weight on {weight.device}; move them to one device."
        )
