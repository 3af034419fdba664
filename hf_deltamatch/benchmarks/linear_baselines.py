"""What our linears are compared with. A baseline that cannot run is named with the reason.

torchao's recipes are meant for ``torch.compile``; each runs in a process of its own
(:mod:`hf_deltamatch.benchmarks.process`), since recipes that share one hit recompile limits and then
run uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_deltamatch.benchmarks import tables, timing
from hf_deltamatch.benchmarks.baselines import Absent, installed
from hf_deltamatch.benchmarks.linear_shapes import (
    MAX_ERROR,
    Linear,
    LinearShape,
    both,
    compare,
    exact,
    make_linear_inputs,
)
from hf_deltamatch.benchmarks.process import in_own_process

BF16, BF16_COMPILED = "BF16", "BF16 compiled"
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
ENGINE = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
OWN_PROCESS_S = 150.0
"""For all shapes of one torchao recipe."""


def compiled(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """For the sizes of its first call."""
    return torch.compile(linear, dynamic=False)


def here(s: LinearShape) -> dict[str, Callable[[], Linear]]:
    """By name, something that makes the function for ``s`` in this process, or raises."""
    rows: dict[str, Callable[[], Linear]] = {
        BF16: lambda: F.linear,
        BF16_COMPILED: lambda: compiled(lambda x, w: F.linear(x, w)),
    }
    if not installed("transformer_engine.pytorch"):
        return rows | {"Transformer Engine": _absent("`transformer_engine` is not installed")}
    for name in ENGINE:
        rows[f"Transformer Engine {name}"] = lambda name=name: transformer_engine(s, name)
    return rows


def _absent(reason: str) -> Callable[[], Linear]:
    def make() -> Linear:
        raise Absent(reason)

    return make


def transformer_engine(s: LinearShape, name: str) -> Linear:
    """One of Transformer Engine's recipes by the name of its class: E4M3 forward, and backward what
    the recipe has by default."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    if not hasattr(recipes, name):
        raise Absent(f"this Transformer Engine has no {name}")
    recipe = getattr(recipes, name)()
    if hasattr(te, "autocast"):  # 2.9 and newer
        fp8 = lambda: te.autocast(enabled=True, recipe=recipe)
    else:
        fp8 = lambda: te.fp8_autocast(enabled=True, fp8_recipe=recipe)
    module = te.Linear(s.n_in, s.n_out, bias=False, params_dtype=torch.bfloat16, device="cuda")

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        if module.weight is not weight:
            module.weight = weight
        with fp8():
            return module(x)

    return linear


def torchao_rows(shapes: Iterable[LinearShape]) -> dict[str, list[dict[str, Any]]]:
    """Rows of every torchao recipe, one for each shape, each recipe from its own process."""
    shapes = [tuple(s) for s in shapes]
    if not installed("torchao.float8"):
        return {"torchao": [{"failed": "`torchao` is not installed"}] * len(shapes)}
    rows = {}
    for recipe in TORCHAO:
        request = {"recipe": recipe, "shapes": shapes}
        try:
            found = in_own_process("linear_baselines.time_torchao", request, OWN_PROCESS_S)
        except Exception as error:
            found = [{"failed": str(error)}] * len(shapes)
        rows[f"torchao {recipe}"] = found
    return rows


def time_torchao(
    recipe: str, shapes: Iterable[tuple[int, int, int]], device: str = "cuda"
) -> list[dict[str, Any]]:
    """Runs in the process of one recipe: a row for each shape."""
    return [_torchao_row(recipe, LinearShape(*s), device) for s in shapes]


def _torchao_row(recipe: str, s: LinearShape, device: str) -> dict[str, Any]:
    torch.compiler.reset()
    inputs = make_linear_inputs(s, device)
    module = nn.Linear(s.n_in, s.n_out, bias=False, device="meta", dtype=torch.bfloat16)
    module.weight = inputs[1]
    try:
        run = compiled(torchao_module(module, recipe))
        linear = lambda x, weight: run(x)
        row = {"error": compare(both(linear, inputs), exact(inputs), MAX_ERROR["fp8"], "FP32")}
    except Exception as error:  # whatever another library raises, or a compiler
        return {"failed": tables.reason(error)}
    return row | times(linear, inputs)


def torchao_module(module: nn.Linear, recipe: str) -> nn.Module:
    """torchao's FP8 form of a linear: a name of ``Float8LinearConfig``, or the prototype for
    ``blockwise``, its options left as they are."""
    if recipe == "blockwise":
        from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear

        return Float8BlockwiseLinear.from_float(module)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    holder = nn.Sequential(module)
    convert_to_float8_training(holder, config=Float8LinearConfig.from_recipe_name(recipe))
    if type(holder[0]) is nn.Linear:
        raise Absent("torchao left the layer in BF16")
    return holder[0]


def times(linear: Linear, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """The times of one row."""
    calls = {"fwd": lambda: forward(linear, inputs), "fwd_bwd": lambda: both(linear, inputs)}
    return {k: v for part, t in timing.measure(calls).items() for k, v in columns(part, t).items()}


def columns(part: str, t: timing.Times) -> dict[str, Any]:
    """Times of one part as columns of a row."""
    return {
        f"{part}_ms": t.queued,
        f"{part}_ms_range": t.queued_range,
        f"{part}_one_call_ms": t.one_call,
    }


@torch.no_grad()
def forward(linear: Linear, inputs: tuple[Tensor, ...]) -> Tensor:
    return linear(*inputs[:2])
