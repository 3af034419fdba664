"""How calls are timed on a CUDA device.

Two times of every call, ours and the baselines' alike:

* **queued** (the headline): after one call that keeps the device busy, N calls are launched one after
  another between two events, without a wait; the time between the events over N, the median of
  several such queues. The host runs ahead of the device, as in a training step, so its launch time
  counts only where it is the longer one.
* **one call**: the device is idle, one call is launched and waited for; median of several. All of
  the host's time before the first kernel and between kernels counts.

The queues of all rows of a shape take turns, so that clocks and temperature favour none.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

Function = Callable[[], Any]


class Times(NamedTuple):
    """Milliseconds of one call; ``queued_range`` is the fastest and the slowest queue."""

    queued: float
    queued_range: tuple[float, float]
    one_call: float


def elapsed_ms(function: Function, calls: int, *, busy: bool) -> float:
    """Time of ``calls`` calls launched without a wait, over ``calls``; on a ``busy`` device, behind
    another call, or on an idle one."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if busy:
        function()
    start.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def measure(
    functions: Mapping[str, Function], *, queues: int = 5, singles: int = 7, queue_ms: float = 60.0
) -> dict[str, Times]:
    """Every function warmed up, then timed in turns.

    Args:
        queues: queues a function.
        singles: single calls a function.
        queue_ms: about how long a queue takes; it has 4 to 50 calls.
    """
    lengths = {}
    for name, function in functions.items():
        for _ in range(2):
            function()
        once = elapsed_ms(function, 3, busy=True)
        lengths[name] = max(4, min(50, round(queue_ms / max(once, 1e-3))))
    one_call = {name: [] for name in functions}
    queued = {name: [] for name in functions}
    for turn in range(max(queues, singles)):
        for name, function in functions.items():
            if turn < singles:
                one_call[name].append(elapsed_ms(function, 1, busy=False))
            if turn < queues:
                queued[name].append(elapsed_ms(function, lengths[name], busy=True))
    return {
        name: Times(
            statistics.median(queued[name]),
            (min(queued[name]), max(queued[name])),
            statistics.median(one_call[name]),
        )
        for name in functions
    }


def kernel_times(function: Function, repeats: int = 3) -> dict[str, float]:
    """Milliseconds of each CUDA kernel of a call, by name, from the profiler; empty where the
    profiler sees none."""
    from torch.profiler import ProfilerActivity, profile

    function()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as run:
        for _ in range(repeats):
            function()
        torch.cuda.synchronize()
    events = {e.key: e.device_time_total / repeats / 1e3 for e in run.key_averages()}
    return {k: v for k, v in events.items() if v > 0}


def quantize_ms(kernels: Mapping[str, float]) -> float | None:
    """The part of our kernels that quantise or transpose payloads; None without any kernel."""
    if not kernels:
        return None
    ours = lambda name: name.startswith("_") and ("_quantize" in name or "_transpose" in name)
    return sum(ms for name, ms in kernels.items() if ours(name))


def fp8_peak(size: int = 8192) -> float:
    """FP8 matmul rate of this device now, TFLOP/s (``torch._scaled_mm``, tensorwise, queued)."""
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    product = lambda: torch._scaled_mm(
        a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return 2 * size**3 / measure({"": product}, singles=1)[""].queued / 1e9


def bf16_peak(size: int = 8192) -> float:
    """BF16 matmul rate of this device now, TFLOP/s (queued)."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / measure({"": lambda: a @ b.t()}, singles=1)[""].queued / 1e9


def copy_bandwidth(n_bytes: int = 2**30) -> float:
    """TB/s that a copy of ``n_bytes`` reads and writes on this device now (queued)."""
    return 2 * n_bytes / measure({"": make_copy(n_bytes)}, singles=1)[""].queued / 1e9


def make_copy(n_bytes: int, device: torch.device | str = "cuda") -> Function:
    """A call that reads ``n_bytes`` and writes as many."""
    a, b = (torch.empty(n_bytes // 4, dtype=torch.int32, device=device) for _ in range(2))
    return lambda: a.copy_(b)
