"""Schedule and data order: pure functions of the step."""

from __future__ import annotations

import pytest
import torch

from hf_deltamatch.training import lr_factor, order_positions


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_schedules_warm_up_and_end(kind: str) -> None:
    factors = [lr_factor(s, steps=100, warmup=10, kind=kind, floor=0.1) for s in range(101)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == 1.0 and factors[100] == pytest.approx(1.0 if kind == "constant" else 0.1)
    assert all(a >= b for a, b in zip(factors[10:], factors[11:], strict=False))
    if kind == "wsd":
        assert factors[80] == 1.0 > factors[81] and factors[90] == pytest.approx(0.55)
    if kind == "cosine":
        assert factors[55] == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"kind": "linear"}, "'linear'.*'cosine'"), ({"floor": 2.0}, "`floor` is 2.0")],
)
def test_schedule_refuses(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lr_factor(0, steps=10, **fields)


def test_order_is_a_permutation_of_every_epoch() -> None:
    three = order_positions(10, 0, 0, 30).view(3, 10)
    assert all(sorted(epoch.tolist()) == list(range(10)) for epoch in three)
    assert not torch.equal(three[0], three[1])
    assert not torch.equal(order_positions(10, 1, 0, 10), three[0])


def test_order_does_not_depend_on_where_it_is_read_from() -> None:
    whole = order_positions(7, 3, 0, 40)
    parts = [order_positions(7, 3, start, 8) for start in range(0, 40, 8)]
    assert torch.equal(torch.cat(parts), whole)
    assert order_positions(7, 3, 5, 0).shape == (0,)


@pytest.mark.parametrize("arguments", [(0, 0, 0, 1), (3, 0, -1, 1), (3, 0, 0, -1)])
def test_order_refuses(arguments: tuple) -> None:
    with pytest.raises(ValueError, match="order_positions"):
        order_positions(*arguments)
