"""Does this model really run what was asked for?"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from hf_deltamatch.hf.config import QUANT_METHOD, DeltaMatchConfig
from hf_deltamatch.hf.linear import fp8_linears, low_precision_note
from hf_deltamatch.hf.modules import (
    ATTN_IMPLEMENTATION,
    attention_modules,
    choice_of,
    is_ours,
    own_attention_modules,
    require_module,
)
from hf_deltamatch.hf.running import running, would_run
from hf_deltamatch.ops.backend import SLOW_PATH, explain
from hf_deltamatch.recipes import AttentionRecipe


@dataclass
class ModelCheck:
    """What :func:`check_model` found."""

    attention: dict[str, AttentionRecipe]
    """Attention modules that call our function, with their recipe."""
    linears: list[str]
    """FP8 linears, and fused experts in FP8."""
    other_attention: dict[str, str]
    """Attention-like modules that run code of their own, and why."""
    notes: list[str] = field(default_factory=list)
    """What to know before training."""

    def __str__(self) -> str:
        recipes = sorted({r.name for r in self.attention.values()})
        lines = [
            f"{len(self.attention)} attention modules on {ATTN_IMPLEMENTATION}"
            + (f" ({', '.join(recipes)})" if recipes else ""),
            f"{len(self.linears)} FP8 linears",
        ]
        lines += [f"not ours: {name}: {why}" for name, why in self.other_attention.items()]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def check_model(model: nn.Module) -> ModelCheck:
    """Which parts of ``model`` run in FP8; an error if the attention choice has no effect.

    Transformers accepts any registered ``attn_implementation`` for every model and runs the model's
    own attention where its code does not use the attention interface.

    Returns:
        a :class:`ModelCheck`; print it.

    Raises:
        ValueError: the model was asked for ``fp8_delta_matching`` and would silently ignore it; or
            its config holds a ``DeltaMatchConfig`` that was never applied; or it has neither FP8
            attention nor FP8 linears.
        NotImplementedError: a module has no kernel on the device that it is on, so that its first
            forward would raise.
    """
    require_module("check_model", model)
    without_kernel = modules_without_kernel(model)
    if without_kernel is not None:
        raise NotImplementedError(f"check_model: {without_kernel}")
    return what_runs(model)


def modules_without_kernel(model: nn.Module) -> str | None:
    """What would raise in the first forward, as a sentence."""
    asked = [
        ("attention", name, module, choice.backend)
        for name, module in attention_modules(model).items()
        if is_ours(module) and (choice := choice_of(module)).recipe.quantize
    ] + [("linear", n, m, getattr(m, "fp8_backend", None)) for n, m in fp8_linears(model).items()]
    found: dict[tuple[str, str], list[str]] = {}
    for op, name, module, backend in asked:
        parameter = next(module.parameters(), None)
        if parameter is not None:
            choice = explain(op, parameter.device, backend)
            if choice.backend is None:
                found.setdefault((op, choice.reason), []).append(name)
    if not found:
        return None
    modules = [
        f"{len(names)} {op} modules, such as {names[0]}, cannot run where they are: {reason}"
        for (op, reason), names in found.items()
    ]
    return f"{'; '.join(modules)}. {SLOW_PATH}"


def what_runs(model: nn.Module) -> ModelCheck:
    """:func:`check_model` but for the device, which may still change after loading."""
    _refuse_config_without_effect(model)
    ours, other = _attention_of(model)
    linears = sorted(fp8_linears(model))
    asked = getattr(getattr(model, "config", None), "_attn_implementation", None)
    ignored = ignored_choice(model, ours, other)
    if ignored is not None:
        raise ValueError(f"check_model: {ignored}")
    if not ours and not linears:
        raise ValueError(
            f"check_model: {type(model).__name__} has neither FP8 attention nor FP8 linears "
            f"(attn_implementation is {asked!r}). Load it with attn_implementation="
            f"{ATTN_IMPLEMENTATION!r}, call swap_linears(model), or pass "
            "quantization_config=DeltaMatchConfig()."
        )
    return ModelCheck(ours, linears, other, low_precision_note(fp8_linears(model).values()))


def _attention_of(model: nn.Module) -> tuple[dict[str, AttentionRecipe], dict[str, str]]:
    """Recipes of the modules on our attention; of the others, what they run instead."""
    ours, other = {}, {}
    for name, module in attention_modules(model).items():
        if is_ours(module):
            ours[name] = choice_of(module).recipe
        else:
            implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
            other[name] = f"its config asks for {implementation!r}"
    for name, module in own_attention_modules(model).items():
        other[name] = f"{type(module).__name__} does not use the attention interface"
    return ours, other


def ignored_choice(
    model: nn.Module, ours: dict | None = None, other: dict | None = None
) -> str | None:
    """That our attention was asked for and none of the model's is ours, as a sentence."""
    asked = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if asked != ATTN_IMPLEMENTATION:
        return None
    if ours is None or other is None:
        ours, other = _attention_of(model)
    if ours:
        return None
    return (
        f"{type(model).__name__} was loaded with attn_implementation={ATTN_IMPLEMENTATION!r}, but "
        f"{_why_ignored(other)}; it runs without FP8 attention. FP8 linears alone work: "
        "swap_linears(model), or DeltaMatchConfig(attention=None, linear='blockwise')."
    )


def _refuse_config_without_effect(model: nn.Module) -> None:
    """Transformers runs no quantiser in ``from_config``: the model is plain, and saves a config that
    says otherwise."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if isinstance(config, dict) and config.get("quant_method") == QUANT_METHOD:
        config = DeltaMatchConfig.from_dict(config)
    if not isinstance(config, DeltaMatchConfig):
        return
    if any(vars(m).get("hf_quantizer") is not None for m in model.modules()):
        return  # it keeps the config up to date
    if would_run(config, model) != running(model):
        raise ValueError(
            f"check_model: the config of {type(model).__name__} holds a DeltaMatchConfig that the "
            "model does not run: from_config builds the plain model. Apply it with "
            "DeltaMatchConfig.from_dict(dict(model.config.quantization_config)).apply_to(model), or "
            "delete model.config.quantization_config."
        )


def _why_ignored(other: dict[str, str]) -> str:
    if not other:
        return "it has no attention modules"
    name, why = next(iter(other.items()))
    return f"none of its attention modules uses it (for example {name}: {why})"
