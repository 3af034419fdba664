"""Kernels: ``silu(gate) · up`` and its gradient, element by element.

Reference: :mod:`hf_deltamatch.reference.gated`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = tl.constexpr(2048)


@triton.jit
def _gated_kernel(gate_ptr, up_ptr, h_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    h = g * tl.sigmoid(g) * u
    tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_bwd_kernel(
    dh_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, h_ptr, n,
    WITH_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    d = tl.load(dh_ptr + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    dg = d * u * s * (1.0 + g * (1.0 - s))
    du = d * g * s
    tl.store(dgate_ptr + at, dg.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + at, du.to(dup_ptr.dtype.element_ty), mask=inside)
    if WITH_H:
        h = g * s * u
        tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=inside)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) · up`` in the dtype of gate; contiguous, of one shape."""
    h = torch.empty_like(gate)
    if n := gate.numel():
        _gated_kernel[(triton.cdiv(n, _BLOCK.value),)](gate, up, h, n, BLOCK=_BLOCK.value)
    return h


def gated_bwd(
    dh: Tensor, gate: Tensor, up: Tensor, *, with_h: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of gate and up and, ``with_h``, ``silu(gate) · up`` once more."""
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    h = torch.empty_like(gate) if with_h else None
    if n := gate.numel():
        _gated_bwd_kernel[(triton.cdiv(n, _BLOCK.value),)](
            dh, gate, up, dgate, dup, h, n, WITH_H=with_h, BLOCK=_BLOCK.value
        )
    return dgate, dup, h
