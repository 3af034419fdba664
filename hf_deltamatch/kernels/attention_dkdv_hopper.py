r"""dK and dV on Hopper: the arithmetic of :mod:`attention_dkdv`, in Gluon.

Two warpgroups of 64 keys share the query tiles that a producer warp brings in by TMA, so that one
multiplies while the other exponentiates. Sᵀ and dPᵀ come from shared memory; P and dS go from
accumulators to register operands without a shuffle (``regroup_rows``). A product over 64 queries is
added to FP32 registers with its own power of two per key: the tensor cores' short accumulators see
no longer contraction than in the plain kernel, and the numbers are the same.

For ``128xD``, without a boolean mask, at head dimensions 65 to 128, dO in E4M3. Gluon has no
interpreter: compared with the reference on a GPU.
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

from hf_deltamatch.kernels.attention_problem import Problem
from hf_deltamatch.kernels.casts import (
    exp2_int,
    inverse_exp2_int,
    nan_to_zero,
    pow2_exponent,
)
from hf_deltamatch.kernels.geometry import (
    COMPACT_MASK,
    own_program,
    own_segment,
    query_tiles,
    segment_of,
)
from hf_deltamatch.kernels.hopper import (
    ROWS,
    add_product,
    async_load,
    columns_descriptor,
    load_negated_pairs,
    rows_descriptor,
    store_rows,
    to_operand,
)
from hf_deltamatch.kernels.logits import LOG2E, positive, tanh

BLOCK_M = 64
"""Queries of a tile, as in ``attention_config.dkdv_configs``."""
STAGES = 4


@gluon.jit
def _produce(
    q_desc, do_desc, qt_desc, dot_desc, shifted_desc, k_desc, v_desc, stages, k_s, v_s, kv_ready,
    key_token, head, G, origin, tiles, Tq, q_base, q_slot, D_padded, D_padded_v,
    STEP: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """K and V of this program once, then the query tiles of every query head, in visiting order."""
    q_s, do_s, qt_s, dot_s, shifted_s, full, empty = stages
    mbarrier.expect(kv_ready, 4 * ROWS * BLOCK_D)
    for w in gl.static_range(2):
        async_load(k_desc, [key_token + w * ROWS, 0], kv_ready, k_s.index(w))
        async_load(v_desc, [key_token + w * ROWS, 0], kv_ready, v_s.index(w))
    i = 0
    for t in range(tiles):
        start = (origin + STEP * t) * BLOCK_M
        column = (q_slot + start // 128) * 128 + start % 128
        for group in range(G):
            bh = head + group
            token = bh * Tq + q_base + start
            stage = i % STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(ready, 4 * BLOCK_M * BLOCK_D + 4 * BLOCK_M)
            async_load(q_desc, [token, 0], ready, q_s.index(stage))
            async_load(do_desc, [token, 0], ready, do_s.index(stage))
            async_load(shifted_desc, [bh, column], ready, shifted_s.index(stage))
            async_load(dot_desc, [bh * D_padded_v, column], ready, dot_s.index(stage))
            async_load(qt_desc, [bh * D_padded, column], ready, qt_s.index(stage))
            i += 1


@gluon.jit
def _step(
    i, dk, dv, start, bh, own, keys, position, reach, stages, pointers, queries, sizes,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr,
    DLSE: gl.constexpr, MASKED: gl.constexpr, STORE_DS: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One tile of queries, the i-th that this warpgroup sees; tuples as in ``_consume``."""
    k, v, k_tile, v_tile = own
    q_s, do_s, qt_s, dot_s, shifted_s, full, empty = stages
    lse2_ptr, q_descale_ptr, do_descale_ptr, do_fold_ptr, ds_ptr = pointers
    q_base, q_slot, Tq, offset = queries
    Tk, k_base, T_queries, T_keys, stride_stat, slots_q, window, softmax_scale, softcap = sizes
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    grads: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 32])
    operand: gl.constexpr = gl.DotOperandLayout(0, grads, 4)
    by_key: gl.constexpr = gl.SliceLayout(1, grads)
    by_query: gl.constexpr = gl.SliceLayout(0, scores)
    stage = i % STAGES
    slot = bh * slots_q + q_slot + start // 128
    q_tile = gl.load(q_descale_ptr + slot)
    do_tile = gl.load(do_descale_ptr + slot)
    zero = gl.zeros([ROWS, BLOCK_M], gl.float32, scores)
    # Straight from memory, before the wait: from shared memory ptxas spills 26 registers a tile.
    rows = start + gl.arange(0, BLOCK_M, by_query)
    stat = bh.to(gl.int64) * stride_stat + q_slot * 128
    minus_lse2 = load_negated_pairs(lse2_ptr + stat + rows)[None, :]
    mbarrier.wait(full.index(stage), (i // STAGES) & 1)
    s = warpgroup_mma(k, q_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, do_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    f = k_tile * q_tile
    s = warpgroup_mma_wait(1, deps=[s])
    if SOFTCAP:
        t = tanh(s * (f * (softmax_scale / softcap)), SOFTCAP)
        p = gl.exp2(t * (softcap * LOG2E) + minus_lse2)
    else:
        p = gl.exp2(s * positive(f * (softmax_scale * LOG2E)) + minus_lse2)
    if MASKED:
        seen = (keys < Tk)[:, None] & (rows < Tq)[None, :]
        at = (rows + offset)[None, :]
        if MASK == COMPACT_MASK:
            seen = seen & (position >= 0)[:, None] & (position[:, None] <= at)
            seen = seen & (at - position[:, None] < reach[:, None])
        if CAUSAL and MASK == 0:
            seen = seen & (keys[:, None] <= at)
        if WINDOW and MASK == 0:
            seen = seen & (at - keys[:, None] < window)
        p = gl.where(seen, p, 0.0)
        if SOFTCAP:  # 0 · NaN where a query or key is NaN that this pair hides
            t = gl.where(seen, t, 0.0)
    largest = p
    if DLSE:
        # A zero row of dO whose lse has a gradient: P is alive, adds nothing to dV, unless it is NaN, and
        # must not raise the descale.
        at_rows = bh.to(gl.int64) * T_queries + q_base + rows
        fold = gl.load(do_fold_ptr + at_rows, mask=rows < Tq, other=0.0)
        largest = gl.where((fold == 0.0)[None, :], 0.0, p)
    e = pow2_exponent(gl.max(largest, 1))
    p8 = to_operand(p * inverse_exp2_int(e)[:, None], operand)
    back_v = gl.convert_layout(exp2_int(e), by_key, assert_trivial=True) * nan_to_zero(do_tile)
    shifted = shifted_s.index(stage).load(scores)
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = p * (dp * (v_tile * do_tile) - shifted)
    if MASKED:
        ds = gl.where(seen, ds, 0.0)
    if STORE_DS:
        at = (bh.to(gl.int64) * T_queries + q_base + rows) * T_keys + k_base
        inside = (keys < Tk)[:, None] & (rows < Tq)[None, :]
        gl.store(ds_ptr + (at[None, :] + keys[:, None]), ds, mask=inside)
    if SOFTCAP:
        ds = ds * (1.0 - t * t)
    e = pow2_exponent(gl.max(gl.abs(ds), 1))
    back_k = gl.convert_layout(exp2_int(e), by_key, assert_trivial=True) * nan_to_zero(q_tile)
    ds8 = to_operand(ds * inverse_exp2_int(e)[:, None], operand)
    dv = add_product(dv, p8, dot_s.index(stage), back_v)
    dk = add_product(dk, ds8, qt_s.index(stage), back_k)
    mbarrier.arrive(empty.index(stage))
    return dk, dv


@gluon.jit
def _consume(
    w: gl.constexpr,
    stages, pointers, k_s, v_s, kv_ready, dk_ptr, dv_ptr, k_descale_ptr, v_descale_ptr, mask_ptr,
    first, kv, b, h, G, origin, edge, inner, tiles, k_base, k_len, k_slot,
    queries, Tq, stride_stat, Tk, D, Dv, slots_q, slots_k, softmax_scale, softcap, window,
    stride_dkb, stride_dkh, stride_dkt, stride_dvb, stride_dvh, stride_dvt,
    STEP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, MASK: gl.constexpr,
    SOFTCAP: gl.constexpr, DLSE: gl.constexpr, STORE_DS: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 keys against every query tile.

    ``stages``: buffers of query tiles and their barriers; ``pointers``: what is read from memory
    by query; ``queries``: first token, first slot and length of the segment, its offset to the keys.
    """
    head = kv * G
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    grads: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 32])
    first_key = first + w * ROWS
    keys = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, scores))
    position = keys
    reach = keys
    if MASK == COMPACT_MASK:
        position = gl.load(mask_ptr + keys, mask=keys < k_len, other=-1)
        reach = gl.load(mask_ptr + Tk + keys, mask=keys < k_len, other=0)
    slot = kv * slots_k + k_slot + first // 128
    k_tile = gl.load(k_descale_ptr + slot)
    v_tile = gl.load(v_descale_ptr + slot)
    sizes = (k_len, k_base, Tq, Tk, stride_stat, slots_q, window, softmax_scale, softcap)
    dk = gl.zeros([ROWS, BLOCK_D], gl.float32, grads)
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, grads)
    mbarrier.wait(kv_ready, 0)
    own = (k_s.index(w), v_s.index(w), k_tile, v_tile)
    i = 0
    for t in range(edge):
        for group in range(G):
            dk, dv = _step(
                i, dk, dv, (origin + STEP * t) * BLOCK_M, head + group, own, keys,
                position, reach, stages, pointers, queries, sizes, CAUSAL, WINDOW, MASK, SOFTCAP,
                DLSE, True, STORE_DS, BLOCK_D, BLOCK_M, STAGES,
            )  # fmt: skip
            i += 1
    if MASK == 0:
        for t in range(edge, edge + inner):
            for group in range(G):
                dk, dv = _step(
                    i, dk, dv, (origin + STEP * t) * BLOCK_M, head + group, own, keys,
                    position, reach, stages, pointers, queries, sizes, CAUSAL, WINDOW, MASK,
                    SOFTCAP, DLSE, False, STORE_DS, BLOCK_D, BLOCK_M, STAGES,
                )  # fmt: skip
                i += 1
        for t in range(edge + inner, tiles):
            for group in range(G):
                dk, dv = _step(
                    i, dk, dv, (origin + STEP * t) * BLOCK_M, head + group, own, keys,
                    position, reach, stages, pointers, queries, sizes, CAUSAL, WINDOW, MASK,
                    SOFTCAP, DLSE, True, STORE_DS, BLOCK_D, BLOCK_M, STAGES,
                )  # fmt: skip
                i += 1
    dv_ptr += b.to(gl.int64) * stride_dvb + h.to(gl.int64) * stride_dvh
    store_rows(dv_ptr, dv, first_key, k_base, k_len, Dv, stride_dvt)
    dk_ptr += b.to(gl.int64) * stride_dkb + h.to(gl.int64) * stride_dkh
    store_rows(dk_ptr, dk * softmax_scale, first_key, k_base, k_len, D, stride_dkt)


@gluon.jit(do_not_specialize=["heads_at_once", "places"])
def _attention_bwd_dkdv_hopper_kernel(
    q_desc, do_desc, qt_desc, dot_desc, shifted_desc, k_desc, v_desc, dk_ptr, dv_ptr, lse2_ptr,
    q_descale_ptr, do_descale_ptr, k_descale_ptr, v_descale_ptr, do_fold_ptr, ds_ptr, mask_ptr,
    bounds_ptr, cu_q_ptr, cu_k_ptr, segment_k_ptr,
    heads_at_once, places, Hkv, G, Tq, stride_stat, Tk, D, Dv, D_padded, D_padded_v, slots_q, slots_k,
    softmax_scale, softcap, window, stride_dkb, stride_dkh, stride_dkt, stride_dvb, stride_dvh,
    stride_dvt, stride_mb,
    STEP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, MASK: gl.constexpr,
    SOFTCAP: gl.constexpr, DLSE: gl.constexpr, PACKED: gl.constexpr, STORE_DS: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Arguments as :func:`attention_dkdv._attention_bwd_dkdv_kernel`."""
    slot, kv = own_program(heads_at_once, places)
    b = kv // Hkv
    h = kv % Hkv
    # The first keys have the most causal rows.
    segment, k_base, k_len, k_slot, first = own_segment(
        slot, Tk, cu_k_ptr, segment_k_ptr, 128, PACKED
    )
    q_base, q_len, q_slot = segment_of(segment, Tq, cu_q_ptr, PACKED)
    offset = k_len - q_len
    if MASK != 0:
        mask_ptr += b.to(gl.int64) * stride_mb
        offset = gl.load(mask_ptr + 2 * Tk)
        bounds_ptr += (b * slots_k + first // 128) * 2
    lo, full_lo, full_hi, hi = query_tiles(
        first, q_len, k_len, offset, window, bounds_ptr, CAUSAL, WINDOW, MASK, BLOCK_M, 128
    )
    tiles = hi - lo
    if first >= k_len:  # an unused slot: nothing to visit, nothing to store
        tiles = 0
        full_hi = full_lo
    inner = full_hi - full_lo
    # Tiles that need a mask come first and last.
    edge = tiles
    origin = lo
    if STEP < 0:
        origin = hi - 1
    if MASK == 0:
        edge = full_lo - lo
        if STEP < 0:
            edge = hi - full_hi
        edge = gl.minimum(edge, tiles)
    F8: gl.constexpr = gl.float8e4nv
    k_s = gl.allocate_shared_memory(F8, [2, ROWS, BLOCK_D], k_desc.layout)
    v_s = gl.allocate_shared_memory(F8, [2, ROWS, BLOCK_D], v_desc.layout)
    q_s = gl.allocate_shared_memory(F8, [STAGES, BLOCK_M, BLOCK_D], q_desc.layout)
    do_s = gl.allocate_shared_memory(F8, [STAGES, BLOCK_M, BLOCK_D], do_desc.layout)
    qt_s = gl.allocate_shared_memory(F8, [STAGES, BLOCK_D, BLOCK_M], qt_desc.layout)
    dot_s = gl.allocate_shared_memory(F8, [STAGES, BLOCK_D, BLOCK_M], dot_desc.layout)
    shifted_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], shifted_desc.layout)
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    stages = (q_s, do_s, qt_s, dot_s, shifted_s, full, empty)
    pointers = (lse2_ptr, q_descale_ptr, do_descale_ptr, do_fold_ptr, ds_ptr)
    queries = (q_base, q_slot, q_len, offset)
    gl.warp_specialize([
        (_consume, (
            0, stages, pointers, k_s, v_s, kv_ready, dk_ptr, dv_ptr, k_descale_ptr,
            v_descale_ptr, mask_ptr, first, kv, b, h, G, origin, edge, inner, tiles, k_base, k_len,
            k_slot, queries, Tq, stride_stat, Tk, D, Dv, slots_q, slots_k, softmax_scale, softcap,
            window, stride_dkb, stride_dkh, stride_dkt, stride_dvb, stride_dvh, stride_dvt, STEP,
            CAUSAL, WINDOW, MASK, SOFTCAP, DLSE, STORE_DS, BLOCK_D, BLOCK_M, STAGES,
        )),
        (_consume, (
            1, stages, pointers, k_s, v_s, kv_ready, dk_ptr, dv_ptr, k_descale_ptr,
            v_descale_ptr, mask_ptr, first, kv, b, h, G, origin, edge, inner, tiles, k_base, k_len,
            k_slot, queries, Tq, stride_stat, Tk, D, Dv, slots_q, slots_k, softmax_scale, softcap,
            window, stride_dkb, stride_dkh, stride_dkt, stride_dvb, stride_dvh, stride_dvt, STEP,
            CAUSAL, WINDOW, MASK, SOFTCAP, DLSE, STORE_DS, BLOCK_D, BLOCK_M, STAGES,
        )),
        (_produce, (
            q_desc, do_desc, qt_desc, dot_desc, shifted_desc, k_desc, v_desc, stages, k_s, v_s,
            kv_ready, kv * Tk + k_base + first, kv * G, G, origin, tiles, Tq, q_base, q_slot,
            D_padded, D_padded_v, STEP, BLOCK_D, BLOCK_M, STAGES,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


def step(group: int) -> int:
    """Direction over the query tiles. Programs of a key head that start at their own diagonals are
    spread over its queries: fine for one query head (3.24 ms against 3.40 from the last tile back) and
    for two (3.05 against 3.14), more than L2 holds for eight (22.4 against 13.7)."""
    return 1 if group <= 4 else -1


def dkdv_hopper(
    x: Problem,
    queries: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    stats: tuple[Tensor, Tensor],
    descales: tuple[Tensor, Tensor, Tensor, Tensor],
    do_fold: Tensor | None,
    dk: Tensor,
    dv: Tensor,
    ds: Tensor | None,
    bounds: Tensor | None,
    *,
    has_dlse: bool,
) -> None:
    """Fill ``dk``, ``dv`` (and ``ds``).

    Args:
        queries: payloads of q and do, transposed copies of q and do.
        keys: payloads of k and v.
        stats: ``lse2``, ``δ − dlse``: rows padded to 16 bytes.
        descales: of q, do, k, v, one per slot.
        do_fold: ``[B, Hq, Tq]``, with a gradient of lse.
    """
    q8, do8, qt, do_t = queries
    lse2, shifted = stats
    D = x.BLOCK_D
    flags = {k: v for k, v in x.flags().items() if k not in ("TILE", "SOFT_CAST")}
    grid, order = x.programs(2 * ROWS.value, 1, by_key=True)
    _attention_bwd_dkdv_hopper_kernel[grid](
        rows_descriptor(q8, BLOCK_M, D), rows_descriptor(do8, BLOCK_M, D),
        columns_descriptor(qt, D, BLOCK_M), columns_descriptor(do_t, D, BLOCK_M),
        rows_descriptor(shifted, BLOCK_M, D),
        *(rows_descriptor(t, ROWS.value, D) for t in keys), dk, dv, lse2, *descales, do_fold, ds,
        x.mask_bytes, bounds, x.pack_q.cu, x.pack_k.cu, x.pack_k.segment, *order, x.Hkv,
        x.Hq // x.Hkv, x.Tq, lse2.stride(1), x.Tk, x.D, x.Dv, qt.shape[2], do_t.shape[2],
        x.pack_q.slots, x.pack_k.slots, x.softmax_scale, x.softcap or 1.0, x.window or 0,
        *dk.stride()[:3], *dv.stride()[:3], x.mask_strides[0], DLSE=has_dlse,
        STORE_DS=ds is not None, STEP=step(x.Hq // x.Hkv), BLOCK_D=D, BLOCK_M=BLOCK_M, STAGES=STAGES,
        num_warps=4, **flags,
    )  # fmt: skip
