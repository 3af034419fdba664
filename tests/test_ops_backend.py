"""The choice of backend, and the counters and recorders below it."""

from __future__ import annotations

import contextlib
import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from hf_deltamatch import (
    AttentionRecipe,
    delta_matching_attention,
    fp8_linear,
    kernels,
    reference,
)
from hf_deltamatch.ops import library, observe
from hf_deltamatch.ops.backend import BACKENDS, OPS, Choice, choose, explain, refuse_unsupported
from hf_deltamatch.ops.observe import CALLS, RowSumResidual, record_row_sum

EVERY_OP = pytest.mark.parametrize("op", OPS)
CPU = torch.device("cpu")
CUDA = torch.device("cuda")  # only its name is used: no GPU is needed


@EVERY_OP
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_choose_by_device(op: str, device: str) -> None:
    assert choose(op, torch.device(device), None) == "reference"
    assert choose(op, torch.device(device), "reference") == "reference"


@EVERY_OP
def test_a_wrong_variable_is_said_everywhere(op: str, monkeypatch) -> None:
    monkeypatch.setenv(kernels.HOPPER_VARIABLE, "2")
    with pytest.raises(ValueError, match=f"{kernels.HOPPER_VARIABLE} is '2'; it must be 1"):
        explain(op, CPU)


@EVERY_OP
def test_choose_without_kernel_names_the_slow_path(op: str, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "OPS", ())
    for device in (CUDA, torch.device("cuda", 1), torch.device("mps"), torch.device("xpu")):
        with pytest.raises(NotImplementedError) as error:
            choose(op, device, None)
        for part in (op, f"`{device.type}`", 'backend="reference"', "DeltaMatchConfig"):
            assert part in str(error.value)
        # Asked for by name it runs anywhere.
        assert choose(op, device, "reference") == "reference"


@EVERY_OP
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["fast", "", "REFERENCE"])
def test_choose_unknown_backend(op: str, device: str, name: str) -> None:
    with pytest.raises(ValueError) as error:
        choose(op, torch.device(device), name)
    for part in (op, "`backend`", repr(name), "None", *map(repr, BACKENDS)):
        assert part in str(error.value)


def test_ops_raise_like_choose() -> None:
    """Both public ops ask for the backend by device, and check a name they are given."""
    q = torch.zeros(1, 1, 4, 16)
    for call in (
        lambda name: delta_matching_attention(q, q, q, backend=name),
        lambda name: fp8_linear(q, torch.zeros(8, 16), backend=name),
    ):
        call("reference")
        with pytest.raises(ValueError, match="'fast'; allowed are None .*'reference'"):
            call("fast")


@EVERY_OP
def test_explain(op: str, monkeypatch) -> None:
    for device in ("cpu", torch.device("cpu"), "meta"):
        chosen, reason = explain(op, device)
        assert chosen == "reference" and "specification" in reason
    chosen, reason = explain(op, "cuda", "reference")
    assert chosen == "reference" and "by name" in reason
    monkeypatch.setattr(kernels, "OPS", ())
    chosen, reason = explain(op, "cuda")
    assert chosen is None and op in reason and "`cuda`" in reason


def test_explain_by_capability(monkeypatch) -> None:
    """A table decides: never a kernel on a device that it does not name."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(kernels, "installed", lambda: True)
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d, c=capability: c)
        assert explain("attention", CUDA).backend == "triton"
        small = kernels.unsupported_attention(
            AttentionRecipe.from_name("delta_matching"), (192, 128), 1.0, CUDA
        )
        assert (small is not None) == (capability in kernels.SMALL_SHARED_MEMORY)
        boolean = kernels.unsupported_attention(
            AttentionRecipe.from_name("delta_matching"), (64, 64), 1.0, CUDA, boolean_mask=True
        )
        assert (boolean is not None) == (capability in kernels.NO_BOOLEAN_MASK)
        mx = kernels.unsupported_attention(
            AttentionRecipe.from_name("delta_matching", block="mx"), (64, 64), 1.0, CUDA,
            boolean_mask=True,
        )  # fmt: skip
        assert mx is None
    for capability in ((7, 5), (8, 0), (8, 6), (11, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d, c=capability: c)
        chosen, reason = explain("attention", CUDA)
        assert chosen is None and f"{capability[0]}.{capability[1]}" in reason and "9.0" in reason
    monkeypatch.setattr(kernels, "installed", lambda: False)
    assert "not installed" in explain("attention", CUDA).reason
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # which a package would not help
    assert "finds no `cuda` device" in explain("attention", CUDA).reason


@pytest.mark.parametrize(
    "fields,options,part",
    [
        (dict(quantize=False), {}, "does not quantise"),
        ({}, dict(softmax_scale=-1.0), "positive"),
        ({}, dict(head_dims=(64, 512)), "above 256"),
        ({}, dict(masked_packing=True), "one of them"),
        ({}, dict(heads=2**14, tokens=2**17), "16384 batches × query heads of 131072 tokens"),
    ],
    ids=lambda x: str(x) if isinstance(x, str) else None,
)
def test_unsupported_attention(fields: dict, options: dict, part: str) -> None:
    plain = dict(head_dims=(64, 64), softmax_scale=1.0, device=CPU)
    recipe = AttentionRecipe.from_name("delta_matching", **fields)
    sentence = kernels.unsupported_attention(recipe, **{**plain, **options})
    assert part in sentence
    with pytest.raises(NotImplementedError, match="backend=.reference"):
        refuse_unsupported("attention", sentence)
    plain_recipe = AttentionRecipe.from_name("delta_matching")
    assert kernels.unsupported_attention(plain_recipe, **plain) is None


@EVERY_OP
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_explain_agrees_with_choose(op: str, device: str) -> None:
    """``explain`` has no backend exactly where ``choose`` raises."""
    for name in (None, *BACKENDS):
        explained = explain(op, device, name)
        assert isinstance(explained, Choice) and explained.reason
        try:
            chosen = choose(op, torch.device(device), name)
        except (ValueError, NotImplementedError):
            chosen = None
        assert explained.backend == chosen, name


def test_explain_unknown_backend() -> None:
    """Unknown names raise in ``choose``, so nothing would run."""
    with pytest.raises(ValueError):
        choose("linear", torch.device("cpu"), "fast")
    assert explain("linear", "cpu", "fast").backend is None


def attention_step(recipe: str = "delta_matching", fn=delta_matching_attention) -> None:
    """One small causal forward and backward whose stale δ is visibly stale."""
    q, k, v = (torch.randn(1, 2, 64, 32, requires_grad=True) for _ in range(3))
    fn(q, k, v + 1, is_causal=True, recipe=recipe).backward(torch.randn(1, 2, 64, 32))


def linear_step(fn=fp8_linear) -> None:
    x, weight = torch.randn(3, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    fn(x, weight).sum().backward()


ATTENTION_CALLS = {"attention_fwd": 1, "attention_bwd": 1}
LINEAR_CALLS = {"linear_fwd": 1, "linear_bwd_input": 1, "linear_bwd_weight": 1}


def calls_of(step, *args, **kwargs) -> dict[str, int]:
    before = Counter(CALLS)
    step(*args, **kwargs)
    return dict(CALLS - before)


def test_calls_eager() -> None:
    assert calls_of(attention_step) == ATTENTION_CALLS
    assert calls_of(linear_step) == LINEAR_CALLS
    with torch.no_grad():
        x = torch.randn(3, 32)
        assert calls_of(fp8_linear, x, torch.randn(16, 32)) == {"linear_fwd": 1}


@pytest.mark.parametrize(
    "step,op,expected",
    [
        (attention_step, delta_matching_attention, ATTENTION_CALLS),
        (linear_step, fp8_linear, LINEAR_CALLS),
    ],
    ids=OPS,
)
def test_calls_under_compile(step, op, expected: dict[str, int]) -> None:
    """Executions are counted, not traces: nothing for compiling, the same in every run."""
    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        assert calls_of(step, fn=compiled) == expected


def test_calls_not_counted_by_fake_tensors() -> None:
    def step() -> None:
        fp8_linear(torch.zeros(3, 32, device="meta"), torch.zeros(16, 32, device="meta"))

    assert calls_of(step) == {}


def test_record_row_sum() -> None:
    # Ten seeds measured: matched 6e-8 to 8e-8, forward 1.8e-3 to 2.2e-3, dequantized 7e-3 to
    # 9e-3, stale 0.029 to 0.034.
    values = {}
    for recipe in ("delta_matching", "forward_delta", "dequantized_delta", "stale_delta"):
        with record_row_sum() as recorder:
            attention_step(recipe)
            attention_step(recipe)
        assert len(recorder.per_call) == 2
        low, high = sorted(recorder.per_call)
        assert low <= recorder.value <= high
        values[recipe] = recorder.value
    assert values["delta_matching"] < 2e-7
    assert 1e-3 < values["forward_delta"] < 3e-3
    assert 5e-3 < values["dequantized_delta"] < 1.5e-2
    assert 2e-2 < values["stale_delta"] < 5e-2


def test_record_row_sum_pools_calls() -> None:
    recorder = RowSumResidual()
    recorder.add([(1.0, 10.0), (2.0, 10.0)])
    recorder.add([(0.0, 80.0)])
    assert recorder.per_call == [0.15, 0.0]
    assert recorder.value == 0.03
    recorder.add([(0.0, 0.0)])
    assert recorder.per_call[-1] == 0.0


def test_record_row_sum_without_backward() -> None:
    with record_row_sum() as recorder:
        q = torch.randn(1, 2, 8, 16)
        delta_matching_attention(q, q, q)
        linear_step()
    assert recorder.per_call == [] and math.isnan(recorder.value)


def test_record_row_sum_nests() -> None:
    with record_row_sum() as outer:
        attention_step()
        with record_row_sum() as inner:
            attention_step("stale_delta")
        attention_step()
    attention_step()  # nobody records
    assert len(outer.per_call) == 3 and len(inner.per_call) == 1
    assert outer.per_call[1] == inner.per_call[0] > 2e-2
    assert observe._recorders == []


def test_record_row_sum_restores_on_exceptions() -> None:
    with pytest.raises(KeyError), record_row_sum() as outer:
        with pytest.raises(ValueError), record_row_sum() as inner:
            attention_step()
            raise ValueError
        assert observe._recorders == [outer]
        attention_step()
        raise KeyError
    assert observe._recorders == []
    attention_step()
    assert len(inner.per_call) == 1 and len(outer.per_call) == 2


def test_record_row_sum_under_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(delta_matching_attention, fullgraph=True, backend="aot_eager")
    attention_step("stale_delta", compiled)  # compiled with nobody recording
    with record_row_sum() as recorder:
        torch.manual_seed(1)
        attention_step("stale_delta", compiled)
    with record_row_sum() as eager:
        torch.manual_seed(1)
        attention_step("stale_delta")
    assert recorder.per_call == eager.per_call and len(eager.per_call) == 1


def test_recording_changes_no_gradient() -> None:
    def grads() -> list[Tensor]:
        torch.manual_seed(2)
        q, k, v = (torch.randn(1, 2, 40, 32, requires_grad=True) for _ in range(3))
        delta_matching_attention(q, k, v, is_causal=True).square().sum().backward()
        return [q.grad, k.grad, v.grad]

    plain = grads()
    with record_row_sum():
        recorded = grads()
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


def test_ops_run_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device: with a model spread over several, not that of q."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with FakeTensorMode():
        first, second = (torch.empty(2, device=f"cuda:{i}") for i in range(2))
    assert library._other_device((None, second, first, 1.0)) == torch.device("cuda", 1)
    assert library._other_device((first, None)) is None
    assert library._other_device((torch.empty(2), None)) is None
    assert library._other_device((None, 1)) is None
    # The body of an op asks, and enters it around the work.
    entered = []

    @contextlib.contextmanager
    def enter(device: torch.device):
        entered.append(device)
        yield
        entered.append(None)

    monkeypatch.setattr(library, "_other_device", lambda args: torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "device", enter)
    q = torch.zeros(1, 1, 4, 8, requires_grad=True)
    delta_matching_attention(q, q, q).sum().backward()
    assert entered == [torch.device("cuda", 1), None] * 2


def test_ops_run_without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would cast what an op has chosen, forward and backward."""
    seen = []
    for name in ("linear_fwd", "linear_bwd_input", "linear_bwd_weight"):
        plain = getattr(reference, name)

        def watched(*args, plain=plain):
            seen.append(torch.is_autocast_enabled("cpu"))
            return plain(*args)

        monkeypatch.setattr(reference, name, watched)
    x, weight = torch.randn(4, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fp8_linear(x, weight).sum().backward()
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False] * 3
