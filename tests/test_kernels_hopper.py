"""The Gluon kernels have no interpreter: at least they compile, in `make test` too (the other kernels
and capabilities: `test_kernels_compile`, slow)."""

from __future__ import annotations

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
    kernels = compile_for(
        (9, 0), [{"D": 128, "window": 64, "softcap": 20.0, "hopper": True}], tmp_path
    )
    names = [kernel["kernel"] for kernel in kernels]
    assert names.count("_attention_bwd_dq_hopper_kernel") == 2  # δ and dQ
    assert "_attention_bwd_dkdv_hopper_kernel" in names
    for kernel in kernels:
        assert kernel["products"] == kernel["fp8_products"] > 0, kernel


def test_hopper_kernels_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a variable, which has two values; on capability 9.0 and square heads alone."""
    device = torch.device("cuda")
    capability = (9, 0)
    monkeypatch.setattr(config, "capability_of", lambda device: capability)
    plain = config.dkdv_configs(64, 64, device)
    for value, asked in ((None, False), ("0", False), ("1", True)):
        if value is None:
            monkeypatch.delenv(HOPPER_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(HOPPER_VARIABLE, value)
        assert config.has_hopper(128, 128, device) is config.has_hopper(64, 64, device) is asked
        assert (config.dkdv_configs(64, 64, device) != plain) is asked
    assert not config.has_hopper(256, 256, device) and not config.has_hopper(128, 64, device)
    capability = (10, 0)
    assert not config.has_hopper(128, 128, device)
    monkeypatch.setenv(HOPPER_VARIABLE, "yes")
    with pytest.raises(ValueError, match="HF_DELTAMATCH_HOPPER is 'yes'; it must be 1 .* or 0"):
        config.has_hopper(128, 128, device)
    with pytest.raises(ValueError, match="HF_DELTAMATCH_HOPPER"):  # before the first step, too
        kernels.unsupported_attention(AttentionRecipe(), (128, 128), 0.1, device)
