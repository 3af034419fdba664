"""Where a tile lies: packed segments, visibility, and the range of tiles worth visiting.

Tokens are counted from the start of their segment; without ``cu_seqlens`` there is one segment.
Descales and transposed copies are addressed by *slots* of 128 tokens; segment s owns the slots from
``cu[s] // 128 + s`` on, so that every segment starts on a slot of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_MASK = tl.constexpr(0)
COMPACT_MASK = tl.constexpr(1)
BOOL_MASK = tl.constexpr(2)


@triton.jit
def own_program(heads_at_once, places):
    """Place among the ``places`` of a head, and head of this program. Programs start in the order of their number:
    so ``heads_at_once`` heads from their longest rows to their shortest, then the next ones."""
    number = tl.program_id(0)
    first = number // (heads_at_once * places) * heads_at_once
    heads = tl.minimum(heads_at_once, tl.num_programs(0) // places - first)
    number -= first * places
    return number // heads, first + number % heads


@triton.jit
def own_segment(tile, T, cu_ptr, segment_ptr, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Segment of a tile of BLOCK tokens: its index, first token, length, first slot, and the tile's
    first token inside it (at or past the length if the tile is empty)."""
    if PACKED:
        segment = tl.load(segment_ptr + tile * BLOCK // 128)
        base, length, slot = segment_of(segment, T, cu_ptr, True)
        first = tile * BLOCK - slot * 128
    else:
        segment = 0
        base = 0
        length = T
        slot = 0
        first = tile * BLOCK
    return segment, base, length, slot, first


@triton.jit
def segment_of(segment, T, cu_ptr, PACKED: tl.constexpr):
    """First token, length and first slot of a segment."""
    if PACKED:
        base = tl.load(cu_ptr + segment)
        length = tl.load(cu_ptr + segment + 1) - base
        slot = base // 128 + segment
    else:
        base = 0
        length = T
        slot = 0
    return base, length, slot


@triton.jit
def visible(
    query, key, Tq, Tk, offset, window, mask_ptr, stride_mq, stride_mk,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """True where a query sees a key; ``query`` and ``key`` are int32 and broadcast together.

    ``mask_ptr`` points at the batch (and head) in question; a compact mask is ``[3, 1, Tk]``.
    """
    out = (key < Tk) & (query < Tq)
    at = query + offset
    if MASK == COMPACT_MASK:
        position = tl.load(mask_ptr + key, mask=key < Tk, other=-1)
        reach = tl.load(mask_ptr + Tk + key, mask=key < Tk, other=0)
        return out & (position >= 0) & (position <= at) & (at - position < reach)
    if CAUSAL:
        out = out & (key <= at)
    if WINDOW:
        out = out & (at - key < window)
    if MASK == BOOL_MASK:
        where = query.to(tl.int64) * stride_mq + key.to(tl.int64) * stride_mk
        out = out & (tl.load(mask_ptr + where, mask=out, other=0) != 0)
    return out


@triton.jit
def key_tiles(
    first, Tq, Tk, offset, window, bounds_ptr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Key tiles that queries ``first … first + BLOCK_M − 1`` visit: ``lo, full_lo, full_hi, hi`` in
    tiles. Tiles of ``[full_lo, full_hi)`` are visible throughout; the rest need a mask."""
    if MASK != NO_MASK:
        lo = tl.load(bounds_ptr) // BLOCK_N
        hi = (tl.load(bounds_ptr + 1) + BLOCK_N - 1) // BLOCK_N
        return lo, lo, lo, hi
    lo = 0
    full_lo = 0
    last = tl.minimum(first + BLOCK_M, Tq) - 1
    end = Tk
    full_hi = Tk // BLOCK_N
    if CAUSAL:
        end = tl.maximum(tl.minimum(Tk, last + offset + 1), 0)
        full_hi = tl.minimum(full_hi, tl.maximum(first + offset + 1, 0) // BLOCK_N)
    hi = (end + BLOCK_N - 1) // BLOCK_N
    if WINDOW:
        lo = tl.maximum(first + offset - window + 1, 0) // BLOCK_N
        full_lo = (tl.maximum(last + offset - window + 1, 0) + BLOCK_N - 1) // BLOCK_N
    lo = tl.minimum(lo, hi)
    full_hi = tl.minimum(tl.maximum(full_hi, lo), hi)
    full_lo = tl.minimum(tl.maximum(full_lo, lo), full_hi)
    return lo, full_lo, full_hi, hi


@triton.jit
def query_tiles(
    first, Tq, Tk, offset, window, bounds_ptr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Query tiles that keys ``first … first + BLOCK_N − 1`` visit, as :func:`key_tiles`."""
    if MASK != NO_MASK:
        lo = tl.load(bounds_ptr) // BLOCK_M
        hi = (tl.load(bounds_ptr + 1) + BLOCK_M - 1) // BLOCK_M
        return lo, hi, hi, hi
    lo = 0
    full_lo = 0
    end = Tq
    full_hi = Tq // BLOCK_M
    last = tl.minimum(first + BLOCK_N, Tk) - 1
    if CAUSAL:
        lo = tl.maximum(first - offset, 0) // BLOCK_M
        full_lo = (tl.maximum(last - offset, 0) + BLOCK_M - 1) // BLOCK_M
    if WINDOW:
        end = tl.minimum(Tq, tl.maximum(last + window - offset, 0))
        full_hi = tl.minimum(full_hi, tl.maximum(first + window - offset, 0) // BLOCK_M)
    hi = (end + BLOCK_M - 1) // BLOCK_M
    lo = tl.minimum(lo, hi)
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_hi, full_lo), hi)
    return lo, full_lo, full_hi, hi


@triton.jit(do_not_specialize=["tiles", "Tq", "Tk", "window", "mask_heads"])
def _bounds_kernel(
    mask_ptr, bounds_ptr, tiles, Tq, Tk, window, mask_heads, stride_mb, stride_mh, stride_mq,
    stride_mk,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, BY_KEY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """First and one past the last token of the other axis that a tile of BLOCK tokens sees."""
    tile = tl.program_id(0) % tiles
    bh = tl.program_id(0) // tiles
    mask_ptr += (bh // mask_heads).to(tl.int64) * stride_mb
    mask_ptr += (bh % mask_heads).to(tl.int64) * stride_mh
    offset = Tk - Tq
    if MASK == COMPACT_MASK:
        offset = tl.load(mask_ptr + 2 * Tk)
    own = tile * BLOCK + tl.arange(0, BLOCK)
    T_other = Tq if BY_KEY else Tk
    lo = T_other
    hi = 0
    for start in range(0, T_other, BLOCK):
        other = start + tl.arange(0, BLOCK)
        query = other[:, None] if BY_KEY else own[:, None]
        key = own[None, :] if BY_KEY else other[None, :]
        seen = visible(
            query, key, Tq, Tk, offset, window, mask_ptr, stride_mq, stride_mk,
            CAUSAL, WINDOW, MASK,
        )  # fmt: skip
        at = query if BY_KEY else key
        lo = tl.minimum(lo, tl.min(tl.min(tl.where(seen, at, T_other), 1), 0))
        hi = tl.maximum(hi, tl.max(tl.max(tl.where(seen, at + 1, 0), 1), 0))
    at = bounds_ptr + tl.program_id(0) * 2
    tl.store(at, tl.minimum(lo, hi))
    tl.store(at + 1, hi)


@triton.jit(do_not_specialize=["segments", "slots_q", "slots_k"])
def _segments_kernel(
    cu_q_ptr, cu_k_ptr, segment_q_ptr, segment_k_ptr, segments, slots_q, slots_k,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The segment that owns each slot, of the queries (``program_id(1)`` 0) and of the keys: the
    last one that starts there or before."""
    if tl.program_id(1) == 0:
        _own_slots(cu_q_ptr, segment_q_ptr, segments, slots_q, BLOCK)
    else:
        _own_slots(cu_k_ptr, segment_k_ptr, segments, slots_k, BLOCK)


@triton.jit
def _own_slots(cu_ptr, segment_ptr, segments, slots, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, segments, BLOCK):
        s = start + tl.arange(0, BLOCK)
        first = tl.load(cu_ptr + s, mask=s < segments, other=0) // 128 + s
        starts = (s < segments)[None, :] & (first[None, :] <= slot[:, None])
        count += tl.sum(starts.to(tl.int32), 1)
    tl.store(segment_ptr + slot, count - 1, mask=slot < slots)


@triton.jit(do_not_specialize=["segments", "Tq", "Tk"])
def _rising_kernel(cu_q_ptr, cu_k_ptr, out_ptr, segments, Tq, Tk, BLOCK: tl.constexpr):
    """1 where the offsets of queries and of keys rise from 0 to the number of tokens, else 0."""
    falls = _falls(cu_q_ptr, segments, Tq, BLOCK) + _falls(cu_k_ptr, segments, Tk, BLOCK)
    tl.store(out_ptr, (falls == 0).to(tl.int32))


@triton.jit
def _falls(cu_ptr, segments, T, BLOCK: tl.constexpr):
    count = (tl.load(cu_ptr) != 0).to(tl.int32) + (tl.load(cu_ptr + segments) != T).to(tl.int32)
    for start in range(0, segments, BLOCK):
        s = start + tl.arange(0, BLOCK)
        first = tl.load(cu_ptr + s, mask=s < segments, other=0)
        last = tl.load(cu_ptr + s + 1, mask=s < segments, other=0)
        count += tl.sum((first > last).to(tl.int32), 0)
    return count
