"""How far the kernels reach: strides as given, offsets beyond 2³¹, and no further than a window.

Small in the interpreter, at full size on a CUDA device (marked gpu).
"""

from __future__ import annotations

import pytest
import torch
from attention_cases import Shape, compact, padded_positions

pytest.importorskip("triton")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from hf_deltamatch import kernels as package  # noqa: E402

if package.missing("attention", torch.device("cuda" if torch.cuda.is_available() else "cpu")):
    pytest.skip("no device for the kernels", allow_module_level=True)

from kernel_cases import DEVICE, Call, make_call, through_kernels  # noqa: E402
from torch import Tensor  # noqa: E402

from hf_deltamatch import delta_matching_attention  # noqa: E402
from hf_deltamatch.kernels import attention_config as config  # noqa: E402
from hf_deltamatch.kernels.attention_problem import Problem  # noqa: E402
from hf_deltamatch.kernels.geometry import key_tiles, own_program, query_tiles  # noqa: E402
from hf_deltamatch.testing import assert_bitwise_equal  # noqa: E402

RESULTS = ("o", "lse", "dq", "dk", "dv")


def results(call: Call) -> dict[str, Tensor]:
    fwd, bwd = through_kernels(call)
    return dict(zip(RESULTS, (fwd.o, fwd.lse, *bwd[:3]), strict=True))


def wider(x: Tensor) -> Tensor:
    """Every other feature and token of a larger tensor, the rest poisoned."""
    B, H, T, D = x.shape
    big = torch.full((B, H, 2 * T, 2 * D), torch.nan, dtype=x.dtype, device=x.device)
    view = big[:, :, ::2, 1::2]
    view.copy_(x)
    return view


LAYOUTS = {
    "BHTD": lambda x: x.contiguous(),
    "BTHD": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "THBD": lambda x: x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3),
    "BHDT": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "sliced": wider,
    # Odd row lengths and an odd start: no row is aligned.
    "odd": lambda x: torch.nn.functional.pad(x, (3, 2))[..., 3:-2],
}


@pytest.fixture(scope="module")
def plain_results() -> dict[str, tuple[Call, dict[str, Tensor]]]:
    shape = Shape(2, 2, 1, 70, 70, 32, 32)
    calls = {
        "128xD": make_call(shape),
        "1xD": make_call(shape, dtype=torch.float16, fields=dict(block="1xD")),
    }
    return {block: (call, results(call)) for block, call in calls.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", ["128xD", "1xD"])
def test_strides_as_given(layout: str, block: str, plain_results) -> None:
    call, expected = plain_results[block]
    moved = (LAYOUTS[layout](x) for x in (call.q, call.k, call.v, call.do))
    for name, x in results(Call(*moved, call.dlse, call.options)).items():
        assert_bitwise_equal(x, expected[name], name)


@pytest.mark.parametrize("axes", [dict(q=0, k=1, v=0, do=2), dict(q=2, k=0, v=1, do=3)], ids=str)
def test_expanded(axes: dict[str, int]) -> None:
    """Stride 0: keys repeated over heads or batch, the gradient of a sum."""
    call = make_call(Shape(2, 2, 2, 70, 70, 32, 32))
    expanded = {n: getattr(call, n).narrow(axis, 0, 1) for n, axis in axes.items()}
    expanded = {n: x.expand_as(getattr(call, n)) for n, x in expanded.items()}
    assert all(x.stride(axes[n]) == 0 for n, x in expanded.items())
    expected = results(call._replace(**{n: x.contiguous() for n, x in expanded.items()}))
    for name, x in results(call._replace(**expanded)).items():
        assert_bitwise_equal(x, expected[name], name)


def test_strides_of_a_fused_projection() -> None:
    """q, k, v sliced from one tensor, through the public function, and the gradient of a sum."""
    qkv = torch.randn(1, 70, 4 * 32, device=DEVICE)
    grads = []
    for contiguous in (False, True):
        leaf = qkv.clone().requires_grad_()
        parts = leaf.view(1, 70, 4, 32).split([2, 1, 1], 2)
        parts = [x.transpose(1, 2) for x in parts]
        if contiguous:
            parts = [x.contiguous() for x in parts]
        delta_matching_attention(*parts, is_causal=True, backend="triton").sum().backward()
        grads.append(leaf.grad)
    assert_bitwise_equal(*grads)


# --- the order of programs ----------------------------------------------------------------------


@triton.jit
def _programs_kernel(out_ptr, heads_at_once, places):
    place, head = own_program(heads_at_once, places)
    number = tl.program_id(0)
    tl.store(out_ptr + 2 * number, place)
    tl.store(out_ptr + 2 * number + 1, head)


@pytest.mark.parametrize(("tiles", "heads"), [(3, 7), (1, 5), (4, 1)])
@pytest.mark.parametrize("heads_at_once", [1, 2, 3, 7])
def test_every_tile_of_every_head_is_someones(tiles: int, heads: int, heads_at_once: int) -> None:
    """Once; some heads after others, the same place of all of them one after another."""
    at_once = min(heads_at_once, heads)
    out = torch.full((tiles * heads, 2), -1, dtype=torch.int32, device=DEVICE)
    _programs_kernel[(tiles * heads,)](out, at_once, tiles)
    expected = [
        [place, head]
        for first in range(0, heads, at_once)
        for place in range(tiles)
        for head in range(first, min(first + at_once, heads))
    ]
    assert out.tolist() == expected


@pytest.mark.parametrize("heads", [2, 3])
def test_order_of_programs_changes_nothing(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(Shape(1, 3, 3, 260, 260, 32, 32))
    monkeypatch.setattr(Problem, "heads_at_once", lambda *args: 1)
    plain = results(call)
    monkeypatch.setattr(Problem, "heads_at_once", lambda *args: heads)
    for name, x in results(call).items():
        assert_bitwise_equal(x, plain[name], name)


# --- windows ------------------------------------------------------------------------------------


@triton.jit
def _tiles_kernel(
    out_ptr, Tq, Tk, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BY_KEY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The four bounds of every tile, as the attention kernels get them."""
    tile = tl.program_id(0)
    if BY_KEY:
        lo, a, b, hi = query_tiles(
            tile * BLOCK_N, Tq, Tk, Tk - Tq, window, out_ptr, CAUSAL, WINDOW, 0, BLOCK_M, BLOCK_N
        )
    else:
        lo, a, b, hi = key_tiles(
            tile * BLOCK_M, Tq, Tk, Tk - Tq, window, out_ptr, CAUSAL, WINDOW, 0, BLOCK_M, BLOCK_N
        )
    tl.store(out_ptr + tile * 4, lo)
    tl.store(out_ptr + tile * 4 + 1, a)
    tl.store(out_ptr + tile * 4 + 2, b)
    tl.store(out_ptr + tile * 4 + 3, hi)


def tile_bounds(Tq: int, Tk: int, window: int, c: config.Config, by_key: bool) -> list[list[int]]:
    own = -(-Tk // c.BLOCK_N) if by_key else -(-Tq // c.BLOCK_M)
    out = torch.full((own, 4), -1, dtype=torch.int32, device=DEVICE)
    _tiles_kernel[(own,)](out, Tq, Tk, window, True, True, by_key, c.BLOCK_M, c.BLOCK_N)
    return out.tolist()


def used_configs(D: int) -> list[tuple[config.Config, bool]]:
    """Tiles of every pass, and whether it loops over queries."""
    passes = (config.fwd_config, config.delta_config, config.dq_config, config.one_pass_config)
    rows = [f(D, D, DEVICE) for f in passes]
    return [(c, False) for c in rows] + [(c, True) for c, _, _ in config.dkdv_configs(D, D, DEVICE)]


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(
    "Tq,Tk,window", [(384, 384, 100), (200, 450, 64), (300, 300, 1), (450, 200, 150)]
)
def test_tiles_visited_cover_the_window(Tq: int, Tk: int, window: int, D: int) -> None:
    """Every tile with a visible pair is visited, and the ones taken as visible throughout are."""
    i, j = torch.arange(Tq)[:, None] + Tk - Tq, torch.arange(Tk)
    seen = (j <= i) & (i - j < window)
    for c, by_key in used_configs(D):
        own, other = (c.BLOCK_N, c.BLOCK_M) if by_key else (c.BLOCK_M, c.BLOCK_N)
        pairs = seen.T if by_key else seen
        for tile, (lo, full_lo, full_hi, hi) in enumerate(tile_bounds(Tq, Tk, window, c, by_key)):
            rows = pairs[tile * own : (tile + 1) * own]
            assert 0 <= lo <= full_lo <= full_hi <= hi
            assert not rows[:, : lo * other].any() and not rows[:, hi * other :].any()
            assert rows[:, full_lo * other : full_hi * other].all()


@pytest.mark.parametrize("D", [128, *(pytest.param(D, marks=pytest.mark.slow) for D in (64, 256))])
def test_tiles_visited_for_a_small_window_at_length(D: int) -> None:
    """Window 128 at T = 32768: a row of tiles visits the window and one tile more at each end, so its
    share of causal attention is 1/128 times at most 4. (What it costs in time is in the benchmark.)"""
    T, window = 32768, 128
    for c, by_key in used_configs(D):
        own, other = (c.BLOCK_N, c.BLOCK_M) if by_key else (c.BLOCK_M, c.BLOCK_N)
        visited = sum(hi - lo for lo, _, _, hi in tile_bounds(T, T, window, c, by_key))
        # A tile of `own` rows sees own + window − 1 others, which may start within a tile.
        assert visited <= (T // own) * ((own + window - 2) // other + 2)
        assert visited * own * other <= 4 * window * T
        assert visited * own * other >= window * T - window * (window - 1) // 2


def check_window_is_not_left(T: int, block: str, value: float, tile: int) -> None:
    """A tile of other tokens: outside of what attends to it, directly or through a gradient, no bit
    changes. ``tile``: a backward may share the scale of P or dS among that many neighbours."""
    call = make_call(
        Shape(1, 1, 1, T, T, 32, 32), dtype=torch.bfloat16, window=128, fields=dict(block=block)
    )
    clean = results(call)
    start = T // 2 // 128 * 128
    for x in (call.q, call.k, call.v, call.do):
        x[:, :, start : start + 128] *= value
    dirty = results(call)
    # Queries that see such a key, and keys that such a query sees.
    seen, through = (0, 127), (-127 - tile, 127 + tile)
    reach = dict(o=seen, lse=seen, dq=(-tile, 127 + tile), dk=through, dv=through)
    for name, (before, after) in reach.items():
        lo, hi = start + before, start + 128 + after
        for part in (slice(None, lo), slice(hi, None)):
            assert clean[name][:, :, part].numel() and clean[name][:, :, part].isfinite().all()
            assert_bitwise_equal(dirty[name][:, :, part], clean[name][:, :, part], name)
        changed = dirty[name][:, :, start : start + 128] != clean[name][:, :, start : start + 128]
        assert changed.any(-1).all() if name != "lse" else changed.all(), name


@pytest.mark.parametrize("block", ["128xD", pytest.param("1xD", marks=pytest.mark.slow)])
def test_window_is_not_left(block: str) -> None:
    """The interpreter reads the FP8 code of NaN as a number, so here they are only large."""
    check_window_is_not_left(896, block, 30.0, tile=128)


@pytest.mark.gpu
@pytest.mark.parametrize("block", ["128xD", "1xD"])
def test_window_is_not_left_by_nan_at_length(block: str) -> None:
    """Exactly the rows that see a poisoned token, or a token of its tile, as the reference."""
    check_window_is_not_left(32768, block, float("nan"), tile=0)


# --- offsets beyond 2³¹ -------------------------------------------------------------------------


def check_ends_of_a_long_call(
    Hq: int, Hkv: int, T: int, D: int, *, layout: str, block: str = "128xD", tail: int = 512
) -> int:
    """First and last tokens of all heads against calls on just those tokens, bit by bit: with a
    window of 128 they depend on nothing else. Returns the number of elements of Q."""
    g = torch.Generator(device=DEVICE).manual_seed(0)
    dtype, recipe = torch.bfloat16, {"block": block}

    def normal(H: int) -> Tensor:
        size = (1, T, H, D) if layout == "BTHD" else (1, H, T, D)
        x = torch.randn(size, device=DEVICE, dtype=dtype, generator=g)
        return x.transpose(1, 2) if layout == "BTHD" else x

    plain = make_call(Shape(1, Hq, Hkv, 1, 1, D, D), dtype=dtype, window=128, fields=recipe)
    call = Call(normal(Hq), normal(Hkv), normal(Hkv), normal(Hq), None, plain.options)
    whole = results(call)
    ends = {
        # Gradients of the last 127 keys of the first part come from later queries too.
        "first": (slice(0, tail), slice(0, tail), slice(0, tail - 128)),
        "last": (slice(T - tail, T), slice(128, tail), slice(128, tail)),
    }
    for end, (tokens, queries, keys) in ends.items():
        part = [x[:, :, tokens].clone() for x in (call.q, call.k, call.v, call.do)]
        alone = results(Call(*part, None, plain.options))
        for name in RESULTS:
            kept = keys if name in ("dk", "dv") else queries
            a, b = whole[name][:, :, tokens][:, :, kept], alone[name][:, :, kept]
            assert b.isfinite().all() and b.any(), (end, name)
            assert_bitwise_equal(a, b, f"{end} tokens, {name}")
    return call.q.numel()


@pytest.mark.parametrize("Hkv,layout,block", [(2, "BTHD", "128xD"), (1, "BHTD", "1xD")])
def test_ends_of_a_long_call(Hkv: int, layout: str, block: str) -> None:
    """The comparison itself, small enough for the interpreter."""
    check_ends_of_a_long_call(2, Hkv, 512, 32, layout=layout, block=block, tail=256)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["BTHD", "BHTD"])
@pytest.mark.parametrize("Hq,Hkv", [(33, 33), (33, 1)])
def test_offsets_beyond_32_bits(Hq: int, Hkv: int, layout: str) -> None:
    """2.2e9 elements of Q, O and dQ, with 33 key heads of K, V, dK, dV too (55 and 30 GB)."""
    if torch.cuda.mem_get_info()[0] < (70 if Hkv > 1 else 40) * 2**30:
        pytest.skip("needs more free memory")
    assert check_ends_of_a_long_call(Hq, Hkv, 2**19, 128, layout=layout) > 2**31
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("block", ["128xD", "1xD"])
def test_more_heads_than_an_axis_of_a_grid_has(block: str) -> None:
    """70000 short sequences, as a batch and the last ones alone, bit by bit; padded, so with every kernel."""
    B, D = 70000, 64
    lengths = torch.arange(B) % 7 + 2
    mask = compact(padded_positions(lengths.tolist(), 8, "left")).to(DEVICE)
    shape = Shape(B, 1, 1, 8, 8, D, D)
    call = make_call(
        shape, dtype=torch.bfloat16, mask=mask, is_causal=False, fields=dict(block=block)
    )
    few = Call(
        *(x[-5:].clone() for x in call[:4]), None, {**call.options, "mask": mask[-5:].clone()}
    )
    whole, alone = results(call), results(few)
    for name in RESULTS:
        assert_bitwise_equal(whole[name][-5:], alone[name], name)


@pytest.mark.gpu
def test_offsets_of_a_mask_beyond_32_bits() -> None:
    """A boolean mask of 49152² bytes, a band: the same as the window that it spells out."""
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs more free memory")
    T = 49152
    mask = torch.ones(T, T, dtype=torch.bool, device=DEVICE).tril_().triu_(-127)
    assert mask.numel() > 2**31
    shape, fields = Shape(1, 2, 1, T, T, 64, 64), dict(block="1xD")
    by_window = results(make_call(shape, dtype=torch.bfloat16, window=128, fields=fields))
    call = make_call(shape, dtype=torch.bfloat16, mask=mask, is_causal=False, fields=fields)
    for name, x in results(call).items():
        # Tiles that a window skips are visited with a mask of zeros, in the same order.
        assert_bitwise_equal(x, by_window[name], name)
