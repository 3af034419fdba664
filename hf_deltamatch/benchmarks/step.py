"""``hf-deltamatch bench step``: whole training steps, BF16 beside ours, each in its own process."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hf_deltamatch.benchmarks import tables, timing
from hf_deltamatch.benchmarks.process import in_own_process
from hf_deltamatch.benchmarks.step_arm import ARMS, WEIGHTS, Size
from hf_deltamatch.benchmarks.verify import WrongNumbers

BASELINE = "bf16"
DEFAULT_ARMS = (BASELINE, "fp8")
ARM_S = 240.0
MAX_LOSS_DIFFERENCE = 5e-3
"""Relative, of the first loss, to the BF16 arm and to the reference."""
MAX_NORM_DIFFERENCE = 0.2
"""Relative, of the norm of every parameter's first gradient, to the BF16 arm. Rounding of FP8 that is
independent of the gradient adds the square of its share: 0.1 of error is 0.005 of norm."""
MAX_GRADIENT_DIFFERENCE = 0.15
MEDIAN_GRADIENT_DIFFERENCE = 0.1
"""Relative, of the first gradient of a parameter at 512 of its elements, to the same arm through the
reference, in a model of one layer: measured 0.097 and 0.070 (with FP8 attention alone 0.035 and 0.010).
A sum in another order changes a last bit of BF16, now and then a value of FP8, which is an eighth; every
linear before and behind adds to it, so that 20 layers are 0.47 and 0.36 apart. Nor to the BF16 arm,
which is 0.66 away there (``examples/benchmarks/NOTES.md``). What is unrelated is 1.4 away."""
NOMINAL_BF16 = {"H200": 989.0, "H100 80GB": 989.0, "B200": 2250.0, "A100": 312.0}
"""Dense BF16 TFLOP/s in the data sheets of the SXM modules, by a part of the device's name."""

METHOD = {
    "step_ms": "forward, backward, fused AdamW: queues of 5 steps launched without a wait, the median "
    "of 3 queues, after 4 steps",
    "kernels_ms": "of a step of its own under the profiler, milliseconds of the CUDA kernels that take most and of "
    "the others together",
    "recorded_ms": "the same step recorded as a CUDA graph and replayed, for every arm: what is left when "
    "the host is never waited for; rates and speed-up of it beside it",
    "weights": "bf16: weights, gradients and optimiser state in BF16; fp32: all of them in FP32, under "
    "autocast to BF16",
    "linears": "swap_linears(model, fuse_gated='whole'); fp8-gated with fuse_gated=True",
    "compile": "every layer and the loss with torch.compile; embedding and last norm without",
    "mfu": "model FLOPs (6 per matrix element and token, attention's visible pairs, nothing "
    "recomputed) over the data sheet's dense BF16 rate",
    "share_of_bf16_matmul": "the same over the rate of an 8192³ product in this run",
    "peak_GiB": "largest allocation of the timed steps; between_steps_GiB is there before a step",
    "checked": "the first loss and the norms of all first gradients against the BF16 arm; loss, norms "
    "and 512 elements of all first gradients of one layer and one sequence, not compiled, against the "
    "reference; the losses of the next steps fall",
}


def bench_step(
    size: Size | None = None,
    arms: Iterable[str] | None = None,
    weights: str = "bf16",
    compiled: bool = True,
    progress: Callable[[str], None] = print,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Time the arms, BF16 first.

    Args:
        size: default 20 layers, hidden 2048, 4 sequences of 8192 tokens: 1.4 billion parameters.
        arms: names of ``step_arm.ARMS``; default BF16 and ``fp8``.
        weights: ``bf16`` or ``fp32``.

    Returns:
        as the other benchmarks, with one shape.

    Raises:
        BenchError: no CUDA device with kernels.
        ValueError: an unknown arm, or a size that is no model.
    """
    size = Size() if size is None else size
    size.config()
    arms = tuple(dict.fromkeys((BASELINE, *(arms or DEFAULT_ARMS))))
    for what, given, known in (("--arm", arms, tuple(ARMS)), ("--weights", (weights,), WEIGHTS)):
        for value in given:
            if value not in known:
                raise ValueError(f"{what} is {value!r}; it must be one of {', '.join(known)}.")
    tables.require_kernels("steps are", "attention", "linear")
    name = f"{size}, {size.parameters / 1e9:.2f} B parameters in {weights}"
    rows: tables.Rows = {}
    result: dict[str, Any] = {
        "bf16_tflops": timing.bf16_peak(),
        "bf16_tflops_nominal": nominal_bf16(torch.cuda.get_device_name()),
        "method": METHOD,
        "shapes": [{"shape": size._asdict() | {"weights": weights}, "name": name, "rows": rows}],
    }
    torch.cuda.empty_cache()
    expected: dict[str, Any] | None = None
    for arm in arms:
        rows[arm] = row = {"ours": arm != BASELINE, "bf16": arm == BASELINE}
        request = {
            "arm": arm,
            "size": list(size),
            "weights": weights,
            "compiler": "inductor" if compiled else None,
        }
        try:
            found = in_own_process("step_arm.run_arm", request, ARM_S)
            row |= {k: found[k] for k in ("losses", "graphs", "graph_breaks", "process_s")}
            if arm == BASELINE:
                expected = found
            elif expected is None:
                raise WrongNumbers("nothing to compare with: the BF16 arm failed")
            row["difference"] = off = differences(found["first"], expected["first"])
            if arm != BASELINE:
                row["from_reference"] = differences(found["kernels"], found["reference"])
            agree(off, row.get("from_reference"), found["losses"])
        except Exception as error:
            row["failed"] = tables.reason(error)
        else:
            row |= {k: v for k, v in found.items() if k not in ("first", "kernels", "reference")}
            add_rates(row, rows[BASELINE], size, result)
        keep(result)
    progress(tables.format_rows(name, rows, COLUMNS))
    return result


def nominal_bf16(device: str) -> float | None:
    """None for a device that is not in :data:`NOMINAL_BF16`, which the NVL cards are not."""
    if "NVL" in device:
        return None
    return next((rate for part, rate in NOMINAL_BF16.items() if part in device), None)


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Relative, of the loss and, by parameter, of the gradient's norm and sample: the largest with its
    name, and of the samples the median too.

    Raises:
        WrongNumbers: other parameters have gradients.
    """
    if found["grad_norms"].keys() != expected["grad_norms"].keys():
        raise WrongNumbers("other parameters have gradients than where it is compared")
    relative = lambda a, b: abs(a - b) / abs(b) if a != b else 0.0
    norms = {n: relative(a, expected["grad_norms"][n]) for n, a in found["grad_norms"].items()}
    samples = {n: _distance(a, expected["gradients"][n]) for n, a in found["gradients"].items()}
    largest = lambda of: max(of.items(), key=lambda x: (math.isnan(x[1]), x[1]))
    (norm_of, norm), (sample_of, sample) = largest(norms), largest(samples)
    return {
        "loss": relative(found["loss"], expected["loss"]),
        "grad_norms": norm, "grad_norms_at": norm_of, "gradients": sample,
        "gradients_at": sample_of, "gradients_median": statistics.median(samples.values()),
    }  # fmt: skip


def agree(off: dict[str, Any], reference: dict[str, Any] | None, losses: list[float]) -> None:
    """
    Args:
        off: differences from the BF16 arm.
        reference: from the reference; None for the BF16 arm itself.

    Raises:
        WrongNumbers: a difference is above its bound, or NaN, or the losses do not fall.
    """
    for other, found in (("BF16", off), ("the reference", reference)):
        if found is None:
            continue
        if not found["grad_norms"] <= MAX_NORM_DIFFERENCE:
            raise WrongNumbers(
                f"the first gradient of {found['grad_norms_at']} has a norm {found['grad_norms']:.3g} "
                f"away from that of {other}; allowed is {MAX_NORM_DIFFERENCE}"
            )
        _within("the first loss", found["loss"], MAX_LOSS_DIFFERENCE, other)
    if reference is not None:
        what = f"the first gradient of {reference['gradients_at']}"
        _within(what, reference["gradients"], MAX_GRADIENT_DIFFERENCE, "the reference")
        median = reference["gradients_median"]
        what = "the median of first gradients"
        _within(what, median, MEDIAN_GRADIENT_DIFFERENCE, "the reference")
    if not all(b < a for a, b in itertools.pairwise(losses)):
        raise WrongNumbers(f"the losses of the first steps do not fall: {losses}")


def _within(what: str, value: float, allowed: float, other: str) -> None:
    if not value <= allowed:
        raise WrongNumbers(f"{what} is {value:.3g} away from that of {other}; allowed is {allowed}")


def _distance(a: list[float], b: list[float]) -> float:
    """‖a − b‖ / ‖b‖; 0 where both are nothing."""
    off = math.dist(a, b)
    return off / size if (size := math.hypot(*b)) else (math.inf if off else 0.0)


def add_rates(
    row: dict[str, Any], baseline: dict[str, Any], size: Size, machine: dict[str, Any]
) -> None:
    nominal = machine["bf16_tflops_nominal"]
    for prefix, ms in (("", "step_ms"), ("recorded_", "recorded_ms")):
        if ms not in row:
            continue
        rate = size.flops / row[ms] / 1e9
        row[f"{prefix}tokens_per_s"] = size.batch * size.tokens / row[ms] * 1e3
        row[f"{prefix}tflops"] = rate
        row[f"{prefix}mfu"] = None if nominal is None else rate / nominal
        row[f"{prefix}share_of_bf16_matmul"] = rate / machine["bf16_tflops"]
        if ms in baseline:
            row[f"{prefix}speedup"] = baseline[ms] / row[ms]
    if row["peak_GiB"] is not None:
        row["memory"] = row["peak_GiB"] / baseline["peak_GiB"]


COLUMNS = (
    ("step ms", "step_ms", ".1f"), ("tokens/s", "tokens_per_s", ".0f"),
    ("TFLOP/s", "tflops", ".0f"), ("MFU", "mfu", ".1%"),
    ("peak GiB", "peak_GiB", ".2f"), ("x BF16: tokens/s", "speedup", ".2f"),
    ("memory", "memory", ".2f"), ("recorded: ms", "recorded_ms", ".1f"),
    ("tokens/s", "recorded_tokens_per_s", ".0f"), ("MFU", "recorded_mfu", ".1%"),
    ("x BF16", "recorded_speedup", ".2f"), ("graphs", "graphs", "d"), ("breaks", "graph_breaks", "d"),
    ("seconds", "process_s", ".0f"),
)  # fmt: skip
