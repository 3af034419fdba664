"""fp8_experts_linear: bit for bit a loop of fp8_linear over the experts, whatever their counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_deltamatch import LinearRecipe, fp8_linear
from hf_deltamatch.diagnostics import count_calls
from hf_deltamatch.ops import experts as ops
from hf_deltamatch.ops import fp8_experts_linear
from hf_deltamatch.testing import assert_bitwise_equal, rel_rms

NAMED = [LinearRecipe.from_name(name) for name in LinearRecipe.NAMES]
RECIPES = [*NAMED, LinearRecipe(grad_weight_hp=True)]
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
LAYOUT = pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])

# Rows of each expert: many, none at the start, the middle and the end, one, more than a block.
SPLITS = [(40, 30, 20), (0, 1, 0, 200, 0), (0, 0), (1,)]


def make(
    counts: tuple[int, ...],
    *,
    extra: int = 0,
    transposed: bool = False,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, int] = (48, 64),
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Leaves, ends, and the gradient of the output; ``extra`` rows belong to no expert."""
    n_out, n_in = shape
    rows, experts = sum(counts) + extra, len(counts)
    weight = 0.1 * torch.randn(experts, n_out, n_in)
    leaves = {
        "x": torch.randn(rows, n_in),
        "weight": weight.mT.contiguous() if transposed else weight,
    }
    if bias:
        leaves["bias"] = torch.randn(experts, n_out)
    leaves = {k: v.to(dtype).requires_grad_() for k, v in leaves.items()}
    dy = (0.01 * torch.randn(rows, n_out)).to(dtype)
    return leaves, torch.tensor(counts).cumsum(0), dy


def loop(x, weight, ends, bias=None, recipe="blockwise", backend=None, *, transposed=False):
    """What the op must equal: fp8_linear of each expert, zeros past the last."""
    parts, start = [], 0
    for e, end in enumerate(ends.tolist()):
        w = weight[e].t() if transposed else weight[e]
        b = None if bias is None else bias[e]
        parts.append(fp8_linear(x[start:end], w, b, recipe, backend))
        start = end
    return torch.cat([*parts, parts[0].new_zeros(len(x) - start, parts[0].shape[1])])


def run(fn, leaves: dict[str, Tensor], ends: Tensor, dy: Tensor, **kwargs) -> dict[str, Tensor]:
    output = fn(**leaves, ends=ends, **kwargs)
    grads = torch.autograd.grad(output, list(leaves.values()), dy)
    return {"output": output.detach(), **dict(zip(leaves, grads, strict=True))}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_bitwise_equal(actual[name], expected[name], name)


@pytest.mark.parametrize("counts", SPLITS, ids=str)
@LAYOUT
@EVERY_RECIPE
def test_experts_linear_is_the_loop(recipe, transposed: bool, counts: tuple[int, ...]) -> None:
    for bias, extra, dtype in ((True, 0, torch.bfloat16), (False, 3, torch.float32)):
        args = make(counts, transposed=transposed, bias=bias, extra=extra, dtype=dtype)
        options = {"recipe": recipe, "transposed": transposed}
        ours = run(fp8_experts_linear, *args, **options)
        assert_same(ours, run(loop, *args, **options))
        for e, n in enumerate(counts):
            idle = [ours[k][e] for k in ("weight", "bias") if k in ours]
            assert all(bool(g.any()) == (n > 0) for g in idle)
        if extra:
            assert not ours["output"][-extra:].any() and not ours["x"][-extra:].any()


@pytest.mark.parametrize("recipe", NAMED, ids=lambda r: r.name)
def test_experts_linear_kernels(recipe: LinearRecipe) -> None:
    """The same through the kernels' layouts of what is saved, in Triton's interpreter."""
    args = make((0, 3, 130, 0, 1), extra=2, shape=(32, 40))
    options = {"recipe": recipe, "backend": "triton"}
    assert_same(run(fp8_experts_linear, *args, **options), run(loop, *args, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@EVERY_RECIPE
def test_experts_linear_error(recipe: LinearRecipe, dtype: torch.dtype) -> None:
    """Within the bound of the linear recipe against products in high precision."""
    leaves, ends, dy = make((70, 90, 110), dtype=dtype, shape=(96, 160))
    ours = run(fp8_experts_linear, leaves, ends, dy, recipe=recipe)
    exact = {k: v.detach().double().requires_grad_() for k, v in leaves.items()}
    owner = torch.repeat_interleave(torch.arange(3), ends.diff(prepend=ends.new_zeros(1)))
    product = torch.einsum("ti,toi->to", exact["x"], exact["weight"][owner]) + exact["bias"][owner]
    grads = torch.autograd.grad(product, list(exact.values()), dy.double())
    expected = {"output": product.detach(), **dict(zip(exact, grads, strict=True))}
    errors = {k: rel_rms(ours[k].double(), expected[k]) for k in expected}
    # The output, most of which is the bias here, and the bias, which is summed in FP32, are better.
    hp = recipe.grad_weight_hp
    assert 0.034 < errors["x"] < 0.040, errors
    assert errors["weight"] < 0.003 if hp else 0.034 < errors["weight"] < 0.040, errors
    assert 0.02 < errors["output"] < 0.040 and errors["bias"] < 0.003, errors


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_experts_linear_frozen(frozen: str) -> None:
    """No work for what wants no gradient, and nothing saved of the input without grad_weight."""
    leaves, ends, dy = make((20, 0, 30))
    whole = run(fp8_experts_linear, leaves, ends, dy)
    leaves[frozen].requires_grad_(False)
    sizes: list[int] = []

    def pack(t: Tensor) -> Tensor:
        sizes.append(t.numel() if t.dtype == torch.float8_e4m3fn else 0)
        return t

    with count_calls() as calls, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = fp8_experts_linear(**leaves, ends=ends)
        output.backward(dy)
    assert leaves[frozen].grad is None
    for name in {"x", "weight", "bias"} - {frozen}:
        assert_bitwise_equal(leaves[name].grad, whole[name], name)
    assert calls["linear_fwd"] == 2
    assert calls["linear_bwd_input"] == (0 if frozen == "x" else 2)
    assert calls["linear_bwd_weight"] == (0 if frozen == "weight" else 2)
    assert (sum(sizes) > 0) == (frozen != "weight")


def test_experts_linear_saves_one_byte() -> None:
    """One FP8 copy of the input (and a row for each expert), its descales and the weight itself."""
    leaves, ends, _ = make((200, 0, 100), dtype=torch.bfloat16)
    saved: list[Tensor] = []
    pack = lambda t: saved.append(t) or t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fp8_experts_linear(**leaves, ends=ends)
    assert any(t is leaves["weight"] for t in saved)
    others = {t.dtype: t.numel() for t in saved if t is not leaves["weight"]}
    blocks = (
        3 + 3
    )  # tiles of 128 x 128: of 300 rows, and of one for each expert; 64 features fit in one
    assert others == {
        torch.float8_e4m3fn: (300 + 3) * 64,
        torch.float32: blocks,
        torch.int64: 3,
    }


@EVERY_RECIPE
@LAYOUT
def test_experts_linear_opcheck(transposed: bool, recipe: LinearRecipe) -> None:
    leaves, ends, dy = make((3, 0, 140), extra=1, transposed=transposed, dtype=torch.bfloat16)
    x, weight, bias = (t.detach() for t in leaves.values())
    hp, options = recipe.grad_weight_hp, (recipe.encoded, "reference")
    tests = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    saved: list[Tensor] = []
    for save in (False, True):
        args = (x, weight, bias, ends, transposed, save, *options)
        _, *saved = ops.experts_fwd(*args)
        # The tail of what is saved is not set, so that two calls differ there.
        fwd_tests = ("test_autograd_registration", "test_faketensor") if save else tests
        torch.library.opcheck(ops.experts_fwd, args, test_utils=fwd_tests)
    kept = (x, x.new_empty(0)) if hp else tuple(saved)
    for wants in ((True, True, True), (False, True, False), (True, False, False)):
        args = (dy, weight, *kept, ends, transposed, *wants, hp, *options)
        # Not test_schema: torch compares inputs by a product, which FP8 has not on a CPU.
        torch.library.opcheck(ops.experts_bwd, args, test_utils=tests[1:])


@EVERY_RECIPE
def test_experts_linear_compile(recipe: LinearRecipe) -> None:
    """The bits of eager, in one graph for any number of rows and any split of them."""
    torch._dynamo.reset()
    fn = lambda **kwargs: fp8_experts_linear(**kwargs, recipe=recipe).relu()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=True)
    for counts in ((70, 0, 60), (0, 65, 1), (5, 330, 8)):
        with torch.compiler.set_stance("default" if counts[0] == 70 else "fail_on_recompile"):
            args = make(counts, dtype=torch.bfloat16)
            assert_same(run(compiled, *args), run(fn, *args))


def test_experts_linear_checkpoint_and_autocast() -> None:
    leaves, ends, dy = make((30, 0, 50))
    fn = lambda **kwargs: checkpoint(fp8_experts_linear, use_reentrant=False, **kwargs)
    assert_same(run(fn, leaves, ends, dy), run(fp8_experts_linear, leaves, ends, dy))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        args = (leaves, ends, dy.bfloat16())
        ours, expected = run(fp8_experts_linear, *args), run(loop, *args)
    assert ours["output"].dtype == torch.bfloat16 and ours["weight"].dtype == torch.float32
    assert_same(ours, expected)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"weight": torch.zeros(48, 64)}, "weight"),
        ({"x": torch.zeros(5, 63)}, "do not fit"),
        ({"x": torch.zeros(5, 1, 64)}, "[rows, in]"),
        ({"ends": torch.tensor([5])}, "one for each of 2 experts"),
        ({"ends": torch.tensor([2.0, 5.0])}, "int32 or int64"),
        ({"ends": torch.tensor([3, 2])}, "ascend"),
        ({"ends": torch.tensor([3, 6])}, "at most the number of rows"),
        ({"bias": torch.zeros(48)}, "[experts, out]"),
        ({"bias": torch.zeros(2, 47)}, "[out]"),
        ({"x": torch.zeros(5, 64, dtype=torch.float64)}, "torch.float64"),
        ({"recipe": "tensorwise"}, "tensorwise"),
        ({"backend": "cuda"}, "'cuda'"),
    ],
)
def test_experts_linear_errors(change: dict, part: str) -> None:
    args = {"x": torch.zeros(5, 64), "weight": torch.zeros(2, 48, 64), "ends": torch.tensor([3, 5])}
    with pytest.raises(ValueError) as error:
        fp8_experts_linear(**{**args, **change})
    assert part in str(error.value)
