"""``hf-deltamatch bench attention``: what is counted, what refuses a speed, what the table says.

The times themselves need a device; everything else runs here in the interpreter, the clock replaced.
"""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")
from hf_deltamatch import kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if kernels.missing("attention", DEVICE):
    pytest.skip("no device for the kernels", allow_module_level=True)

from hf_deltamatch import cli, delta_matching_attention  # noqa: E402
from hf_deltamatch.benchmarks import attention, baselines, tables, timing, verify  # noqa: E402
from hf_deltamatch.benchmarks.shapes import (  # noqa: E402
    RECIPES,
    SHAPES,
    Shape,
    make_inputs,
    parse_recipe,
    parse_shape,
)

SMALL = Shape(1, 2, 1, 192, 32, True)
WINDOW = SMALL._replace(window=40)
FULL = SMALL._replace(causal=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 ms for a forward, 4 ms with the backward; half of it for FlashAttention-2."""

    def measure(functions, **_):
        out = {}
        for name, part in functions:
            ms = (1.0 if part == "fwd" else 4.0) * (0.5 if name == baselines.FLASH2 else 1.0)
            functions[name, part]()
            out[name, part] = timing.Times(ms, (ms, ms), 2 * ms)
        return out

    monkeypatch.setattr(timing, "measure", measure)
    found = {"_quantize_kernel": 0.25, "_transpose_payloads": 0.5, "transpose": 9.0, "_fwd": 3.0}
    monkeypatch.setattr(timing, "kernel_times", lambda _: found)


@pytest.mark.parametrize("shape", [*SHAPES, WINDOW, FULL], ids=str)
def test_shape_is_what_its_text_says(shape: Shape) -> None:
    text = f"{shape.B},{shape.Hq},{shape.Hkv},{shape.T},{shape.D},{shape.mask}"
    assert parse_shape(text) == shape


def test_default_shapes_have_the_window_beside_full_causal() -> None:
    windows = [s for s in SHAPES if s.window is not None]
    assert windows and all(s._replace(window=None) in SHAPES for s in windows)


@pytest.mark.parametrize("window", [1, 40, 192, 500])
def test_flops_of_a_window_count_its_pairs(window: int) -> None:
    i, j = torch.arange(192)[:, None], torch.arange(192)
    pairs = ((j <= i) & (i - j < window)).sum().item()
    assert SMALL._replace(window=window).flops == 4 * 2 * 32 * pairs
    assert FULL.flops == 2 * SMALL.flops == 4 * 2 * 32 * 192**2


@pytest.mark.parametrize("shape", [SMALL, WINDOW, FULL], ids=str)
def test_expected_rows_are_exact_attention(shape: Shape) -> None:
    """The sampled FP64 rows against the package's unquantised recipe in FP64."""
    q, k, v, do = make_inputs(shape, "cpu")
    rows = verify.sample(shape)
    assert rows.queries.shape == (verify.QUERIES, 3) and len(rows.keys) == verify.KEYS
    truth = verify.expected(shape, rows, *(x.detach() for x in (q, k, v, do)))
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o = delta_matching_attention(
        *leaves, is_causal=shape.causal, window=shape.window, recipe="bf16"
    )
    got = (o, *torch.autograd.grad(o, leaves, do.double()))
    errors = verify.against_fp64(rows, truth, *got, 1e-12)
    assert errors.keys() == {"o", "dq", "dk", "dv"}


@pytest.mark.parametrize("which", range(4), ids=["o", "dq", "dk", "dv"])
@pytest.mark.parametrize("value", [float("nan"), 3.0])
def test_sampled_rows_find_a_wrong_row(which: int, value: float) -> None:
    q, k, v, do = make_inputs(SMALL, "cpu")
    rows = verify.sample(SMALL)
    truth = verify.expected(SMALL, rows, *(x.detach() for x in (q, k, v, do)))
    o = delta_matching_attention(q, k, v, is_causal=True)
    got = [x.detach().clone() for x in (o, *torch.autograd.grad(o, (q, k, v), do))]
    verify.against_fp64(rows, truth, *got, verify.MAX_ERROR["matched"])
    got[which][0, -1, -1] = value  # the last row is always in the sample
    with pytest.raises(verify.WrongNumbers, match="away from FP64 at the full length"):
        verify.against_fp64(rows, truth, *got, verify.MAX_ERROR["matched"])


@pytest.mark.parametrize("shape", [SMALL, WINDOW, FULL], ids=str)
@pytest.mark.parametrize("recipe", ["delta_matching", "stale_delta", "forward_delta"])
def test_against_reference(shape: Shape, recipe: str) -> None:
    """Interpreted up to 0.0125, stale 0.0104, forward 0.0128: the interpreter rounds O to BF16 by truncation,
    which δ, or the estimate of it that dQ starts from, is taken from."""
    worst = verify.against_reference(shape, parse_recipe(recipe), DEVICE, 64)
    assert worst < {"stale_delta": 0.012, "forward_delta": 0.014}.get(recipe, 0.0135)


def test_against_reference_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "MAX_DIFFERENCE", 1e-9)
    with pytest.raises(
        verify.WrongNumbers, match="kernels and reference differ by o .*B1 H4/2 T64"
    ):
        verify.against_reference(SMALL, parse_recipe("delta_matching"), DEVICE, 64)


def test_rows_of_a_shape(clock) -> None:
    """Every baseline is there, by time or by reason; rates follow from the times."""
    shape = SMALL._replace(Hq=1, Hkv=1)
    rows = attention.bench_shape(shape, ["delta_matching"], 100.0, DEVICE)
    assert list(rows) == [*baselines.baselines(shape), "delta_matching"]
    for name, row in rows.items():
        assert ("failed" in row) != ("fwd_ms" in row), name
    for name in (baselines.FLASH4, baselines.ENGINE):
        if "failed" in rows[name]:
            assert "installed" in rows[name]["failed"]
    ours = rows["delta_matching"]
    assert ours["fwd_ms"] == 1.0 and ours["fwd_bwd_one_call_ms"] == 8.0
    assert ours["fwd_bwd_tflops"] == pytest.approx(3.5 * shape.flops / 4e9)
    assert ours["share_of_fp8_peak"] == pytest.approx(ours["fwd_bwd_tflops"] / 100)
    assert ours["quantize_ms"] == 0.75
    assert rows[baselines.FLASH2]["fwd_speedup"] == 1.0 and ours["fwd_bwd_speedup"] == 0.5
    json.dumps(rows)
    table = attention.format_shape(shape, rows)
    assert len(table.splitlines()) == 1 + len(rows) and "not timed: " in table
    assert all(name in table for name in rows)


def test_a_window_has_a_baseline_that_knows_it() -> None:
    """On a device; on a CPU the operator is missing, and says so."""
    inputs = make_inputs(WINDOW._replace(Hq=2, Hkv=2), "cpu")
    with pytest.raises(baselines.Absent, match="SDPA has no window"):
        baselines.cudnn(WINDOW)
    if not torch.cuda.is_available():
        with pytest.raises((NotImplementedError, RuntimeError), match="flash_attention"):
            baselines.flash2(WINDOW)(*inputs[:3])


def test_no_speed_for_wrong_numbers(clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "MAX_DIFFERENCE", 1e-9)
    rows = attention.bench_shape(SMALL, ["delta_matching"], 100.0, DEVICE)
    row = rows["delta_matching"]
    assert "kernels and reference differ" in row["failed"] and "fwd_ms" not in row
    result = {"shapes": [{"name": "x", "rows": rows}]}
    (failure,) = tables.failures(result)
    assert failure.startswith("x, delta_matching: kernels and reference differ")


def test_an_unsupported_recipe_is_named(clock) -> None:
    rows = attention.bench_shape(SMALL, ["bf16"], 100.0, DEVICE)
    assert "does not quantise" in rows["bf16"]["failed"]


def test_command(clock, monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    """The table, the file with its environment after every shape, and the exit status."""
    monkeypatch.setattr(kernels, "missing", lambda *_: None)
    monkeypatch.setattr(timing, "fp8_peak", lambda: 1000.0)
    plain = attention.bench_shape
    monkeypatch.setattr(attention, "bench_shape", lambda *args: plain(*args, device=DEVICE))
    path = tmp_path / "attention.json"
    arguments = ["bench", "attention", "--json", str(path), "--recipe", "delta_matching"]
    shape = "1,1,1,64,32"
    assert cli.main([*arguments, "--shape", f"{shape},causal", "--shape", f"{shape},window9"]) == 0
    out = capsys.readouterr().out
    assert "FP8 matmul 1000 TFLOP/s" in out and "B1 H1 T64 D32 window9" in out
    result = json.loads(path.read_text())
    assert [s["name"] for s in result["shapes"]] == [
        f"B1 H1 T64 D32 {m}" for m in ("causal", "window9")
    ]
    assert (
        result["environment"]["packages"]["torch"]
        and result["method"]
        and result["fp8_peak_tflops"]
    )
    assert list(tmp_path.iterdir()) == [path]

    written = path.read_text()
    calls = []

    def stop(shape, *args):
        calls.append(shape)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(shape, *args, device=DEVICE)

    monkeypatch.setattr(attention, "bench_shape", stop)
    with pytest.raises(KeyboardInterrupt):
        cli.main([*arguments, "--shape", f"{shape},full", "--shape", f"{shape},causal"])
    (kept,) = json.loads(path.read_text())["shapes"]
    assert kept["name"].endswith("full") and path.read_text() != written

    monkeypatch.setattr(attention, "bench_shape", lambda *args: plain(*args, device=DEVICE))
    monkeypatch.setattr(verify, "MAX_DIFFERENCE", 1e-9)
    assert cli.main([*arguments, "--shape", f"{shape},causal"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("hf-deltamatch bench: B1 H1 T64 D32 causal, delta_matching: kernels and")


def test_default_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "missing", lambda *_: None)
    monkeypatch.setattr(timing, "fp8_peak", lambda: 1000.0)
    seen = []
    monkeypatch.setattr(attention, "bench_shape", lambda s, r, _: seen.append((s, tuple(r))) or {})
    monkeypatch.setattr(attention, "format_shape", lambda *_: "")
    attention.bench_attention(progress=lambda _: None)
    assert [s for s, _ in seen] == list(SHAPES)
    assert seen[0][1] == RECIPES and {r for _, r in seen[1:]} == {RECIPES[:1]}
    for text in RECIPES:
        parse_recipe(text)


@pytest.mark.gpu
def test_times_on_a_device() -> None:
    x = torch.randn(64, 64, device="cuda")
    times = timing.measure({"": lambda: [x.add(1) for _ in range(20)]})[""]
    assert times.one_call > 0
    assert 0 < times.queued_range[0] <= times.queued <= times.queued_range[1]
    names = timing.kernel_times(lambda: x @ x)
    assert names and all(ms > 0 for ms in names.values())


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "full", "window128"])
def test_rows_on_a_device(mask: str) -> None:
    """Ours and FlashAttention-2 are timed for every mask, the window included."""
    shape = parse_shape(f"1,4,2,1024,128,{mask}")
    rows = attention.bench_shape(shape, ["delta_matching"], 1000.0)
    assert tables.failures({"shapes": [{"name": "", "rows": rows}]}) == []
    assert rows[baselines.FLASH2]["fwd_bwd_ms"] > 0, rows[baselines.FLASH2]
    assert 0 < rows["delta_matching"]["quantize_ms"] < rows["delta_matching"]["fwd_bwd_ms"]


def test_turns_and_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Medians of queues behind a call and of single calls, the functions in turns."""
    seen = []

    def elapsed(function, calls, *, busy):
        seen.append((function(), calls, busy))
        return {"a": 10.0, "b": 1000.0}[function()] * (1 if busy else 2) + len(seen) / 1000

    monkeypatch.setattr(timing, "elapsed_ms", elapsed)
    times = timing.measure({"a": lambda: "a", "b": lambda: "b"}, queues=3, singles=2)
    assert seen[:2] == [("a", 3, True), ("b", 3, True)]  # how long a queue has to be
    assert seen[2:6] == [("a", 1, False), ("a", 6, True), ("b", 1, False), ("b", 4, True)]
    assert [name for name, _, busy in seen[2:] if busy] == ["a", "b"] * 3
    assert times["a"].queued == pytest.approx(10.008) and times["a"].one_call > 20
    assert times["b"].queued_range == pytest.approx((1000.006, 1000.012))
