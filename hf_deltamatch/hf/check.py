"""Does this model really run what was asked for?"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hf_deltamatch.hf.linear import fp8_linears
from hf_deltamatch.hf.modules import (
    ATTN_IMPLEMENTATION,
    attention_modules,
    choice_of,
    own_attention_modules,
)
from hf_deltamatch.recipes import AttentionRecipe


@dataclass
class ModelCheck:
    """What :func:`check_model` found."""

    attention: dict[str, AttentionRecipe]
    """Attention modules that call our function, with their recipe."""
    linears: list[str]
    """FP8 linears."""
    other_attention: dict[str, str]
    """Attention-like modules that run code of their own, and why."""

    def __str__(self) -> str:
        recipes = sorted({r.name for r in self.attention.values()})
        lines = [
            f"{len(self.attention)} attention modules on {ATTN_IMPLEMENTATION}"
            + (f" ({', '.join(recipes)})" if recipes else ""),
            f"{len(self.linears)} FP8 linears",
        ]
        lines += [f"not ours: {name}: {why}" for name, why in self.other_attention.items()]
        return "\n".join(lines)


def check_model(model: nn.Module) -> ModelCheck:
    """Which parts of ``model`` run in FP8; an error if the attention choice has no effect.

    Transformers accepts any registered ``attn_implementation`` for every model and runs the model's
    own attention where its code does not use the attention interface.

    Returns:
        a :class:`ModelCheck`; print it.

    Raises:
        ValueError: the model was asked for ``fp8_delta_matching`` and would silently ignore it; or
            it has neither FP8 attention nor FP8 linears.
    """
    found = attention_modules(model)
    ours, other = {}, {}
    for name, module in found.items():
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if implementation == ATTN_IMPLEMENTATION:
            ours[name] = choice_of(module).recipe
        else:
            other[name] = f"its config asks for {implementation!r}"
    for name, module in own_attention_modules(model).items():
        other[name] = f"{type(module).__name__} does not use the attention interface"
    linears = sorted(fp8_linears(model))
    asked = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if not ours and asked == ATTN_IMPLEMENTATION:
        raise ValueError(
            f"check_model: {type(model).__name__} was loaded with attn_implementation="
            f"{ATTN_IMPLEMENTATION!r}, but {_why_ignored(other)}; it runs without FP8 attention. "
            "FP8 linears alone work: swap_linears(model), or "
            "DeltaMatchConfig(attention=None, linear='blockwise')."
        )
    if not ours and not linears:
        raise ValueError(
            f"check_model: {type(model).__name__} has neither FP8 attention nor FP8 linears "
            f"(attn_implementation is {asked!r}). Load it with attn_implementation="
            f"{ATTN_IMPLEMENTATION!r}, call swap_linears(model), or pass "
            "quantization_config=DeltaMatchConfig()."
        )
    return ModelCheck(ours, linears, other)


def _why_ignored(other: dict[str, str]) -> str:
    if not other:
        return "it has no attention modules"
    name, why = next(iter(other.items()))
    return f"none of its attention modules uses it (for example {name}: {why})"
