"""FP8 linears of the experts of a mixture: one fused weight, tokens sorted by expert.

Each expert with tokens runs the three GEMMs of :mod:`hf_deltamatch.ops.linear` on its rows, bit for
bit as ``fp8_linear`` would. One op a pass, so that ``torch.compile`` sees neither the loop nor the
counts; what the experts save for the backward lies end to end in one buffer.

Annotations are evaluated here (the op schemas are inferred from them).
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_deltamatch.ops.attention_args import (
    autocast_dtype,
    refuse_double_backward,
    refuse_transforms,
    require_tensors,
)
from hf_deltamatch.ops.library import NAMESPACE, define_op
from hf_deltamatch.ops.linear import (
    cast_and_choose,
    check_linear,
    gradients,
    linear_fwd,
    saved_shapes,
)
from hf_deltamatch.ops.saved import kept
from hf_deltamatch.recipes import LinearRecipe


def _features(weight: Tensor, transposed: bool) -> tuple[int, int]:
    """``out, in``."""
    return (weight.shape[2], weight.shape[1]) if transposed else tuple(weight.shape[1:])


def _groups(ends: Tensor, tokens: int) -> Iterator[tuple[int, int, int]]:
    """``expert, first row, row past the last`` of the experts that have rows."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if not start <= end <= tokens:
            raise ValueError(
                f"fp8_experts_linear: `ends` is {ends.tolist()} with {tokens} rows; it must ascend "
                "from at least 0 to at most the number of rows."
            )
        if end > start:
            yield expert, start, end
        start = end


class _Saved:
    """The FP8 inputs and descales of all experts, end to end in two flat buffers.

    The buffers hold any split of the rows over the experts: blocks and padding of an expert are
    its own, at most those of one row more than its share. Their sizes must not depend on the split,
    which is data.
    """

    def __init__(self, n_in: int, recipe: str, backend: str) -> None:
        self.shapes = lambda tokens: saved_shapes(tokens, n_in, recipe, backend)
        self.used = [0, 0]

    def empty(self, x: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        sizes = [
            math.prod(whole) + experts * math.prod(one)
            for whole, one in zip(self.shapes(x.shape[0]), self.shapes(1), strict=True)
        ]
        dtypes = (torch.float8_e4m3fn, torch.float32)
        payload, descale = (x.new_empty(n, dtype=d) for n, d in zip(sizes, dtypes, strict=True))
        return payload, descale

    def next(self, buffers: tuple[Tensor, Tensor], tokens: int) -> tuple[Tensor, ...]:
        """Payload and descale of the next expert, as views."""
        views = []
        for i, shape in enumerate(self.shapes(tokens)):
            start, size = self.used[i], math.prod(shape)
            views.append(buffers[i][start : start + size].view(shape))
            self.used[i] += size
        return tuple(views)


@define_op
def experts_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    transposed: bool,
    save_input: bool,
    recipe: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """``output [rows, out]`` in the dtype of x, zero past the last end; with ``save_input`` the FP8
    inputs and their descales (:class:`_Saved`), else two empty tensors. ``ends`` lies on the CPU."""
    n_out, n_in = _features(weight, transposed)
    output = x.new_empty(x.shape[0], n_out)
    saved = _Saved(n_in, recipe, backend)
    buffers = saved.empty(x, len(ends)) if save_input else (x.new_empty(0), x.new_empty(0))
    last = 0
    for expert, start, last in _groups(ends, x.shape[0]):
        w = weight[expert].t() if transposed else weight[expert]
        b = None if bias is None else bias[expert]
        rows, *parts = linear_fwd(x[start:last], w, b, save_input, recipe, backend)
        output[start:last] = rows
        if save_input:
            for view, part in zip(saved.next(buffers, last - start), parts, strict=True):
                view.copy_(part)
    output[last:] = 0
    return output, *buffers


@torch.library.register_fake(f"{NAMESPACE}::experts_fwd")
def _(x, weight, bias, ends, transposed, save_input, recipe, backend):
    n_out, n_in = _features(weight, transposed)
    output = x.new_empty(x.shape[0], n_out)
    if not save_input:
        return output, x.new_empty(0), x.new_empty(0)
    return output, *_Saved(n_in, recipe, backend).empty(x, weight.shape[0])


@define_op
def experts_bwd(
    dy: Tensor,
    weight: Tensor,
    x: Tensor,
    x_descale: Tensor,
    ends: Tensor,
    transposed: bool,
    wants_dx: bool,
    wants_dw: bool,
    wants_db: bool,
    hp: bool,
    recipe: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_input ``[rows, in]`` in the dtype of dy, grad_weight as ``weight``, grad_bias
    ``[experts, out]`` in FP32; empty where not wanted, zero for rows and experts without the other.
    ``x, x_descale`` are what :func:`experts_fwd` saved, or with ``hp`` the input and nothing."""
    n_out, n_in = _features(weight, transposed)
    nothing = lambda: dy.new_empty(0)
    dx = dy.new_empty(dy.shape[0], n_in) if wants_dx else nothing()
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if wants_dw else nothing()
    db = dy.new_zeros(len(ends), n_out, dtype=torch.float32) if wants_db else nothing()
    saved = _Saved(n_in, recipe, backend)
    idle, last = set(range(len(ends))), 0
    for expert, start, last in _groups(ends, dy.shape[0]):
        idle.remove(expert)
        rows = dy[start:last]
        if hp or not wants_dw:
            kept = (x[start:last],) if wants_dw else ()
        else:
            kept = saved.next((x, x_descale), last - start)
        w = weight[expert].t() if transposed else weight[expert]
        d_in, d_weight = gradients(rows, w, kept, (wants_dx, wants_dw), hp, recipe, backend)
        if wants_dx:
            dx[start:last] = d_in
        if wants_dw:
            dw[expert] = d_weight.t() if transposed else d_weight
        if wants_db:
            torch.sum(rows, 0, dtype=torch.float32, out=db[expert])
    if wants_dx:
        dx[last:] = 0
    if wants_dw:
        for expert in idle:
            dw[expert] = 0
    return dx, dw, db


@torch.library.register_fake(f"{NAMESPACE}::experts_bwd")
def _(
    dy, weight, x, x_descale, ends, transposed, wants_dx, wants_dw, wants_db, hp, recipe, backend
):
    n_out, n_in = _features(weight, transposed)
    nothing = lambda: dy.new_empty(0)
    dx = dy.new_empty(dy.shape[0], n_in) if wants_dx else nothing()
    dw = weight.new_empty(weight.shape) if wants_dw else nothing()
    db = dy.new_empty(weight.shape[0], n_out, dtype=torch.float32) if wants_db else nothing()
    return dx, dw, db


class ExpertsFunction(torch.autograd.Function):
    """Saves and forwards; ``x [rows, in]``."""

    @staticmethod
    def forward(ctx, x, weight, bias, ends, transposed, save_input, hp, recipe, backend):
        output, *saved = experts_fwd(
            x, weight, bias, ends, transposed, save_input and not hp, recipe, backend
        )
        if save_input and hp:
            saved[0] = kept(x)
        ctx.save_for_backward(weight, ends, *saved)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.transposed, ctx.options = transposed, (hp, recipe, backend)
        return output

    @staticmethod
    def backward(ctx, dy):
        refuse_double_backward("fp8_experts_linear")
        weight, ends, *saved = ctx.saved_tensors
        wants = ctx.needs_input_grad[:3]
        grads = experts_bwd(dy, weight, *saved, ends, ctx.transposed, *wants, *ctx.options)
        dx, dw, db = (g if wanted else None for g, wanted in zip(grads, wants, strict=True))
        return dx, dw, None if db is None else db.to(ctx.bias_dtype), *(None,) * 6


def fp8_experts_linear(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    bias: Tensor | None = None,
    recipe: str | LinearRecipe = "blockwise",
    backend: str | None = None,
    *,
    transposed: bool = False,
) -> Tensor:
    """``x W_eᵀ + bias_e`` for the rows of each expert e: :func:`fp8_linear` of every expert that has
    rows. Experts without rows get zero gradients.

    Args:
        x: ``[rows, in]``, FP32, BF16 or FP16, sorted by expert.
        weight: ``[experts, out, in]``, or ``[experts, in, out]`` if ``transposed``; the
            high-precision master weights, quantised in every call.
        ends: ``[experts]``, integers: rows ``ends[e-1]`` to ``ends[e]`` are of expert e. Rows past
            the last give zeros and get zero gradients. Best on the CPU: it is read there.
        bias: ``[experts, out]`` or None.
        recipe, backend: as in :func:`fp8_linear`.

    Returns:
        ``[rows, out]`` in the dtype of x (under autocast, in autocast's dtype).

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fp8_linear`.

    >>> ends = torch.tensor([3, 3, 5])
    >>> fp8_experts_linear(torch.randn(5, 64), torch.randn(3, 32, 64), ends).shape
    torch.Size([5, 32])
    """
    what = "fp8_experts_linear"
    recipe = LinearRecipe.resolve(recipe)
    refuse_transforms(what)
    require_tensors(what, x=x, weight=weight, ends=ends)
    if bias is not None:
        require_tensors(what, bias=bias)
    _check_experts(what, x, weight, ends, bias)
    autocast = autocast_dtype(x)
    one = weight.detach()[0]
    check_linear(
        what,
        x,
        one.t() if transposed else one,
        None if bias is None else bias.detach()[0],
        autocast is not None,
    )
    x, chosen = cast_and_choose(x, autocast, recipe, backend)
    # Asked here: inside the Function gradients are always off.
    save_input = torch.is_grad_enabled() and weight.requires_grad
    return ExpertsFunction.apply(
        x, weight, bias, ends.to("cpu"), transposed, save_input, recipe.grad_weight_hp,
        recipe.encoded, chosen,
    )  # fmt: skip


def _check_experts(what: str, x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 3 or 0 in weight.shape or x.dim() != 2:
        raise ValueError(
            f"{what}: x is {tuple(x.shape)}, weight {tuple(weight.shape)}; x is [rows, in] and weight "
            "[experts, out, in] (or transposed), every size of it at least 1."
        )
    if ends.is_meta and not x.is_meta:
        raise ValueError(
            f"{what}: `ends` is on meta and x on {x.device}; its values are read. Make it on the CPU."
        )
    if ends.shape != weight.shape[:1] or ends.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{what}: `ends` is {ends.dtype} {tuple(ends.shape)}; it must be int32 or int64, one for "
            f"each of {weight.shape[0]} experts."
        )
    if bias is not None and (bias.dim() != 2 or bias.shape[0] != weight.shape[0]):
        raise ValueError(
            f"{what}: bias is {tuple(bias.shape)}; it must be [experts, out], of {weight.shape[0]} "
            "experts."
        )
