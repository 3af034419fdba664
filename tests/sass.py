"""Machine code of a compiled kernel, looked through for two faults of NVIDIA's assembler.

A warpgroup product (HGMMA, QGMMA) may take its left operand from registers. Where a loop leaves that
operand alone, ptxas 12.8 and 13.0 gave its registers to something else in the loop, so that every round
but the first multiplied by that: wrong results from correct PTX.

Where four numbers were cast to the E4M3 bytes of a word and two of these back to FP16, ptxas 12.8 converted
the register of the word before that round had written it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton

NVDISASM = Path(triton.__path__[0]) / "backends/nvidia/bin/nvdisasm"
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?(.*?);")
_CONDITIONAL = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+@!?U?P\w+ BRA.*`\((\.L_x_\d+)\)")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_PRODUCT = re.compile(r"[HQ]GMMA\S* R\d+, R(\d+), gdesc")
_FROM_E4M3 = re.compile(r"F2FP\.F16\.E4M3\.UNPACK_B\S* R\d+, R(\d+)")
_WRITES = re.compile(r"(\S+) R(\d+)\b")
_WRITES_NO_REGISTER = ("ST", "HGMMA", "QGMMA", "BAR", "SYNCS", "UTMA", "RED", "ATOM")
LEFT_REGISTERS = 4  # a row of 16 bytes, for 64 × 32 bytes in 128 threads


def _width(opcode: str) -> int:
    """Registers that an instruction writes, from its first one on."""
    if re.search(r"\.128|\.M88\.4|\.MT88\.4", opcode):
        return 4
    return 2 if re.search(r"\.64|\.WIDE|\.M88\.2|\.MT88\.2", opcode) else 1


def _loops(lines: list[str]) -> list[tuple[int, int]]:
    """First and last line of each loop: a conditional jump backwards."""
    labels = {m[1]: i for i, line in enumerate(lines) if (m := _LABEL.match(line))}
    jumps = [(labels.get(m[1], i), i) for i, x in enumerate(lines) if (m := _CONDITIONAL.search(x))]
    return [(first, last) for first, last in jumps if first < last]


def _code(cubin: bytes) -> Iterator[tuple[list[str], dict[int, list[int]]]]:
    """Every loop's instructions, and where in it each register is written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(NVDISASM), "-c", str(path)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = lines.splitlines()
    for first, last in _loops(lines):
        code = [m[1] if (m := _INSTRUCTION.search(x)) else "" for x in lines[first:last]]
        written: dict[int, list[int]] = {}
        for at, text in enumerate(code):
            m = _WRITES.match(text)
            if m and not m[1].startswith(_WRITES_NO_REGISTER):
                for register in range(int(m[2]), int(m[2]) + _width(m[1])):
                    written.setdefault(register, []).append(at)
        yield code, written


def lost_operands(cubin: bytes) -> tuple[int, int]:
    """Products in loops that take their left operand from registers, and how many of those find it
    overwritten after the first round."""
    found = lost = 0
    for code, written in _code(cubin):
        for at, text in enumerate(code):
            if m := _PRODUCT.search(text):
                found += 1
                left = range(int(m[1]), int(m[1]) + LEFT_REGISTERS)
                # Set in the loop, but nowhere before the product: the value is of the round before.
                lost += any(r in written and written[r][0] > at for r in left)
    return found, lost


def early_conversions(cubin: bytes) -> int:
    """Conversions of E4M3 in loops that read a register which this round has not written yet."""
    early = 0
    for code, written in _code(cubin):
        for at, text in enumerate(code):
            if m := _FROM_E4M3.match(text):
                source = written.get(int(m[1]), [])
                early += bool(source) and source[0] >= at
    return early
