r"""The matched δ, and dQ, on Hopper: the arithmetic of :mod:`attention_dq`, in Gluon.

Two warpgroups of 64 queries share the key tiles that a producer warp brings in by TMA, so that one
multiplies while the other exponentiates. All passes are one kernel with switches, as there, and the
numbers are those of the plain kernel: same tiles, same order, same instructions. (In one pass W is in units
of the latest descale here, of the largest there.)

For ``128xD``, without a boolean mask, at head dimensions 65 to 128, dO in E4M3, without the row-sum
projection. Compared with the plain kernel and the reference on a GPU.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hf_deltamatch.kernels.attention_dq import LIFT, LOWER, unit_of
from hf_deltamatch.kernels.attention_problem import Problem
from hf_deltamatch.kernels.casts import exp2_int, inverse_exp2_int, nan_to_zero, pow2_exponent
from hf_deltamatch.kernels.geometry import (
    COMPACT_MASK,
    key_tiles,
    own_program,
    own_segment,
    segment_of,
)
from hf_deltamatch.kernels.hopper import (
    ROWS,
    add_product,
    add_products,
    async_load,
    columns_descriptor,
    rows_descriptor,
    store_rows,
    to_operand,
)
from hf_deltamatch.kernels.logits import LOG2E, positive, tanh

BLOCK_N = {"delta": 128, "dq": 128, "one_pass": 64}
STAGES = {"delta": 4, "dq": 3, "one_pass": 4}
"""Key tiles in flight."""


@gluon.jit
def _produce(
    q_desc, do_desc, k_desc, v_desc, kt_desc, stages, q_s, do_s, q_ready, token, key_token, kt_row,
    k_slot, last, tiles, DELTA: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Q and dO of this program once, then the key tiles from the last one back."""
    k_s, v_s, kt_s, full, empty = stages
    mbarrier.expect(q_ready, 4 * ROWS * BLOCK_D)
    for w in gl.static_range(2):
        async_load(q_desc, [token + w * ROWS, 0], q_ready, q_s.index(w))
        async_load(do_desc, [token + w * ROWS, 0], q_ready, do_s.index(w))
    COPIES: gl.constexpr = 2 if DELTA else 3
    for t in range(tiles):
        start = (last - t) * BLOCK_N
        stage = t % STAGES
        ready = full.index(stage)
        mbarrier.wait(empty.index(stage), ((t // STAGES) & 1) ^ 1)
        mbarrier.expect(ready, COPIES * BLOCK_N * BLOCK_D)
        async_load(k_desc, [key_token + start, 0], ready, k_s.index(stage))
        async_load(v_desc, [key_token + start, 0], ready, v_s.index(stage))
        if not DELTA:
            async_load(kt_desc, [kt_row, k_slot * 128 + start], ready, kt_s.index(stage))


@gluon.jit
def _step(
    t, acc, key, unit, top, sum_a, sum_b, start, own, rows, lse2, shifted, stages,
    pointers, sizes, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, MASK: gl.constexpr,
    SOFTCAP: gl.constexpr, MASKED: gl.constexpr, DELTA: gl.constexpr, ONE_PASS: gl.constexpr,
    STORE_DS: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One tile of keys, the t-th; arguments as ``attention_dq._dq_tile``, tuples as in ``_consume``."""
    q, do, q_tile, do_tile = own
    k_s, v_s, kt_s, full, empty = stages
    k_descale_ptr, v_descale_ptr, mask_ptr, ds_ptr, p_ptr = pointers
    Tq, Tk, all_keys, k_base, offset, window, softmax_scale, softcap = sizes
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    grads: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 32])
    operand: gl.constexpr = gl.DotOperandLayout(0, grads, 4)
    by_row: gl.constexpr = gl.SliceLayout(1, grads)
    by_key: gl.constexpr = gl.SliceLayout(0, scores)
    stage = t % STAGES
    k_tile = gl.load(k_descale_ptr + start // 128)
    f = q_tile * k_tile
    g = do_tile * gl.load(v_descale_ptr + start // 128)
    if ONE_PASS:
        g = g * LOWER
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, scores)
    mbarrier.wait(full.index(stage), (t // STAGES) & 1)
    s = warpgroup_mma(q, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(do, v_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    if SOFTCAP:
        cap = tanh(s * (f * (softmax_scale / softcap)), SOFTCAP)
        p = gl.exp2(cap * (softcap * LOG2E) - lse2[:, None])
    else:
        p = gl.exp2(s * positive(f * (softmax_scale * LOG2E)) - lse2[:, None])
    keys = start + gl.arange(0, BLOCK_N, by_key)
    if MASKED:
        seen = (keys < Tk)[None, :] & (rows < Tq)[:, None]
        at = (rows + offset)[:, None]
        if MASK == COMPACT_MASK:
            position = gl.load(mask_ptr + keys, mask=keys < Tk, other=-1)[None, :]
            reach = gl.load(mask_ptr + all_keys + keys, mask=keys < Tk, other=0)[None, :]
            seen = seen & (position >= 0) & (position <= at) & (at - position < reach)
        if CAUSAL and MASK == 0:
            seen = seen & (keys[None, :] <= at)
        if WINDOW and MASK == 0:
            seen = seen & (at - keys[None, :] < window)
        p = gl.where(seen, p, 0.0)
        if SOFTCAP:  # 0 · NaN where a query or key is NaN that this pair hides
            cap = gl.where(seen, cap, 0.0)
    dp = warpgroup_mma_wait(0, deps=[dp])
    if DELTA:
        mbarrier.arrive(empty.index(stage))
        if MASKED:
            sum_a += gl.sum(p * gl.where(seen, dp * g, 0.0), 1)
        else:  # every row sees the tile, so one factor after the sum will do
            sum_a += gl.sum(p * dp, 1) * g
        sum_b += gl.sum(p, 1)
    else:
        dp = dp * g
        if MASKED:
            dp = gl.where(seen, dp, 0.0)
        ds = p * (dp - shifted[:, None])
        if MASKED:
            ds = gl.where(seen, ds, 0.0)
        if STORE_DS:
            inside = (rows < Tq)[:, None] & (keys < Tk)[None, :]
            out = rows.to(gl.int64)[:, None] * all_keys + k_base + keys[None, :]
            gl.store(ds_ptr + out, ds, mask=inside)
            if ONE_PASS:
                gl.store(p_ptr + out, p * LOWER, mask=inside)
        if ONE_PASS:
            sum_a += gl.sum(ds, 1)
            sum_b += gl.sum(p, 1)
        if SOFTCAP:
            ds = ds * (1.0 - cap * cap)
            if ONE_PASS:
                p = p * (1.0 - cap * cap)
        e = pow2_exponent(gl.max(gl.abs(ds), 1))
        back = gl.convert_layout(exp2_int(e), by_row, assert_trivial=True) * nan_to_zero(k_tile)
        ds8 = to_operand(ds * inverse_exp2_int(e)[:, None], operand)
        if ONE_PASS:
            own_descale = gl.where(k_tile == k_tile, k_tile, unit)
            if own_descale != unit:  # seldom: 2.54 ms without the branch, 2.30 with it
                top = gl.maximum(top, own_descale)
                own_unit = unit_of(own_descale, top)
                key = key * (unit / own_unit)
                p = p * (own_descale / own_unit)
                unit = own_unit
            p8 = to_operand(p, operand, True)
            acc, key = add_products(acc, key, ds8, p8, kt_s.index(stage), back)
        else:
            acc = add_product(acc, ds8, kt_s.index(stage), back)
        mbarrier.arrive(empty.index(stage))
    return acc, key, unit, top, sum_a, sum_b


@gluon.jit
def _consume(
    w: gl.constexpr,
    stages, pointers, stats, q_s, do_s, q_ready, dq_ptr, q_descale_ptr, do_descale_ptr, sinks_ptr,
    first, bh, h, q_base, slot, stat, tiles, sizes, all_queries, D,
    stride_dqt,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr, DLSE: gl.constexpr, DELTA: gl.constexpr, ONE_PASS: gl.constexpr,
    STORE_DS: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 queries against every key tile.

    ``stages``: buffers of key tiles and their barriers; ``pointers``: descales of K and V, the mask,
    dS, P; ``stats``: ``lse2, δ − dlse, δ, dlse``; ``tiles``: ``lo, full_lo, full_hi, hi`` of ``key_tiles``.
    """
    lse2_ptr, shifted_ptr, delta_ptr, dlse_ptr = stats
    lo, full_lo, full_hi, hi = tiles
    q_len = sizes[0]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    grads: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 32])
    rows = first + w * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, scores))
    inside = rows < q_len
    lse2 = gl.load(lse2_ptr + stat + rows, mask=inside, other=float("inf"))
    q_tile = gl.load(q_descale_ptr + slot)
    do_tile = gl.load(do_descale_ptr + slot)
    own = (q_s.index(w), do_s.index(w), q_tile, do_tile)
    sum_a = gl.zeros_like(lse2)
    sum_b = gl.zeros_like(lse2)
    if DELTA:
        shifted = lse2
        acc = lse2
    else:
        shifted = gl.load(shifted_ptr + stat + rows, mask=inside, other=0.0)
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, grads)
    unit = 0.0
    top = 0.0
    key = sum_a
    if ONE_PASS:
        # An estimate that is no number would stay in what it is taken out of again.
        z = gl.where(gl.abs(shifted) < float("inf"), shifted, 0.0)
        shifted = z * LOWER
        lse2 -= LIFT
        key = gl.zeros([ROWS, BLOCK_D], gl.float32, grads)
    mbarrier.wait(q_ready, 0)
    for t in range(hi - full_hi):
        acc, key, unit, top, sum_a, sum_b = _step(
            t, acc, key, unit, top, sum_a, sum_b, (hi - 1 - t) * BLOCK_N, own, rows, lse2, shifted,
            stages, pointers, sizes, CAUSAL, WINDOW, MASK, SOFTCAP, True, DELTA, ONE_PASS, STORE_DS,
            BLOCK_D, BLOCK_N, STAGES,
        )  # fmt: skip
    if MASK == 0:
        for t in range(hi - full_hi, hi - full_lo):
            acc, key, unit, top, sum_a, sum_b = _step(
                t, acc, key, unit, top, sum_a, sum_b, (hi - 1 - t) * BLOCK_N, own, rows, lse2,
                shifted, stages, pointers, sizes, CAUSAL, WINDOW, MASK, SOFTCAP, False, DELTA,
                ONE_PASS, STORE_DS, BLOCK_D, BLOCK_N, STAGES,
            )  # fmt: skip
    if WINDOW and MASK == 0:
        for t in range(hi - full_lo, hi - lo):
            acc, key, unit, top, sum_a, sum_b = _step(
                t, acc, key, unit, top, sum_a, sum_b, (hi - 1 - t) * BLOCK_N, own, rows, lse2,
                shifted, stages, pointers, sizes, CAUSAL, WINDOW, MASK, SOFTCAP, True, DELTA,
                ONE_PASS, STORE_DS, BLOCK_D, BLOCK_N, STAGES,
            )  # fmt: skip
    if ONE_PASS:
        lse2 += LIFT
        sum_b *= LOWER
        sum_a += z * sum_b
    if DELTA or ONE_PASS:
        if SINKS:
            sink = gl.load(sinks_ptr + h).to(gl.float32) * LOG2E
            sum_b += gl.exp2(sink - lse2)
        delta = sum_a / gl.where(sum_b == 0.0, 1.0, sum_b)
        row = bh.to(gl.int64) * all_queries + q_base + rows
        gl.store(delta_ptr + row, delta, mask=inside)
        if DLSE:
            delta = delta - gl.load(dlse_ptr + row, mask=inside, other=0.0)
            # A row that sees nothing has no gradient, whatever comes down to its lse.
            delta = gl.where(lse2 == float("inf"), 0.0, delta)
        gl.store(shifted_ptr + stat + rows, delta, mask=inside)
    if ONE_PASS:
        off = gl.convert_layout(
            (delta - z) * (unit * LOWER), gl.SliceLayout(1, grads), assert_trivial=True
        )
        acc = acc - key * off[:, None]
    if not DELTA:
        out = acc * sizes[6]
        store_rows(dq_ptr, out, first + w * ROWS, q_base, q_len, D, stride_dqt)


@gluon.jit(do_not_specialize=["heads_at_once", "places"])
def _attention_bwd_dq_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, kt_desc, dq_ptr, delta_ptr, shifted_ptr, dlse_ptr, lse2_ptr,
    q_descale_ptr, do_descale_ptr, k_descale_ptr, v_descale_ptr, sinks_ptr, ds_ptr, p_ptr, mask_ptr,
    bounds_ptr, cu_q_ptr, cu_k_ptr, segment_q_ptr,
    heads_at_once, places, Hq, G, Tq, Tk, D, D_padded, slots_q, slots_k, softmax_scale, softcap,
    window, mask_heads,
    stride_stat, stride_dqb, stride_dqh, stride_dqt, stride_mb, stride_mh,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr, DLSE: gl.constexpr, PACKED: gl.constexpr, DELTA: gl.constexpr,
    ONE_PASS: gl.constexpr, STORE_DS: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Arguments as :func:`attention_dq._attention_bwd_dq_kernel`."""
    place, bh = own_program(heads_at_once, places)
    slot = places - 1 - place  # the longest causal rows first
    b = bh // Hq
    h = bh % Hq
    kv = b * (Hq // G) + h // G
    segment, q_base, q_len, q_slot, first = own_segment(
        slot, Tq, cu_q_ptr, segment_q_ptr, 128, PACKED
    )
    k_base, k_len, k_slot = segment_of(segment, Tk, cu_k_ptr, PACKED)
    offset = k_len - q_len
    if MASK != 0:
        mask_ptr += b.to(gl.int64) * stride_mb + h.to(gl.int64) * stride_mh
        offset = gl.load(mask_ptr + 2 * Tk)
        bounds_ptr += ((b * mask_heads + h % mask_heads) * slots_q + first // 128) * 2
    lo, full_lo, full_hi, hi = key_tiles(
        first, q_len, k_len, offset, window, bounds_ptr, CAUSAL, WINDOW, MASK, 128, BLOCK_N
    )
    if first >= q_len:  # an unused slot: nothing to visit, nothing to store
        lo = hi
        full_lo = hi
        full_hi = hi
    F8: gl.constexpr = gl.float8e4nv
    q_s = gl.allocate_shared_memory(F8, [2, ROWS, BLOCK_D], q_desc.layout)
    do_s = gl.allocate_shared_memory(F8, [2, ROWS, BLOCK_D], do_desc.layout)
    k_s = gl.allocate_shared_memory(F8, [STAGES, BLOCK_N, BLOCK_D], k_desc.layout)
    v_s = gl.allocate_shared_memory(F8, [STAGES, BLOCK_N, BLOCK_D], v_desc.layout)
    kt_s = k_s
    if not DELTA:
        kt_s = gl.allocate_shared_memory(F8, [STAGES, BLOCK_D, BLOCK_N], kt_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    stages = (k_s, v_s, kt_s, full, empty)
    own_slot = bh * slots_q + q_slot + first // 128
    k_descale_ptr += kv * slots_k + k_slot
    v_descale_ptr += kv * slots_k + k_slot
    if STORE_DS:
        ds_ptr += (bh.to(gl.int64) * Tq + q_base) * Tk
        if ONE_PASS:
            p_ptr += (bh.to(gl.int64) * Tq + q_base) * Tk
    pointers = (k_descale_ptr, v_descale_ptr, mask_ptr, ds_ptr, p_ptr)
    stats = (lse2_ptr, shifted_ptr, delta_ptr, dlse_ptr)
    tiles = (lo, full_lo, full_hi, hi)
    sizes = (q_len, k_len, Tk, k_base, offset, window, softmax_scale, softcap)
    stat = bh.to(gl.int64) * stride_stat + q_slot * 128
    dq_ptr += b.to(gl.int64) * stride_dqb + h.to(gl.int64) * stride_dqh
    gl.warp_specialize([
        (_consume, (
            0, stages, pointers, stats, q_s, do_s, q_ready, dq_ptr, q_descale_ptr,
            do_descale_ptr, sinks_ptr, first, bh, h, q_base, own_slot, stat, tiles, sizes, Tq, D,
            stride_dqt, CAUSAL, WINDOW, MASK, SOFTCAP, SINKS, DLSE, DELTA, ONE_PASS, STORE_DS,
            BLOCK_D, BLOCK_N, STAGES,
        )),
        (_consume, (
            1, stages, pointers, stats, q_s, do_s, q_ready, dq_ptr, q_descale_ptr,
            do_descale_ptr, sinks_ptr, first, bh, h, q_base, own_slot, stat, tiles, sizes, Tq, D,
            stride_dqt, CAUSAL, WINDOW, MASK, SOFTCAP, SINKS, DLSE, DELTA, ONE_PASS, STORE_DS,
            BLOCK_D, BLOCK_N, STAGES,
        )),
        (_produce, (
            q_desc, do_desc, k_desc, v_desc, kt_desc, stages, q_s, do_s, q_ready,
            bh * Tq + q_base + first, kv * Tk + k_base, kv * D_padded, k_slot, hi - 1, hi - lo,
            DELTA, BLOCK_D, BLOCK_N, STAGES,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


def dq_hopper(
    which: str,
    x: Problem,
    payloads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    stats: tuple[Tensor, Tensor, Tensor, Tensor | None],
    descales: tuple[Tensor, Tensor, Tensor, Tensor],
    dq: Tensor,
    debug: tuple[Tensor | None, Tensor | None],
    bounds: Tensor | None,
) -> None:
    """Fill ``δ`` and ``δ − dlse``, or ``dq``, or all.

    Args:
        which: ``delta``, ``dq`` or ``one_pass``.
        payloads: of q, do, k, v, and the transposed copy of k.
        stats: ``lse2``, ``δ − dlse``: rows padded to 16 bytes; ``δ [B, Hq, Tq]``, and dlse or None.
        descales: of q, do, k, v, one per slot.
        debug: where dS (before the estimate is corrected, for ``one_pass``) and P go, or None.
    """
    q8, do8, k8, v8, kt = payloads
    lse2, shifted, delta, dlse = stats
    BD, BN = x.BLOCK_D, BLOCK_N[which]
    flags = {k: v for k, v in x.flags().items() if k not in ("TILE", "SOFT_CAST")}
    grid, order = x.programs(2 * ROWS.value, 1)
    _attention_bwd_dq_hopper_kernel[grid](
        rows_descriptor(q8, ROWS.value, BD), rows_descriptor(do8, ROWS.value, BD),
        rows_descriptor(k8, BN, BD), rows_descriptor(v8, BN, BD), columns_descriptor(kt, BD, BN),
        dq, delta, shifted, dlse, lse2, *descales, x.sinks, *debug, x.mask_bytes, bounds, x.pack_q.cu,
        x.pack_k.cu, x.pack_q.segment, *order, x.Hq,
        x.Hq // x.Hkv, x.Tq, x.Tk, x.D, kt.shape[2], x.pack_q.slots, x.pack_k.slots,
        x.softmax_scale, x.softcap or 1.0, x.window or 0, x.mask_heads, lse2.stride(1),
        *dq.stride()[:3], *x.mask_strides[:2], SINKS=x.sinks is not None, DLSE=dlse is not None,
        DELTA=which == "delta", ONE_PASS=which == "one_pass", STORE_DS=debug[0] is not None,
        BLOCK_D=BD, BLOCK_N=BN, STAGES=STAGES[which], num_warps=4, **flags,
    )  # fmt: skip
