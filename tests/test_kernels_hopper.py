"""The Gluon kernels have no interpreter: at least they compile, in `make test` too (the other kernels
and capabilities: `test_kernels_compile`, slow)."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")
from test_kernels_compile import compile_for  # noqa: E402


def test_hopper_kernels_compile(tmp_path: Path) -> None:
    """With a window and a soft cap, which have branches of their own."""
    kernels = compile_for((9, 0), [{"D": 128, "window": 64, "softcap": 20.0}], tmp_path)
    names = [kernel["kernel"] for kernel in kernels]
    assert names.count("_attention_bwd_dq_hopper_kernel") == 2  # δ and dQ
    assert "_attention_bwd_dkdv_hopper_kernel" in names
    for kernel in kernels:
        assert kernel["products"] == kernel["fp8_products"] > 0, kernel
