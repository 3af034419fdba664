"""``hf-deltamatch bench step``: what an arm does, what is compared, what refuses a speed."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import LlamaForCausalLM

pytest.importorskip("triton")
from hf_deltamatch import cli, kernels
from hf_deltamatch.benchmarks import process, step, step_arm, tables, timing, verify
from hf_deltamatch.benchmarks.step_arm import Size

TINY = Size(2, 256, 24, 2)


@pytest.fixture
def small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_arm, "VOCABULARY", 64)


def test_size_counts_what_the_model_has(small_vocabulary) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(TINY.config())
    assert sum(p.numel() for p in model.parameters()) == TINY.parameters
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    pairs = 24 * 24 / 2
    heads = model.config.num_attention_heads * model.config.head_dim
    assert TINY.flops == 2 * (6 * matrices * 24 + 3 * TINY.layers * 4 * heads * pairs)


def test_the_default_is_between_1_2_and_1_7_billion_parameters() -> None:
    assert 1.2e9 < Size().parameters < 1.7e9 and Size().tokens == 8192
    for size in (Size(hidden=300), Size(layers=0), Size(tokens=-1)):
        with pytest.raises(ValueError, match="multiple of 256"):
            size.config()


@pytest.mark.parametrize("weights", step_arm.WEIGHTS)
def test_arms_learn_the_same(weights: str, small_vocabulary) -> None:
    """On a CPU: ours with FP8 linears, the losses fall and agree; with feed-forwards of one op as well."""
    rows = {
        arm: step_arm.run_arm(arm, list(TINY), weights, None, "cpu")
        for arm in (*step.DEFAULT_ARMS, "fp8-gated")
    }
    assert rows["fp8-gated"]["losses"] == pytest.approx(rows["fp8"]["losses"], rel=1e-3)
    assert rows["fp8"]["swapped"] == 14 and rows["bf16"]["swapped"] == 0
    assert rows["bf16"]["sdpa"] == "cpu" and "sdpa" not in rows["fp8"]
    for row in rows.values():
        assert row["parameters"] == TINY.parameters
        assert abs(row["losses"][0] - math.log(64)) < 0.2
        assert row["losses"] == sorted(row["losses"], reverse=True)
        assert len(row["first"]["grad_norms"]) == 2 + 1 + 9 * 2
    assert rows["fp8"]["losses"] != rows["bf16"]["losses"]
    off = step.differences(rows["fp8"]["first"], rows["bf16"]["first"])
    same = step.differences(rows["fp8"]["kernels"], rows["fp8"]["reference"])
    step.agree(off, same, rows["fp8"]["losses"])
    assert same["gradients"] == 0  # a CPU has the reference alone
    assert 0 < off["loss"] < step.MAX_LOSS_DIFFERENCE
    assert off["grad_norms"] > 1e-3 and off["gradients"] > off["gradients_median"] > 0.01


@pytest.mark.slow
def test_a_layer_is_compiled_once_for_all(small_vocabulary) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    row = step_arm.run_arm("fp8", [5, 256, 24, 1], "bf16", "aot_eager", "cpu")
    assert (row["graphs"], row["graph_breaks"]) == (2, 0)  # a layer, and the loss


def _found(ms: float, gib: float, **changes) -> dict:
    first = {
        "loss": 6.0, "grad_norms": {"a": 1.0, "b": 2.0},
        "gradients": {"a": [1.0, 0.0], "b": [1.0, -1.0]},
    }  # fmt: skip
    found = {
        "step_ms": ms, "peak_GiB": gib, "losses": [6.0, 5.0], "first": first, "kernels": first,
        "reference": first, "graphs": 2, "graph_breaks": 0, "process_s": 30.0,
    }  # fmt: skip
    for name in ("first", "kernels"):
        found[name] = found[name] | changes.pop(name, {})
    return found | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"first": {"loss": 6.12}}, "first loss is 0.02 away from that of BF16"),
        ({"kernels": {"loss": 6.12}}, "first loss is 0.02 away from that of the reference"),
        ({"first": {"loss": math.nan}}, "first loss is nan"),
        ({"losses": [6.0, math.nan]}, "do not fall"),
        ({"losses": [6.0, 6.5]}, "do not fall"),
        (
            {"kernels": {"gradients": {"a": [1.0, 0.0], "b": [-1.0, 1.0]}}},
            "gradient of b is 2 away",
        ),
        (
            {"kernels": {"gradients": {"a": [0.87, 0.0], "b": [1.0, -0.87]}}},
            "median of first gradients is 0.111",
        ),
        (
            {"kernels": {"gradients": {"a": [1.0, math.nan], "b": [1.0, -1.0]}}},
            "gradient of a is nan",
        ),
        ({"first": {"grad_norms": {"a": 1.0, "b": 3.0}}}, "gradient of b has a norm 0.5 away"),
        ({"kernels": {"grad_norms": {"a": 1.0, "b": 3.0}}}, "gradient of b has a norm 0.5 away"),
        ({"first": {"grad_norms": {"a": math.nan, "b": 2.0}}}, "gradient of a"),
        ({"first": {"grad_norms": {"a": 1.0}}}, "other parameters"),
    ],
)
def test_what_does_not_agree(changes: dict, words: str) -> None:
    with pytest.raises(verify.WrongNumbers, match=words):
        found = _found(1.0, 1.0, **changes)
        step.agree(
            step.differences(found["first"], _found(1.0, 1.0)["first"]),
            step.differences(found["kernels"], found["reference"]),
            found["losses"],
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """A device with answers instead of processes."""
    answers = {"bf16": _found(200.0, 20.0), "fp8": _found(100.0, 12.0, first={"loss": 6.003})}
    asked = []

    def run(function, request, timeout):
        asked.append(request)
        if isinstance(answers[request["arm"]], Exception):
            raise answers[request["arm"]]
        return dict(answers[request["arm"]])

    monkeypatch.setattr(kernels, "missing", lambda *_: None)
    monkeypatch.setattr(timing, "bf16_peak", lambda: 700.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(step, "in_own_process", run)
    return answers, asked


def test_command(machine, tmp_path, capsys) -> None:
    answers, asked = machine
    path = tmp_path / "step.json"
    arguments = ["bench", "step", "--json", str(path), "--layers", "2", "--hidden", "256"]
    assert cli.main([*arguments, "--tokens", "64", "--batch", "3", "--weights", "fp32"]) == 0
    out = capsys.readouterr().out
    assert "2 layers, hidden 256, 3 x 64 tokens" in out and "in fp32" in out
    assert [r["arm"] for r in asked] == ["bf16", "fp8"]
    assert all(r["size"] == [2, 256, 64, 3] and r["weights"] == "fp32" for r in asked)
    result = json.loads(path.read_text())
    rows = result["shapes"][0]["rows"]
    size = Size(2, 256, 64, 3)
    assert rows["fp8"]["tokens_per_s"] == pytest.approx(1920)
    assert rows["fp8"]["mfu"] == pytest.approx(size.flops / 0.1 / 989e12)
    assert rows["fp8"]["share_of_bf16_matmul"] == pytest.approx(size.flops / 0.1 / 700e12)
    assert (rows["fp8"]["speedup"], rows["fp8"]["memory"]) == (2.0, 0.6)
    assert rows["fp8"]["difference"]["loss"] == pytest.approx(0.003 / 6.0)
    assert not {"first", "kernels", "reference"} & set(rows["fp8"])
    assert rows["fp8"]["from_reference"]["gradients"] == 0
    assert result["environment"]["packages"]["torch"]

    answers["fp8"] = _found(100.0, 12.0, first={"loss": 6.5})
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert "fp8: the first loss is" in captured.err and "not timed" in captured.out
    assert "step_ms" not in json.loads(path.read_text())["shapes"][0]["rows"]["fp8"]
    answers["bf16"] = process.ArmFailed("out of memory")
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert "bf16                                not timed: out of memory" in captured.out
    assert "nothing to compare with" in captured.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--arm fp9", "--arm is 'fp9'; it must be one of bf16, fp8"),
        ("--weights fp16", "--weights is 'fp16'"),
        ("--hidden 100", "multiple of 256"),
    ],
)
def test_bad_arguments(argv: str, words: str, capsys) -> None:
    assert cli.main(["bench", "step", *argv.split()]) == 2
    assert words in capsys.readouterr().err


def test_unknown_devices_have_no_data_sheet() -> None:
    assert step.nominal_bf16("NVIDIA H200") == 989.0
    assert step.nominal_bf16("NVIDIA H200 NVL") is step.nominal_bf16("something else") is None


@pytest.mark.gpu
def test_arms_on_a_device(small_vocabulary) -> None:
    rows = {a: step_arm.run_arm(a, [2, 256, 512, 1], "bf16", None) for a in step.DEFAULT_ARMS}
    fp8 = rows["fp8"]
    step.agree(
        step.differences(fp8["first"], rows["bf16"]["first"]),
        step.differences(fp8["kernels"], fp8["reference"]),
        fp8["losses"],
    )
    assert all("recorded_ms" in row for row in rows.values())
    assert rows["fp8"]["peak_GiB"] > 0 and rows["bf16"]["sdpa"]
    assert tables.format_rows("", {"bf16": rows["bf16"]}, step.COLUMNS)


def test_largest_kernels(monkeypatch) -> None:
    """Nothing is lost: templates whose names begin alike are one row, the rest another."""
    long = "void at::native::vectorized_elementwise_kernel<4, " + 120 * "x"
    times = {long + "Mul": 5.0, long + "Add": 4.0, **{f"k{i}": 0.1 for i in range(5)}}
    monkeypatch.setattr(step_arm.timing, "kernel_times", lambda step, repeats: times)
    found = step_arm._largest_kernels(None, count=3)
    assert found == {long[:120]: 9.0, "k0": 0.1, "k1": 0.1, "(others)": 0.3}
