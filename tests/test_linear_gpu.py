"""The FP8 linear layer on a device: against the reference there, and in the set-ups of training."""

from __future__ import annotations

import pytest
import torch
from test_ops_experts import loop as loop_of_experts
from test_ops_experts import make as make_experts
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")
import triton
import triton.language as tl

from hf_deltamatch import LinearRecipe, formats, fp8_linear, kernels
from hf_deltamatch.ops import fp8_experts_linear
from hf_deltamatch.testing import assert_bitwise_equal, assert_close

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
if torch.cuda.is_available():
    if kernels.missing("linear", DEVICE):
        pytest.skip("no linear kernel for this device", allow_module_level=True)
    from hf_deltamatch.kernels import linear as launchers
    from hf_deltamatch.kernels import linear_operands as lq

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RECIPES = [
    LinearRecipe(),
    LinearRecipe(descale="pow2"),
    LinearRecipe(grad_weight_hp=True),
    LinearRecipe("rowwise"),
    LinearRecipe("rowwise", "pow2", "e5m2"),
    LinearRecipe("mx", "pow2"),
    LinearRecipe("mx", "pow2", "e5m2"),
]


def supported(recipe: LinearRecipe) -> LinearRecipe:
    reason = kernels.unsupported_linear(recipe, DEVICE)
    if reason:
        pytest.skip(reason)
    return recipe


def make(*shape: int, n_out: int, dtype: torch.dtype = FP32, bias: bool = True):
    x = torch.randn(shape, device=DEVICE).to(dtype)
    weight = (0.1 * torch.randn(n_out, shape[-1], device=DEVICE)).to(dtype)
    b = torch.randn(n_out, device=DEVICE).to(dtype) if bias else None
    dy = (0.01 * torch.randn(*shape[:-1], n_out, device=DEVICE)).to(dtype)
    return *(t if t is None else t.requires_grad_() for t in (x, weight, b)), dy


def run(fn, x, weight, bias, dy) -> dict[str, Tensor]:
    output = fn(x, weight, bias)
    leaves = {"grad_input": x, "grad_weight": weight}
    if bias is not None:
        leaves["grad_bias"] = bias
    grads = torch.autograd.grad(output, list(leaves.values()), dy)
    return {"output": output.detach(), **dict(zip(leaves, grads, strict=True))}


def through(recipe: LinearRecipe, backend: str | None = None):
    return lambda x, w, b: fp8_linear(x, w, b, recipe, backend)


# FP8 tensor cores keep about 14 bits of the partial sum of a block; the rounding of a 16-bit result.
BOUND = {FP32: 1e-3, BF16: 4e-3, FP16: 1e-3}


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize(
    "shape,n_out",
    [((3, 341, 640), 384), ((2, 3, 50, 200), 72), ((1, 128), 48), ((64,), 1), ((5, 33), 1000)],
    ids=str,
)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_against_reference(
    recipe: LinearRecipe, shape: tuple[int, ...], n_out: int, dtype: torch.dtype
) -> None:
    """The same operands, so only sums and the rounding of results differ; and the same bits again."""
    args = make(*shape, n_out=n_out, dtype=dtype)
    ours = run(through(supported(recipe)), *args)
    expected = run(through(recipe, "reference"), *args)
    for name, value in expected.items():
        assert ours[name].shape == value.shape and ours[name].dtype == value.dtype
        assert_close(ours[name], value, rms=BOUND[dtype], what=name)
    for name, value in run(through(recipe), *args).items():
        assert_bitwise_equal(value, ours[name], name)


@pytest.mark.parametrize("hp", [False, True], ids=["fp8", "hp"])
def test_block_scales_refuse_e5m2(hp: bool) -> None:
    """Before the forward, with a way out; the reference, asked for by name, trains."""
    recipe = LinearRecipe(grad_format="e5m2", grad_weight_hp=hp)
    x, weight, b, dy = make(130, 256, n_out=384, dtype=BF16)
    supported(LinearRecipe())
    with pytest.raises(NotImplementedError, match=r"'e5m2'.*'rowwise' or 'mx'.*\"reference\""):
        fp8_linear(x, weight, b, recipe)
    result = run(through(recipe, "reference"), x, weight, b, dy)
    exact = run(
        torch.nn.functional.linear,
        *(t.detach().double().requires_grad_() for t in (x, weight, b)),
        dy.double(),
    )
    for name, value in result.items():
        assert_close(value, exact[name], rms=0.1, what=name)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_zero_tokens(recipe: LinearRecipe) -> None:
    ours = run(through(supported(recipe)), *make(2, 0, 200, n_out=72, dtype=BF16))
    assert ours["output"].shape == (2, 0, 72) and ours["grad_input"].shape == (2, 0, 200)
    assert not ours["grad_weight"].any() and not ours["grad_bias"].any()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
@pytest.mark.parametrize("where", ["x", "weight", "dy"])
def test_poison_reaches_what_depends_on_it(recipe: LinearRecipe, where: str) -> None:
    """NaN where the reference has it, and nowhere else."""
    x, weight, b, dy = make(300, 256, n_out=384, dtype=BF16)
    with torch.no_grad():
        {"x": x, "weight": weight, "dy": dy}[where][135, 130] = float("inf")
    ours = run(through(supported(recipe)), x, weight, b, dy)
    for name, value in run(through(recipe, "reference"), x, weight, b, dy).items():
        if name != "grad_bias" and not (recipe.grad_weight_hp and name == "grad_weight"):
            assert torch.equal(ours[name].isnan(), value.isnan()), name


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_long_contraction_is_promoted_to_fp32(recipe: LinearRecipe) -> None:
    """65536 positive products in every GEMM: an accumulator of 14 bits is off by more than 1e-2."""
    if recipe.grad_format == "e5m2":
        pytest.skip("the same GEMMs")
    supported(recipe)
    K = 65536
    with torch.no_grad():
        long = torch.rand(128, K, device=DEVICE) + 0.5
        other = torch.rand(128, K, device=DEVICE) + 0.5
    for x, weight, dy, wanted in (
        (long, other, None, "output"),
        (other[:, :128].contiguous(), long.t()[:, :128].contiguous(), other, "grad_input"),
        (long.t().contiguous(), other[:, :128].contiguous(), other.t().contiguous(), "grad_weight"),
    ):
        results = []
        for backend in (None, "reference"):
            a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
            y = fp8_linear(a, w, None, recipe, backend)
            if dy is None:
                results.append(y.detach())
                continue
            leaf = a if wanted == "grad_input" else w
            results.append(torch.autograd.grad(y, leaf, dy)[0])
        assert_close(*results, rms=2e-3, max_rel=5e-3, what=wanted)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_autocast_compile_and_checkpoint(recipe: LinearRecipe) -> None:
    """Under autocast with FP32 parameters: FP32 gradients of them; compiled in one graph and
    recomputed, the same bits."""
    torch._dynamo.reset()
    supported(recipe)
    x, weight, b, dy = make(2, 130, 256, n_out=384)

    def fn(x, w, b):
        with torch.autocast("cuda", BF16):
            return fp8_linear(x, w, b, recipe).relu()

    dy = dy.to(BF16)
    plain = run(fn, x, weight, b, dy)
    assert plain["output"].dtype == BF16
    assert all(plain[name].dtype == FP32 for name in ("grad_input", "grad_weight", "grad_bias"))
    recompute = lambda *args: checkpoint(fn, *args, use_reentrant=False)
    for other in (recompute, torch.compile(fn, fullgraph=True)):
        result = run(other, x, weight, b, dy)
        # Inductor generates the token sum itself, in another order.
        assert_close(result.pop("grad_bias"), plain["grad_bias"], rms=1e-6)
        for name, value in result.items():
            assert_bitwise_equal(value, plain[name], name)


def test_block_scales_of_weights_with_few_blocks() -> None:
    """1 to 5 blocks along the contraction: descales are padded to 4."""
    supported(LinearRecipe())
    for blocks in range(1, 6):
        x = torch.randn(64, 128 * blocks, device=DEVICE)
        w = torch.randn(256, 128 * blocks, device=DEVICE)
        w *= torch.exp2(torch.arange(blocks, device=DEVICE)).repeat_interleave(128)
        a = lq.quantize_matrix(x, lq.VECTOR, torch.float8_e4m3fn, False, rows=True)[0]
        b = lq.quantize_matrix(w, lq.TILE_128, torch.float8_e4m3fn, False, rows=True)[0]
        exact = lq.dequantize(a, FP32).double() @ lq.dequantize(b, FP32).double().t()
        assert_close(launchers.gemm(a, b, FP32), exact, rms=1e-3)


@triton.jit
def _scales_kernel(
    top_ptr, descale_ptr, factor_ptr, E5M2: tl.constexpr, SHORT: tl.constexpr = False
):  # fmt: skip
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    descale, factor = scales(tl.load(top_ptr + at), E5M2, False, False, False, SHORT)
    tl.store(descale_ptr + at, descale)
    tl.store(factor_ptr + at, factor)


if torch.cuda.is_available():
    from hf_deltamatch.kernels.linear_scales import scales


@pytest.mark.parametrize("exponent", [1, 9, 17, 127, 254])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_descales_round_as_ieee_divides(fmt: str, exponent: int) -> None:
    """Every significand: amax over the largest value, and the reciprocal of that."""
    largest = formats.FORMATS[fmt].max
    top = torch.arange(2**23, dtype=torch.int32) | exponent << 23
    descale, factor = torch.empty(2, 2**23, device=DEVICE)
    _scales_kernel[(2**13,)](top.to(DEVICE), descale, factor, fmt == "e5m2")
    exact = (top.view(FP32) / largest).clamp_min(2.0**-126)
    assert_bitwise_equal(descale.cpu(), exact)
    assert_bitwise_equal(factor.cpu(), exact.reciprocal())


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_descales_of_every_short_magnitude(fmt: str, dtype: torch.dtype) -> None:
    amax = torch.arange(2**15, dtype=torch.int16).view(dtype).float()
    amax[~amax.isfinite()] = 0
    descale, factor = torch.empty(2, 2**15, device=DEVICE)
    _scales_kernel[(2**5,)](amax.view(torch.int32).to(DEVICE), descale, factor, fmt == "e5m2", True)
    exact = (amax / formats.FORMATS[fmt].max).clamp_min(2.0**-126)
    exact[amax == 0] = 1
    assert_bitwise_equal(descale.cpu(), exact)
    assert_bitwise_equal(factor.cpu(), exact.reciprocal())


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_experts_linear_gpu(recipe: LinearRecipe, dtype: torch.dtype, transposed: bool) -> None:
    """Bit for bit the loop over the experts, some of which have no rows or one."""
    options = {"recipe": supported(recipe), "transposed": transposed}
    args = make_experts((0, 300, 1, 0, 129), extra=5, transposed=transposed, dtype=dtype)
    leaves, ends, dy = args
    leaves = {k: v.detach().to(DEVICE).requires_grad_() for k, v in leaves.items()}
    results = []
    for fn in (fp8_experts_linear, loop_of_experts):
        output = fn(**leaves, ends=ends, **options)
        grads = torch.autograd.grad(output, list(leaves.values()), dy.to(DEVICE))
        results.append((output.detach(), *grads))
    for name, ours, expected in zip(("output", *leaves), *results, strict=True):
        assert_bitwise_equal(ours, expected, name)
