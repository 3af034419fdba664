"""The numerics table: well-formed, and the claims it exists to show."""

from __future__ import annotations

import json
import math

import pytest
import torch

from hf_deltamatch import numerics
from hf_deltamatch.numerics import OFFSETS, RULES, Measured, rules_of

SMALL = {"B": 2, "H": 1, "T": 200, "D": 64}


def test_make_inputs() -> None:
    """What the docstring states, per head of a shape large enough to see it."""
    shape = {"B": 2, "H": 2, "T": 1024, "D": 128}
    q, k, v, do = (x.float() for x in numerics.make_inputs(6.0, 0, **shape))
    assert numerics.make_inputs(6.0, 0, **shape)[0].dtype == torch.bfloat16
    assert abs(q.mean()) < 0.01 and abs(q.std() - 1) < 0.01
    for x, spread in ((k, 6.0), (v, 0.5)):  # one common vector per head
        common = x.mean((0, 2), keepdim=True)
        assert abs(common.std() / spread - 1) < 0.1
        assert abs((x - common).std() / (1.0 if x is k else 0.5) - 1) < 0.01
    row = do.norm(dim=-1) / 128**0.5
    assert abs(row.log().std() - 1) < 0.03 and abs(row.median() / 1e-3 - 1) < 0.05
    again = numerics.make_inputs(6.0, 0, **shape)
    assert all(torch.equal(a.float(), b) for a, b in zip(again, (q, k, v, do), strict=True))
    assert not torch.equal(numerics.make_inputs(6.0, 1, **shape)[0].float(), q)


@pytest.mark.parametrize("block", ["128xD", "mx"])
def test_table(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "SHAPE", SMALL)
    steps: list[str] = []
    result = numerics.table(seeds=2, block=block, progress=steps.append)
    assert len(steps) == len(set(steps)) == 2 * len(OFFSETS)
    assert json.loads(json.dumps(result)) == result
    assert {k: v for k, v in result.items() if k != "rules"} == {
        "shape": SMALL,
        "mask": "causal",
        "block": block,
        "seeds": 2,
    }
    rules = rules_of(block)
    assert list(result["rules"]) == [name for name in RULES if (name, block) != ("forward", "mx")]
    for by_offset in result["rules"].values():
        assert list(by_offset) == ["0", "2", "6"]
        for fields in by_offset.values():
            assert list(fields) == list(Measured._fields)
            for entry in fields.values():
                assert math.isfinite(entry["mean"]) and entry["mean"] > 0 and entry["std"] > 0
    one_seed = numerics.table(seeds=1, block=block)["rules"]
    runs = [numerics.measure(2.0, seed, rules) for seed in (0, 1)]
    for name in rules:
        values = [r[name].dq for r in runs]
        entry = result["rules"][name]["2"]["dq"]
        assert entry["mean"] == pytest.approx(sum(values) / 2, rel=1e-6)
        assert entry["std"] == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2), rel=1e-4)
        assert one_seed[name]["2"]["dq"] == {"mean": pytest.approx(values[0], rel=1e-6), "std": 0.0}


def test_format_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "SHAPE", SMALL)
    result = numerics.table(seeds=2)
    lines = numerics.format_table(result).splitlines()
    assert "B2 H1 T200 D64 causal, block 128xD" in lines[0] and "2 seeds" in lines[0]
    assert all(f"key offset {o}" in lines[2] for o in "026")
    for line, (name, by_offset) in zip(lines[3:], result["rules"].items(), strict=False):
        assert line.startswith(name)
        for fields in by_offset.values():
            assert f"{fields['dq']['mean']:.3f} ± {fields['dq']['std']:.3f}" in line
        worst = max(fields["residual"]["mean"] for fields in by_offset.values())
        assert line.endswith(f"{worst:.1e}")


def check_claims(measured: dict[str, Measured], *, stale_factor: float) -> None:
    """What every key offset other than 0 has to show."""
    stale, dequantized = measured["stale"], measured["dequantized"]
    matched, projected = measured["matched"], measured["matched + row-sum projection"]
    assert stale.dq >= stale_factor * matched.dq
    assert matched.dq < dequantized.dq < stale.dq
    assert projected.dq < matched.dq
    # The stale δ is nearer to the exact one and still worse: agreement with dP is what counts.
    assert stale.delta < matched.delta
    assert matched.residual < 1.5e-7 and projected.residual == matched.residual
    assert 2e-3 < dequantized.residual < 7e-3 and 0.02 < stale.residual < 0.04
    # The rules differ in δ alone, which neither o nor dv reads; the projection changes dq alone.
    assert stale.o == dequantized.o == matched.o == projected.o
    assert stale.dv == dequantized.dv == matched.dv == projected.dv
    assert projected.dk == matched.dk
    if "forward" in measured:
        # Nearer to matched than to dequantized, and not matched: O is rounded to BF16.
        forward = measured["forward"]
        assert 1e-3 < forward.residual < 0.6 * dequantized.residual
        assert forward.dq < matched.dq + 0.3 * (dequantized.dq - matched.dq)
        assert forward.o < matched.o and forward.dv == matched.dv


@pytest.mark.parametrize("block", ["128xD", "1xD", "mx"])
@pytest.mark.parametrize("offset", [2.0, 6.0])
def test_measure_small(offset: float, block: str) -> None:
    """At T = 256 the stale error is 3.3 and 4.1 times the matched one (it grows with T)."""
    check_claims(numerics.measure(offset, 0, rules_of(block), T=256), stale_factor=3.0)


@pytest.mark.parametrize(
    "offset, expected",
    # dq of stale, dequantized, forward, matched, matched + projection (128xD, seed 0).
    [
        (0.0, (0.0818, 0.0713, 0.0704, 0.0702, 0.0702)),
        (2.0, (0.541, 0.1355, 0.1198, 0.1154, 0.1014)),
        (6.0, (1.605, 0.362, 0.289, 0.270, 0.222)),
    ],
)
def test_measure(offset: float, expected: tuple[float, ...]) -> None:
    """The stated shape, one seed."""
    measured = numerics.measure(offset, 0)
    if offset:
        check_claims(measured, stale_factor=3.5)
    for name, dq in zip(RULES, expected, strict=True):
        assert measured[name].dq == pytest.approx(dq, rel=0.02), name
