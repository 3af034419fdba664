"""Kernels of several processes that take turns on one GPU.

Kernels whose warps are specialised were once wrong there, and only there: what the hardware had begun was
written over between two time slices. Each process compares every result bitwise with its first.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_processes_that_share_a_gpu(tmp_path: Path, monkeypatch) -> None:
    import share_gpu

    monkeypatch.setattr(share_gpu, "COMPILE_S", 300.0)  # beside other tests
    monkeypatch.setattr(share_gpu, "GRACE_S", 30.0)

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper device")
    out = tmp_path / "rows.json"
    status = share_gpu.main(["hopper-128", "--queue", "200", "--seconds", "5", "--json", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert status == 0 and len(row["processes"]) == 3, row
    assert all(p["rounds"] >= 200 and not p["differ"] for p in row["processes"]), row
