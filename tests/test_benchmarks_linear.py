"""``hf-deltamatch bench linear``: what is compared, what refuses a speed, what is counted.

The times themselves need a device; everything else runs here in the interpreter, the clock replaced.
"""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from hf_deltamatch import kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if kernels.missing("linear", DEVICE):
    pytest.skip("no device for the kernels", allow_module_level=True)

from hf_deltamatch import LinearRecipe, cli, fp8_linear  # noqa: E402
from hf_deltamatch.benchmarks import (  # noqa: E402
    linear,
    linear_baselines,
    linear_parts,
    linear_shapes,
    process,
    tables,
    timing,
    verify,
)
from hf_deltamatch.benchmarks.linear_shapes import LinearShape, both, make_linear_inputs  # noqa: E402

SMALL = LinearShape(96, 128, 64)
PLAIN = ("blockwise", "rowwise", "mx")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 ms for a forward and every part, 4 ms with the backward; half of it for compiled BF16."""

    def measure(functions, **_):
        out = {}
        for key, function in functions.items():
            function()
            ms = 4.0 if "fwd_bwd" in (key, key[-1]) else 1.0
            ms *= 0.5 if key[0] == linear_baselines.BF16_COMPILED else 1.0
            out[key] = timing.Times(ms, (ms, ms), 2 * ms)
        return out

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(timing, "kernel_times", lambda function, repeats: {"": 1.0})
    monkeypatch.setattr(linear_baselines, "compiled", lambda linear: linear)


def test_shapes_and_recipes_are_what_their_text_says() -> None:
    for s in linear_shapes.LINEAR_SHAPES:
        assert linear_shapes.parse_linear_shape(f"{s.tokens},{s.n_in},{s.n_out}") == s
    for text in ("1,2", "1,2,3,4", "1,2,x", "0,2,3", ""):
        with pytest.raises(ValueError, match="tokens,in,out"):
            linear_shapes.parse_linear_shape(text)
    assert linear_shapes.parse_linear_recipe("mx") == (LinearRecipe.from_name("mx"), False)
    assert linear_shapes.parse_linear_recipe("blockwise compiled")[1]
    for text in ("fp9", "", "blockwise fast", "blockwise compiled compiled"):
        with pytest.raises(ValueError):
            linear_shapes.parse_linear_recipe(text)
    assert SMALL.flops == 2 * 96 * 128 * 64


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_compared(name: str) -> None:
    """The emulated products are those of the op; the exact ones are those of autograd."""
    inputs = make_linear_inputs(SMALL, "cpu")
    recipe = LinearRecipe.from_name(name)
    wide = tuple(t.detach().float().requires_grad_() for t in inputs)
    op = both(lambda x, w: fp8_linear(x, w, None, recipe, "reference"), wide)
    for a, b in zip(linear_shapes.emulated(inputs, recipe), op, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-5)
    for a, b in zip(linear_shapes.exact(inputs), both(F.linear, wide), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("part", range(3))
def test_one_wrong_row_is_no_match(part: int) -> None:
    results = linear_shapes.exact(make_linear_inputs(SMALL, "cpu"))
    wrong = list(results)
    wrong[part] = results[part].clone()
    wrong[part][7] = 0
    allowed = linear_shapes.MAX_DIFFERENCE
    with pytest.raises(verify.WrongNumbers, match="against it: results differ by output"):
        linear_shapes.compare(tuple(wrong), results, allowed, "against it")
    wrong[part][7] = torch.nan
    with pytest.raises(verify.WrongNumbers, match="nan"):
        linear_shapes.compare(tuple(wrong), results, 1e9, "against it")
    assert linear_shapes.compare(results, results, allowed, "") == 0.0


def test_rows_of_a_shape(clock) -> None:
    apart = {"torchao x": {"fwd_ms": 2.0, "fwd_bwd_ms": 4.0}, "torchao y": {"failed": "because"}}
    names = (*PLAIN, "blockwise compiled")
    rows = linear.bench_linear_shape(SMALL, names, 100.0, 4.0, apart, DEVICE)
    assert list(rows)[:2] == ["BF16", "BF16 compiled"] and list(rows)[-4:] == list(names)
    for name in names:
        row = rows[name]
        assert row["ours"] and "failed" not in row, row
        assert 0 < row["difference"] < linear_shapes.MAX_DIFFERENCE < row["error"] < 0.06
        assert row["fwd_ms"] == 1.0 and row["fwd_bwd_one_call_ms"] == 8.0
        assert row["fwd_bwd_tflops"] == pytest.approx(3 * SMALL.flops / 4e9)
        assert row["share_of_fp8_peak"] == pytest.approx(row["fwd_bwd_tflops"] / 100)
        assert row["fwd_speedup"] == 0.5 and row["fwd_bwd_speedup"] == 0.5
        assert row["quantize_ms"] == 4.0 and row["gemm_ms"] == 3.0
    assert ("emulated" in rows["mx"]) == (kernels.capability_of(DEVICE) not in kernels.NATIVE_MX)
    assert rows["torchao x"]["fwd_bwd_speedup"] == 0.5
    assert rows["BF16"]["error"] < 0.01 and not rows["BF16"]["ours"]
    json.dumps(rows)
    table = linear.format_linear(SMALL, rows)
    assert "not timed: because" in table and all(name in table for name in rows)
    assert table.count("of copy bandwidth") == 4 * len(PLAIN)
    assert f"mx: {linear.EMULATED}" in table or "emulated" not in rows["mx"]


@pytest.mark.parametrize("name", PLAIN)
def test_bytes_of_the_quantisers(name: str, clock) -> None:
    """BF16 read once (twice for whole rows), a byte written each way, and the descales."""
    inputs = make_linear_inputs(LinearShape(256, 128, 384), DEVICE)
    recipe = LinearRecipe.from_name(name)
    parts = linear_parts.time_parts(inputs, recipe)
    reads = 4 if name == "rowwise" else 2
    per_descale = {"blockwise": 128, "rowwise": 128, "mx": 32}[name]
    for part, elements, ways in (
        ("quantise x", 256 * 128, 2), ("quantise dy", 256 * 384, 2),
        ("quantise weight, forward", 128 * 384, 1), ("quantise weight, backward", 128 * 384, 1),
    ):  # fmt: skip
        payload = elements * (reads + ways)
        assert payload < parts[part]["bytes"] <= payload + ways * elements * 4 / per_descale
    assert {p["flops"] for n, p in parts.items() if "flops" in p} == {2.0 * 256 * 128 * 384}
    row = linear_parts.add_up(parts, 4.0)
    total = sum(p.get("bytes", 0) for p in parts.values())
    assert row["share_of_copy"] == pytest.approx(total / 4e-3 / 4e12)
    assert all(p["copy_ms"] == 1.0 == p["ms"] for p in parts.values() if "bytes" in p)
    assert row["parts"]["quantise x"]["share_of_same_copy"] == 1.0
    assert row["parts"]["output"]["tflops"] == pytest.approx(2 * 256 * 128 * 384 / 1e9)


def test_no_products_in_fp8_for_a_high_precision_grad_weight(clock) -> None:
    inputs = make_linear_inputs(SMALL, DEVICE)
    plain = linear_parts.time_parts(inputs, LinearRecipe())
    hp = linear_parts.time_parts(inputs, LinearRecipe(grad_weight_hp=True))
    for part in ("quantise x", "quantise dy"):
        assert hp[part]["bytes"] < plain[part]["bytes"]


def test_no_speed_for_wrong_numbers(clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MAX_DIFFERENCE", 1e-9)
    rows = linear.bench_linear_shape(SMALL, ["blockwise"], 100.0, 4.0, device=DEVICE)
    row = rows["blockwise"]
    assert "against the reference: results differ by" in row["failed"] and "fwd_ms" not in row
    (failure,) = tables.failures({"shapes": [{"name": "x", "rows": rows}]})
    assert failure.startswith("x, blockwise: against the reference")
    monkeypatch.setattr(linear, "MAX_ERROR", {"fp8": 0.1, "bf16": 1e-9})
    rows = linear.bench_linear_shape(SMALL, [], 100.0, 4.0, device=DEVICE)
    assert "against FP32" in rows["BF16"]["failed"] and "fwd_ms" not in rows["BF16"]


def test_a_recipe_without_kernel_is_named(clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "unsupported_linear", lambda *_: "not on this device")
    rows = linear.bench_linear_shape(SMALL, ["rowwise"], 100.0, 4.0, device=DEVICE)
    assert rows["rowwise"]["failed"] == "not on this device"


def test_command(clock, monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(kernels, "missing", lambda *_: None)
    for name, value in (("fp8_peak", 1000.0), ("bf16_peak", 700.0), ("copy_bandwidth", 4.0)):
        monkeypatch.setattr(timing, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(linear_parts, "host_us", lambda: {"bf16": 50.0, "fp8": 200.0})
    plain = linear.bench_linear_shape
    monkeypatch.setattr(linear, "bench_linear_shape", lambda *args: plain(*args, device=DEVICE))
    path = tmp_path / "linear.json"
    arguments = ["bench", "linear", "--json", str(path), "--recipe", "blockwise"]
    assert cli.main([*arguments, "--shape", "32,64,64", "--shape", "64,64,16"]) == 0
    out = capsys.readouterr().out
    assert "FP8 matmul 1000 TFLOP/s" in out and "64 x 64 x 16" in out and "fp8 200 µs" in out
    result = json.loads(path.read_text())
    assert [s["name"] for s in result["shapes"]] == ["32 x 64 x 64", "64 x 64 x 16"]
    assert result["environment"]["packages"]["torch"] and result["method"]
    assert "torchao" in result["shapes"][0]["rows"] or linear_baselines.installed("torchao")
    monkeypatch.setattr(linear, "MAX_DIFFERENCE", 1e-9)
    assert cli.main([*arguments, "--shape", "32,64,64"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("hf-deltamatch bench: 32 x 64 x 64, blockwise: against the reference")
    assert cli.main(["bench", "linear", "--shape", "32,64"]) == 2
    assert "tokens,in,out" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the benchmark")
def test_refused_without_a_device(capsys) -> None:
    assert cli.main(["bench", "linear"]) == 2
    assert "CUDA device with kernels" in capsys.readouterr().err


def test_torchao_rows_come_from_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(function, request, timeout):
        seen.append((function, request["recipe"]))
        if request["recipe"] == "rowwise":
            raise process.ArmFailed("it broke")
        return [{"fwd_ms": 1.0}] * len(request["shapes"])

    monkeypatch.setattr(linear_baselines, "in_own_process", run)
    monkeypatch.setattr(linear_baselines, "installed", lambda name: name == "torchao.float8")
    rows = linear_baselines.torchao_rows([SMALL, SMALL])
    assert seen == [("linear_baselines.time_torchao", name) for name in linear_baselines.TORCHAO]
    assert rows["torchao rowwise"] == [{"failed": "it broke"}] * 2
    assert rows["torchao tensorwise"] == [{"fwd_ms": 1.0}] * 2
    monkeypatch.setattr(linear_baselines, "installed", lambda name: False)
    assert "not installed" in linear_baselines.torchao_rows([SMALL])["torchao"][0]["failed"]


def test_a_torchao_row_is_checked_before_it_is_timed(clock, monkeypatch) -> None:
    """Through an imitation of the library: what it is asked for, and that its numbers count."""
    from torch import nn

    class Halved(nn.Module):
        def __init__(self, inner: nn.Linear, by: float) -> None:
            super().__init__()
            self.weight, self.by = inner.weight, by

        def forward(self, x):
            return F.linear(x, self.weight) * self.by

    def module(by: float):
        def convert(holder, config):
            assert config == "rowwise"
            holder[0] = Halved(holder[0], by)

        package, fake = types.ModuleType("torchao"), types.ModuleType("torchao.float8")
        fake.convert_to_float8_training = convert
        fake.Float8LinearConfig = types.SimpleNamespace(from_recipe_name=lambda name: name)
        monkeypatch.setitem(sys.modules, "torchao", package)
        monkeypatch.setitem(sys.modules, "torchao.float8", fake)

    module(1.0)
    (row,) = linear_baselines.time_torchao("rowwise", [tuple(SMALL)], str(DEVICE))
    assert row["fwd_bwd_ms"] == 4.0 and 0 < row["error"] < 0.01
    module(0.5)
    (row,) = linear_baselines.time_torchao("rowwise", [tuple(SMALL)], str(DEVICE))
    assert "results differ by" in row["failed"] and "fwd_ms" not in row


def test_a_process_of_its_own() -> None:
    request = {"text": "16384,4096,14336"}
    run = process.in_own_process
    assert run("linear_shapes.parse_linear_shape", request, 100) == [16384, 4096, 14336]
    with pytest.raises(process.ArmFailed, match="tokens,in,out"):
        run("linear_shapes.parse_linear_shape", {"text": "1"}, 100)
    with pytest.raises(process.ArmFailed, match="not done after 0 s"):
        run("linear_shapes.parse_linear_shape", request, 0.2)


def test_host_time_is_of_both(clock) -> None:
    assert linear_parts.host_us(DEVICE) == {"bf16": 1000.0, "fp8": 1000.0}


@pytest.mark.gpu
def test_rows_on_a_device() -> None:
    shape = LinearShape(512, 256, 384)
    found = linear.bench_linear_shape(shape, PLAIN, timing.fp8_peak(2048), 4.0)
    assert tables.failures({"shapes": [{"name": "", "rows": found}]}) == []
    assert found["BF16 compiled"]["fwd_bwd_ms"] > 0
    assert linear_parts.host_us()["fp8"] > 0 and timing.copy_bandwidth(2**26) > 0.1
