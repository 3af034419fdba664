"""Gated feed-forward modules (SwiGLU) of FP8 linears, with down_proj of the product, or all of it, in one op.

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
from hf_deltamatch.ops import fp8_gated_linear, fp8_swiglu


def _shared_forward(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


WHOLE = "whole"
_CODE = _shared_forward.__code__
_SILU = (nn.SiLU, type(ACT2FN["silu"]))


class FusedGated:
    """Mixed into the class of a gated feed-forward module."""

    def forward(self, x: Tensor) -> Tensor:
        down = self.down_proj
        # Wrapped, hooked or turned back since: as its own class does it.
        if why_not(down) or why_not_silu(self):
            return super().forward(x)
        return fp8_gated_linear(
            self.gate_proj(x), self.up_proj(x), down.weight, down.bias, down.fp8_recipe,
            down.fp8_backend,
        )  # fmt: skip

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _rebuilt, (_own_class(self), isinstance(self, FusedWhole)), self.__getstate__()


class FusedWhole(FusedGated):
    """The same, with gate_proj and up_proj in the op."""

    def forward(self, x: Tensor) -> Tensor:
        down = self.down_proj
        if why_not_whole(self) or why_not_silu(self):
            return super().forward(x)
        return fp8_swiglu(
            x,
            self.gate_proj.weight,
            self.up_proj.weight,
            down.weight,
            down.fp8_recipe,
            down.fp8_backend,
        )


def _own_class(module: nn.Module) -> type[nn.Module]:
    return next(c for c in type(module).__mro__ if not issubclass(c, FusedGated))


def _rebuilt(base: type[nn.Module], whole: bool = False) -> nn.Module:
    cls = _fused(base, whole)
    return cls.__new__(cls)


@functools.cache
def _fused(base: type[nn.Module], whole: bool) -> type[nn.Module]:
    bases = (FusedWhole if whole else FusedGated, base)
    return type(f"FP8{base.__name__}", bases, {"__module__": base.__module__})


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


def why_not(linear: nn.Module, name: str = "down_proj") -> str | None:
    """Why the product cannot be taken from this linear's weight: what would be passed over."""
    if type(linear) is not FP8Linear:
        return f"{name} is {type(linear).__name__}"
    return _seen_from_outside(linear, name)


def why_not_silu(module: nn.Module) -> str | None:
    """Why the activation cannot be passed over."""
    if not isinstance(module.act_fn, _SILU):
        return f"act_fn is {type(module.act_fn).__name__}"
    return _seen_from_outside(module.act_fn, "act_fn")


def _seen_from_outside(module: nn.Module, name: str) -> str | None:
    if "forward" in vars(module):
        return f"{name}'s forward is replaced on the instance"
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks,
        module._backward_pre_hooks,
    )  # fmt: skip
    return f"{name} has hooks" if any(hooks) else None


def why_not_whole(module: nn.Module) -> str | None:
    """Why the three linears of this module cannot be one op."""
    linears = {name: getattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")}
    for name, linear in linears.items():
        if reason := why_not(linear, name):
            return reason
    down = module.down_proj
    for name, linear in linears.items():
        if linear.bias is not None:
            return f"{name} has a bias"
        if (linear.fp8_recipe, linear.fp8_backend) != (down.fp8_recipe, down.fp8_backend):
            return f"{name} and down_proj have different recipes or backends"
        if linear.weight.dtype != down.weight.dtype:
            return f"{name} and down_proj have different dtypes"
    return (
        "grad_weight_hp keeps inputs in high precision" if down.fp8_recipe.grad_weight_hp else None
    )


def choose_gated(model: nn.Module, fuse: bool | str | None) -> list[str]:
    """Fuse what can be (False undoes it, None changes nothing); what to know of it."""
    if fuse is None:
        return []
    modules = [m for m in model.modules() if is_gated(m)]
    reasons: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    for module in modules:
        reason = (why_not(module.down_proj) or why_not_silu(module)) if fuse else ""
        if reason is None:
            left = why_not_whole(module) if fuse == WHOLE else ""
            if left:
                parts[left] += 1
            module.__class__ = _fused(_own_class(module), left is None)
        else:
            unfuse_module(module)
            reasons[reason] += 1
    if not fuse:
        return []
    if not modules:
        return ["fuse_gated: this model has no gated feed-forward with the usual forward"]
    fused = len(modules) - reasons.total()
    notes = [f"{fused} gated feed-forward modules keep nothing of their product"]
    if fuse == WHOLE:
        notes.append(f"{fused - parts.total()} of them are one op of all three linears")
    return notes + [
        *(f"{n} gated feed-forward modules are not one op: {why}" for why, n in parts.items()),
        *(f"{n} gated feed-forward modules are not fused: {why}" for why, n in reasons.items()),
    ]


def check_fuse(fuse: bool | str | None) -> None:
    if not (fuse is None or isinstance(fuse, bool) or fuse == WHOLE):
        raise ValueError(
            f"swap_linears: fuse_gated is {fuse!r}; it must be True, False, None or {WHOLE!r}."
        )


def unfuse_module(module: nn.Module) -> None:
    if isinstance(module, FusedGated):
        module.__class__ = _own_class(module)
