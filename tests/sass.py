"""Machine code of a compiled kernel, looked through for two faults of NVIDIA's assembler.

A warpgroup product (HGMMA, QGMMA) may take its left operand from registers. Where a loop leaves that
operand alone, ptxas 12.8 and 13.0 gave its registers to something else in the loop, so that every round
but the first multiplied by that: wrong results from correct PTX.

Where four numbers were cast to the E4M3 bytes of a word and two of these back to FP16, ptxas 12.8 converted
the register of the word before that round had written it, or took bytes out of a register before the word
was there: an address then.
"""

from __future__ import annotations

import functools
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
_FROM_E4M3 = re.compile(r"F2FP\.F16\.E[45]M[23]\.UNPACK_B\S* R\d+, R(\d+)")
_WRITES = re.compile(r"(\S+) (?:U?P[T\d]+, )?R(\d+)\b")
_WRITES_NO_REGISTER = ("ST", "HGMMA", "QGMMA", "BAR", "SYNCS", "UTMA", "RED", "ATOM")
_EXCLUSIVE_OR = re.compile(r"LOP3.LUT .*, RZ, 0x3c,")
_SIGN = re.compile(r"SHF\.R\.S32\.HI R\d+, RZ, 0x1f,")
_READS = re.compile(r"\bR\d+")
_MAKES_BYTES = ("F2FP", "LDG", "LDS", "LDL", "LD.", "ATOM")
_NOTHING = re.compile(r"U?RZ|U?PT|!PT|-?0x[0-9a-f]+")
LEFT_REGISTERS = 4  # a row of 16 bytes, for 64 × 32 bytes in 128 threads


def _width(opcode: str) -> int:
    """Registers that an instruction writes, from its first one on."""
    if re.search(r"\.128|\.M88\.4|\.MT88\.4", opcode):
        return 4
    return 2 if re.search(r"\.64|\.WIDE|\.M88\.2|\.MT88\.2|^CS2R$", opcode) else 1


def _loops(lines: list[str]) -> list[tuple[int, int]]:
    """First and last line of each loop: a conditional jump backwards."""
    labels = {m[1]: i for i, line in enumerate(lines) if (m := _LABEL.match(line))}
    jumps = [(labels.get(m[1], i), i) for i, x in enumerate(lines) if (m := _CONDITIONAL.search(x))]
    return [(first, last) for first, last in jumps if first < last]


@functools.lru_cache(maxsize=1)
def _disassembled(cubin: bytes) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(NVDISASM), "-c", str(path)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return lines.splitlines()


def _written(text: str) -> range:
    """Registers that an instruction writes."""
    m = _WRITES.match(text)
    if not m or m[1].startswith(_WRITES_NO_REGISTER):
        return range(0)
    return range(int(m[2]), int(m[2]) + _width(m[1]))


def _code(cubin: bytes) -> Iterator[tuple[list[str], dict[int, list[int]]]]:
    """Every loop's instructions, and where in it each register is written."""
    lines = _disassembled(cubin)
    for first, last in _loops(lines):
        code = [m[1] if (m := _INSTRUCTION.search(x)) else "" for x in lines[first:last]]
        written: dict[int, list[int]] = {}
        for at, text in enumerate(code):
            for register in _written(text):
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
    """Conversions of FP8 in loops that read a register which this round has not written yet."""
    early = 0
    for code, written in _code(cubin):
        for at, text in enumerate(code):
            if m := _FROM_E4M3.match(text):
                source = written.get(int(m[1]), [])
                early += bool(source) and source[0] >= at
    return early


def _operands(text: str) -> list[str]:
    return [x.strip().split(".")[0] for x in text.partition(" ")[2].split(",")]


def _shifted(wanted: frozenset[int], by: int) -> frozenset[int]:
    return frozenset(byte + by for byte in wanted if 0 <= byte + by < 4)


def _sources(text: str, wanted: frozenset[int]) -> list[tuple[str, frozenset[int]]] | None:
    """What an instruction takes the wanted bytes of its result from: registers and bytes of them. None if it
    does not move bytes."""
    opcode, operands = text.split(" ")[0], _operands(text)
    if opcode == "CS2R":
        return []  # zeros that a load may leave
    numbers = [int(x, 16) for x in operands if x.startswith("0x")]
    if opcode == "PRMT" and numbers:
        picked = [(numbers[0] >> 4 * byte) & 7 for byte in wanted]
        low, high = (frozenset(n - at for n in picked if at <= n < at + 4) for at in (0, 4))
        return [(operands[1], low), (operands[3], high)]
    if opcode == "LOP3.LUT" and operands[3:5] == ["RZ", "0xc0"] and len(numbers) == 2:
        return [(operands[1], frozenset(b for b in wanted if numbers[0] >> 8 * b & 255))]
    if opcode.startswith("SHF.R") and numbers and numbers[0] % 8 == 0:
        return [(operands[3], _shifted(wanted, numbers[0] // 8))]
    if opcode.startswith("SHF.L") and numbers and numbers[0] % 8 == 0:
        return [(operands[1], _shifted(wanted, -(numbers[0] // 8)))]
    if opcode.startswith("IMAD") and numbers and numbers[0] in (1 << 8, 1 << 16, 1 << 24):
        by = (numbers[0].bit_length() - 1) // 8
        return [(operands[1], _shifted(wanted, -by)), (operands[3], wanted)]
    if opcode.startswith("SHFL"):
        return [(operands[2], wanted)]
    if opcode.startswith(("MOV", "IMAD.MOV", "SEL", "FSEL", "LOP3")):
        return [(x, wanted) for x in operands[1:]]
    return None


def foreign_conversions(cubin: bytes) -> int:
    """Conversions of FP8 outside of loops whose bytes come from what is neither cast nor loaded: back in the
    order of the code, as far as instructions only move and join bytes, to a jump at most."""
    lines = _disassembled(cubin)
    code = [m[1] if (m := _INSTRUCTION.search(x)) else "" for x in lines]
    looped = {at for first, last in _loops(lines) for at in range(first, last)}
    last: dict[str, int] = {}
    before: list[dict[str, int]] = []
    jumped, foreign = False, 0

    def is_foreign(at: int, register: str, wanted: frozenset[int]) -> bool:
        todo, seen = [(at, register, wanted)], set()
        while todo:
            reader, register, wanted = step = todo.pop()
            if step in seen or not wanted or _NOTHING.fullmatch(register):
                continue
            seen.add(step)
            i = before[reader].get(register)
            if i is None:
                if jumped and register.startswith("R"):
                    continue
                return True  # a uniform register, a constant, or nobody's
            if code[i].startswith(_MAKES_BYTES):
                continue
            parts = _sources(code[i], wanted)
            if parts is None:
                return True
            if _EXCLUSIVE_OR.match(code[i]):  # with the zero of `casts.unknown_zero`
                zero = lambda x, i=i: x.startswith("UR") or _SIGN.match(code[before[i].get(x, i)])
                parts = [part for part in parts if not zero(part[0])]
            todo += [(i, register, some) for register, some in parts]
        return False

    for at, text in enumerate(code):
        before.append({r: last[r] for r in _READS.findall(text) if r in last})
        if at not in looped and (m := _FROM_E4M3.match(text)):
            half = frozenset({2, 3} if ".H1" in text.rpartition(",")[2] else {0, 1})
            foreign += is_foreign(at, f"R{m[1]}", half)
        last |= {f"R{register}": at for register in _written(text)}
        if text.startswith("BRA") and "@" not in lines[at]:
            last, jumped = {}, True  # what follows comes from elsewhere
    return foreign
