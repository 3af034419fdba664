"""Tensors on their way into an autograd function, and into what it keeps: where torch.compile differs."""

from __future__ import annotations

import torch
from torch import Tensor


def distinct(first: Tensor, *others: Tensor) -> list[Tensor]:
    """The same tensors as different objects: torch.compile refuses one tensor given twice to an
    autograd function (self-attention on one tensor, one ``cu_seqlens`` for q and k, tied weights)."""
    out = [first]
    for x in others:
        out.append(x.view_as(x) if any(x is seen for seen in out) else x)
    return out


def kept(x: Tensor) -> Tensor:
    """An activation that callers can see, for ``save_for_backward``. If it is changed in place after the
    call eager autograd raises; under torch.compile the backward would read the change without a word. So it
    is a copy there, which Inductor drops where nothing changes it."""
    return x.clone() if torch.compiler.is_compiling() else x
