"""Experts of a mixture that Transformers holds as fused 3-D parameters, in FP8.

Transformers lets such a module's config name the function that runs it. Ours is registered there; a
module that is swapped keeps its class, its parameters and its name, and gets a copy of the model's
config that asks for ours, so that its neighbours, which share the model's, stay what they are.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from hf_deltamatch.ops import fp8_experts_linear
from hf_deltamatch.ops.attention_args import HIGH_PRECISION
from hf_deltamatch.recipes import LinearRecipe

EXPERTS_IMPLEMENTATION = "fp8_delta_matching"
"""Name in the experts interface: ``from_pretrained(…, experts_implementation=…)`` runs every mixture
of a model with the default recipe (Transformers 5.4 takes no names but its own there);
``swap_linears`` and ``DeltaMatchConfig`` choose by module."""

PLAIN_IMPLEMENTATION = "grouped_mm"
"""What Transformers would run by itself where it can choose."""

DEFAULT = LinearRecipe.from_name("blockwise")

# What the interface sets on a module, on each of the versions that have it.
_FACTS = ("config", "num_experts", "has_gate", "has_bias", "is_transposed")
_MARKS = ("fp8_recipe", "fp8_backend", "fp8_shared_config")


def is_experts(module: nn.Module) -> bool:
    """Does the experts interface choose what this module runs?"""
    # Scripted modules have no forward of their class.
    forward = getattr(getattr(type(module), "forward", None), "__globals__", {})
    return forward is vars(moe) and all(name in vars(module) for name in _FACTS)


def is_fp8_experts(module: nn.Module) -> bool:
    if not is_experts(module):
        return False
    return getattr(module.config, "_experts_implementation", None) == EXPERTS_IMPLEMENTATION


def experts_recipe(module: nn.Module) -> LinearRecipe:
    return getattr(module, "fp8_recipe", DEFAULT)


def experts_weights(module: nn.Module) -> list[str]:
    """Names of the two fused weights."""
    return ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]


def experts_shape(module: nn.Module) -> str:
    """``experts 8 x 64 -> 128``: how many, features of the model, features inside."""
    count, *features = module.down_proj.shape
    inside, outside = features if module.is_transposed else reversed(features)
    return f"experts {count} x {outside} -> {inside}"


def experts_hard_reason(module: nn.Module) -> str | None:
    """Why an experts module cannot be swapped, whatever is asked for."""
    for name in experts_weights(module):
        weight = getattr(module, name, None)
        if not isinstance(weight, Tensor) or weight.dim() != 3:
            return f"fused experts without a 3-D {name}"
        if weight.dtype not in HIGH_PRECISION:
            return f"{name} is stored as {weight.dtype}"
    return None


def experts_default_reason(
    name: str, module: nn.Module, tied: dict[int, list[str]], least: int
) -> str | None:
    """Why an experts module is left by default."""
    for key in experts_weights(module):
        weight, own = getattr(module, key), f"{name}.{key}" if name else key
        shared = [n for n in tied.get(id(weight), ()) if n != own]
        if shared:
            return f"{key} tied with {shared[0]}"
        if min(weight.shape[1:]) < least:
            return f"{key} has a side of {min(weight.shape[1:])} < {least}"
    return None


def swap_experts(module: nn.Module, recipe: LinearRecipe, backend: str | None) -> None:
    """``backend`` None keeps what the module has."""
    if not is_fp8_experts(module):
        module.fp8_shared_config = module.config
        module.config = _asking_for(EXPERTS_IMPLEMENTATION, module.config)
    module.fp8_recipe = recipe
    module.fp8_backend = backend or getattr(module, "fp8_backend", None)


def unswap_experts(module: nn.Module) -> bool:
    if not is_fp8_experts(module):
        return False
    module.config = getattr(module, "fp8_shared_config", module.config)
    if is_fp8_experts(module):  # the whole model asks for ours
        module.config = _asking_for(PLAIN_IMPLEMENTATION, module.config)
    for mark in _MARKS:
        vars(module).pop(mark, None)
    return True


def _asking_for(implementation: str, config):
    own = copy.copy(config)
    # Past the property, whose setter reaches into the configs that the copy shares.
    own._experts_implementation_internal = implementation
    return own


class _Rows(torch.autograd.Function):
    """``x [T, H]`` to ``[T·k, H]``: row ``order[i] // k`` at i; ``back`` is the inverse of ``order``.
    The gradient adds the k of each row up in their order, without atomics."""

    @staticmethod
    def forward(ctx, x, order, back, k):
        ctx.save_for_backward(back)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx, dy):
        (back,) = ctx.saved_tensors
        return dy[back].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


def fp8_experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Experts with FP8 operands in the forward and both gradients, biases, activations and routing
    weights in high precision.

    Args:
        self: a module of the experts interface; ``fp8_recipe`` and ``fp8_backend`` on it choose.
        hidden_states: ``[tokens, hidden]``.
        top_k_index: ``[tokens, k]``, experts of each token; what is no local expert gives nothing.
        top_k_weights: ``[tokens, k]``.

    Returns:
        ``[tokens, hidden]`` in the dtype of ``hidden_states``.
    """
    tokens, k = top_k_index.shape
    # What is below 0 is no expert either; sorted, it would lie in the rows of the first.
    index = torch.where(top_k_index < 0, self.num_experts, top_k_index)
    experts, order = torch.sort(index.reshape(-1), stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(tokens * k, device=order.device)
    every = torch.arange(self.num_experts, device=experts.device, dtype=experts.dtype)
    # The one wait for the device: the two linears and their gradients read it on the CPU.
    ends = torch.searchsorted(experts, every, right=True).to("cpu")

    def linear(x: Tensor, name: str) -> Tensor:
        bias = getattr(self, f"{name}_bias") if self.has_bias else None
        return fp8_experts_linear(
            x,
            getattr(self, name),
            ends,
            bias,
            experts_recipe(self),
            getattr(self, "fp8_backend", None),
            transposed=self.is_transposed,
        )

    x = _Rows.apply(hidden_states, order, back, k)
    if self.has_gate:
        x = self._apply_gate(linear(x, "gate_up_proj"))
    else:
        x = self.act_fn(linear(x, "up_proj"))
    x = linear(x, "down_proj")
    if getattr(self, "has_post_expert_norm", False):
        x = self.post_expert_norm(x)
    x = _Rows.apply(x, back, order, 1) * top_k_weights.reshape(-1, 1)
    return x.unflatten(0, (tokens, k)).sum(1).to(hidden_states.dtype)


def register() -> None:
    """Register with Transformers; harmless when done again."""
    moe.ExpertsInterface.register(EXPERTS_IMPLEMENTATION, fp8_experts_forward)
