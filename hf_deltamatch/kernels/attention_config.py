"""Tile sizes of the attention kernels by head dimension, and what the kernels do not do."""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    """``BLOCK_M`` queries × ``BLOCK_N`` keys; both divide 128."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    STAGES: int

    def launch(self) -> dict[str, int]:
        return self._asdict()


def fwd_config(BLOCK_D: int, BLOCK_DV: int) -> Config:
    if max(BLOCK_D, BLOCK_DV) <= 128:
        return Config(64, 128, 4, 3)
    return Config(64, 64, 4, 2)


def delta_config(BLOCK_D: int, BLOCK_DV: int) -> Config:
    if max(BLOCK_D, BLOCK_DV) <= 128:
        return Config(64, 128, 4, 3)
    return Config(64, 64, 4, 2)


def dq_config(BLOCK_D: int, BLOCK_DV: int) -> Config:
    if max(BLOCK_D, BLOCK_DV) <= 128:
        return Config(64, 64, 4, 3)
    return Config(64, 64, 4, 2)


def dkdv_config(BLOCK_D: int, BLOCK_DV: int) -> Config:
    if max(BLOCK_D, BLOCK_DV) <= 128:
        return Config(64, 64, 4, 2)
    return Config(32, 64, 4, 2)
