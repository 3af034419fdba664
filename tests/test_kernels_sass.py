"""The check of machine code for bytes that are converted before they are there, on lines of code."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
import sass  # noqa: E402

CAST = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C {}, R6, R7, RZ"
ADDRESS = "IADD3 {}, R1, R2, R3"
FINE = [
    [CAST.format("R5")],
    ["LDG.E.64 R4, desc[UR4][R2.64]"],
    ["CS2R R4, SRZ"],
    [CAST.format("R5"), "LOP3.LUT R5, R5, UR4, RZ, 0x3c, !PT"],
    [CAST.format("R5"), "SHF.R.S32.HI R0, RZ, 0x1f, R0", "LOP3.LUT R5, R5, R0, RZ, 0x3c, !PT"],
    [ADDRESS.format("R5"), CAST.format("R4"), "SHFL.BFLY PT, R5, R4, 0x1, 0x1f"],
    [
        ADDRESS.format("R4"),
        CAST.format("R8"),
        "PRMT R5, R8, 0x7610, R4",
    ],  # the upper half is not used
    [ADDRESS.format("R5"), "BRA `(.L_x_1)"],  # what comes after it comes from elsewhere
]
WRONG = [
    [],
    [ADDRESS.format("R5")],
    ["LDC.64 R4, c[0x0][0x210]"],
    ["MOV R5, c[0x0][0x210]"],
    ["IMAD.MOV.U32 R5, RZ, RZ, c[0x0][0x210]"],
    ["UIADD3 UR5, UR4, 0x1, URZ", "MOV R5, UR5"],
    [ADDRESS.format("R4"), CAST.format("R5"), "SHFL.BFLY PT, R5, R4, 0x1, 0x1f"],
    [ADDRESS.format("R4"), CAST.format("R8"), "PRMT R5, R4, 0x7610, R8"],
    # Seen: bytes of a word taken out before the word was there, joined with others.
    ["SHF.R.S32.HI R20, RZ, 0x1f, R8", "LOP3.LUT R84, R20, 0xffff, RZ, 0xc0, !PT", CAST.format("R20"),
     "SHF.R.U32.HI R9, RZ, 0x8, R84", "LOP3.LUT R20, R20, 0xff, RZ, 0xc0, !PT", "IMAD R5, R9, 0x100, R20"],
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "found"), [*((code, 0) for code in FINE), *((code, 1) for code in WRONG)]
)
def test_where_the_bytes_come_from(code: list[str], found: int, monkeypatch) -> None:
    code = [*code, "F2FP.F16.E4M3.UNPACK_B R10, R5"]
    lines = [f"        /*{16 * i:04x}*/                   {text} ;" for i, text in enumerate(code)]
    monkeypatch.setattr(sass, "_disassembled", lambda cubin: lines)
    assert sass.foreign_conversions(b"") == found
