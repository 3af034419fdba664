"""fp8_linear: autograd, what it saves, compile, autocast, checkpointing, and its error messages.

The numbers are the reference's, bit for bit; test_reference_linear checks those.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_deltamatch import LinearRecipe, fp8_linear, reference
from hf_deltamatch.ops import linear as ops
from hf_deltamatch.ops.observe import CALLS
from hf_deltamatch.testing import assert_bitwise_equal, assert_close

NAMED = [LinearRecipe.from_name(name) for name in LinearRecipe.NAMES]
EVERY_NAME = pytest.mark.parametrize("recipe", NAMED, ids=lambda r: r.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def make(*shape: int, n_out: int = 48, dtype=torch.float32, bias: bool = True, grad: bool = True):
    """x of ``shape``, weight, bias (or None) and the gradient of the output."""
    x = torch.randn(shape).to(dtype)
    weight = (0.1 * torch.randn(n_out, shape[-1])).to(dtype)
    b = torch.randn(n_out).to(dtype) if bias else None
    dy = (0.01 * torch.randn(*shape[:-1], n_out)).to(dtype)
    for t in (x, weight, b):
        if t is not None:
            t.requires_grad_(grad)
    return x, weight, b, dy


def run(fn, x, weight, bias, dy) -> dict[str, Tensor]:
    """Output and gradients of ``fn``, which leaves the leaves' own ``.grad`` alone."""
    output = fn(x, weight, bias)
    leaves = {"grad_input": x, "grad_weight": weight}
    if bias is not None:
        leaves["grad_bias"] = bias
    grads = torch.autograd.grad(output, list(leaves.values()), dy)
    return {"output": output.detach(), **dict(zip(leaves, grads, strict=True))}


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name in expected:
        assert_bitwise_equal(ours[name], expected[name], name)


def calls_of(fn) -> dict[str, int]:
    before = Counter(CALLS)
    fn()
    return {k: v for k, v in (CALLS - before).items() if k.startswith("linear")}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize(
    "shape", [(64,), (1, 64), (0, 40), (2, 0, 40), (3, 50, 200), (2, 3, 5, 33)]
)
@DTYPES
@EVERY_NAME
def test_fp8_linear(recipe: LinearRecipe, dtype: torch.dtype, shape: tuple, bias: bool) -> None:
    """Forward and all gradients are the reference on ``[tokens, features]``, rounded once."""
    x, weight, b, dy = make(*shape, dtype=dtype, bias=bias)
    ours = run(lambda *args: fp8_linear(*args, recipe=recipe), x, weight, b, dy)
    x2, dy2 = x.detach().view(-1, shape[-1]), dy.view(-1, 48)
    w, saved = weight.detach(), reference.linear_save_input(x2, recipe)
    expected = {
        "output": reference.linear_fwd(x2, w, b, recipe).detach().to(dtype).view(dy.shape),
        "grad_input": reference.linear_bwd_input(dy2, w, recipe).to(dtype).view(shape),
        "grad_weight": reference.linear_bwd_weight(dy2, saved, recipe).to(dtype),
    }
    if bias:
        expected["grad_bias"] = dy2.float().sum(0).to(dtype)
    assert_same(ours, expected)


@DTYPES
@EVERY_NAME
def test_fp8_linear_against_fp64(recipe: LinearRecipe, dtype: torch.dtype) -> None:
    x, weight, b, dy = make(4, 64, 320, n_out=192, dtype=dtype)
    ours = run(lambda *args: fp8_linear(*args, recipe=recipe), x, weight, b, dy)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, b)]
    expected = run(torch.nn.functional.linear, *exact, dy.double())
    # Ten seeds measured: 0.031 to 0.034 (output), 0.036 to 0.038 (gradients).
    for name, bound in (("output", 0.036), ("grad_input", 0.040), ("grad_weight", 0.040)):
        assert_close(ours[name], expected[name], rms=bound, what=name)
    # The bias gradient is not quantised: FP32 sums of 256 tokens, then one rounding.
    rounding = {torch.float32: 2e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert_close(ours["grad_bias"], expected["grad_bias"], rms=rounding)


def test_fp8_linear_takes_names_and_dicts() -> None:
    x, weight, b, _ = make(5, 64)
    for name in LinearRecipe.NAMES:
        recipe = LinearRecipe.from_name(name)
        expected = fp8_linear(x, weight, b, recipe)
        assert_bitwise_equal(fp8_linear(x, weight, b, recipe=name), expected)
        assert_bitwise_equal(fp8_linear(x, weight, b, recipe=recipe.to_dict()), expected)
    default = fp8_linear(x, weight, b, "blockwise", backend="reference")
    assert_bitwise_equal(fp8_linear(x, weight, b), default)


@EVERY_NAME
def test_fp8_linear_strides(recipe: LinearRecipe) -> None:
    """Transposed and expanded operands give the same bits as contiguous ones."""
    x, weight, b, dy = make(40, 64, dtype=torch.bfloat16)
    fn = lambda *args: fp8_linear(*args, recipe=recipe)
    strided = [t.detach().T.contiguous().T.requires_grad_() for t in (x, weight)]
    assert_same(run(fn, *strided, b, dy.T.contiguous().T), run(fn, x, weight, b, dy))
    ones = dy.new_ones(()).expand(40, 48)  # what .sum().backward() sends
    assert_same(run(fn, x, weight, b, ones), run(fn, x, weight, b, ones.contiguous()))


def test_fp8_linear_weight_is_quantised_in_every_call() -> None:
    x, weight, _, _ = make(5, 64, grad=False)
    before = fp8_linear(x, weight)
    weight *= -2
    assert_bitwise_equal(fp8_linear(x, weight), -2 * before)


@EVERY_NAME
def test_fp8_linear_pow2_loss_scale_is_exact(recipe: LinearRecipe) -> None:
    """A loss scale of 2**12 changes no bit of the gradients but their exponents."""
    recipe = LinearRecipe(recipe.scaling, "pow2")
    x, weight, _, dy = make(140, 64, bias=False)
    fn = lambda *args: fp8_linear(*args, recipe=recipe)
    plain, scaled = run(fn, x, weight, None, dy), run(fn, x, weight, None, dy * 4096)
    for name in ("grad_input", "grad_weight"):
        assert_bitwise_equal(scaled[name], plain[name] * 4096, name)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_fp8_linear_overflowed_gradient_is_visible(bad: float) -> None:
    """A gradient scaler looks for non-finite gradients; FP8 must not hide one."""
    x, weight, b, dy = make(140, 64)
    dy[3, 5] = bad
    ours = run(fp8_linear, x, weight, b, dy)
    expected = {"grad_input": ours["grad_input"][3], "grad_weight": ours["grad_weight"][5]}
    for name, part in expected.items():
        assert bool(part.isnan().all())
        assert int(ours[name].isnan().sum()) == part.numel()
    assert not ours["grad_bias"][5].isfinite() and int(ours["grad_bias"].isfinite().sum()) == 47


@pytest.mark.parametrize(
    "frozen,expected",
    [
        ((), {"linear_fwd": 1, "linear_bwd_input": 1, "linear_bwd_weight": 1}),
        (("x",), {"linear_fwd": 1, "linear_bwd_weight": 1}),
        (("weight",), {"linear_fwd": 1, "linear_bwd_input": 1}),
        (("weight", "bias"), {"linear_fwd": 1, "linear_bwd_input": 1}),
        (("x", "weight"), {"linear_fwd": 1}),
    ],
    ids=str,
)
def test_fp8_linear_frozen(frozen: tuple[str, ...], expected: dict[str, int]) -> None:
    x, weight, b, dy = make(140, 64)
    tensors = {"x": x, "weight": weight, "bias": b}
    full = run(fp8_linear, x, weight, b, dy)
    for name in frozen:
        tensors[name].requires_grad_(False)
    saved: list[Tensor] = []

    def step() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            output = fp8_linear(x, weight, b)
        output.backward(dy)

    assert calls_of(step) == expected
    for name, key in (("x", "grad_input"), ("weight", "grad_weight"), ("bias", "grad_bias")):
        if name in frozen:
            assert tensors[name].grad is None
        else:
            assert_bitwise_equal(tensors[name].grad, full[key], name)
    others = [t for t in saved if t.data_ptr() != weight.data_ptr()]
    if "weight" in frozen:
        assert sum(t.numel() for t in others) == 0  # no FP8 input


@EVERY_NAME
def test_fp8_linear_saved_tensors(recipe: LinearRecipe) -> None:
    """The weight itself, one byte per input element, and descales; never the input."""
    x, weight, b, _ = make(2, 130, 64, dtype=torch.bfloat16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fp8_linear(x, weight, b, recipe)
    kept, payload, descale = saved
    assert kept.data_ptr() == weight.data_ptr() and kept.shape == weight.shape
    assert payload.dtype == torch.float8_e4m3fn and payload.shape == (260, 64)
    assert descale.dtype == torch.float32
    assert descale.shape == recipe.token_blocks[1].descale_shape(260, 64)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fp8_linear_saves_nothing_without_grad(mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """No backward can follow, so the input is quantised once, for the product."""
    calls = []
    original = reference.linear_save_input
    monkeypatch.setattr(reference, "linear_save_input", lambda *a: calls.append(a) or original(*a))
    x, weight, b, _ = make(5, 64)
    expected = fp8_linear(x, weight, b)
    assert len(calls) == 1
    with mode():
        assert_bitwise_equal(fp8_linear(x, weight, b), expected)
    assert len(calls) == 1


@DTYPES
@EVERY_NAME
def test_grad_weight_hp(recipe: LinearRecipe, dtype: torch.dtype) -> None:
    """The other two GEMMs as without it; that one unquantised, from the input itself, which is what
    is kept."""
    x, weight, b, dy = make(2, 130, 64, dtype=dtype)
    hp = LinearRecipe.from_name(recipe.name, grad_weight_hp=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours = run(lambda *args: fp8_linear(*args, recipe=hp), x, weight, b, dy)
    kept_weight, kept = saved
    assert kept_weight.data_ptr() == weight.data_ptr() and kept.data_ptr() == x.data_ptr()
    expected = run(lambda *args: fp8_linear(*args, recipe=recipe), x, weight, b, dy)
    exact = dy.view(-1, 48).double().T @ x.detach().view(-1, 64).double()
    rounding = {torch.float32: 3e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert_close(ours.pop("grad_weight"), exact, rms=rounding)
    assert_close(expected.pop("grad_weight"), exact, rms=0.04)
    assert_same(ours, expected)


def test_fp8_linear_weight_changed_before_backward() -> None:
    x, weight, b, dy = make(5, 64)
    output = fp8_linear(x, weight, b)
    with torch.no_grad():
        weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward(dy)


def test_fp8_linear_double_backward_raises() -> None:
    x, weight, b, dy = make(5, 64)
    with pytest.raises(RuntimeError, match="create_graph=True.*second derivative"):
        torch.autograd.grad(fp8_linear(x, weight, b), x, dy, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@EVERY_NAME
def test_fp8_linear_autocast(recipe: LinearRecipe, dtype: torch.dtype) -> None:
    """x is cast like in F.linear; the FP32 weight is quantised from FP32 and has FP32 gradients."""
    x, weight, b, dy = make(40, 64)
    with torch.autocast("cpu", dtype):
        ours = run(lambda *args: fp8_linear(*args, recipe=recipe), x, weight, b, dy.to(dtype))
    x2, dy2, w = x.detach().to(dtype), dy.to(dtype), weight.detach()
    saved = reference.linear_save_input(x2, recipe)
    expected = {
        "output": reference.linear_fwd(x2, w, b.detach(), recipe).to(dtype),
        "grad_input": reference.linear_bwd_input(dy2, w, recipe).to(dtype).float(),
        "grad_weight": reference.linear_bwd_weight(dy2, saved, recipe),
        "grad_bias": dy2.float().sum(0),
    }
    assert_same(ours, expected)


@EVERY_NAME
def test_fp8_linear_checkpoint(recipe: LinearRecipe) -> None:
    x, weight, b, dy = make(140, 64, dtype=torch.bfloat16)
    fn = lambda *args: fp8_linear(*args, recipe=recipe).relu()
    recomputed = run(lambda *args: checkpoint(fn, *args, use_reentrant=False), x, weight, b, dy)
    assert_same(recomputed, run(fn, x, weight, b, dy))


@EVERY_NAME
def test_fp8_linear_gradient_accumulation(recipe: LinearRecipe) -> None:
    """Four quarters of a batch against the whole. Blocks of 128 or 32 tokens are the same ones, so
    only the order of FP32 sums differs (measured 2.4e-7); a rowwise descale spans the tokens of a
    call, so its rounding differs (measured 0.046, on gradients that are 0.037 off either way)."""
    x, weight, b, dy = make(512, 64)
    whole = run(lambda *args: fp8_linear(*args, recipe=recipe), x, weight, b, dy)
    for part, d in zip(x.detach().chunk(4), dy.chunk(4), strict=True):
        fp8_linear(part, weight, b, recipe).backward(d)
    bound = 0.05 if recipe.scaling == "rowwise" else 1e-6
    assert_close(weight.grad, whole["grad_weight"], rms=bound)
    assert_close(b.grad, whole["grad_bias"], rms=1e-6)


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@EVERY_NAME
def test_linear_opcheck(recipe: LinearRecipe, strided: bool) -> None:
    """Schema, fake implementation (shapes, dtypes, strides) and tracing with dynamic shapes."""
    x, weight, b, dy = make(5, 64, dtype=torch.bfloat16, grad=False)
    if strided:
        x, weight, dy = (t.T.contiguous().T for t in (x, weight, dy))
    options = (recipe.encoded, "reference")
    for save in (True, False):
        torch.library.opcheck(ops.linear_fwd, (x, weight, b, save, *options))
    torch.library.opcheck(ops.linear_bwd_input, (dy, weight, *options))
    saved = reference.linear_save_input(x, recipe)
    torch.library.opcheck(
        ops.linear_bwd_weight,
        (dy, *saved, 64, torch.float32, *options),
        # Not test_schema: torch compares the inputs before and after with a product, which FP8
        # tensors do not have on a CPU.
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
    torch.library.opcheck(ops.linear_bwd_weight_hp, (dy, x, torch.float32, "reference"))


@EVERY_NAME
def test_fp8_linear_compile(recipe: LinearRecipe) -> None:
    """The bits of eager, in one graph for any number of tokens beyond one block (torch specialises
    on sizes of 1, here the single descale)."""
    torch._dynamo.reset()
    fn = lambda *args: fp8_linear(*args, recipe=recipe).relu()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (130, 65, 333):
        with torch.compiler.set_stance("default" if tokens == 130 else "fail_on_recompile"):
            args = make(2, tokens, 64, dtype=torch.bfloat16)
            assert_same(run(compiled, *args), run(fn, *args))
    args = make(2, 3, 64, dtype=torch.bfloat16)
    assert_same(run(compiled, *args), run(fn, *args))


@EVERY_NAME
def test_fp8_linear_compile_inductor(recipe: LinearRecipe) -> None:
    """As in a model: two layers with code between them, the input of the first transposed."""
    torch._dynamo.reset()
    other = make(48, n_out=16)[1]
    first = lambda x, w, b: fp8_linear(x.mT, w, b, recipe).relu()
    fn = lambda x, w, b: fp8_linear(first(x, w, b), other, None, recipe)
    x, weight, b, _ = make(130, 64)
    args = (x.detach().T.contiguous().requires_grad_(), weight, b, torch.randn(130, 16))
    ours, expected = run(torch.compile(fn, fullgraph=True), *args), run(fn, *args)
    # Inductor generates the token sum itself, in another order (measured 2.2e-7).
    assert_close(ours.pop("grad_bias"), expected.pop("grad_bias"), rms=1e-6)
    assert_same(ours, expected)


X, W = torch.zeros(5, 64), torch.zeros(48, 64)


@pytest.mark.parametrize(
    "args,error,parts",
    [
        ((X, torch.zeros(64, 48)), ValueError, ("x (5, 64)", "weight (64, 48)", "[out, in]")),
        ((X, torch.zeros(64)), ValueError, ("weight (64,)", "[out, in]")),
        ((torch.tensor(1.0), W), ValueError, ("x ()", "[..., in]")),
        ((X.double(), W.double()), ValueError, ("torch.float64", "float32", "bfloat16", "float16")),
        ((X.int(), W), ValueError, ("x is torch.int32", "float32", "bfloat16", "float16")),
        ((X, W.to(torch.float8_e4m3fn)), ValueError, ("weight torch.float8_e4m3fn", "bfloat16")),
        ((X.bfloat16(), W), ValueError, ("bfloat16", "float32", "torch.autocast")),
        ((X, W, torch.zeros(64)), ValueError, ("bias is", "(64,)", "(48,)")),
        ((X, W, torch.zeros(1, 48)), ValueError, ("bias is", "(1, 48)", "(48,)")),
        ((X, W.to("meta")), ValueError, ("x is on cpu", "weight on meta")),
        ((X, W, torch.zeros(48, device="meta")), ValueError, ("bias", "meta", "cpu")),
        ((X, W, torch.zeros(48, dtype=torch.int32)), ValueError, ("bias", "int32", "bfloat16")),
        ((X, W, None, "tensorwise"), ValueError, ("'tensorwise'", "blockwise", "rowwise", "mx")),
        ((X, W, None, 8), TypeError, ("int", "blockwise", "LinearRecipe")),
        ((X, W, None, "mx", "cuda"), ValueError, ("linear", "'cuda'", "'reference'")),
    ],
)
def test_fp8_linear_bad_arguments(args: tuple, error: type, parts: tuple[str, ...]) -> None:
    with pytest.raises(error) as raised:
        fp8_linear(*args)
    for part in parts:
        assert part in str(raised.value)
