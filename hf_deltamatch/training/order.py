"""The order of training sequences, a pure function of seed and position: nothing to save but a number."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def order_positions(n: int, seed: int, start: int, count: int) -> Tensor:
    """Which of ``n`` sequences are at positions ``start`` to ``start + count`` of the endless order.

    Each epoch is a permutation of its own, drawn from ``(seed, epoch)``; positions go on across
    epochs, so no sequence is dropped at the end of one.

    Returns:
        int64 ``[count]``.

    Raises:
        ValueError: no sequences, or a negative position.
    """
    if n < 1 or start < 0 or count < 0:
        raise ValueError(
            f"order_positions: {n} sequences from position {start}, {count} of them; there must be "
            "at least one sequence, and no number may be negative."
        )
    parts, position, end = [torch.empty(0, dtype=torch.int64)], start, start + count
    while position < end:
        epoch, first = divmod(position, n)
        last = min(n, first + end - position)
        parts.append(_permutation(n, seed, epoch)[first:last])
        position += last - first
    return torch.cat(parts)


@functools.lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> Tensor:
    # One stream of numbers per epoch; seeds of neighbours must not meet.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(n, generator=generator)
