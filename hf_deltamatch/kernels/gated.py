"""Kernels: ``silu(gate) · up`` and its gradient, element by element.

Reference: :mod:`hf_deltamatch.reference.gated`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_deltamatch.kernels.launch import SOFT_CAST
from hf_deltamatch.kernels.logits import LOG2E

_BLOCK = tl.constexpr(2048)
_SIGMOID = tl.constexpr(
    "{.reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e;}"
)


@triton.jit
def sigmoid(x, SOFT_CAST: tl.constexpr):
    """To 4e-6 of it (3e-7 for ``|x| < 5``), 0 below −87. ``1 / (1 + e^−x)`` of Triton is twice the instructions,
    for a division that is exact to the last bit."""
    if SOFT_CAST:
        return tl.sigmoid(x)
    else:
        return tl.inline_asm_elementwise(_SIGMOID, "=f,f", [x * -LOG2E], tl.float32, True, 1)


# Of ``d`` (the gradient of the product), gate, up and sigmoid(gate).
@triton.jit
def dgate_of(d, g, u, s):
    return d * u * s * (1.0 + g * (1.0 - s))


@triton.jit
def dup_of(d, g, s):
    return d * g * s


@triton.jit
def product_of(g, u, s):
    return g * s * u


@triton.jit
def _gated_kernel(gate_ptr, up_ptr, h_ptr, n, SOFT_CAST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    h = product_of(g, u, sigmoid(g, SOFT_CAST))
    tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_bwd_kernel(
    dh_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, h_ptr, n,
    WITH_H: tl.constexpr, SOFT_CAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    d = tl.load(dh_ptr + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    s = sigmoid(g, SOFT_CAST)
    dg = dgate_of(d, g, u, s)
    du = dup_of(d, g, s)
    tl.store(dgate_ptr + at, dg.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + at, du.to(dup_ptr.dtype.element_ty), mask=inside)
    if WITH_H:
        h = product_of(g, u, s)
        tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=inside)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) · up`` in the dtype of gate; contiguous, of one shape."""
    h = torch.empty_like(gate)
    if n := gate.numel():
        _gated_kernel[(triton.cdiv(n, _BLOCK.value),)](
            gate, up, h, n, SOFT_CAST=SOFT_CAST, BLOCK=_BLOCK.value
        )
    return h


def gated_bwd(
    dh: Tensor, gate: Tensor, up: Tensor, *, with_h: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of gate and up and, ``with_h``, ``silu(gate) · up`` once more."""
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    h = torch.empty_like(gate) if with_h else None
    if n := gate.numel():
        _gated_bwd_kernel[(triton.cdiv(n, _BLOCK.value),)](
            dh, gate, up, dgate, dup, h, n, WITH_H=with_h, SOFT_CAST=SOFT_CAST, BLOCK=_BLOCK.value,
        )  # fmt: skip
    return dgate, dup, h
