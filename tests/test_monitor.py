"""The monitor's numbers against others computed directly, in plain, packed, checkpointed and compiled
training."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import batch, build, one_thread, padded, use  # noqa: F401

from hf_deltamatch import AttentionRecipe, delta_matching_attention
from hf_deltamatch.diagnostics import Monitor, record_row_sum
from hf_deltamatch.monitor import Slice, measure
from hf_deltamatch.monitor.capture import Capture

OFFSET = 3.0
HEAD = {"turn": 5, "b": 1, "h": 1}  # sequence 5 % 2, head 5 % 4


def run(recipe="delta_matching", T=150, dtype=torch.float32, max_tokens=1024, **options) -> tuple:
    """One call with two sequences, four heads on two, keys with a common part."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, T, 32).to(dtype).requires_grad_()
    k = (torch.randn(2, 2, T, 32) + OFFSET * torch.randn(32)).to(dtype).requires_grad_()
    v = (torch.randn(2, 2, T, 32) + torch.randn(32)).to(dtype).requires_grad_()
    do = torch.randn(2, 4, T, 32).to(dtype)
    options = {"is_causal": True, **options}
    capture = Capture(max_tokens, HEAD["turn"])
    with capture:
        delta_matching_attention(q, k, v, recipe=recipe, **options).backward(do)
    return q, k, v, do, capture.done


def exact_dq(q, k, v, do, **options) -> torch.Tensor:
    """Through autograd in FP64."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    recipe = AttentionRecipe(quantize=False)
    delta_matching_attention(q, k, v, recipe=recipe, **options).backward(do.double())
    return q.grad


OPTIONS = [
    {"is_causal": True},
    {"is_causal": True, "window": 40},
    {"is_causal": False},
    {"is_causal": True, "softcap": 5.0, "softmax_scale": 0.3},
    {"is_causal": True, "sinks": torch.tensor([0.5, 2.0, -1.0, 0.0])},
    {"is_causal": False, "mask": torch.ones(150, 150, dtype=torch.bool).tril(3)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_error_of_dq_is_that_of_the_op(options: dict) -> None:
    q, k, v, do, (found,) = run(**options)
    numbers = measure(found)
    error = (q.grad.double() - (exact := exact_dq(q, k, v, do, **options)))[1, 1]
    assert numbers["dq_error"] == pytest.approx(float(error.norm() / exact[1, 1].norm()), rel=1e-4)
    mean = k[1, 0].detach().double().mean(0)
    along = error @ mean / mean.norm()
    assert numbers["dq_error_mean_key"] == pytest.approx(
        float(along.square().sum() / error.square().sum()), rel=1e-3
    )
    assert 0.005 < numbers["dq_error"] < 0.5 and numbers["row_sum_residual"] < 1e-6


def test_logits() -> None:
    q, k, _, _, (found,) = run()
    s = (q[1, 1] @ k[1, 0].T * 32**-0.5).masked_fill(torch.ones(150, 150).triu(1).bool(), -9e9)
    assert measure(found)["logit_max"] == pytest.approx(s.max().item(), rel=1e-5)


@pytest.mark.parametrize("block", ["128xD", "1xD", "mx"])
@pytest.mark.parametrize("delta", ["matched", "stale", "dequantized", "forward"])
def test_residual_is_that_of_the_recorder(block: str, delta: str) -> None:
    """One sequence and head, so that the recorder of the whole call sees the same rows."""
    if (block, delta) == ("mx", "forward"):
        pytest.skip("refused: test_recipes.py")
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 1, 150, 32, requires_grad=True) for _ in "qkv")
    recipe = AttentionRecipe(block=block, delta=delta)
    capture = Capture(1024, 0)
    with record_row_sum() as recorded, capture:
        delta_matching_attention(q, k, v + 1.0, is_causal=True, recipe=recipe).backward(
            torch.randn(1, 1, 150, 32)
        )
    numbers = measure(capture.done[0])
    if delta == "matched":
        assert numbers["row_sum_residual"] < 1e-6 and recorded.value < 1e-6
    else:
        assert numbers["row_sum_residual"] == pytest.approx(recorded.value, rel=1e-3)
        assert numbers["row_sum_residual"] > (1e-4 if delta == "forward" else 1e-3)


def test_e_is_the_gap_between_the_rules() -> None:
    """Against δ as the op itself returns it under the two recipes."""
    deltas = {}
    for rule in ("matched", "stale"):
        *_, (found,) = run(AttentionRecipe(delta=rule), dtype=torch.bfloat16)
        deltas[rule] = found.delta.double()
    numbers = measure(found)
    e = deltas["matched"] - deltas["stale"]
    assert numbers["e_abs"] == pytest.approx(float(e.abs().mean()), rel=1e-3)
    assert numbers["e_rel"] == pytest.approx(float(e.norm() / deltas["matched"].norm()), rel=1e-3)
    assert numbers["e_abs"] > 0


def test_stale_errors_lie_along_the_mean_key() -> None:
    matched, stale = (
        measure(run(r, dtype=torch.bfloat16)[-1][0]) for r in ("delta_matching", "stale_delta")
    )
    assert stale["dq_error_mean_key"] > matched["dq_error_mean_key"]
    assert stale["dq_error"] > matched["dq_error"] and stale["row_sum_residual"] > 1e-3


def test_a_delta_that_is_off_shows() -> None:
    """The residual is that of the δ which the backward used, not of one computed again."""
    *_, (found,) = run()
    wrong = dataclasses.replace(found, delta=found.delta * 1.01)
    assert measure(wrong)["row_sum_residual"] > 1e4 * measure(found)["row_sum_residual"]


def operand_slice(q: torch.Tensor, recipe: AttentionRecipe) -> Slice:
    n = len(q)
    torch.manual_seed(2)
    k, v, do = (torch.randn(n, q.shape[1]) for _ in range(3))
    *_, (like,) = run(recipe, T=n)
    shapes = {"lse": torch.zeros(n), "delta": torch.zeros(n), "dq": torch.zeros_like(q)}
    return dataclasses.replace(like, q=q, k=k, v=v, do=do, o=torch.zeros_like(q), **shapes)


@pytest.mark.parametrize("block", ["128xD", "1xD"])
def test_underflow_and_saturation(block: str) -> None:
    """A quarter of a row far below the largest of its block, and the largest number itself."""
    q = torch.full((128, 32), 448.0)
    q[:, :8] = 1e-6
    q[:, 8:16] = 0.0  # zeros are not lost
    q[:, 16:20] = 100.0
    numbers = measure(operand_slice(q, AttentionRecipe(block=block)))
    assert numbers["underflow_q"] == pytest.approx(8 / 24)
    assert numbers["saturated_q"] == pytest.approx(12 / 24)
    assert numbers["underflow_k"] < 0.01 and 0 <= numbers["underflow_ds"] <= 1


def test_long_sequences_are_cut_to_whole_tiles() -> None:
    """The beginning of a causal sequence stands by itself: as a call of that length."""
    *_, (cut,) = run(T=300, max_tokens=256)
    assert cut.q.shape == (256, 32)
    numbers = measure(cut)
    assert numbers["row_sum_residual"] < 1e-6
    q, k, v, do, _ = run(T=300)
    exact = exact_dq(q, k, v, do, is_causal=True)[1, 1, :256]
    error = q.grad[1, 1, :256].double() - exact
    assert numbers["dq_error"] == pytest.approx(float(error.norm() / exact.norm()), rel=1e-4)
    *_, found = run(T=300, max_tokens=256, is_causal=False)
    assert found == [None]


def loss_of(model, inputs: dict) -> None:
    model.zero_grad()
    model(**inputs, use_cache=False).loss.backward()


INPUTS = {
    "plain": lambda: {"input_ids": (ids := batch(2, 40)), "labels": ids},
    "padded": lambda: padded("right")._asdict(),
    "packed": lambda: {
        "input_ids": (ids := batch(1, 40)),
        "labels": ids,
        "position_ids": torch.cat([torch.arange(25), torch.arange(15)])[None],
        "cu_seq_lens_q": (cu := torch.tensor([0, 25, 40], dtype=torch.int32)),
        "cu_seq_lens_k": cu,
        "attention_mask": torch.ones(1, 40),
    },
}


@pytest.mark.parametrize("inputs", list(INPUTS))
@pytest.mark.parametrize("how", ["eager", "checkpointed", "reentrant", "compiled"])
def test_in_training(inputs: str, how: str) -> None:
    """Gradients are untouched; checkpointing sees the same numbers; compiled steps stay compiled."""
    model, given = use(build("llama")).train(), INPUTS[inputs]()
    loss_of(model, given)
    before = [p.grad.clone() for p in model.parameters()]
    plain = Monitor(1)
    with plain.step(0):
        loss_of(model, given)
    expected = plain.pop()
    assert plain.pop() == {}
    if how in ("checkpointed", "reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
        model.enable_input_require_grads()
    if how == "compiled":
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        loss_of(model, given)
    monitor = Monitor(2)
    with monitor.step(1):
        loss_of(model, given)
    assert monitor.pop() == {}
    with monitor.step(2):
        loss_of(model, given)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
    found = monitor.pop()
    assert {n for n in found if n.startswith("attention/dq_error")} == {
        f"attention/dq_error{kind}{layer}"
        for kind in ("", "_mean_key")
        for layer in ("", "/layer_00", "/layer_01")
    }
    turned = Monitor(1)
    with turned.step(1):  # the same turn as step 2 of every second
        loss_of(use(build("llama")).train(), given)
    assert turned.pop() == found
    assert found["attention/row_sum_residual"] < 1e-6 and expected.keys() == found.keys()


def test_layers_take_turns() -> None:
    model, given = use(build("llama", num_hidden_layers=5)).train(), INPUTS["plain"]()
    monitor, seen = Monitor(10, layers=2), set()
    for step in range(0, 50, 10):
        with monitor.step(step):
            loss_of(model, given)
        layers = {n[-2:] for n in monitor.pop() if "/layer_" in n}
        assert len(layers) == 2
        seen |= layers
    assert seen == {f"{i:02d}" for i in range(5)}


def test_layers_have_their_own_numbers() -> None:
    """Layer 1 is stale: it alone has a residual, whichever way backwards are ordered."""
    from hf_deltamatch import set_attention_recipe

    model, given = use(build("llama", num_hidden_layers=3)).train(), INPUTS["plain"]()
    set_attention_recipe(model, "delta_matching", layers={"model.layers.1": "stale_delta"})
    monitor = Monitor(1, layers=3)
    with monitor.step(0):
        loss_of(model, given)
    found = monitor.pop()
    residuals = [found[f"attention/row_sum_residual/layer_{i:02d}"] for i in range(3)]
    assert residuals[1] > 1e-4 and max(residuals[0], residuals[2]) < 1e-6
    assert found["attention/row_sum_residual"] == residuals[1]


def test_nothing_of_ours_is_nothing_to_see() -> None:
    monitor = Monitor(1)
    with monitor.step(0):
        loss_of(build("llama").train(), INPUTS["plain"]())
    assert monitor.pop() == {}
    with pytest.raises(ValueError, match="max_tokens 100.*multiple of 128"):
        Monitor(max_tokens=100)


@pytest.mark.parametrize(
    "options", [{"interval": "5"}, {"interval": None}, {"interval": 1.5}, {"layers": "2"},
                {"interval": True}, {"max_tokens": 100}],
)  # fmt: skip
def test_wrong_arguments(options: dict) -> None:
    with pytest.raises(ValueError, match="Monitor: .*all are integers"):
        Monitor(**options)
    for step in ("1", None, 1.0, True):
        with pytest.raises(TypeError, match="Monitor.step: `step` is"), Monitor(1).step(step):
            pass


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_of_a_layer_is_the_largest(values: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter(values)
    monkeypatch.setattr("hf_deltamatch.monitor.measure", lambda _: {"e_rel": next(found)})
    numbers = Monitor(1, layers=2)._measure([object(), object()])
    assert math.isnan(numbers["attention/e_rel"])


@pytest.mark.slow
def test_script_that_measures_its_cost(tmp_path) -> None:
    script = Path(__file__).parent / "measure_monitor.py"
    file = tmp_path / "cost.json"
    command = [sys.executable, str(script), "--case", "tiny", "--json", str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (row,) = json.loads(file.read_text())["rows"]
    assert len(row["sampled_ms"]) == 2 and row["step_ms"] > 0
    assert row["share"] == pytest.approx(row["extra_ms"] / row["step_ms"] / row["interval"])
