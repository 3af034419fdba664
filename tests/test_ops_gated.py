"""fp8_gated_linear: fp8_linear of ``silu(gate) · up``, which is not kept; both backends.

On a CPU the kernels run in Triton's interpreter. The product itself against FP64.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_deltamatch import LinearRecipe, fp8_linear, kernels, reference
from hf_deltamatch.ops import fp8_gated_linear
from hf_deltamatch.ops import gated as ops
from hf_deltamatch.ops.observe import CALLS
from hf_deltamatch.testing import assert_bitwise_equal, assert_close

DEVICE = torch.device("cpu")
RECIPES = [
    LinearRecipe(), LinearRecipe(grad_weight_hp=True), LinearRecipe("rowwise", "pow2", "e5m2"),
    LinearRecipe("mx", "pow2"),
]  # fmt: skip
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
interpreted = pytest.mark.skipif(
    bool(kernels.missing("linear", DEVICE)), reason="no interpreter of Triton"
)
BACKENDS = pytest.mark.parametrize(
    "backend", ["reference", pytest.param("triton", marks=interpreted)]
)


def make(*shape: int, n_out: int = 48, dtype=torch.float32, bias: bool = True):
    """gate, up of ``shape``, weight, bias (or None) and the gradient of the output."""
    gate, up = (2 * torch.randn(shape).to(dtype) for _ in "gu")
    weight = (0.1 * torch.randn(n_out, shape[-1])).to(dtype)
    b = torch.randn(n_out).to(dtype) if bias else None
    dy = (0.01 * torch.randn(*shape[:-1], n_out)).to(dtype)
    return *(t if t is None else t.requires_grad_() for t in (gate, up, weight, b)), dy


def once_in_the_interpreter(recipe: LinearRecipe, backend: str) -> None:
    if backend == "triton" and recipe.scaling != "blockwise":
        pytest.skip("seconds in the interpreter, and nothing new")


def run(fn, gate, up, weight, bias, dy) -> dict[str, Tensor]:
    output = fn(gate, up, weight, bias)
    leaves = {"gate": gate, "up": up, "weight": weight} | ({} if bias is None else {"bias": bias})
    grads = torch.autograd.grad(output, list(leaves.values()), dy)
    return {"output": output.detach(), **dict(zip(leaves, grads, strict=True))}


def composed(recipe: LinearRecipe, backend: str, gate, up, weight, bias, dy) -> dict[str, Tensor]:
    """The same from fp8_linear, with the product as its input and the backend's own product."""
    g, u = gate.detach(), up.detach()
    product, product_bwd = reference.gated, reference.gated_bwd
    if backend == "triton":
        from hf_deltamatch.kernels import gated as launchers

        product = launchers.gated
        product_bwd = lambda *a: launchers.gated_bwd(*a, with_h=False)[:2]
    h = product(g, u).requires_grad_()
    output = fp8_linear(h, weight, bias, recipe, backend)
    leaves = [h, weight, *([] if bias is None else [bias])]
    dh, *rest = torch.autograd.grad(output, leaves, dy)
    names = ["weight", *([] if bias is None else ["bias"])]
    dgate, dup = product_bwd(dh, g, u)
    found = {"output": output.detach(), "gate": dgate, "up": dup}
    return found | dict(zip(names, rest, strict=True))


@BACKENDS
@pytest.mark.parametrize("shape", [(130, 200), (2, 3, 5, 33), (1, 64), (0, 64), (64,)], ids=str)
@DTYPES
@EVERY_RECIPE
def test_is_the_linear_of_the_product(recipe, dtype, shape: tuple, backend: str) -> None:
    if backend == "triton" and dtype != torch.bfloat16 and shape != (1, 64):
        pytest.skip("one dtype in every shape is enough for the interpreter")
    args = make(*shape, dtype=dtype, bias=len(shape) > 1)
    ours = run(lambda *a: fp8_gated_linear(*a, recipe, backend), *args)
    expected = composed(recipe, backend, *args)
    assert ours.keys() == expected.keys()
    for name in expected:
        assert ours[name].shape == expected[name].shape and ours[name].dtype == dtype
        assert_bitwise_equal(ours[name], expected[name], name)


@DTYPES
def test_the_product_and_its_gradient(dtype: torch.dtype) -> None:
    """Against FP64, rounded once; also where the sigmoid is 0 or 1."""
    gate = torch.cat([4 * torch.randn(500), torch.tensor([0.0, -0.0, 80.0, -80.0, 1e4, -1e4])])
    gate, up, dh = (x.to(dtype) for x in (gate, torch.randn(506), torch.randn(506)))
    g, u = (x.double().requires_grad_() for x in (gate, up))
    exact = F.silu(g) * u
    dg, du = torch.autograd.grad(exact, (g, u), dh.double())
    found = reference.gated(gate, up), *reference.gated_bwd(dh, gate, up)
    eps = torch.finfo(dtype).eps
    for ours, expected in zip(found, (exact.detach(), dg, du), strict=True):
        largest = expected.abs().clamp_max(torch.finfo(dtype).max)
        assert bool(((ours.double() - expected).abs() <= 2 * eps * largest + 1e-6).all())


@interpreted
@DTYPES
@pytest.mark.parametrize("n", [1, 5000])
def test_kernels_of_the_product(dtype: torch.dtype, n: int) -> None:
    from hf_deltamatch.kernels import gated as launchers

    gate, up, dh = (torch.randn(n).to(dtype) for _ in "gud")
    h = launchers.gated(gate, up)
    *found, again = launchers.gated_bwd(dh, gate, up, with_h=True)
    assert_bitwise_equal(h, again)
    assert launchers.gated_bwd(dh, gate, up, with_h=False)[2] is None
    expected = reference.gated(gate, up), *reference.gated_bwd(dh, gate, up)
    for ours, other in zip((h, *found), expected, strict=True):
        assert_close(ours, other, rms=torch.finfo(dtype).eps, max_rel=2 * torch.finfo(dtype).eps)


@BACKENDS
@EVERY_RECIPE
@pytest.mark.parametrize("frozen", ["gate", "gate up", "weight", "up weight", "gate up weight"])
def test_frozen(recipe: LinearRecipe, frozen: str, backend: str) -> None:
    """What is frozen costs no product, and the rest has the same bits."""
    once_in_the_interpreter(recipe, backend)
    gate, up, weight, b, dy = make(2, 65, 64, dtype=torch.bfloat16)
    expected = run(lambda *a: fp8_gated_linear(*a, recipe, backend), gate, up, weight, b, dy)
    leaves = {"gate": gate, "up": up, "weight": weight, "bias": b}
    args = [t.detach() if n in frozen.split() else t for n, t in leaves.items()]
    before = Counter(CALLS)
    output = fp8_gated_linear(*args, recipe, backend)
    live = {n: t for n, t in zip(leaves, args, strict=True) if t.requires_grad}
    for name, grad in zip(live, torch.autograd.grad(output, list(live.values()), dy), strict=True):
        assert_bitwise_equal(grad, expected[name], name)
    calls = CALLS - before
    assert calls["linear_bwd_input"] == ("gate" in live or "up" in live)
    assert calls["linear_bwd_weight"] == ("weight" in live)


@BACKENDS
def test_keeps_gate_and_up_alone(backend: str) -> None:
    gate, up, weight, b, dy = make(2, 65, 64, dtype=torch.bfloat16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fp8_gated_linear(gate, up, weight, b, backend=backend)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in (gate, up, weight)]


@BACKENDS
@EVERY_RECIPE
def test_compile_and_checkpoint(recipe: LinearRecipe, backend: str) -> None:
    """One graph, the bits of eager."""
    once_in_the_interpreter(recipe, backend)
    torch._dynamo.reset()
    fn = lambda *a: fp8_gated_linear(*a, recipe, backend)
    args = make(2, 65, 64, dtype=torch.bfloat16)
    expected = run(fn, *args)
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager_decomp_partition")
    for other in (compiled, lambda *a: checkpoint(fn, *a, use_reentrant=False)):
        found = run(other, *args)
        for name, value in expected.items():
            assert_bitwise_equal(found[name], value, name)


def test_compiled_keeps_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As down_proj of a feed-forward: gate, up and the weight."""
    torch._dynamo.reset()
    gate, up, weight, _, dy = make(130, 64, dtype=torch.bfloat16, bias=False)
    compiled = torch.compile(fp8_gated_linear, fullgraph=True, backend="aot_eager_decomp_partition")
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        compiled(gate, up, weight).backward(dy)
    assert sum(kept.values()) == gate.nbytes + up.nbytes + weight.nbytes


def test_opcheck() -> None:
    gate, up, weight, b, dy = (t.detach() for t in make(130, 64))
    options = (LinearRecipe().encoded, "reference")
    torch.library.opcheck(ops.gated_linear_fwd, (gate, up, weight, b, *options))
    for wants in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(ops.gated_linear_bwd, (dy, gate, up, weight, *wants, *options))


def test_autocast_and_strides() -> None:
    gate, up, weight, b, dy = make(6, 40, 64)
    fused = lambda *a: fp8_gated_linear(*a)
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(fused, gate, up, weight, b, dy.bfloat16())
    low = [t.detach().bfloat16().requires_grad_() for t in (gate, up)]
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(fused, *low, weight, b, dy.bfloat16())
    for name in ("output", "weight", "bias"):
        assert_bitwise_equal(ours[name], expected[name], name)
    turned = [t.detach().transpose(0, 1).contiguous().transpose(0, 1) for t in (gate, up)]
    found = run(fused, *(t.requires_grad_() for t in turned), weight, b, dy)
    for name, value in run(fused, gate, up, weight, b, dy).items():
        assert_bitwise_equal(found[name], value, name)


def test_refusals() -> None:
    gate, up, weight, b, _ = make(5, 64)
    with pytest.raises(ValueError, match=r"gate is .*\(5, 64\).*up .*\(4, 64\).*must be the same"):
        fp8_gated_linear(gate, up[:4], weight)
    with pytest.raises(ValueError, match="must be the same"):
        fp8_gated_linear(gate, up.half(), weight)
    with pytest.raises(TypeError, match="fp8_gated_linear: `up`"):
        fp8_gated_linear(gate, 3, weight)
    with pytest.raises(ValueError, match="do not fit"):
        fp8_gated_linear(gate, up, weight.T)
    with pytest.raises(RuntimeError, match="create_graph=True.*second derivative"):
        output = fp8_gated_linear(gate, up, weight, b)
        torch.autograd.grad(output, gate, torch.ones_like(output), create_graph=True)


@pytest.mark.gpu
@EVERY_RECIPE
def test_on_a_device(recipe: LinearRecipe) -> None:
    """The product to two units, the layer bit for bit from fp8_linear's own parts, and the memory."""
    from hf_deltamatch.kernels import gated as launchers

    device = torch.device("cuda")
    if reason := kernels.unsupported_linear(recipe, device):
        pytest.skip(reason)
    *leaves, dy = (
        None if t is None else t.detach().to(device) for t in make(1000, 1024, dtype=torch.bfloat16)
    )
    gate, up, weight, b = (t.requires_grad_() for t in leaves)
    h = launchers.gated(gate.detach(), up.detach())
    assert_close(h, reference.gated(gate.detach(), up.detach()), rms=2e-3, max_rel=2**-7)
    ours = run(lambda *a: fp8_gated_linear(*a, recipe), gate, up, weight, b, dy)
    expected = composed(recipe, "triton", gate, up, weight, b, dy)
    for name in expected:
        assert_bitwise_equal(ours[name], expected[name], name)
    before = torch.cuda.memory_allocated()
    output = fp8_gated_linear(gate, up, weight, b, recipe)
    assert torch.cuda.memory_allocated() - before <= output.nbytes + 4096
