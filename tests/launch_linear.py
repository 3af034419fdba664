"""Check the launches of a linear's quantisers against Triton's own; a script, because Triton must not
be told to interpret. Nothing is compiled and no device is needed: what Triton would compile is known
by its key.

    python tests/launch_linear.py

Prints one JSON object: how often a launch took which way.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Target:
    """A driver of one device, whose stream can be told apart."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 77


launches: list[tuple] = []
ways: Counter[str] = Counter()


class Kernel(CompiledKernel):
    """What was compiled for a key, in name only."""

    def __init__(self, key: str) -> None:
        self.function, self.packed_metadata = key, (4, 1, 0)

    @property
    def run(self):
        def launched(x, y, z, stream, function, packed, metadata, enter, leave, *args):
            for hook in (enter, leave):
                if hook is not None:
                    hook(metadata)
            launches.append((x, y, z, stream, function, packed, *map(name, args)))

        return launched

    def launch_metadata(self, grid, stream, *args) -> str:
        return self.function


def name(x: object) -> object:
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


def named_only(self, key, *_, **__) -> Kernel:
    kernel = self.device_caches[0][0][key] = Kernel(key)
    ways["compiled"] += 1
    return kernel


plain = JITFunction.run


def counted(self, *args, **kwargs):
    ways["through Triton"] += 1
    return plain(self, *args, **kwargs)


def main() -> None:
    driver.set_active(Target())
    JITFunction._do_compile = named_only
    JITFunction.run = counted
    from hf_deltamatch.kernels import linear_operands as lo

    ours = lo.launch

    def both_ways(kernel, programs, pointers, args, seen, **options) -> None:
        launches.clear()
        ours(kernel, programs, pointers, args, seen, **options)
        ways["launches"] += 1
        plain(kernel, *pointers, *args, grid=(programs,), warmup=False, **options)
        assert len(launches) == 2 and launches[0] == launches[1], launches

    lo.launch = both_ways
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    pairs = [(b, b) for b in (lo.VECTOR, lo.TILE_128, lo.ROW, lo.MX)]
    pairs += [(lo.VECTOR, lo.TILE_128), (lo.TILE_128, lo.VECTOR)]
    sizes = (1, 2, 16, 17, 32, 120, 128, 130, 256, 272)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    draw = random.Random(0)
    kinds = itertools.product(pairs, (e4m3, e5m2), (False, True), ((1, 0), (0, 1), (1, 1)))
    for (block, across), fmt, pow2, (rows, columns) in kinds:
        for _ in range(12):
            R, C = draw.choice(sizes), draw.choice(sizes)
            strides = draw.choice(((C, 1), (1, R), (272, 1), (2 * C, 2), (0, 1)))
            buffer = torch.zeros(2 * 300 * 300, dtype=draw.choice(dtypes))
            for more, offset in ((R, 0), (R, 1), (R, 8), (draw.choice(sizes), 0)):
                lo.quantize_matrix(
                    buffer.as_strided((more, C), strides, offset), block, fmt, pow2,
                    rows=bool(rows), columns=bool(columns), columns_block=across,
                )  # fmt: skip
    swept = dict(ways)
    # Hooks are called as ever, and a setting that Triton compiles for leads to another kernel.
    x = torch.zeros(128, 128)
    quantize = lambda: lo.quantize_matrix(x, lo.VECTOR, e4m3, False, rows=True)
    heard: list[str] = []
    quantize()
    knobs.runtime.launch_enter_hook.add(heard.append)
    quantize()
    knobs.runtime.launch_enter_hook.remove(heard.append)
    assert len(heard) == 2 and heard[0] == heard[1] == launches[0][4], heard
    before = launches[0][4]
    knobs.runtime.debug = True
    quantize()
    assert launches[0][4] != before
    print(json.dumps(swept))


if __name__ == "__main__":
    main()
