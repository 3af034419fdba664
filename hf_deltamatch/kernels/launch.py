"""What every launcher needs: packing tables, padded sizes, the interpreter switch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from hf_deltamatch.formats import MX_BLOCK, TOKENS_PER_TILE
from hf_deltamatch.kernels.geometry import _rising_kernel, _segments_kernel

SOFT_CAST: bool = bool(triton.knobs.runtime.interpret)
"""The interpreter rounds FP8 wrongly, so there the cast is done in integers."""


def launch(
    kernel: Any,
    programs: int,
    pointers: tuple[Tensor | None, ...],
    args: tuple,
    seen: dict[tuple, CompiledKernel],
    **options: int,
) -> None:
    """``kernel[(programs,)](*pointers, *args, **options)``, all arguments in order.

    Triton looks at every argument to find what it compiled for their like, which takes the host most
    of the time of a launch. What it found is kept in ``seen``, so the next such launch goes straight
    to it. Pointers that are no multiples of 16 always take the long way.

    Args:
        seen: kept by the caller for launches that Triton compiles one kernel for, but for the device
            and what is set for the process: the same dtypes, the same pointers that are None, the
            same constants and options, and the same integers, but for those marked
            ``do_not_specialize`` (with 32 bits for all of them or more for all).
    """
    if SOFT_CAST:
        kernel[(programs,)](*pointers, *args, **options)
        return
    addresses = 0
    for x in pointers:
        if x is not None:
            addresses |= x.data_ptr()
    active = driver.active
    device = active.get_current_device()
    key = (active, device, knobs.runtime.debug, knobs.compilation.instrumentation_mode)
    direct = addresses % 16 == 0 and not _watched()
    compiled = seen.get(key) if direct else None
    if compiled is None:
        compiled = kernel[(programs,)](*pointers, *args, **options)
        if direct and isinstance(compiled, CompiledKernel):
            seen[key] = compiled
        return
    # As Triton itself does, without metadata and hooks: nobody is there to see them.
    compiled.run(
        programs, 1, 1, active.get_current_stream(device), compiled.function,
        compiled.packed_metadata, None, None, None, *pointers, *args,
    )  # fmt: skip


def _watched() -> bool:
    """Whether something wants to hear of launches (a profiler of Triton's), or compiles otherwise."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    if getattr(runtime, "add_stages_inspection_hook", None) is not None:
        return True
    return bool(getattr(knobs.compilation, "fpsan_homomorphic_casts", False))  # not in Triton 3.6


class Packing(NamedTuple):
    """Slots of 128 tokens along one axis.

    ``cu [n + 1]`` int32 offsets of the packed sequences and ``segment [slots]`` the sequence that
    owns a slot; both None for plain batches.
    """

    slots: int
    cu: Tensor | None = None
    segment: Tensor | None = None


def packings(Tq: int, Tk: int, cu_q: Tensor | None, cu_k: Tensor | None) -> tuple[Packing, Packing]:
    """Slots of the queries and of the keys; nothing is copied to the host."""
    if cu_q is None:
        return Packing(-(-Tq // TOKENS_PER_TILE)), Packing(-(-Tk // TOKENS_PER_TILE))
    n = cu_q.numel() - 1
    out = []
    for T, cu in ((Tq, cu_q), (Tk, cu_k)):
        slots = T // TOKENS_PER_TILE + n
        segment = torch.empty(slots, dtype=torch.int32, device=cu.device)
        # Clamped, or an offset past 32 bits would wrap into the range that is asserted.
        cu = cu.clamp(-1, 2**31 - 1).to(torch.int32).contiguous()
        out.append(Packing(slots, cu, segment))
    q, k = out
    _segments_kernel[(-(-max(q.slots, k.slots) // 128), 2)](
        q.cu, k.cu, q.segment, k.segment, n, q.slots, k.slots, BLOCK=128
    )
    return q, k


def assert_rising(Tq: int, Tk: int, q: Packing, k: Packing) -> None:
    """Offsets that do not fit would be read and written past the end; nobody waits for the answer.

    Raises:
        RuntimeError: on a CPU; on a CUDA device, an assertion there fails with the same message.
    """
    if q.cu is None:
        return
    valid = torch.empty((), dtype=torch.int32, device=q.cu.device)
    _rising_kernel[(1,)](q.cu, k.cu, valid, q.cu.numel() - 1, Tq, Tk, BLOCK=128)
    torch._assert_async(
        valid,
        "delta_matching_attention: `cu_seqlens` must rise from 0 to the number of tokens, here "
        f"{Tq} for q and {Tk} for k. Look at cu_seqlens.tolist(); tokens of padding need a "
        "sequence of their own.",
    )


def feature_block(D: int) -> int:
    """Power of two that holds ``D`` features; FP8 products need at least 32."""
    return max(32, 1 << (D - 1).bit_length())


def code_columns(D: int) -> int:
    """E8M0 codes that are stored for a token; ``ceil(D / 32)`` of them mean something."""
    return feature_block(D) // MX_BLOCK


def padded_features(D: int) -> int:
    """Row length of a stored payload: rows start at multiples of 16 bytes."""
    return max(16, -(-D // 16) * 16)
