"""The quantisers and the GEMMs of an FP8 linear, each timed alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_deltamatch.benchmarks import timing
from hf_deltamatch.benchmarks.linear_shapes import LinearShape, both, make_linear_inputs
from hf_deltamatch.kernels import linear as kernels
from hf_deltamatch.kernels import unsupported_linear
from hf_deltamatch.kernels.linear_operands import ROW, Operand
from hf_deltamatch.ops import fp8_linear
from hf_deltamatch.recipes import LinearRecipe

HOST_SHAPE = LinearShape(16, 256, 256)
"""Too small for the device to be what takes time."""

# What a forward with both gradients quantises, as rows and as columns.
_QUANTISED = {
    "quantise x": ("x", True, True),
    "quantise weight, forward": ("weight", True, False),
    "quantise weight, backward": ("weight", False, True),
    "quantise dy": ("dy", True, True),
}


def time_parts(
    inputs: tuple[Tensor, Tensor, Tensor], recipe: LinearRecipe
) -> dict[str, dict[str, Any]]:
    """``ms`` of every part; quantisers have ``bytes`` and ``copy_ms``, of a copy that reads and writes as many;
    GEMMs have ``flops``. A quantiser of a small matrix takes the host longer than the device, so these and their
    copies are times of their kernels, from the profiler; queued where it sees none.

    Args:
        inputs: ``x [tokens, in]``, ``weight [out, in]``, ``dy [tokens, out]``.
    """
    tensors = dict(zip(("x", "weight", "dy"), (t.detach() for t in inputs), strict=True))
    hp = recipe.grad_weight_hp
    calls, facts, made = {}, {}, {}
    for name, (what, rows, columns) in _QUANTISED.items():
        columns = columns and (what == "weight" or not hp)

        def quantise(what=what, rows=rows, columns=columns):
            return kernels.quantize(tensors[what], recipe, what, rows=rows, columns=columns)

        calls[name] = quantise
        made[name] = operands = quantise()
        facts[name] = {"bytes": _moved(tensors[what], [o for o in operands if o is not None])}
    (x_rows, x_columns), (dy_rows, dy_columns) = made["quantise x"], made["quantise dy"]
    w_rows, w_columns = made["quantise weight, forward"][0], made["quantise weight, backward"][1]
    dtype = tensors["x"].dtype
    calls["output"] = lambda: kernels.gemm(x_rows, w_rows, dtype)
    calls["grad_input"] = lambda: kernels.gemm(dy_rows, w_columns, dtype)
    if hp:
        calls["grad_weight"] = lambda: tensors["dy"].t() @ tensors["x"]
    else:
        calls["grad_weight"] = lambda: kernels.gemm(dy_columns, x_columns, dtype)
    flops = 2.0 * tensors["x"].numel() * tensors["dy"].shape[1]
    for name in ("output", "grad_input", "grad_weight"):
        facts[name] = {"flops": flops}
    copy_of = {name: f"copy of {f['bytes']:,} bytes" for name, f in facts.items() if "bytes" in f}
    for name, copy in copy_of.items():
        calls[copy] = timing.make_copy(facts[name]["bytes"] // 2, tensors["x"].device)
    ms = {
        name: time.queued
        for name, time in timing.measure(calls, queues=3, singles=1, queue_ms=20.0).items()
    }
    for name in (*copy_of, *copy_of.values()):
        ms[name] = sum(timing.kernel_times(calls[name], 20).values()) or ms[name]
    for name, copy in copy_of.items():
        facts[name]["copy_ms"] = ms[copy]
    return {name: {"ms": ms[name], **fact} for name, fact in facts.items()}


def _moved(x: Tensor, operands: list[Operand]) -> int:
    """Bytes read and written: payloads and descales once, ``x`` once, or twice for whole rows."""
    reads = 2 if operands[0].block == ROW else 1
    written = [t for o in operands for t in (o.payload, o.descale)]
    return reads * x.numel() * x.element_size() + sum(t.nbytes for t in written)


def add_up(parts: dict[str, dict[str, Any]], bandwidth: float) -> dict[str, Any]:
    """Columns of a row: ``parts`` with rates, and sums. ``bandwidth`` of a copy in TB/s."""
    parts = {name: dict(part) for name, part in parts.items()}
    for part in parts.values():
        if "bytes" in part:
            part["share_of_copy"] = part["bytes"] / part["ms"] / 1e9 / bandwidth
            part["share_of_same_copy"] = part["copy_ms"] / part["ms"]
        else:
            part["tflops"] = part["flops"] / part["ms"] / 1e9
    quantisers = [p for p in parts.values() if "bytes" in p]
    ms = sum(p["ms"] for p in quantisers)
    return {
        "parts": parts,
        "quantize_ms": ms,
        "gemm_ms": sum(p["ms"] for p in parts.values() if "flops" in p),
        "share_of_copy": sum(p["bytes"] for p in quantisers) / ms / 1e9 / bandwidth,
    }


def host_us(device: torch.device | str = "cuda") -> dict[str, float]:
    """Microseconds of a forward with both gradients of a layer so small that the host is what takes
    them: BF16, and the first of our recipes that runs here."""
    inputs = make_linear_inputs(HOST_SHAPE, device)
    calls = {"bf16": lambda: both(F.linear, inputs)}
    why_not = lambda name: unsupported_linear(LinearRecipe.from_name(name), torch.device(device))
    name = next((n for n in LinearRecipe.NAMES if why_not(n) is None), None)
    if name is not None:
        ours = lambda x, weight: fp8_linear(x, weight, None, name, "triton")
        calls["fp8"] = lambda: both(ours, inputs)
    times = timing.measure(calls, queues=5, singles=1, queue_ms=20.0)
    return {name: 1e3 * t.queued for name, t in times.items()}
