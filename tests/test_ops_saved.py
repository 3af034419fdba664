"""What ops keep for the backward, under torch.compile: an activation that is changed in place after the call, the
copy that guards against it, and one tensor given twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.fx_passes.post_grad import remove_noop_ops

from hf_deltamatch import LinearRecipe, delta_matching_attention, fp8_linear
from hf_deltamatch.ops import fp8_experts_linear, fp8_gated_linear, fp8_swiglu
from hf_deltamatch.testing import assert_bitwise_equal

HP = LinearRecipe.from_name("blockwise", grad_weight_hp=True)
TIMES = torch.linspace(-1, 1, 32)


def attention(recipe: str, lse: bool = False) -> Callable:
    def op(change: Callable, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * 1
        out = delta_matching_attention(
            q, k, v, is_causal=True, recipe=recipe, return_lse=lse, backend="reference"
        )
        loss = (change(q) * 0).sum()
        if lse:
            o, stat = out
            return (o * TIMES).sum() + change(stat).sum() + loss
        return (change(out) * TIMES).sum() + loss

    return op


def linear(change: Callable, x: Tensor, w: Tensor) -> Tensor:
    x = x * 1
    y = fp8_linear(x, w, recipe=HP, backend="reference")
    return (y * TIMES).sum() + (change(x) * 0).sum()


def experts(change: Callable, x: Tensor, w: Tensor) -> Tensor:
    x = x * 1
    ends = torch.tensor([20, x.shape[0]], dtype=torch.int32)
    y = fp8_experts_linear(x, torch.stack([w, 2 * w]), ends, recipe=HP, backend="reference")
    return (y * TIMES).sum() + (change(x) * 0).sum()


def gated(change: Callable, x: Tensor, w: Tensor) -> Tensor:
    gate, up = x * 1, x * 2
    y = fp8_gated_linear(gate, up, w, backend="reference")
    return (y * TIMES).sum() + (change(gate) * 0 + change(up) * 0).sum()


def swiglu(change: Callable, x: Tensor, w: Tensor) -> Tensor:
    x = x * 1
    y = fp8_swiglu(x, w, w.flip(0), w.mT.contiguous(), backend="reference")
    return (y * TIMES).sum() + (change(x) * 0).sum()


OPS = {
    **{recipe: attention(recipe) for recipe in ("delta_matching", "stale_delta", "bf16")},
    "lse": attention("delta_matching", lse=True),
    "linear": linear,
    "experts": experts,
    "gated": gated,
    "swiglu": swiglu,
}
LINEAR = ("linear", "experts", "gated", "swiglu")


def gradients(name: str, change: Callable, compiled: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(48, 32), (32, 32)] if name in LINEAR else [(1, 2, 48, 32)] * 3
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    torch._dynamo.reset()
    run = torch.compile(OPS[name], backend="aot_eager") if compiled else OPS[name]
    return list(torch.autograd.grad(run(change, *leaves), leaves))


@pytest.mark.parametrize("name", OPS)
def test_changed_in_place_after_the_call(name: str) -> None:
    """As if the change had made a new tensor, bit for bit; without the copy the backward read the changed one."""
    expected = gradients(name, lambda x: x * 3)
    for a, b in zip(gradients(name, lambda x: x.mul_(3)), expected, strict=True):
        assert_bitwise_equal(a, b, name)


@pytest.mark.parametrize("name", ["stale_delta", "lse", "linear", "gated"])
def test_eager_raises(name: str) -> None:
    with pytest.raises(RuntimeError, match="modified inplace|inplace operation"):
        gradients(name, lambda x: x.mul_(3), compiled=False)


@pytest.mark.parametrize("change", ["nothing", "in place"])
def test_the_copy_is_dropped_where_nothing_changes_it(change: str) -> None:
    """By Inductor's own pass, run on the graph that it is given."""
    clones: list[int] = []

    def count(graph_module, inputs):
        is_clone = lambda node: node.target is torch.ops.aten.clone.default
        clones.append(sum(map(is_clone, graph_module.graph.nodes)))
        remove_noop_ops(graph_module.graph)
        clones.append(sum(map(is_clone, graph_module.graph.nodes)))
        return graph_module.forward

    def layer(q: Tensor, w: Tensor) -> Tensor:
        o = delta_matching_attention(
            q, q * 2, q * 3, is_causal=True, recipe="stale_delta", backend="reference"
        )
        if change == "in place":
            o.mul_(2)
        h = o.transpose(1, 2).reshape(48, 64)
        return fp8_linear(h, w, backend="reference").sum()

    torch._dynamo.reset()
    q, w = torch.randn(1, 2, 48, 32, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    run = torch.compile(layer, backend=aot_autograd(fw_compiler=count, bw_compiler=count))
    run(q, w).backward()
    assert clones[0] > 0 and clones[1] == 0 and len(clones) == 4


def test_one_tensor_twice() -> None:
    """Tied weights, x as its own weight: compiled as eager."""
    x = torch.randn(32, 32, requires_grad=True)
    calls = {
        "linear": lambda x: fp8_linear(x, x, backend="reference"),
        "gated": lambda x: fp8_gated_linear(x, x, x, backend="reference"),
        "swiglu": lambda x: fp8_swiglu(x, x, x, x, backend="reference"),
        "attention": lambda x: delta_matching_attention(*(x[None, None],) * 3, backend="reference"),
    }
    for name, call in calls.items():
        torch._dynamo.reset()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        (a,), (b,) = (torch.autograd.grad(f(x).square().sum(), x) for f in (compiled, call))
        assert_bitwise_equal(a, b, name)
