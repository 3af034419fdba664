"""Public feed-forward layer of three FP8 linears, ``(silu(x Wgᵀ) · x Wuᵀ) Wdᵀ``, in one op.

The numbers of :func:`fp8_linear` and :func:`fp8_gated_linear` one after another (under autocast the two
gradients of x are added in its dtype). Kept for the backward: gate, up and one FP8 copy of x. The input is
quantised once, and where the kernels take it (BF16, FP16; not ``rowwise``) the gradients of gate and up become FP8
operands as they are made, never matrices in memory.

Annotations are evaluated here (the op schemas are inferred from them).
"""

import torch
from torch import Tensor

from hf_deltamatch import reference
from hf_deltamatch.ops import observe
from hf_deltamatch.ops.attention_args import (
    autocast_dtype,
    refuse_double_backward,
    refuse_transforms,
    require_alike,
    require_tensors,
)
from hf_deltamatch.ops.library import NAMESPACE, define_op
from hf_deltamatch.ops.linear import (
    cast_and_choose,
    check_linear,
    linear_kernels,
    saved_shapes,
)
from hf_deltamatch.ops.saved import distinct
from hf_deltamatch.recipes import LinearRecipe


@define_op
def swiglu_fwd(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    save_input: bool,
    recipe: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``output [tokens, out]``, gate and up ``[tokens, features]`` in the dtype of ``x [tokens, in]``, and what
    :func:`ops.linear.linear_fwd` saves of x (empty without ``save_input``)."""
    observe.CALLS["linear_fwd"] += 3
    decoded = LinearRecipe.decode(recipe)
    if backend == "triton":
        from hf_deltamatch.kernels import gated as products
        from hf_deltamatch.kernels import linear_gated

        k = linear_kernels()
        rows, saved = k.quantize(x, decoded, "x", rows=True, columns=save_input)
        gate = k.linear_fwd_quantized(rows, w_gate, None, x.dtype, decoded)
        up = k.linear_fwd_quantized(rows, w_up, None, x.dtype, decoded)
        if linear_gated.fits(gate, up, decoded):
            product = linear_gated.gated_quantize(gate, up, decoded)
            output = k.linear_fwd_quantized(product, w_down, None, x.dtype, decoded)
        else:
            output = k.linear_fwd(products.gated(gate, up), w_down, None, False, decoded)[0]
        saved = saved and saved[:2]
    else:
        assert backend == "reference", backend
        gate, up = (reference.linear_fwd(x, w, None, decoded).to(x.dtype) for w in (w_gate, w_up))
        product = reference.gated(gate, up)
        output = reference.linear_fwd(product, w_down, None, decoded).to(x.dtype)
        saved = reference.linear_save_input(x, decoded) if save_input else None
    return output, gate, up, *(saved or (x.new_empty(0), x.new_empty(0)))


@torch.library.register_fake(f"{NAMESPACE}::swiglu_fwd")
def _(x, w_gate, w_up, w_down, save_input, recipe, backend):
    like = lambda w: x.new_empty(x.shape[0], w.shape[0])
    made = like(w_down), like(w_gate), like(w_up)
    if not save_input:
        return *made, x.new_empty(0), x.new_empty(0)
    shape, descale = saved_shapes(*x.shape, recipe, backend)
    payload = x.new_empty(shape, dtype=torch.float8_e4m3fn)
    return *made, payload, x.new_empty(descale, dtype=torch.float32)


@define_op
def swiglu_bwd(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    x_fp8: Tensor,
    x_descale: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    wants_x: bool,
    wants_gate: bool,
    wants_up: bool,
    wants_down: bool,
    recipe: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x through gate and through up, which torch.compile adds where it reads them, and of the
    three weights; empty where not wanted."""
    wants = wants_x, wants_gate, wants_up, wants_down
    observe.CALLS["linear_bwd_input"] += 2 * wants_x + any(wants[:3])
    observe.CALLS["linear_bwd_weight"] += sum(wants[1:])
    decoded = LinearRecipe.decode(recipe)
    saved, weights = (x_fp8, x_descale), (w_gate, w_up, w_down)
    if backend == "triton":
        found = _by_kernels(dy, gate, up, saved, weights, wants, decoded)
    else:
        assert backend == "reference", backend
        found = _by_reference(dy, gate, up, saved, weights, wants, decoded)
    return tuple(dy.new_empty(0) if t is None else t for t in found)


@torch.library.register_fake(f"{NAMESPACE}::swiglu_bwd")
def _(
    dy, gate, up, x_fp8, x_descale, w_gate, w_up, w_down, wants_x, wants_gate, wants_up, wants_down,
    recipe, backend,
):  # fmt: skip
    size = (dy.shape[0], w_gate.shape[1]) if wants_x else 0
    weights = (w_gate, wants_gate), (w_up, wants_up), (w_down, wants_down)
    return (
        dy.new_empty(size),
        dy.new_empty(size),
        *(w.new_empty(w.shape if wanted else 0) for w, wanted in weights),
    )


def _by_kernels(dy, gate, up, saved, weights, wants, recipe: LinearRecipe) -> list[Tensor | None]:
    from hf_deltamatch.kernels import gated as products
    from hf_deltamatch.kernels import linear_gated

    k = linear_kernels()
    w_gate, w_up, w_down = weights
    wants_x, wants_gate, wants_up, wants_down = wants
    inner = any(wants[:3])
    dy_rows, dy_columns = k.quantize(dy, recipe, "dy", rows=inner, columns=wants_down)
    product = by_gate = by_up = (None, None)
    if inner:
        dh = k.grad_input(dy_rows, w_down, dy.dtype, recipe)
        columns = wants_gate or wants_up
        if linear_gated.fits(gate, up, recipe):
            *both, h = linear_gated.gated_bwd_quantize(
                dh, gate, up, recipe, rows=wants_x, columns=columns, product=wants_down
            )
            by_gate, by_up, product = both[:2], both[2:], (None, h)
        else:
            dgate, dup, h = products.gated_bwd(dh, gate, up, with_h=wants_down)
            by_gate, by_up = (
                k.quantize(d, recipe, "dy", rows=wants_x, columns=columns) for d in (dgate, dup)
            )
    elif wants_down:
        h = products.gated(gate, up)
    if wants_down and product[1] is None:
        product = k.quantize(h, recipe, "x", columns=True)
    dxg = dxu = dwg = dwu = dwd = None
    if wants_x:
        dxg = k.grad_input(by_gate[0], w_gate, dy.dtype, recipe)
        dxu = k.grad_input(by_up[0], w_up, dy.dtype, recipe)
    if wants_gate or wants_up:
        x = k.saved_input(*saved, dy.shape[0], w_gate.shape[1], recipe)
        dwg = k.gemm(by_gate[1], x, w_gate.dtype) if wants_gate else None
        dwu = k.gemm(by_up[1], x, w_up.dtype) if wants_up else None
    if wants_down:
        dwd = k.gemm(dy_columns, product[1], w_down.dtype)
    return [dxg, dxu, dwg, dwu, dwd]


def _by_reference(dy, gate, up, saved, weights, wants, recipe: LinearRecipe) -> list[Tensor | None]:
    w_gate, w_up, w_down = weights
    wants_x, wants_gate, wants_up, wants_down = wants
    dxg = dxu = dwg = dwu = dwd = None
    if any(wants[:3]):
        dh = reference.linear_bwd_input(dy, w_down, recipe).to(dy.dtype)
        dgate, dup = reference.gated_bwd(dh, gate, up)
    if wants_x:
        dxg, dxu = (
            reference.linear_bwd_input(d, w, recipe).to(dy.dtype)
            for d, w in ((dgate, w_gate), (dup, w_up))
        )
    x = reference.Quantized(*saved)
    if wants_gate:
        dwg = reference.linear_bwd_weight(dgate, x, recipe).to(w_gate.dtype)
    if wants_up:
        dwu = reference.linear_bwd_weight(dup, x, recipe).to(w_up.dtype)
    if wants_down:
        h = reference.linear_save_input(reference.gated(gate, up), recipe)
        dwd = reference.linear_bwd_weight(dy, h, recipe).to(w_down.dtype)
    return [dxg, dxu, dwg, dwu, dwd]


class SwigluFunction(torch.autograd.Function):
    """Saves and forwards; ``x [..., in]``."""

    @staticmethod
    def forward(ctx, x, w_gate, w_up, w_down, save_input, recipe, backend):
        leading = x.shape[:-1]
        output, gate, up, *saved = swiglu_fwd(
            x.reshape(-1, x.shape[-1]), w_gate, w_up, w_down, save_input, recipe, backend
        )
        ctx.save_for_backward(gate, up, *saved, w_gate, w_up, w_down)
        ctx.options = recipe, backend
        return torch.ops.aten._unsafe_view(output, [*leading, output.shape[1]])

    @staticmethod
    def backward(ctx, dy):
        refuse_double_backward("fp8_swiglu")
        wants = ctx.needs_input_grad[:4]
        leading = dy.shape[:-1]
        found = swiglu_bwd(dy.reshape(-1, dy.shape[-1]), *ctx.saved_tensors, *wants, *ctx.options)
        dx = (found[0] + found[1]).reshape(*leading, found[0].shape[-1]) if wants[0] else None
        dw = (t if wanted else None for t, wanted in zip(found[2:], wants[1:], strict=True))
        return dx, *dw, None, None, None


def fp8_swiglu(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    recipe: str | LinearRecipe = "blockwise",
    backend: str | None = None,
) -> Tensor:
    """``(silu(x Wgᵀ) · x Wuᵀ) Wdᵀ``, each product as :func:`fp8_linear` (SwiGLU: arXiv 2002.05202).

    Args:
        x: ``[..., in]``, FP32, BF16 or FP16.
        w_gate, w_up: ``[features, in]``, of one shape and dtype.
        w_down: ``[out, features]``.
        recipe, backend: as in :func:`fp8_linear`; not ``grad_weight_hp``, which keeps what this does not.

    Returns:
        ``[..., out]`` in the dtype of x (under autocast, in autocast's dtype).

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fp8_linear`.

    >>> up = torch.randn(96, 64)
    >>> fp8_swiglu(torch.randn(2, 5, 64), torch.randn(96, 64), up, torch.randn(64, 96)).shape
    torch.Size([2, 5, 64])
    """
    what = "fp8_swiglu"
    recipe = LinearRecipe.resolve(recipe)
    refuse_transforms(what)
    require_tensors(what, x=x, w_gate=w_gate, w_up=w_up, w_down=w_down)
    if recipe.grad_weight_hp:
        raise ValueError(
            f"{what}: a recipe with grad_weight_hp keeps inputs in high precision, which this op does not; "
            "use fp8_linear and fp8_gated_linear."
        )
    require_alike(what, w_gate=w_gate, w_up=w_up)
    autocast = autocast_dtype(x)
    check_linear(what, x, w_gate, None, autocast is not None)
    fits = w_down.dim() == 2 and w_down.shape[0] > 0 and w_down.shape[1] == w_gate.shape[0]
    if not fits or w_down.dtype != w_gate.dtype or w_down.device != x.device:
        raise ValueError(
            f"{what}: w_down is {w_down.dtype} {tuple(w_down.shape)} on {w_down.device}; it must be {w_gate.dtype} "
            f"[out, {w_gate.shape[0]}], the features of w_gate, on {x.device}."
        )
    x, chosen = cast_and_choose(x, autocast, recipe, backend)
    save_input = torch.is_grad_enabled() and (w_gate.requires_grad or w_up.requires_grad)
    tensors = distinct(x, w_gate, w_up, w_down)
    return SwigluFunction.apply(*tensors, save_input, recipe.encoded, chosen)
