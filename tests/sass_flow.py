"""A third fault of NVIDIA's assembler, looked for along the paths of a kernel's machine code.

Descriptors of operands in shared memory, worked out before a loop, were used again after it, and in a loop
that follows: on a path that enters neither the first nor what lies before it, the uniform registers hold
something else (ptxas 12.8; kernels whose specialised warps repeat several loops).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sass import _INSTRUCTION, _LABEL, _disassembled

_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_WRITES_UNIFORM = re.compile(r"\S+ (?:!?U?P[T\d]+, )*UR(\d+)\b")
_ADDRESSES = ("ST", "BAR", "SYNCS", "BRA", "UTMA", "WARP", "QGMMA", "HGMMA", "LDG", "LDS", "LDL")
"""Instructions whose first uniform register is read."""

Code = list[tuple[str, bool]]


def _parse(lines: Iterable[str]) -> tuple[Code, dict[str, int]]:
    """Instructions, and whether a predicate decides on them; where labels stand."""
    code: Code = []
    labels: dict[str, int] = {}
    for line in lines:
        if m := _LABEL.match(line):
            labels[m[1]] = len(code)
        elif m := _INSTRUCTION.search(line):
            code.append((m[1], "@" in line))
    return code, labels


def _writes(text: str) -> range:
    opcode = text.split(" ")[0]
    m = _WRITES_UNIFORM.match(text)
    if not m or opcode.startswith(_ADDRESSES):
        return range(0)
    count = 4 if ".128" in opcode else 2 if re.search(r"\.64|\.WIDE", opcode) else 1
    return range(int(m[1]), int(m[1]) + count)


def _reads(text: str) -> list[int]:
    found = [int(r) for r in _UNIFORM.findall(text)]
    return found[1:] if len(_writes(text)) else found


def _next(code: Code, labels: dict[str, int]) -> list[list[int]]:
    """Of each instruction those that may follow. Specialised warps start (BRX) where registers are handed over."""
    starts = [
        at for at in labels.values()
        if any("USETMAXREG" in text for text, _ in code[at : at + 4])
    ]  # fmt: skip
    out = []
    for i, (text, predicated) in enumerate(code):
        opcode = text.split(" ")[0]
        after = [i + 1]
        if opcode.startswith("BRX"):
            after = starts
        elif opcode.startswith(("BRA", "EXIT")):
            # A predicate among the operands decides as well.
            goes_on = predicated or re.search(r"BRA\S* (?:!?U?P\d|DIV)", text)
            after = after if goes_on else []
            if m := _TARGET.search(text):
                after = [*after, labels[m[1]]]
        out.append([j for j in after if j < len(code)])
    return out


def unwritten_uniforms(cubin: bytes) -> int:
    """Instructions that read a uniform register which some path from the kernel's start has not written."""
    code, labels = _parse(_disassembled(cubin))
    after = _next(code, labels)
    written = [sum(1 << r for r in _writes(text)) for text, _ in code]
    known: list[int | None] = [None] * len(code)
    known[0] = 0
    todo = [0]
    while todo:
        i = todo.pop()
        here = known[i] | written[i]
        for j in after[i]:
            there = here if known[j] is None else known[j] & here
            if there != known[j]:
                known[j] = there
                todo.append(j)
    return sum(
        any(not known[i] >> r & 1 for r in _reads(text))
        for i, (text, _) in enumerate(code)
        if known[i] is not None
    )
