"""Triton's interpreter with the E4M3 codes of NaN, which it reads as ±480 up to 3.9."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def nan_codes() -> Iterator[None]:
    """Products and casts of interpreted kernels read 0x7F and 0xFF as NaN, as a device does. Nothing
    changes on a device."""
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter._convert_float

    def convert(x, from_dtype, to_dtype, rounding):
        out = plain(x, from_dtype, to_dtype, rounding)
        if from_dtype == tl.float8e4nv and to_dtype.primitive_bitwidth > 8:
            bad = (np.frombuffer(x.tobytes(), np.uint8) & 0x7F) == 0x7F
            width = to_dtype.primitive_bitwidth
            mantissa = to_dtype.fp_mantissa_width
            code = ((1 << (width - 1 - mantissa)) - 1) << mantissa | 1 << (mantissa - 1)
            out = np.where(bad.reshape(out.shape), out.dtype.type(code), out)
        return out

    interpreter._convert_float = convert
    try:
        yield
    finally:
        interpreter._convert_float = plain
