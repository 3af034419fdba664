"""What a linear's launches rely on, of Triton and of torch, without a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from python_path import python_path
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

pytest.importorskip("triton")
from hf_deltamatch.kernels import linear, linear_operands  # noqa: E402
from hf_deltamatch.kernels.linear_operands import MX, ROW, TILE_128, VECTOR, Operand  # noqa: E402


def test_launches_are_tritons_own() -> None:
    """Past Triton's look at the arguments, every launch is the one that it would make: the kernel,
    grid, stream and arguments."""
    script = Path(__file__).parent / "launch_linear.py"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": python_path(script.parent.parent)}
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=env, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    ways = json.loads(run.stdout)
    assert ways["compiled"] <= ways["through Triton"] < 0.7 * ways["launches"], ways


KINDS = {
    VECTOR: ScalingType.BlockWise1x128,
    TILE_128: ScalingType.BlockWise128x128,
    ROW: ScalingType.RowWise,
    MX: ScalingType.BlockWise1x32,
}


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("blocks", [(VECTOR, TILE_128), (VECTOR, VECTOR), (ROW, ROW), (MX, MX)])
def test_scaled_gemm_is_torchs(
    blocks: tuple[str, str], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``torch._scaled_mm_v2`` gets what the public function hands it."""
    calls = []

    def product(a, b, *args):
        calls.append((a, b, *args))
        return torch.zeros(a.shape[0], b.shape[1], dtype=args[7])

    monkeypatch.setattr(torch, "_scaled_mm_v2", product)
    monkeypatch.setattr(linear, "rowwise_in_cublas", lambda device: True)
    operands = []
    for block, outer in zip(blocks, (40, 72), strict=True):
        payload = torch.zeros(linear_operands.payload_shape(outer, 200), dtype=torch.float8_e4m3fn)
        descale = torch.ones(linear_operands.descale_shape(block, outer, 200))
        operands.append(Operand(payload, descale, block, outer, 200))
    bias = torch.randn(72) if bias else None
    output = linear._scaled(*operands, torch.bfloat16, bias)
    assert output.shape == (40, 72) and output.is_contiguous() and output.dtype == torch.bfloat16
    a, b, scale_a, _, _, scale_b, *_ = calls[0]
    in_epilogue = calls[0][8]
    swizzle = SwizzleType.SWIZZLE_32_4_4 if blocks[0] == MX else SwizzleType.NO_SWIZZLE
    scaled_mm(
        a, b, scale_a[0], KINDS[blocks[0]], scale_b[0], KINDS[blocks[1]], swizzle, swizzle,
        bias=in_epilogue, output_dtype=torch.bfloat16, use_fast_accum=False,
    )  # fmt: skip
    assert len(calls) == 2 and len(calls[0]) == len(calls[1])
    for ours, public in zip(*calls, strict=True):
        one, other = (x if isinstance(x, list) else [x] for x in (ours, public))
        assert all(
            x is y or (not torch.is_tensor(x) and x == y) for x, y in zip(one, other, strict=True)
        )
    if bias is not None:
        assert in_epilogue.dtype == torch.bfloat16 and in_epilogue.shape == (80,)
        assert torch.equal(in_epilogue[:72], bias.bfloat16()) and not in_epilogue[72:].any()
