"""Times the attention kernels in other tiles than those of ``attention_config``; a script for a CUDA device.

    python tests/tune_attention.py                     # D128, D64, D256: what compiles without many spills on 9.0
    python tests/tune_attention.py --shape 4,16,8192,128 --kernel dq --config 64,64,4,2 --config 64,128,4,2,168
    python tests/tune_attention.py --json tune.json

A configuration is queries, keys, warps, stages and, if wanted, registers of a thread; ``hopper`` are the Gluon
kernels, which the others are not compared with. Each is timed by the
profiler (median of its launches, ms) between calls with the tiles in use, which drift with the clocks as it
does, and its results are compared with those: other tiles round P and dS by other blocks, so that what is
printed is a relative difference of 1e-2 and less for dQ, dK, dV, and 1e-5 for δ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_deltamatch.kernels import HOPPER_VARIABLE, attention_config
from hf_deltamatch.kernels.attention_config import Config
from hf_deltamatch.ops.attention_op import attention_bwd, attention_fwd
from hf_deltamatch.recipes import AttentionRecipe
from hf_deltamatch.testing import rel_rms

FUNCTIONS = {
    "fwd": "fwd_config", "one_pass": "one_pass_config", "delta": "delta_config", "dq": "dq_config",
    "dkdv": "dkdv_configs",
}  # fmt: skip
KERNELS = {
    "fwd": "_attention_fwd", "one_pass": "_attention_bwd_dq", "delta": "_attention_bwd_dq",
    "dq": "_attention_bwd_dq", "dkdv": "_attention_bwd_dkdv",
}  # fmt: skip
OUTPUTS = {
    "fwd": ["o"], "one_pass": ["dq", "delta"], "delta": ["delta"], "dq": ["dq"], "dkdv": ["dk", "dv"],
}  # fmt: skip
SHAPES = [(4, 16, 8192, 128), (4, 32, 8192, 64), (2, 8, 8192, 256)]
DEFAULT = {
    128: {
        "fwd": [(64, 64, 4, 2)],
        "one_pass": [(64, 64, 4, 3), (64, 32, 4, 3)],
        "delta": [(64, 128, 4, 2), (64, 64, 4, 2)],
        "dq": [(64, 64, 4, 2)],
        "dkdv": [(32, 64, 4, 2)],
    },
    64: {
        "fwd": [(64, 128, 4, 2), (64, 128, 4, 3, 128), (64, 64, 4, 3, 128)],
        "one_pass": [(64, 64, 4, 3, 128), (64, 128, 4, 2), (64, 128, 4, 3, 168)],
        "delta": [(64, 128, 4, 3), (64, 64, 4, 3, 128), (64, 128, 4, 3, 128)],
        "dq": [(64, 128, 4, 2), (64, 128, 4, 3, 168), (64, 64, 4, 2, 128)],
        "dkdv": [(128, 64, 4, 2), (64, 64, 4, 3, 168), (64, 64, 4, 2, 128)],
    },
    256: {
        "fwd": [(64, 64, 4, 3), (64, 64, 8, 2)],
        "delta": [(64, 64, 4, 3), (64, 64, 8, 2)],
        "dq": [(64, 64, 8, 2), (64, 128, 8, 1)],
        "dkdv": [(32, 64, 8, 2)],
    },
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: tuple(int(x) for x in text.split(","))
    parser.add_argument("--shape", type=numbers, action="append", metavar="B,H,T,D")
    parser.add_argument("--kernel", choices=FUNCTIONS, action="append")
    parser.add_argument(
        "--config", type=numbers, action="append", metavar="M,N,WARPS,STAGES[,REGS]"
    )
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    rows = []
    for shape in args.shape or SHAPES:
        known = DEFAULT.get(shape[3], {})
        call = _call(*shape)
        for kernel in args.kernel or FUNCTIONS:
            if kernel == "one_pass" and shape[3] > 128:
                continue
            expected, used = _measure(call, kernel)
            gluon = kernel != "fwd" and shape[3] in attention_config.HOPPER_HEADS
            for numbers_of in ["hopper"] * gluon + list(args.config or known.get(kernel, [])):
                row: dict[str, Any] = {"shape": shape, "kernel": kernel, "config": numbers_of}
                try:
                    with _instead(kernel, numbers_of):
                        found, row["ms"] = _measure(call, kernel)
                    pairs = zip(found, expected, strict=True)
                    row["difference"] = max(rel_rms(a, b) for a, b in pairs)
                except Exception as error:  # too much shared memory, an assembler that gives up
                    row["failed"] = f"{type(error).__name__}: {error}"[:200]
                _, after = _measure(call, kernel)
                row["in_use_ms"] = (used + after) / 2
                used = after
                rows.append(row)
                print(json.dumps(row), flush=True)
                if args.json:
                    with open(args.json, "w") as file:
                        json.dump(
                            {"device": torch.cuda.get_device_name(), "rows": rows}, file, indent=1
                        )


def _call(B: int, H: int, T: int, D: int):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.randn(B, T, H, D, device="cuda", generator=generator).bfloat16().transpose(1, 2)
        for _ in range(4)
    )
    options = (None, None, None, None, True, None, D**-0.5, None)
    backend = (AttentionRecipe.resolve("delta_matching").encoded, "triton")

    def call() -> dict[str, Tensor]:
        o, lse, *saved = attention_fwd(q, k, v, *options, *backend)
        dq, dk, dv, _, delta = attention_bwd(do, None, o, lse, *saved, *options, *backend)
        return {"o": o, "dq": dq, "dk": dk, "dv": dv, "delta": delta}

    return call


@contextmanager
def _instead(kernel: str, numbers: str | tuple[int, ...]) -> Iterator[None]:
    name = FUNCTIONS[kernel]
    saved = getattr(attention_config, name), os.environ[HOPPER_VARIABLE]
    if numbers == "hopper":
        os.environ[HOPPER_VARIABLE] = "1"
    else:
        config = Config(*numbers)
        new = [(config, True, True)] if kernel == "dkdv" else config
        setattr(attention_config, name, lambda *args, **kwargs: new)
    try:
        yield
    finally:
        setattr(attention_config, name, saved[0])
        os.environ[HOPPER_VARIABLE] = saved[1]


def _measure(call, kernel: str, calls: int = 8) -> tuple[list[Tensor], float]:
    """Results, and the median time of the kernel in ``calls`` calls."""
    has_one_pass = attention_config.has_one_pass
    if kernel in ("delta", "dq"):
        attention_config.has_one_pass = lambda *args, **kwargs: False
    try:
        return _timed(call, kernel, calls)
    finally:
        attention_config.has_one_pass = has_one_pass


def _timed(call, kernel: str, calls: int) -> tuple[list[Tensor], float]:
    call()
    result = call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    name = KERNELS[kernel]
    cuda = torch.autograd.DeviceType.CUDA
    events = [e for e in profile.events() if e.device_type == cuda and e.name.startswith(name)]
    events.sort(key=lambda e: e.time_range.start)
    times = [e.device_time / 1e3 for e in events]
    if kernel in ("delta", "dq"):  # one kernel, in turns
        times = times[0 if kernel == "delta" else 1 :: 2]
    return [result[name] for name in OUTPUTS[kernel]], statistics.median(times)


if __name__ == "__main__":
    os.environ[HOPPER_VARIABLE] = "0"
    main()
