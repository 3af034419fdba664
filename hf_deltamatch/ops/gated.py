"""Public linear of a gated product, ``(silu(gate) · up) Wᵀ + bias``: down_proj of a SwiGLU feed-forward.

Kept for the backward: gate and up, which their own gradients need anyway, and nothing of the product: it
is made again there. So an FP8 linear's copy of it (a byte an element) is saved, and without
torch.compile what autograd keeps of the activation as well (4 bytes an element of BF16).

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
from hf_deltamatch.ops.linear import cast_and_choose, check_linear, gradients, linear_kernels
from hf_deltamatch.ops.saved import distinct, kept
from hf_deltamatch.recipes import LinearRecipe


def _kernels():
    """The launchers, imported where they run: only they need Triton."""
    from hf_deltamatch.kernels import gated

    return gated


@define_op
def gated_linear_fwd(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, backend: str
) -> Tensor:
    """``output [tokens, out]`` in the dtype of gate; gate and up ``[tokens, in]``."""
    observe.CALLS["linear_fwd"] += 1
    decoded = LinearRecipe.decode(recipe)
    if backend == "triton":
        h = _kernels().gated(gate.contiguous(), up.contiguous())
        return linear_kernels().linear_fwd(h, weight, bias, False, decoded)[0]
    assert backend == "reference", backend
    return reference.linear_fwd(reference.gated(gate, up), weight, bias, decoded).to(gate.dtype)


@torch.library.register_fake(f"{NAMESPACE}::gated_linear_fwd")
def _(gate, up, weight, bias, recipe, backend):
    return gate.new_empty(gate.shape[0], weight.shape[0])


@define_op
def gated_linear_bwd(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    wants_dx: bool,
    wants_dw: bool,
    recipe: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate, up ``[tokens, in]`` and weight; empty where not wanted."""
    decoded = LinearRecipe.decode(recipe)
    hp = decoded.grad_weight_hp
    nothing = lambda: dy.new_empty(0)
    dgate, dup, dw, h = nothing(), nothing(), nothing(), None
    if backend == "triton":
        gate, up = gate.contiguous(), up.contiguous()
        rows, columns = linear_kernels().quantize(
            dy, decoded, "dy", rows=wants_dx, columns=wants_dw and not hp
        )
        if wants_dx:
            observe.CALLS["linear_bwd_input"] += 1
            dh = linear_kernels().grad_input(rows, weight, dy.dtype, decoded)
            dgate, dup, h = _kernels().gated_bwd(dh, gate, up, with_h=wants_dw)
        elif wants_dw:
            h = _kernels().gated(gate, up)
        if wants_dw and not hp:
            observe.CALLS["linear_bwd_weight"] += 1
            dw = linear_kernels().grad_weight(columns, h, weight.dtype, decoded)
    else:
        assert backend == "reference", backend
        if wants_dx:
            dh, _ = gradients(dy, weight, (), (True, False), hp, recipe, backend)
            dgate, dup = reference.gated_bwd(dh, gate, up)
        if wants_dw:
            h = reference.gated(gate, up)
            if not hp:
                saved = reference.linear_save_input(h, decoded)
                _, dw = gradients(dy, weight, saved, (False, True), hp, recipe, backend)
    if wants_dw and hp:
        _, dw = gradients(dy, weight, (h,), (False, True), hp, recipe, backend)
    return dgate, dup, dw


@torch.library.register_fake(f"{NAMESPACE}::gated_linear_bwd")
def _(dy, gate, up, weight, wants_dx, wants_dw, recipe, backend):
    like = lambda x, wanted: x.new_empty(x.shape if wanted else 0)
    return like(gate, wants_dx), like(up, wants_dx), like(weight, wants_dw)


class GatedLinearFunction(torch.autograd.Function):
    """Saves and forwards; gate and up ``[..., in]``."""

    @staticmethod
    def forward(ctx, gate, up, weight, bias, recipe, backend):
        leading, n_in = gate.shape[:-1], gate.shape[-1]
        gate, up = gate.reshape(-1, n_in), up.reshape(-1, n_in)
        output = gated_linear_fwd(gate, up, weight, bias, recipe, backend)
        ctx.save_for_backward(kept(gate), kept(up), weight)
        ctx.options = recipe, backend, leading, None if bias is None else bias.dtype
        return torch.ops.aten._unsafe_view(output, [*leading, output.shape[1]])

    @staticmethod
    def backward(ctx, dy):
        refuse_double_backward("fp8_gated_linear")
        recipe, backend, leading, bias_dtype = ctx.options
        wants_gate, wants_up, wants_dw, wants_db = ctx.needs_input_grad[:4]
        wants_dx = wants_gate or wants_up
        dy = dy.reshape(-1, dy.shape[-1])
        dgate = dup = dw = db = None
        if wants_dx or wants_dw:
            dgate, dup, dw = gated_linear_bwd(
                dy, *ctx.saved_tensors, wants_dx, wants_dw, recipe, backend
            )
        if wants_db:
            db = dy.sum(0, dtype=torch.float32).to(bias_dtype)
        whole = lambda x, wanted: x.reshape(*leading, x.shape[-1]) if wanted else None
        return (
            whole(dgate, wants_gate), whole(dup, wants_up), dw if wants_dw else None, db, None, None,
        )  # fmt: skip


def fp8_gated_linear(
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: str | LinearRecipe = "blockwise",
    backend: str | None = None,
) -> Tensor:
    """``(silu(gate) · up) Wᵀ + bias`` as :func:`fp8_linear` of the product, which is worked out in FP32
    and rounded once (Transformers rounds the activation too).

    Args:
        gate, up: ``[..., in]``, of one shape and dtype: FP32, BF16 or FP16.
        weight, bias, recipe, backend: as in :func:`fp8_linear`.

    Returns:
        ``[..., out]`` in the dtype of gate (under autocast, in autocast's dtype).

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fp8_linear`.

    >>> gate, up = torch.randn(2, 2, 5, 64)
    >>> fp8_gated_linear(gate, up, torch.randn(32, 64)).shape
    torch.Size([2, 5, 32])
    """
    what = "fp8_gated_linear"
    recipe = LinearRecipe.resolve(recipe)
    refuse_transforms(what)
    require_tensors(what, gate=gate, up=up, weight=weight)
    if bias is not None:
        require_tensors(what, bias=bias)
    require_alike(what, gate=gate, up=up)
    autocast = autocast_dtype(gate)
    check_linear(what, gate, weight, bias, autocast is not None)
    gate, chosen = cast_and_choose(gate, autocast, recipe, backend)
    gate, up, weight = distinct(gate, up.to(gate.dtype), weight)
    return GatedLinearFunction.apply(gate, up, weight, bias, recipe.encoded, chosen)
