"""The product of a gated feed-forward layer, ``silu(gate) · up``, and its gradient: the specification.

FP32 throughout, rounded once. SwiGLU: arXiv 2002.05202.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) · up`` in the dtype of gate; both of one shape."""
    g = gate.float()
    return (g * torch.sigmoid(g) * up.float()).to(gate.dtype)


def gated_bwd(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, in their dtypes; with s the sigmoid of gate,
    ``dh · up · s · (1 + gate · (1 − s))`` and ``dh · gate · s``."""
    d, g, u = dh.float(), gate.float(), up.float()
    s = torch.sigmoid(g)
    return (d * u * s * (1 + g * (1 - s))).to(gate.dtype), (d * g * s).to(up.dtype)
