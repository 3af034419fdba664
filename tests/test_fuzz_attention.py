"""Fuzz of ``delta_matching_attention``: any shape, mask, dtype, stride, recipe and extreme value.

What holds for every drawn call: results of the right shape, dtype and device; within the a-priori
bound of an FP64 oracle (``fuzz_bounds``), so finite wherever that is; a NaN or Inf visible in what
depends on it and nowhere else; zero row sums of dS with a matched δ.
"""

from __future__ import annotations

import pytest
import torch
from attention_cases import Result, run
from fuzz_bounds import attention_bounds, check
from fuzz_cases import Attention, attention_cases, fuzz, peak, place
from hypothesis import given
from interpreter_nan import nan_codes
from torch import Tensor

from hf_deltamatch.ops.observe import record_row_sum

LARGEST = 2.0**124
"""Intermediate results beyond this may overflow FP32 although the result is finite."""
ROW_SUM = 1e-5


def in_range(case: Attention, q, k, v, do, dlse) -> tuple[bool, bool]:
    """Whether the intermediate results of the forward, and of the backward, fit into FP32."""
    scale = max(1.0, abs(case.softmax_scale or 1.0))
    forward = case.D * peak(q) * peak(k) * scale < LARGEST and case.Tk * peak(v) < LARGEST * 14
    dp = 4 * case.Dv * peak(do) * max(peak(v), 1.0) + (0.0 if dlse is None else peak(dlse))
    rows = case.G * max(case.Tq, case.Tk) * scale
    backward = all(dp * rows * max(peak(x), 1.0) < LARGEST for x in (q, k))
    return forward, forward and backward


def tile_mates(case: Attention, token: int, n: int, starts: list[int]) -> slice:
    """Tokens that may share a descale with ``token``."""
    if case.recipe.block == "1xD" or not case.recipe.quantize:
        return slice(token, token + 1)
    start = max(s for s in starts if s <= token)
    end = min([s for s in starts if s > token], default=n)
    first = start + (token - start) // 128 * 128
    return slice(first, min(first + 128, end))


def poisoned_by(tokens: dict[str, Tensor], visible: Tensor, G: int) -> dict[str, Tensor]:
    """What depends on bad tokens: by field ``[B, H, T]`` (``dsinks`` ``[Hq]``)."""
    q, do = tokens["q"], tokens["do"]
    k, v = (tokens[n].repeat_interleave(G, 1)[:, :, None] for n in "kv")
    alive = visible.any(-1)
    logits = (q & alive) | (visible & k).any(-1)
    o = logits | (visible & v).any(-1)
    ds = o | (do & alive)
    keys = lambda rows: (visible & rows[..., None]).any(2).unflatten(1, (-1, G)).any(2)
    return {
        "o": o, "lse": logits, "dq": ds, "dk": keys(ds), "dv": keys(logits | (do & alive)),
        "dsinks": ds.any(2).any(0),
    }  # fmt: skip


def check_attention(case: Attention, backend: str | None) -> None:
    options, visible, padding, *starts = case.options()
    x = dict(zip(("q", "k", "v", "do"), case.inputs(), strict=True))
    g = torch.Generator().manual_seed(case.seed)
    H = case.Hkv * case.G
    hidden_q, hidden_k = ~visible.any(-1), ~visible.unflatten(1, (-1, case.G)).any((2, 3))
    # The values of padding may be clamped to the descale of the rest; it is not trained on.
    idle = padding[:, None].expand(-1, H, -1)
    x["do"] = torch.where(idle[..., None], 0.0, x["do"]).to(case.dtype)
    dlse = sinks = None
    if case.dlse:
        dlse = torch.randn(case.B, H, case.Tq, generator=g).masked_fill(idle, 0.0)
        dlse = dlse.double() if case.dtype == torch.float64 else dlse
    if case.sinks is not None:
        sinks = case.sinks * torch.randn(H, generator=g)
    # Copies: an expanded tensor holds one batch for all, and FP64 would stay the same tensor.
    clean = {n: t.double().clone(memory_format=torch.contiguous_format) for n, t in x.items()}
    tokens = {n: torch.zeros(t.shape[:3], dtype=torch.bool) for n, t in x.items()}
    reach = {n: t.clone() for n, t in tokens.items()}
    if case.bad is not None and x[case.bad[0]].numel():
        which, where, bad = case.bad
        b, h, t, d = place(x[which], where)
        hidden = hidden_k if which in "kv" else hidden_q
        x[which] = x[which].clone()
        x[which][b, h, t, d] = bad
        clean[which][b, h, t, d] = 0.0
        tokens[which][b, h, t] = not hidden[b, h, t]
        mates = tile_mates(case, t, x[which].shape[2], starts[which in "kv"])
        if which == "q" and case.recipe.block == "128xD" and idle[b, h, t]:
            mates = t  # padding takes no part in the descale of the rest
        reach[which][b, h, mates] = not hidden[b, h, t]
    for n in clean:
        gone = hidden_k if n in "kv" else hidden_q
        clean[n] = torch.where(gone[..., None], 0.0, clean[n])

    options |= {"softcap": case.softcap, "softmax_scale": case.softmax_scale}
    with record_row_sum() as recorded:
        result: Result = run(
            *x.values(), dlse=dlse, sinks=sinks, recipe=case.recipe, backend=backend, **options
        )

    stat = torch.float64 if case.dtype == torch.float64 else torch.float32
    shapes = {"o": x["do"].shape, "lse": x["q"].shape[:3]}
    shapes |= {"d" + n: x[n].shape for n in "qkv"}
    for field, shape in shapes.items():
        r = getattr(result, field)
        assert r.shape == shape and r.device == x["q"].device, field
        assert r.dtype == (stat if field == "lse" else case.dtype), field
    assert sinks is None or result.dsinks.shape == sinks.shape

    scale = case.D**-0.5 if case.softmax_scale is None else case.softmax_scale
    expected = attention_bounds(
        *clean.values(), visible, case.recipe, softmax_scale=scale, softcap=case.softcap,
        sinks=None if sinks is None else sinks.double(),
        dlse=None if dlse is None else dlse.double(), out_dtype=case.dtype,
    )  # fmt: skip
    must, may = (poisoned_by(t, visible, case.G) for t in (tokens, reach))
    forward, backward = in_range(case, *clean.values(), dlse)
    # Without quantisation an Inf is a number: a logit of −inf takes no probability. So does one that
    # is beyond FP32, and hides what is wrong with its value.
    visible_bad = case.recipe.quantize or (case.bad is not None and case.bad[2] != case.bad[2])
    visible_bad = visible_bad and (forward or case.bad is None or case.bad[0] in "qk")
    for field in ("o", "lse", "dq", "dk", "dv", "dsinks"):
        r = getattr(result, field)
        if r is None:
            continue
        shown = r if field in ("lse", "dsinks") else r.isfinite().all(-1)
        shown = shown if shown.dtype == torch.bool else shown.isfinite()
        if visible_bad:
            laundered = must[field] & shown
            assert not bool(laundered.any()), (
                f"{field}: {case.bad} is not visible in {laundered.nonzero()[0].tolist()}"
            )
        if not (forward if field in ("o", "lse") else backward):
            continue
        fine = ~may[field]
        if field in ("o", "lse", "dq"):
            fine = fine & ~idle
        check(r, expected[field], (fine if r.dim() < 4 else fine[..., None].expand_as(r)), field)
    if case.recipe.delta == "matched" and dlse is None and backward and not may["dq"].any():
        noise = expected["noise"].bound.item()
        assert recorded.rows <= ROW_SUM * recorded.total + noise + 1e-30, recorded


@fuzz(0.5)
@given(case=attention_cases())
def test_attention(case: Attention) -> None:
    check_attention(case, None)


@pytest.mark.slow
@fuzz(0.005)
@given(case=attention_cases(small=True, quantize=True))
def test_attention_interpreted(case: Attention) -> None:
    pytest.importorskip("triton")
    with nan_codes():
        check_attention(case, "triton")
