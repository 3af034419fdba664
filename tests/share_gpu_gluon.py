"""The smallest Gluon kernel with what ours have: a producer with TMA, two warpgroups, 240 registers each;
and, asked for, products that keep more of them than the kernel is launched with (168)."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hf_deltamatch.kernels.hopper import async_load

ROWS, STAGES = 64, 4


@gluon.jit
def _produce(desc, stages, first, tiles, N: gl.constexpr, S: gl.constexpr):
    buffers, full, empty = stages
    for t in range(tiles):
        mbarrier.wait(empty.index(t % S), ((t // S) & 1) ^ 1)
        mbarrier.expect(full.index(t % S), 64 * N * 2)
        async_load(desc, [first + t * 64, 0], full.index(t % S), buffers.index(t % S))


@gluon.jit
def _consume(
    w: gl.constexpr, out_ptr, stages, tiles, MMA: gl.constexpr, N: gl.constexpr, S: gl.constexpr
):
    buffers, full, empty = stages
    small: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    rows = gl.arange(0, 64, gl.SliceLayout(1, wide))
    columns = gl.arange(0, N, gl.SliceLayout(0, wide))
    total = gl.zeros([64, N], gl.float32, wide)
    other = gl.zeros([64, N], gl.float32, wide)
    for t in range(tiles):
        stage = t % S
        mbarrier.wait(full.index(stage), (t // S) & 1)
        x = buffers.index(stage)
        if MMA:
            # x xᵀ, then that times x, twice: two sums of 64 registers, one product of 32 between.
            zero = gl.zeros([64, 64], gl.float32, small)
            s = warpgroup_mma(x, x.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            p = gl.convert_layout((s * 0.01).to(gl.bfloat16), gl.DotOperandLayout(0, wide, 2))
            total = warpgroup_mma(p, x, total, is_async=True)
            other = warpgroup_mma(p, x, other * 0.5, is_async=True)
            total, other = warpgroup_mma_wait(0, deps=[total, other])
        else:
            total = total * (0.5 + 0.25 * w) + x.load(wide).to(gl.float32)
            other = other + total
        mbarrier.arrive(empty.index(stage))
    at = out_ptr + ((gl.program_id(0) * 2 + w) * 64 + rows)[:, None] * N + columns[None, :]
    gl.store(at, total + other)


@gluon.jit
def _kernel(desc, out_ptr, tiles, MMA: gl.constexpr, N: gl.constexpr, S: gl.constexpr):
    buffers = gl.allocate_shared_memory(gl.bfloat16, [S, 64, N], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(S):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    stages = (buffers, full, empty)
    gl.warp_specialize([
        (_consume, (0, out_ptr, stages, tiles, MMA, N, S)),
        (_consume, (1, out_ptr, stages, tiles, MMA, N, S)),
        (_produce, (desc, stages, gl.program_id(0) * tiles * 64, tiles, N, S)),
    ], [4, 1], [240, 24])  # fmt: skip


def run(x: Tensor, tiles: int, mma: bool) -> Tensor:
    """``x [programs · tiles · 64, N]`` BF16, N 64 or 128, to ``[programs · 128, N]`` FP32."""
    N = x.shape[1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    desc = TensorDescriptor(x, list(x.shape), [N, 1], [ROWS, N], layout)
    programs = x.shape[0] // (tiles * ROWS)
    out = torch.empty(programs * 2 * ROWS, N, device=x.device)
    _kernel[(programs,)](desc, out, tiles, mma, N, STAGES, num_warps=4)
    return out
