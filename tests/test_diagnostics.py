"""What a training run sees: the calls that ran, and the row-sum residual."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch

from hf_deltamatch import delta_matching_attention, fp8_linear
from hf_deltamatch.diagnostics import count_calls, record_row_sum
from hf_deltamatch.ops import observe

LINEAR = {"linear_fwd": 1, "linear_bwd_input": 1, "linear_bwd_weight": 1}


def linear_step() -> None:
    x, weight = torch.randn(3, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    fp8_linear(x, weight).sum().backward()


def readings(calls: Counter) -> list:
    """Every way to read a counter."""
    return [
        dict(calls),
        {**calls},
        calls.copy(),
        {op: calls[op] for op in calls},
        {op: calls.get(op) for op in calls.keys()},
        dict(calls.items()),
        json.loads(json.dumps(calls)),
        Counter() + calls,
        dict(calls.most_common()),
        eval(repr(calls), {"Counter": Counter}),
    ]


def test_count_calls_is_live() -> None:
    linear_step()
    with count_calls() as calls:
        assert not calls and len(calls) == 0 and calls.get("linear_fwd") is None
        for n in (1, 2):
            linear_step()
            expected = {op: n for op in LINEAR}
            assert all(reading == expected for reading in readings(calls))
            assert calls and len(calls) == 3 and "linear_fwd" in calls
            assert sum(calls.values()) == calls.total() == 3 * n
            assert calls["attention_fwd"] == 0 and "attention_fwd" not in calls
    linear_step()
    assert all(reading == expected for reading in readings(calls))


def test_count_calls_nests() -> None:
    """An inner block that ends with the counts of the outer one ends alone."""
    with count_calls() as outer:
        with count_calls() as inner:
            linear_step()
        linear_step()
    assert inner == LINEAR and outer == {op: 2 for op in LINEAR}
    assert observe._counters == []


def test_count_calls_ends_on_exceptions() -> None:
    with pytest.raises(KeyError), count_calls() as calls:
        linear_step()
        raise KeyError
    linear_step()
    assert calls == LINEAR and observe._counters == []


@pytest.mark.parametrize("v", [0.0, 1.0], ids=["zero-v", "constant-v"])
def test_residual_of_zero_ds_is_zero(v: float) -> None:
    """A zero dO has a zero dS: nothing is left over. NaN says that no backward ran."""
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    with record_row_sum() as residual:
        o = delta_matching_attention(q, q, torch.full((1, 2, 8, 16), v))
        assert math.isnan(residual.value)
        o.backward(torch.zeros(1, 2, 8, 16))
    assert residual.per_call == [0.0] and residual.value == 0.0
