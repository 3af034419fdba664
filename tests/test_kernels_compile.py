"""The kernels compile for every capability of the table, fit its shared and tensor memory, and multiply
in FP8 only (``mx``: where its products are native). Needs no GPU: Triton brings its assembler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from python_path import python_path

pytest.importorskip("triton")
from hf_deltamatch import AttentionRecipe  # noqa: E402
from hf_deltamatch.kernels import (  # noqa: E402
    CAPABILITIES,
    NATIVE_MX,
    NO_BOOLEAN_MASK,
    SMALL_SHARED_MEMORY,
)
from hf_deltamatch.kernels.attention_config import has_one_pass  # noqa: E402

pytestmark = pytest.mark.slow
CASES = [
    {"D": 128},
    {"D": 128, "hopper": True},  # on 9.0 the backward in Gluon
    {"D": 64},
    {"D": 128, "output": False},  # the matched δ in two passes
    {"D": 128, "output": False, "hopper": True},
    {"D": 128, "fields": {"block": "1xD"}},
    {"D": 64, "fields": {"block": "1xD"}},
    {"D": 96, "window": 64, "softcap": 20.0},
    {"D": 128, "fields": {"delta": "forward"}},
    {"D": 64, "fields": {"delta": "forward", "block": "1xD"}},
    {"D": 128, "fields": {"project_row_sum": True}},
]
BOOLEAN = [{"D": 64, "fields": {"block": "1xD"}, "mask": "bool"}]
# The quantisers alone: what they are compiled for.
QUANTISERS = [
    {"D": D, "mask": mask, "dtype": dtype, "fields": fields, "dlse": D == 80, "attention": False}
    for D, dtype in ((128, "bfloat16"), (80, "float32"), (64, "float16"))
    for mask, fields in (
        (None, {"do_format": "e5m2"}),
        ("bool", {}),
        ("bool", {"do_format": "e5m2", "delta": "dequantized"}),
        ("compact", {"delta": "stale"}),
        ("packed", {"block": "1xD", "project_row_sum": True}),
    )
]


def mx(D: int, do_format: str = "e4m3", **case) -> dict:
    return {"D": D, "fields": {"block": "mx", "do_format": do_format}, **case}


MX = [
    mx(128),
    mx(32, is_causal=False),
    mx(96, "e5m2", window=64, softcap=20.0),
    mx(64, mask="bool"),
]
MX += [
    {**case, "fields": {**case["fields"], "block": "mx"}} for case in QUANTISERS if case["D"] != 64
]
MX_LARGE = [mx(256, mask="bool"), mx(192, Dv=128, mask="bool")]
LARGE = [{"D": 256}, {"D": 192, "Dv": 128, "is_causal": False}]
# Bytes a block can use, from NVIDIA's table of compute capabilities.
SMALL_BYTES, LARGE_BYTES = 99 * 1024, 227 * 1024
TENSOR_COLUMNS = 512
EACH_CAPABILITY = pytest.mark.parametrize(
    "capability", sorted({c for c in CAPABILITIES if c != (10, 3)})
)


def run_script(name: str, capability: tuple[int, int], tmp_path: Path, *more: str) -> list[dict]:
    script = Path(__file__).parent / name
    root = str(script.parent.parent)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": python_path(root), "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, str(script), str(10 * capability[0] + capability[1]), *more],
        capture_output=True, text=True, env=env, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@EACH_CAPABILITY
def test_kernels_of_a_linear_compile(capability: tuple[int, int], tmp_path: Path) -> None:
    kernels = run_script("compile_linear.py", capability, tmp_path)
    names = {kernel["kernel"] for kernel in kernels}
    assert {"_quantize_matrix_kernel", "_quantize_pairs_kernel", "_gated_bwd_kernel"} <= names
    assert "_gated_bwd_quantize_kernel" in names
    assert len(kernels) > 100
    for kernel in kernels:
        large = (
            kernel["kernel"] == "_gated_bwd_quantize_kernel"
            and capability not in SMALL_SHARED_MEMORY
        )
        assert kernel["shared"] <= (LARGE_BYTES if large else SMALL_BYTES), kernel


def compile_for(capability: tuple[int, int], cases: list[dict], tmp_path: Path) -> list[dict]:
    """Attention kernels of the cases; all kernels fit the memory."""
    kernels = run_script("compile_kernels.py", capability, tmp_path, json.dumps(cases))
    limit = SMALL_BYTES if capability in SMALL_SHARED_MEMORY else LARGE_BYTES
    for kernel in kernels:
        assert kernel["shared"] <= limit and kernel["tensor_memory"] <= TENSOR_COLUMNS, kernel
        if "hopper" in kernel["kernel"]:  # Triton's own pipelines invalidate theirs
            assert kernel["barriers"] >= 7 and kernel["reused_barriers"] == 0, kernel
        assert kernel.get("lost_operands", 0) == 0, kernel
        assert kernel.get("early_conversions", 0) == 0, kernel
        assert kernel.get("foreign_conversions", 0) == 0, kernel
        assert kernel.get("unwritten_uniforms", 0) == 0, kernel
    attention = [k for k in kernels if k["kernel"].startswith("_attention")]
    if capability == (9, 0):
        assert any(kernel["products_in_loops"] > 0 for kernel in attention)
    assert len(attention) >= sum(map(launches, cases))
    return attention


def launches(case: dict) -> int:
    """Forward, dK/dV, and dQ with δ or after the matched one."""
    if not case.get("attention", True):
        return 0
    recipe = AttentionRecipe.from_name("delta_matching", **case.get("fields", {}))
    tile = recipe.block == "128xD" and case.get("mask") != "bool"
    heads = case["D"], case.get("Dv", case["D"])
    one_pass = case.get("output", True) and has_one_pass(recipe, *heads, tile=tile)
    return 4 - (recipe.delta != "matched" or one_pass)


@EACH_CAPABILITY
def test_kernels_compile(capability: tuple[int, int], tmp_path: Path) -> None:
    cases = CASES + QUANTISERS + (LARGE if capability not in SMALL_SHARED_MEMORY else [])
    cases += BOOLEAN if capability not in NO_BOOLEAN_MASK else []
    for kernel in compile_for(capability, cases, tmp_path):
        assert kernel["products"] == kernel["fp8_products"] > 0, kernel


@EACH_CAPABILITY
def test_mx_kernels_compile(capability: tuple[int, int], tmp_path: Path) -> None:
    """On 10.x and 12.0 every product is a block-scaled FP8 instruction, before that none is."""
    cases = MX + (MX_LARGE if capability not in SMALL_SHARED_MEMORY else [])
    for kernel in compile_for(capability, cases, tmp_path):
        assert kernel["mx"] and kernel["products"] > 0, kernel
        native = kernel["products"] if capability in NATIVE_MX else 0
        assert kernel["scaled_products"] == native, kernel
