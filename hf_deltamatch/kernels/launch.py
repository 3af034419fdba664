"""What every launcher needs: packing tables, padded sizes, the interpreter switch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from hf_deltamatch.formats import TOKENS_PER_TILE

SOFT_CAST: bool = bool(triton.knobs.runtime.interpret)
"""The interpreter rounds FP8 wrongly, so there the cast is done in integers."""


@dataclass(frozen=True)
class Packing:
    """Slots of 128 tokens along one axis.

    ``cu [n + 1]`` int32 offsets of the packed sequences and ``segment [slots]`` the sequence that
    owns a slot; both None for plain batches.
    """

    slots: int
    cu: Tensor | None = None
    segment: Tensor | None = None


def packing(T: int, cu: Tensor | None) -> Packing:
    """Slots of an axis of ``T`` tokens; nothing is copied to the host."""
    if cu is None:
        return Packing(-(-T // TOKENS_PER_TILE))
    n = cu.numel() - 1
    slots = T // TOKENS_PER_TILE + n
    first = cu[:-1] // TOKENS_PER_TILE + torch.arange(n, device=cu.device)
    at = torch.arange(slots, device=cu.device)
    segment = torch.searchsorted(first, at, right=True) - 1
    return Packing(slots, cu.to(torch.int32), segment.clamp_min(0).to(torch.int32))


def feature_block(D: int) -> int:
    """Power of two that holds ``D`` features; FP8 products need at least 32."""
    return max(32, triton.next_power_of_2(D))


def padded_features(D: int) -> int:
    """Row length of a stored payload: rows start at multiples of 16 bytes."""
    return max(16, -(-D // 16) * 16)
