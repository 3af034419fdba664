"""The Gluon kernels have no interpreter: at least they compile, in `make test` too (the other kernels
and capabilities: `test_kernels_compile`, slow)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from test_kernels_compile import compile_for  # noqa: E402

from hf_deltamatch import AttentionRecipe, kernels  # noqa: E402
from hf_deltamatch.kernels import HOPPER_VARIABLE  # noqa: E402
from hf_deltamatch.kernels import attention_config as config  # noqa: E402


def test_hopper_kernels_compile(tmp_path: Path) -> None:
    """With a window and a soft cap, which have branches of their own."""
    case = {"D": 128, "window": 64, "softcap": 20.0, "hopper": True}
    kernels = compile_for((9, 0), [case, {**case, "output": False}], tmp_path)
    names = [kernel["kernel"] for kernel in kernels]
    assert names.count("_attention_bwd_dq_hopper_kernel") == 3  # both in one; δ and dQ
    assert "_attention_bwd_dkdv_hopper_kernel" in names
    for kernel in kernels:
        assert kernel["products"] == kernel["fp8_products"] > 0, kernel


def test_hopper_kernels_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """On capability 9.0, at head dimensions that both pad to 128, unless a variable says no."""
    device = torch.device("cuda")
    capability = (9, 0)
    monkeypatch.setattr(config, "capability_of", lambda device: capability)
    for value, asked in ((None, True), ("", True), ("0", False), ("1", True)):
        if value is None:
            monkeypatch.delenv(HOPPER_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(HOPPER_VARIABLE, value)
        assert config.has_hopper(128, 128, device) is asked
    for heads in ((64, 64), (128, 64), (256, 256)):
        assert not config.has_hopper(*heads, device)
    capability = (10, 0)
    assert not config.has_hopper(128, 128, device)
    monkeypatch.setenv(HOPPER_VARIABLE, "yes")
    with pytest.raises(ValueError, match="HF_DELTAMATCH_HOPPER is 'yes'; it must be 1 .* or 0 \\("):
        config.has_hopper(128, 128, device)
    with pytest.raises(ValueError, match="HF_DELTAMATCH_HOPPER"):  # before the first step, too
        kernels.unsupported_attention(AttentionRecipe(), (128, 128), 0.1, device)


def test_other_kernels_need_no_gluon() -> None:
    """Which is experimental in Triton."""
    code = (
        "import sys; sys.modules['triton.experimental.gluon'] = None; "
        "import hf_deltamatch.kernels.attention"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
