"""Fuzz of arguments that do not fit: always one of our own sentences, which names the argument."""

from __future__ import annotations

import re

import pytest
import torch
from attention_cases import offsets
from fuzz_cases import Attention, Linear, attention_cases, fuzz, linear_cases
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from hf_deltamatch import delta_matching_attention, fp8_linear

NOT_TENSORS = (1, 0.5, "x", [1.0], (2, 3), {}, object, True)
OTHER_DTYPES = (torch.int32, torch.bool, torch.float8_e4m3fn, torch.complex64)


def reshaped(x: Tensor, how: str) -> Tensor:
    """``x`` in a shape that does not fit it."""
    return {
        "rank-1": lambda: x[None],
        "rank+1": lambda: x[..., None, :],
        "flat": lambda: x.reshape(-1),
        "features": lambda: torch.cat([x, x[..., :1]], -1),
        "no-features": lambda: x[..., :0],
        "batch": lambda: torch.cat([x, x]),
    }[how]()


@st.composite
def bad_attention(draw) -> tuple[Attention, str, object]:
    """A valid call, and one argument to replace by a value that never fits it."""
    case = draw(attention_cases(small=True))
    B, H, Tq, Tk = case.B, case.Hkv * case.G, case.Tq, case.Tk
    q, k, v, _ = case.inputs()
    wrong_shape = st.sampled_from(("rank-1", "rank+1", "flat", "features", "no-features", "batch"))
    kinds: dict[str, st.SearchStrategy] = {
        # A value of another width is a right one.
        "q": wrong_shape.map(lambda how: reshaped(q, how)),
        "k": wrong_shape.map(lambda how: reshaped(k, how)),
        "v": wrong_shape.filter(lambda how: how != "features").map(lambda how: reshaped(v, how)),
        "window": st.one_of(
            st.integers(-(2**40), 0), st.sampled_from((1.0, "4", True, [3], torch.tensor(3)))
        ),
        "mask": st.one_of(
            st.sampled_from((torch.float32, torch.int64, torch.uint8, torch.bfloat16)).map(
                lambda dtype: torch.ones(B, 1, Tq, Tk).to(dtype)
            ),
            st.sampled_from(
                (
                    torch.ones(Tq + 2, Tk + 2, dtype=torch.bool),
                    torch.ones(1, B, H, Tq, Tk, dtype=torch.bool),
                    torch.ones(B + 2, 1, Tq, Tk, dtype=torch.bool),
                    torch.zeros(B, 3, Tk, dtype=torch.int32),
                    torch.zeros(B, 3, 1, Tk + 1, dtype=torch.int32),
                    torch.zeros(B + 2, 3, 1, Tk, dtype=torch.int32),
                    torch.zeros(B, 2, 1, Tk, dtype=torch.int32),
                )
            ),
        ),
        "softcap": st.one_of(
            st.floats(max_value=0.0), st.sampled_from((float("nan"), "30", True, 1j, torch.ones(2)))
        ),
        "softmax_scale": st.sampled_from(
            (
                float("nan"),
                float("inf"),
                10**400,
                "1",
                True,
                1j,
                [1.0],
                torch.ones(2),
                torch.ones(()).requires_grad_(),
            )
        ),
        "sinks": st.sampled_from(
            (
                torch.zeros(H + 1),
                torch.zeros(H, 1),
                torch.zeros(()),
                torch.zeros(H, dtype=torch.int64),
            )
        ),
        "is_causal": st.sampled_from((0, 1, None, "yes", torch.tensor(True))),
        "cu_seqlens": st.one_of(
            st.lists(st.integers(-5, Tq + 5), min_size=0, max_size=5)
            .filter(lambda cu: len(cu) < 2 or cu != sorted(cu) or cu[0] != 0 or cu[-1] != Tq)
            .map(lambda cu: torch.tensor(cu, dtype=torch.int32)),
            st.just(torch.tensor([0.0, Tq])),
            st.just(torch.tensor([[0, Tq]], dtype=torch.int32)),
            st.just((offsets([Tq]), offsets([Tk, 0]))),
            st.just((offsets([Tq]),)),
            st.just((offsets([Tq]), offsets([Tk + 1]))),
        ),
        "recipe": st.sampled_from(
            ("fp8", "", 3, None, ["delta_matching"], {"block": "2xD"}, {"x": 1})
        ),
        "backend": st.sampled_from(("cuda", "", 3, True)),
    }
    name = draw(st.sampled_from(sorted(kinds)))
    value = draw(kinds[name])
    if name not in ("recipe", "backend", "is_causal") and draw(st.integers(0, 4)) == 0:
        value = draw(st.sampled_from(NOT_TENSORS))
        assume(name not in ("window", "softcap", "softmax_scale"))
    if name in ("q", "k", "v") and draw(st.integers(0, 3)) == 0:
        value = {"q": q, "k": k, "v": v}[name].to(draw(st.sampled_from(OTHER_DTYPES)))
    return case, name, value


def message(function, *args, **options) -> str:
    """Of the refusal; any other error, and none, fails."""
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as e:
        function(*args, **options)
    return str(e.value)


@fuzz(0.15)
@given(bad=bad_attention())
def test_attention_refuses(bad: tuple[Attention, str, object]) -> None:
    case, name, value = bad
    options = {**case.options()[0], "softcap": case.softcap, "recipe": case.recipe}
    if name == "window":
        options = {"is_causal": True, "recipe": case.recipe}
    if name == "cu_seqlens":
        assume(case.B == 1)
        options = {"recipe": case.recipe}
    arguments = dict(zip(("q", "k", "v"), case.inputs(), strict=False)) | options
    said = message(delta_matching_attention, **{**arguments, name: value})
    named = {
        "q": r"\bq\b|head", "k": r"\bk\b|head", "v": r"\bv\b|head",
        "recipe": "recipe|AttentionRecipe", "cu_seqlens": "cu_seqlens",
    }  # fmt: skip
    assert re.search(named.get(name, rf"`{name}`"), said), (name, value, said)
    assert re.match("(delta_matching_)?attention: ", said) or name == "recipe", said


@st.composite
def bad_linear(draw) -> tuple[Linear, str, object]:
    """A valid call, and one argument to replace by a value that never fits it."""
    case = draw(linear_cases())
    x, w, _, _ = case.inputs()
    other = st.sampled_from(OTHER_DTYPES)
    kinds = {
        "x": st.one_of(
            st.sampled_from(NOT_TENSORS),
            st.sampled_from(
                (torch.cat([x, x[..., :1]], -1), x[..., :0], torch.zeros((), dtype=x.dtype))
            ),
            other.map(lambda d: x.to(d)),
        ),
        "weight": st.one_of(
            st.sampled_from((None, *NOT_TENSORS)),
            st.sampled_from((w[None], w[0], w[:0], w[:, :0], torch.cat([w, w], 1))),
            other.map(lambda d: w.to(d)),
        ),
        "bias": st.one_of(
            st.sampled_from(NOT_TENSORS),
            st.sampled_from(
                (torch.zeros(case.n_out + 1), torch.zeros(1, case.n_out), torch.zeros(()))
            ),
            other.map(lambda d: torch.zeros(case.n_out).to(d)),
        ),
        "recipe": st.sampled_from(
            ("fp8", "", 3, None, ["mx"], {"scaling": "tensorwise"}, {"x": 1})
        ),
        "backend": st.sampled_from(("cuda", "", 3, True)),
    }
    name = draw(st.sampled_from(sorted(kinds)))
    return case, name, draw(kinds[name])


@fuzz(0.1)
@given(bad=bad_linear())
def test_linear_refuses(bad: tuple[Linear, str, object]) -> None:
    case, name, value = bad
    x, weight, bias, _ = case.inputs()
    said = message(fp8_linear, **{"x": x, "weight": weight, "bias": bias, name: value})
    assert re.search({"recipe": "recipe|LinearRecipe"}.get(name, rf"\b{name}\b"), said), said
