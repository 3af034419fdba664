"""Tile sizes of the attention kernels by head dimension.

Measured on one H200, ms; versions in ``examples/benchmarks/NOTES.md``, and ``tests/tune_attention.py`` times
others. B4 H16 T8192 D128 causal: forward 64×128×4 warps with 2 stages 1.30, 3 stages 10 % slower, 64×64 22 %,
128×128×8 1.96; δ 64×128 with 3 stages 1.14 (2 stages 1.40, 64×64 1.17); dQ 64×128 with 2 stages 1.92 (64×64
1.89); both in one pass, 64×64 with 3 stages 2.57 (2 stages 2.76), in Gluon 2.29; dK/dV 64×64×4 3.63 (32×64 6.5;
3 stages one program per multiprocessor), in Gluon 2.82. One launch each for dK and dV did not pay. D64 (B4 H32),
where fewer registers let another program run: forward 1.92 (2.04 without that), δ 1.73 (1.93), dQ 2.67 (2.94), both
in one pass 64×128 with 3 stages 3.49 (2 stages 3.63, 64×64 4.2), dK/dV 64×64 with 168 registers 4.41, which is less
than in Gluon (4.7; 128×64 5.2). D256 (B2 H8): forward 1.00, δ 64×64×4 0.65 (128×64×8 0.71), dQ 64×128×8 1.62 (64×64×4
2.23), dK/dV 64×64×8 3.65 (32×64×8 4.8).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hf_deltamatch.kernels import (
    SMALL_SHARED_MEMORY,
    TENSOR_MEMORY,
    capability_of,
    wants_hopper,
)
from hf_deltamatch.recipes import AttentionRecipe

HOPPER_HEADS = (128,)
"""Padded head dimensions of the Hopper kernels."""


class Config(NamedTuple):
    """``BLOCK_M`` queries × ``BLOCK_N`` keys; both divide 128. ``maxnreg``: registers of a thread, where the
    assembler takes more than it needs and fewer programs fit a multiprocessor."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    STAGES: int
    maxnreg: int | None = None

    def launch(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if value is not None}


def _is_small(device: torch.device) -> bool:
    return capability_of(device) in SMALL_SHARED_MEMORY


def _is_measured(device: torch.device, tile: bool) -> bool:
    """Where more than the shape of a tile was chosen by measurement: ``128xD`` on 9.0 (blocks of one token and
    Boolean masks need more registers and memory)."""
    return tile and capability_of(device) == (9, 0)


def fwd_config(BLOCK_D: int, BLOCK_DV: int, device: torch.device, *, tile: bool = True) -> Config:
    """``tile``: one descale for 128 tokens."""
    widest = max(BLOCK_D, BLOCK_DV)
    if widest <= 64 and _is_measured(device, tile):
        return Config(64, 128, 4, 2, 128)
    if widest <= 128:
        return Config(64, 128, 4, 2)
    return Config(64, 64, 4, 2)


def sums_in_units(BLOCK_D: int, BLOCK_DV: int) -> bool:
    """Whether the forward's sum is in units of V's latest descale: fewer instructions. D256: 3 % slower."""
    return max(BLOCK_D, BLOCK_DV) <= 128


def delta_config(BLOCK_D: int, BLOCK_DV: int, device: torch.device, *, tile: bool = True) -> Config:
    widest = max(BLOCK_D, BLOCK_DV)
    if _is_small(device) or widest > 128:
        return Config(64, 64, 4, 2)
    if widest <= 64 and _is_measured(device, tile):
        return Config(64, 128, 4, 3, 168)
    return Config(64, 128, 4, 3)


def dq_config(BLOCK_D: int, BLOCK_DV: int, device: torch.device, *, tile: bool = True) -> Config:
    widest, measured = max(BLOCK_D, BLOCK_DV), _is_measured(device, tile)
    if _is_small(device):
        return Config(64, 64, 4, 2)
    if widest <= 64 and measured:
        return Config(64, 128, 4, 2, 168)
    if widest <= 128:
        return Config(64, 128, 4, 2)
    return Config(64, 128, 8, 2) if measured else Config(64, 64, 4, 2)


def has_one_pass(recipe: AttentionRecipe, D: int, Dv: int, *, tile: bool) -> bool:
    """True where the matched δ and dQ come from one sweep over the keys, which reads the output for an
    estimate of δ. D256 has no registers for a second accumulator."""
    matched = recipe.delta == "matched" and not recipe.project_row_sum
    return tile and matched and max(D, Dv) <= 128


def one_pass_config(BLOCK_D: int, BLOCK_DV: int, device: torch.device) -> Config:
    if _is_small(device):
        return Config(64, 64, 4, 2)
    return Config(64, 128 if max(BLOCK_D, BLOCK_DV) <= 64 else 64, 4, 3)


def has_hopper(BLOCK_D: int, BLOCK_DV: int, device: torch.device) -> bool:
    """True where Hopper kernels compute the gradients of ``128xD``, with the tiles of the others."""
    if BLOCK_D != BLOCK_DV or BLOCK_D not in HOPPER_HEADS or not wants_hopper():
        return False
    return capability_of(device) == (9, 0)


def dkdv_configs(
    BLOCK_D: int, BLOCK_DV: int, device: torch.device, *, tile: bool = True
) -> list[tuple[Config, bool, bool]]:
    """One launch for dK and dV, or one each: ``(config, wants_dk, wants_dv)``."""
    widest = max(BLOCK_D, BLOCK_DV)
    if widest <= 64 and _is_measured(device, tile):
        c = Config(64, 64, 4, 2, 168)
    elif widest <= 64:
        c = Config(128, 64, 4, 2)
    else:
        c = Config(64, 64, 4 if widest <= 128 else 8, 2)
    return [(c, True, True)]


def _is_native(device: torch.device) -> bool:
    return capability_of(device) in TENSOR_MEMORY


def mx_fwd_config(BLOCK_D: int, BLOCK_DV: int, device: torch.device) -> Config:
    """``mx``: what compiles and fits, not measured."""
    return Config(128 if _is_native(device) else 64, 64, 4, 2)


mx_delta_config = mx_dq_config = mx_fwd_config


def mx_dkdv_configs(
    BLOCK_D: int, BLOCK_DV: int, device: torch.device
) -> list[tuple[Config, bool, bool]]:
    """A launch each where both gradients do not fit the tensor memory (or the registers)."""
    c = Config(64, 128 if _is_native(device) else 64, 4, 2)
    if BLOCK_D + BLOCK_DV > 256:
        return [(c, True, False), (c, False, True)]
    return [(c, True, True)]
