"""``hf-deltamatch bench linear``: rows of one table per shape, ours and the baselines'.

Our times include quantisation, which is also shown apart (:mod:`.linear_parts`). A recipe or baseline
that fails stays in the table, with its reason and without a speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hf_deltamatch import kernels
from hf_deltamatch.benchmarks import linear_baselines, linear_parts, tables, timing
from hf_deltamatch.benchmarks.baselines import Absent
from hf_deltamatch.benchmarks.linear_shapes import (
    LINEAR_RECIPES,
    LINEAR_SHAPES,
    MAX_DIFFERENCE,
    MAX_ERROR,
    Linear,
    LinearShape,
    both,
    compare,
    emulated,
    exact,
    make_linear_inputs,
    parse_linear_recipe,
)
from hf_deltamatch.ops import fp8_linear

METHOD = {
    "fwd_ms, fwd_bwd_ms": "queued: behind a call that keeps the device busy, N calls launched without "
    "a wait between two events, over N; median of the queues; forward without a graph, and forward "
    "with both gradients as one call; quantisation of x, the weight and dy included",
    "fwd_one_call_ms, fwd_bwd_one_call_ms": "one call on an idle device, waited for; the host's "
    "launch time included; median",
    "tflops": "2·tokens·in·out for each of the three products",
    "share_of_fp8_peak": "fwd_bwd_tflops over the rate of torch._scaled_mm 8192³ in this run",
    "parts": "quantisers and GEMMs of a forward with both gradients, each timed alone: quantisers and copies "
    "by the profiler's times of their kernels, GEMMs queued; quantize_ms and gemm_ms are their sums",
    "share_of_copy": "bytes that the quantisers read and write over their time, over the rate of a copy "
    "of 1 GiB in this run; share_of_same_copy: time of a copy that reads and writes as many bytes over theirs",
    "speedup": "best BF16 row of this run and shape over this row, queued",
    "torchao": "each recipe compiled in its own process, before the others: not in turns with them",
    "difference": "largest relative difference of output, grad_input, grad_weight to the reference "
    "that emulates the recipe, at the full size",
    "error": "the same to FP32 products of unquantised operands",
}
EMULATED = "blocks of 32 are not native here: BF16 products of decoded operands"


def bench_linear(
    shapes: Iterable[LinearShape] | None = None,
    recipes: tuple[str, ...] | None = None,
    progress: Callable[[str], None] = print,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Time shapes with recipes and baselines.

    Args:
        shapes: default :data:`LINEAR_SHAPES`.
        recipes: default :data:`LINEAR_RECIPES`.
        progress: gets each table.
        keep: gets the result so far after every shape, so that a run that is cut off leaves it.

    Returns:
        ``{"fp8_peak_tflops", "bf16_tflops", "copy_TBps", "host_us", "method", "shapes": [{"shape",
        "name", "rows": {name: row}}]}``; a row has ``failed`` (the reason) or times.

    Raises:
        BenchError: no CUDA device with kernels.
    """
    tables.require_kernels("linears are", "linear")
    shapes = LINEAR_SHAPES if shapes is None else tuple(shapes)
    result: dict[str, Any] = {
        "fp8_peak_tflops": timing.fp8_peak(),
        "bf16_tflops": timing.bf16_peak(),
        "copy_TBps": timing.copy_bandwidth(),
        "host_us": linear_parts.host_us(),
        "capability": list(torch.cuda.get_device_capability()),
        "method": METHOD,
        "shapes": [],
    }
    progress(
        f"FP8 matmul {result['fp8_peak_tflops']:.0f} TFLOP/s, BF16 {result['bf16_tflops']:.0f}; "
        f"copy {result['copy_TBps']:.2f} TB/s; host, forward and both gradients of a small layer: "
        + ", ".join(f"{name} {us:.0f} µs" for name, us in result["host_us"].items())
    )
    others = linear_baselines.torchao_rows(shapes)
    for i, shape in enumerate(shapes):
        rows = bench_linear_shape(
            shape,
            recipes or LINEAR_RECIPES,
            result["fp8_peak_tflops"],
            result["copy_TBps"],
            {name: dict(found[i]) for name, found in others.items()},
        )
        result["shapes"].append({"shape": shape._asdict(), "name": str(shape), "rows": rows})
        progress(format_linear(shape, rows))
        keep(result)
    return result


def bench_linear_shape(
    shape: LinearShape,
    recipes: Iterable[str],
    peak: float,
    bandwidth: float,
    timed_apart: tables.Rows | None = None,
    device: torch.device | str = "cuda",
) -> tables.Rows:
    """Rows of one shape: baselines, then our recipes. Checked first, then all timed in turns.

    Args:
        peak: TFLOP/s of FP8 on this device.
        bandwidth: TB/s of a copy.
        timed_apart: rows of other processes, ready.
    """
    torch.compiler.reset()  # what was compiled for other sizes counts against a limit
    inputs = make_linear_inputs(shape, device)
    truth = exact(inputs)
    rows: tables.Rows = {}
    linears: dict[str, Linear] = {}

    def add(name: str, make: Callable[[], Linear], kind: str) -> None:
        rows[name] = row = {"ours": kind == "ours", "bf16": kind == "bf16"}
        try:
            linear = make()
            if kind == "ours":
                recipe, _ = parse_linear_recipe(name)
                if not _native(recipe.scaling, device):
                    row["emulated"] = EMULATED
                got = both(linear, inputs)
                spec = emulated(inputs, recipe)
                row["difference"] = compare(got, spec, MAX_DIFFERENCE, "against the reference")
            else:
                got = both(linear, inputs)
            allowed = MAX_ERROR["bf16" if kind == "bf16" else "fp8"]
            row["error"] = compare(got, truth, allowed, "against FP32")
        except Exception as error:  # whatever another library raises, or a compiler
            row["failed"] = tables.reason(error)
        else:
            linears[name] = linear

    for name, make in linear_baselines.here(shape).items():
        add(name, make, "bf16" if name.startswith("BF16") else "fp8")
    for name, row in (timed_apart or {}).items():
        rows[name] = {"ours": False, "bf16": False} | row
    for name in recipes:
        add(name, lambda name=name: _ours(name, device), "ours")

    calls = {}
    for name, linear in linears.items():
        calls[name, "fwd"] = lambda linear=linear: linear_baselines.forward(linear, inputs)
        calls[name, "fwd_bwd"] = lambda linear=linear: both(linear, inputs)
    for (name, part), times in timing.measure(calls).items():
        rows[name] |= linear_baselines.columns(part, times)
    for name in linears:
        if rows[name]["ours"]:
            recipe, is_compiled = parse_linear_recipe(name)
            same = rows.get(recipe.name, {}).get("parts") if is_compiled else None
            rows[name] |= linear_parts.add_up(
                same or linear_parts.time_parts(inputs, recipe), bandwidth
            )
    tables.add_rates(rows, shape.flops, 3 * shape.flops, peak)
    return rows


def _native(scaling: str, device: torch.device | str) -> bool:
    device = torch.device(device)
    return scaling != "mx" or kernels.capability_of(device) in kernels.NATIVE_MX


def _ours(name: str, device: torch.device | str) -> Linear:
    recipe, is_compiled = parse_linear_recipe(name)
    reason = kernels.unsupported_linear(recipe, torch.device(device))
    if reason is not None:
        raise Absent(reason)
    ours = lambda x, weight: fp8_linear(x, weight, None, recipe, "triton")
    return linear_baselines.compiled(ours) if is_compiled else ours


COLUMNS = (
    ("ms: fwd", "fwd_ms", ".3f"), ("fwd+bwd", "fwd_bwd_ms", ".3f"),
    ("one call: fwd+bwd", "fwd_bwd_one_call_ms", ".3f"),
    ("TFLOP/s: fwd", "fwd_tflops", ".0f"), ("fwd+bwd", "fwd_bwd_tflops", ".0f"),
    ("FP8 peak", "share_of_fp8_peak", ".0%"),
    ("alone: GEMMs ms", "gemm_ms", ".3f"), ("quantise ms", "quantize_ms", ".3f"),
    ("of copy", "share_of_copy", ".0%"),
    ("x BF16: fwd", "fwd_speedup", ".2f"), ("fwd+bwd", "fwd_bwd_speedup", ".2f"),
)  # fmt: skip


def format_linear(shape: LinearShape, rows: tables.Rows) -> str:
    """One table; ``x BF16`` is how many times as fast as the best BF16 row."""
    lines = [tables.format_rows(str(shape), rows, COLUMNS)]
    for name, row in rows.items():
        if "emulated" in row:
            lines.append(f"  {name}: {row['emulated']}")
        for part, p in row.get("parts", {}).items():
            if "share_of_copy" in p and not name.endswith(" compiled"):
                lines.append(
                    f"    {name}: {part} {p['ms']:.4f} ms, {p['share_of_copy']:.0%} of copy bandwidth, "
                    f"{p['share_of_same_copy']:.0%} of a copy of its size"
                )
    return "\n".join(lines)
