"""Gated feed-forward modules (SwiGLU) whose down_proj is an FP8 linear, with that product in one op.

A module counts whose class's forward is the one that most of Transformers' models share, compiled to
the same instructions: ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``. Its own class gets a
subclass; parameters, names and state stay.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from hf_deltamatch.hf.linear_modules import FP8Linear
from hf_deltamatch.ops import fp8_gated_linear


def _shared_forward(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


_CODE = _shared_forward.__code__
_SILU = (nn.SiLU, type(ACT2FN["silu"]))


class FusedGated:
    """Mixed into the class of a gated feed-forward module."""

    def forward(self, x: Tensor) -> Tensor:
        down = self.down_proj
        if why_not(down):  # wrapped, hooked or turned back since: as its own class does it
            return super().forward(x)
        return fp8_gated_linear(
            self.gate_proj(x), self.up_proj(x), down.weight, down.bias, down.fp8_recipe,
            down.fp8_backend,
        )  # fmt: skip

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _rebuilt, (type(self).__mro__[2],), self.__getstate__()


def _rebuilt(base: type[nn.Module]) -> nn.Module:
    cls = _fused(base)
    return cls.__new__(cls)


@functools.cache
def _fused(base: type[nn.Module]) -> type[nn.Module]:
    return type(f"FP8{base.__name__}", (FusedGated, base), {"__module__": base.__module__})


def is_gated(module: nn.Module) -> bool:
    """A gated feed-forward with SiLU and the usual forward, fused or not."""
    if isinstance(module, FusedGated):
        return True
    forward = inspect.getattr_static(type(module), "forward", None)  # a scripted one is no function
    if not isinstance(forward, FunctionType):
        return False
    code = forward.__code__
    if (code.co_code, code.co_names) != (_CODE.co_code, _CODE.co_names):
        return False
    return isinstance(getattr(module, "act_fn", None), _SILU) and "forward" not in vars(module)


def why_not(down: nn.Module) -> str | None:
    """Why the product cannot be taken from this down_proj's weight: what would be passed over."""
    if type(down) is not FP8Linear:
        return f"down_proj is {type(down).__name__}"
    if "forward" in vars(down):
        return "down_proj's forward is replaced on the instance"
    hooks = (
        down._forward_hooks, down._forward_pre_hooks, down._backward_hooks, down._backward_pre_hooks,
    )  # fmt: skip
    return "down_proj has hooks" if any(hooks) else None


def choose_gated(model: nn.Module, fuse: bool | None) -> list[str]:
    """Fuse what can be (False undoes it, None changes nothing); what to know of it."""
    if fuse is None:
        return []
    modules = [m for m in model.modules() if is_gated(m)]
    reasons: Counter[str] = Counter()
    for module in modules:
        reason = why_not(module.down_proj) if fuse else ""
        if reason is None:
            if not isinstance(module, FusedGated):
                module.__class__ = _fused(type(module))
        else:
            unfuse_module(module)
            reasons[reason] += 1
    if not fuse:
        return []
    return [
        f"{len(modules) - reasons.total()} gated feed-forward modules keep nothing of their product",
        *(f"{n} gated feed-forward modules are not fused: {why}" for why, n in reasons.items()),
    ]


def unfuse_module(module: nn.Module) -> None:
    if isinstance(module, FusedGated):
        module.__class__ = type(module).__mro__[2]
