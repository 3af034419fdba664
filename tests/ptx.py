"""PTX of a compiled kernel, looked through for barriers in memory that something else uses.

A barrier (``mbarrier``) must not be written over before it is invalidated. Triton gives the memory of one
that no warp waits for to what comes after: another barrier, or the values that it hands to specialised
warps. Where processes took turns on one GPU, such kernels hung or read what they should not.
"""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"add\.s32\s+(%r\d+), %r\d+, (\d+);|mov\.b32\s+(%r\d+), (global_smem);")
_BARRIER = re.compile(r"mbarrier\.(init|inval)\.shared\S*\s+\[(%r\d+)\]")
_STORE = re.compile(r"st\.shared(?:\.v(\d))?\.b(\d+)\s+\[global_smem(?:\+(\d+))?\]")
BARRIER_BYTES = 8


def reused_barriers(ptx: str) -> tuple[int, int]:
    """Barriers that are made, and how often one is made, or a value is stored, where another one is valid; of
    addresses that are numbers, in the order of the code."""
    known: dict[str, int] = {}
    valid: set[int] = set()
    made = reused = 0
    for line in ptx.splitlines():
        if m := _ADDRESS.search(line):
            known[m[1] or m[3]] = int(m[2] or 0)
        elif m := _BARRIER.search(line):
            at = known.get(m[2])
            if at is None:  # worked out from a number that only the run knows
                continue
            if m[1] == "inval":
                valid.discard(at)
            else:
                made += 1
                reused += at in valid
                valid.add(at)
        elif m := _STORE.search(line):
            first = int(m[3] or 0)
            end = first + int(m[1] or 1) * int(m[2]) // 8
            reused += any(first < at + BARRIER_BYTES and at < end for at in valid)
    return made, reused
