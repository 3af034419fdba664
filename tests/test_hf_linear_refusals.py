"""What the swapper refuses or leaves with a reason: what would fail later, or run otherwise than said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_deltamatch import (
    DeltaMatchConfig,
    check_model,
    set_attention_recipe,
    swap_linears,
    unswap_linears,
)


@pytest.mark.parametrize("given", [None, 3, "x", nn.Linear, torch.ones(2), [nn.Linear(2, 2)]])
@pytest.mark.parametrize(
    "function", [swap_linears, unswap_linears, set_attention_recipe, check_model]
)
def test_what_is_no_model(function, given) -> None:
    with pytest.raises(TypeError, match=f"^{function.__name__}: `model` is .*torch.nn.Module"):
        function(given)


@pytest.mark.parametrize(
    "options",
    [
        {"include": 3}, {"include": [3]}, {"modules_to_not_convert": [None]}, {"layers": {3: "bf16"}},
        {"recipe": []}, {"recipe": ""}, {"recipe": 0}, {"recipe": False},
    ],
    ids=str,
)  # fmt: skip
def test_swap_linears_wrong_types(options: dict) -> None:
    """Nothing empty counts as the default, and patterns are text."""
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises((TypeError, ValueError), match=next(iter(options)) + "|module pattern"):
        swap_linears(model, **options)
    assert type(model[0]) is nn.Linear


def test_swap_linears_leaves_what_would_raise() -> None:
    """At the first forward: FP64, complex, no weight, no features, a scripted module."""
    model = nn.ModuleList(
        [nn.Linear(32, 32), nn.Linear(32, 32).double(), nn.Linear(32, 32).to(torch.complex64)]
    )
    model += [nn.Linear(32, 32), nn.Linear(0, 32), torch.jit.script(nn.Linear(32, 32))]
    model[3].weight = None
    report = swap_linears(model)
    assert list(report.swapped) == ["0"]
    reasons = [report.skipped[str(i)] for i in range(1, 5)]
    for reason, word in zip(reasons, ("float64", "complex64", "no weight", "empty"), strict=True):
        assert word in reason


def test_extended_classes_are_not_left_silently() -> None:
    """A parametrization, as ``fully_shard``, makes a class of its own of a swapped module: it still
    runs in FP8, so no call may say otherwise."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    swap_linears(model)
    torch.nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(ValueError, match="unswap_linears: 0: its class is ParametrizedFP8Linear"):
        unswap_linears(model)
    with pytest.raises(ValueError, match="swap_linears: 0 cannot be left .*ParametrizedFP8Linear"):
        swap_linears(model, "rowwise", layers={"0": "bf16"})
    assert [m.fp8_recipe.name for m in model] == ["blockwise", "blockwise"]
    assert set(swap_linears(model, "rowwise").swapped) == {"0", "1"}
    torch.nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert unswap_linears(model) == 2 and {type(m) for m in model} == {nn.Linear}


def test_recipes_of_layers_are_named() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    known = (
        r"layers\['1'\]: Unknown linear recipe 'fp16'\. Known names: blockwise, mx, rowwise\. "
        "'bf16' leaves the module in high precision"
    )
    with pytest.raises(ValueError, match=f"^swap_linears: {known}"):
        swap_linears(model, layers={"1": "fp16"})
    with pytest.raises(ValueError, match=f"^DeltaMatchConfig: {known}"):
        DeltaMatchConfig(layers={"1": {"linear": "fp16"}})
    with pytest.raises(ValueError, match="A variant is made with .*'bf16' leaves"):
        swap_linears(model, layers={"1": "blockwise(descale='pow2')"})
    with pytest.raises(ValueError, match="a recipe of attention.*'bf16' leaves"):
        swap_linears(model, layers={"1": "stale_delta"})
    with pytest.raises(ValueError, match="rowwise\\), 'bf16', or a dict"):
        DeltaMatchConfig(layers={"1": "fp16"})
    for wrong in (None, 3, ["bf16"]):
        got = rf"layers\['1'\]: .* or its dict; got {type(wrong).__name__}\. 'bf16' leaves"
        with pytest.raises(TypeError, match=f"^swap_linears: {got}"):
            swap_linears(model, layers={"1": wrong})
        with pytest.raises(TypeError, match=f"^DeltaMatchConfig: {got}"):
            DeltaMatchConfig(layers={"1": {"linear": wrong}})
    attention = r"^DeltaMatchConfig: layers\['1'\]: Unknown attention recipe 'fp16'\."
    with pytest.raises(ValueError, match=attention):
        DeltaMatchConfig(layers={"1": {"attention": "fp16"}})
    assert {type(m) for m in model} == {nn.Linear}
