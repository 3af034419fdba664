"""Tile sizes of the attention kernels by head dimension.

Measured on one H200, ms; versions in ``examples/benchmarks/NOTES.md``. B4 H16 T8192 D128 causal: forward
64×128×4 warps with 2 stages 1.33, 3 stages 10 % slower, 128×128×8 1.96; δ 1.11 and dQ 1.83 with 64×128, and
2 stages for dQ (64×64 and 3 stages 6 % slower); dK/dV 64×64×4 3.42 (when that took 4.18, 64×128×8 took
4.20 and 3 stages 6.3: one program per multiprocessor). Larger tiles spill. One launch each for dK and dV
did not pay. D64 (B4 H32): dK/dV 128×64×4 5.2 (64×64×4 6.4 when it took 5.6). D256 (B2 H8): δ + dQ 64×64×4
2.9, 64×64×8 3 % slower; dK/dV 64×64×8 3.7 (when it took 4.9, 32×64×8 took 7.4, 32×64×4 and 32×128×8 23:
spills); 64×128×8 for dQ and a launch each of 128×64×8 do not fit the shared memory with grouped heads. The
Hopper kernels of D64: dK/dV 64×64 4.7. ``tests/tune_attention.py`` times others.
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

HOPPER_HEADS = (64, 128)
"""Padded head dimensions of the Hopper kernels."""


FWD_IN_UNITS = False
"""The forward's sum in units of V's latest descale: fewer instructions, but not yet run on a device."""


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


def fwd_config(BLOCK_D: int, BLOCK_DV: int, device: torch.device) -> Config:
    if max(BLOCK_D, BLOCK_DV) <= 128:
        return Config(64, 128, 4, 2)
    return Config(64, 64, 4, 2)


def delta_config(BLOCK_D: int, BLOCK_DV: int, device: torch.device) -> Config:
    if _is_small(device):
        return Config(64, 64, 4, 2)
    if max(BLOCK_D, BLOCK_DV) <= 128:
        return Config(64, 128, 4, 3)
    return Config(64, 64, 4, 2)


def dq_config(BLOCK_D: int, BLOCK_DV: int, device: torch.device) -> Config:
    if _is_small(device):
        return Config(64, 64, 4, 2)
    if max(BLOCK_D, BLOCK_DV) <= 128:
        return Config(64, 128, 4, 2)
    return Config(64, 64, 4, 2)


def has_hopper(BLOCK_D: int, BLOCK_DV: int, device: torch.device) -> bool:
    """True where Hopper kernels compute the gradients of ``128xD``, with the tiles of the others."""
    if BLOCK_D != BLOCK_DV or BLOCK_D not in HOPPER_HEADS or not wants_hopper():
        return False
    return capability_of(device) == (9, 0)


def dkdv_configs(
    BLOCK_D: int, BLOCK_DV: int, device: torch.device
) -> list[tuple[Config, bool, bool]]:
    """One launch for dK and dV, or one each: ``(config, wants_dk, wants_dv)``."""
    if max(BLOCK_D, BLOCK_DV) <= 64 and not has_hopper(BLOCK_D, BLOCK_DV, device):
        return [(Config(128, 64, 4, 2), True, True)]
    if max(BLOCK_D, BLOCK_DV) <= 128:
        return [(Config(64, 64, 4, 2), True, True)]
    return [(Config(64, 64, 8, 2), True, True)]


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
