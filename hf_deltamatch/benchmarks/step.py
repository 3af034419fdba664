"""``hf-deltamatch bench step``: whole training steps, BF16 beside ours, each in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hf_deltamatch import kernels
from hf_deltamatch.benchmarks import tables, timing
from hf_deltamatch.benchmarks.process import in_own_process
from hf_deltamatch.benchmarks.step_arm import ARMS, WEIGHTS, Size
from hf_deltamatch.benchmarks.verify import WrongNumbers

BASELINE = "bf16"
DEFAULT_ARMS = (BASELINE, "fp8")
ARM_S = 240.0
MAX_LOSS_DIFFERENCE = 0.01
"""Relative, of the losses of the first steps: they start from the same weights and tokens."""
MAX_NORM_DIFFERENCE = 0.2
"""Relative, of the norm of every parameter's first gradient. Rounding of FP8 that is independent of
the gradient adds the square of its share: 0.1 of error is 0.005 of norm."""
NOMINAL_BF16 = {"H200": 989.0, "H100 80GB": 989.0, "B200": 2250.0, "A100": 312.0}
"""Dense BF16 TFLOP/s in the data sheets of the SXM modules, by a part of the device's name."""

METHOD = {
    "step_ms": "forward, backward, fused AdamW: queues of 5 steps launched without a wait, the median "
    "of 3 queues, after 4 steps",
    "weights": "bf16: weights, gradients and optimiser state in BF16; fp32: all of them in FP32, under "
    "autocast to BF16",
    "compile": "every layer and the loss with torch.compile; embedding and last norm without",
    "mfu": "model FLOPs (6 per matrix element and token, attention's visible pairs, nothing "
    "recomputed) over the data sheet's dense BF16 rate",
    "share_of_bf16_matmul": "the same over the rate of an 8192³ product in this run",
    "peak_GiB": "largest allocation of the timed steps; between_steps_GiB is there before a step",
    "checked": "losses of the first steps and norms of all first gradients against the BF16 arm",
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
        size: default 20 layers, hidden 2048, 8192 tokens: 1.4 billion parameters.
        arms: names of ``step_arm.ARMS``; default BF16 and all of ours.
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
    for op in ("attention", "linear"):
        reason = kernels.missing(op, torch.device("cuda"))
        if reason is not None:
            raise tables.BenchError(f"steps are timed on a CUDA device with kernels: {reason}.")
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
            row["difference"] = agree(found, expected)
        except Exception as error:
            row["failed"] = tables.reason(error)
        else:
            row |= {k: v for k, v in found.items() if k != "grad_norms"}
            add_rates(row, rows[BASELINE], size, result)
        keep(result)
    progress(tables.format_rows(name, rows, COLUMNS))
    return result


def nominal_bf16(device: str) -> float | None:
    """None for a device that is not in :data:`NOMINAL_BF16`, which the NVL cards are not."""
    if "NVL" in device:
        return None
    return next((rate for part, rate in NOMINAL_BF16.items() if part in device), None)


def agree(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Largest relative differences of losses and of gradients' norms.

    Raises:
        WrongNumbers: one of them is above its bound, or NaN, or a gradient is missing.
    """
    if found["grad_norms"].keys() != expected["grad_norms"].keys():
        raise WrongNumbers("other parameters have gradients than in the BF16 arm")
    relative = lambda a, b: abs(a - b) / abs(b) if a != b else 0.0
    losses = [relative(a, b) for a, b in zip(found["losses"], expected["losses"], strict=True)]
    norms = {n: relative(a, expected["grad_norms"][n]) for n, a in found["grad_norms"].items()}
    for name, off in norms.items():
        if not off <= MAX_NORM_DIFFERENCE:
            raise WrongNumbers(
                f"the first gradient of {name} has a norm {off:.3g} away from that of BF16; "
                f"allowed is {MAX_NORM_DIFFERENCE}"
            )
    if not all(off <= MAX_LOSS_DIFFERENCE for off in losses):
        raise WrongNumbers(
            f"losses of the first steps are {max(losses):.3g} away from those of BF16; allowed is "
            f"{MAX_LOSS_DIFFERENCE}"
        )
    return {"losses": max(losses), "grad_norms": max(norms.values())}


def add_rates(
    row: dict[str, Any], baseline: dict[str, Any], size: Size, machine: dict[str, Any]
) -> None:
    seconds = row["step_ms"] / 1e3
    rate = size.flops / seconds / 1e12
    nominal = machine["bf16_tflops_nominal"]
    row["tokens_per_s"] = size.tokens / seconds
    row["tflops"] = rate
    row["mfu"] = None if nominal is None else rate / nominal
    row["share_of_bf16_matmul"] = rate / machine["bf16_tflops"]
    row["speedup"] = baseline["step_ms"] / row["step_ms"]
    if row["peak_GiB"] is not None:
        row["memory"] = row["peak_GiB"] / baseline["peak_GiB"]


COLUMNS = (
    ("step ms", "step_ms", ".1f"), ("tokens/s", "tokens_per_s", ".0f"),
    ("TFLOP/s", "tflops", ".0f"), ("MFU", "mfu", ".1%"),
    ("peak GiB", "peak_GiB", ".2f"), ("x BF16: tokens/s", "speedup", ".2f"),
    ("memory", "memory", ".2f"), ("graphs", "graphs", "d"), ("breaks", "graph_breaks", "d"),
    ("seconds", "process_s", ".0f"),
)  # fmt: skip
