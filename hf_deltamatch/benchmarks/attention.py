"""``hf-deltamatch bench attention``: rows of one table per shape, ours and the baselines'.

Our times include quantisation, which is also shown apart. FLOPs: see :attr:`Shape.flops`; backward
2.5 times as many. A recipe or baseline that fails stays in the table, with its reason and without a
speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hf_deltamatch import kernels
from hf_deltamatch.benchmarks import baselines, tables, timing, verify
from hf_deltamatch.benchmarks.shapes import RECIPES, SHAPES, Shape, make_inputs, parse_recipe
from hf_deltamatch.ops.attention import delta_matching_attention
from hf_deltamatch.recipes import AttentionRecipe

METHOD = {
    "fwd_ms, fwd_bwd_ms": "queued: behind a call that keeps the device busy, N calls launched without "
    "a wait between two events, over N; median of the queues; forward without a graph, and forward with backward as one call",
    "fwd_one_call_ms, fwd_bwd_one_call_ms": "one call on an idle device, waited for; the host's "
    "launch time included; median",
    "tflops": "forward 4·D per visible pair and head (causal T²/2), backward 2.5 times as many",
    "share_of_fp8_peak": "fwd_bwd_tflops over the rate of torch._scaled_mm 8192³ in this run",
    "quantize_ms": "kernels of ours that quantise or transpose, in a forward with backward, from "
    "the profiler; part of fwd_bwd_ms",
    "speedup": "best BF16 baseline of this run and shape over this row, queued",
    "difference": "largest relative difference of o, dq, dk, dv to the reference that emulates the "
    "kernels, two groups of heads, up to 1024 tokens",
    "error": "relative error of sampled rows at the full length against FP64",
}


def _hopper_kernels() -> bool:
    if not torch.cuda.is_available():
        return False
    return kernels.wants_hopper() and torch.cuda.get_device_capability() == (9, 0)


def bench_attention(
    shapes: Iterable[Shape] | None = None,
    recipes: tuple[str, ...] | None = None,
    progress: Callable[[str], None] = print,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Time shapes with recipes and baselines.

    Args:
        shapes: default :data:`SHAPES`.
        recipes: of every shape; by default all of :data:`RECIPES` for the first shape and
            ``delta_matching`` for the rest.
        progress: gets each table.
        keep: gets the result so far after every shape, so that a run that is cut off leaves it.

    Returns:
        ``{"fp8_peak_tflops", "method", "shapes": [{"shape", "name", "rows": {name: row}}]}``; a row
        has ``failed`` (the reason) or times.

    Raises:
        tables.BenchError: no CUDA device with kernels.
    """
    tables.require_kernels("attention is", "attention")
    peak = timing.fp8_peak()
    progress(f"FP8 matmul {peak:.0f} TFLOP/s")
    result: dict[str, Any] = {
        "fp8_peak_tflops": peak,
        "hopper_kernels": _hopper_kernels(),
        "method": METHOD,
        "shapes": [],
    }
    for i, shape in enumerate(SHAPES if shapes is None else shapes):
        chosen = recipes or (RECIPES if i == 0 else RECIPES[:1])
        rows = bench_shape(shape, chosen, peak)
        result["shapes"].append({"shape": shape._asdict(), "name": str(shape), "rows": rows})
        progress(format_shape(shape, rows))
        keep(result)
    return result


def bench_shape(
    shape: Shape, recipes: Iterable[str], peak: float, device: torch.device | str = "cuda"
) -> dict[str, dict[str, Any]]:
    """Rows of one shape: baselines, then our recipes. Checked first, then all timed in turns."""
    inputs = make_inputs(shape, device)
    sampled = verify.sample(shape)
    with torch.no_grad():
        truth = verify.expected(shape, sampled, *inputs)
    rows: dict[str, dict[str, Any]] = {}
    forwards: dict[str, baselines.Attention] = {}

    def add(name: str, make: Callable[[], baselines.Attention], kind: str) -> None:
        rows[name] = row = {"ours": kind == "ours", "bf16": kind == "bf16"}
        try:
            if kind == "ours":
                recipe = parse_recipe(name)
                _refuse_unsupported(shape, recipe, torch.device(device))
                kind = "matched" if recipe.delta == "matched" else "fp8"
                row["difference"] = verify.against_reference(shape, recipe, device)
            got, allowed = _both(make(), inputs), verify.MAX_ERROR[kind]
            row["error"] = verify.against_fp64(sampled, truth, *got, allowed)
        except Exception as error:  # whatever another library raises, or a compiler
            row["failed"] = tables.reason(error)
        else:
            forwards[name] = make()

    for name, make in baselines.baselines(shape).items():
        add(name, make, "bf16" if "BF16" in name else "fp8")
    for name in recipes:
        add(name, lambda name=name: _ours(shape, name), "ours")

    calls = {}
    for name, forward in forwards.items():
        calls[name, "fwd"] = lambda forward=forward: _forward(forward, inputs)
        calls[name, "fwd_bwd"] = lambda forward=forward: _both(forward, inputs)
    for (name, part), times in timing.measure(calls).items():
        rows[name][f"{part}_ms"] = times.queued
        rows[name][f"{part}_ms_range"] = times.queued_range
        rows[name][f"{part}_one_call_ms"] = times.one_call
    for name in forwards:
        if rows[name]["ours"]:
            rows[name]["kernels_ms"] = found = timing.kernel_times(calls[name, "fwd_bwd"])
            rows[name]["quantize_ms"] = timing.quantize_ms(found)
    tables.add_rates(rows, shape.flops, 3.5 * shape.flops, peak)
    return rows


def _refuse_unsupported(shape: Shape, recipe: AttentionRecipe, device: torch.device) -> None:
    reason = kernels.unsupported_attention(recipe, (shape.D, shape.D), shape.D**-0.5, device)
    if reason is not None:
        raise baselines.Absent(reason)


def _ours(shape: Shape, name: str) -> baselines.Attention:
    recipe = parse_recipe(name)
    return lambda q, k, v: delta_matching_attention(
        q, k, v, is_causal=shape.causal, window=shape.window, recipe=recipe, backend="triton"
    )


@torch.no_grad()
def _forward(forward: baselines.Attention, inputs: tuple[Tensor, ...]) -> Tensor:
    return forward(*inputs[:3])


def _both(forward: baselines.Attention, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``o, dq, dk, dv``."""
    o = forward(*inputs[:3])
    return (o, *torch.autograd.grad(o, inputs[:3], inputs[3]))


COLUMNS = (
    ("ms: fwd", "fwd_ms", ".3f"), ("fwd+bwd", "fwd_bwd_ms", ".3f"),
    ("one call: fwd", "fwd_one_call_ms", ".3f"), ("fwd+bwd", "fwd_bwd_one_call_ms", ".3f"),
    ("TFLOP/s: fwd", "fwd_tflops", ".0f"), ("fwd+bwd", "fwd_bwd_tflops", ".0f"),
    ("FP8 peak", "share_of_fp8_peak", ".0%"), ("quantise ms", "quantize_ms", ".3f"),
    ("x BF16: fwd", "fwd_speedup", ".2f"), ("fwd+bwd", "fwd_bwd_speedup", ".2f"),
)  # fmt: skip


def format_shape(shape: Shape, rows: dict[str, dict[str, Any]]) -> str:
    """One table; ``x BF16`` is how many times as fast as the best BF16 row."""
    return tables.format_rows(str(shape), rows, COLUMNS)
