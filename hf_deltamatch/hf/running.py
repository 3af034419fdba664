"""What a model runs, what it would run under a config, and the config that says what it runs."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any, NamedTuple

from torch import nn

from hf_deltamatch.hf.config import DeltaMatchConfig
from hf_deltamatch.hf.layer_words import first_and_last
from hf_deltamatch.hf.linear import (
    HIGH_PRECISION,
    fp8_linears,
    linear_modules,
    plan_linears,
    recipe_of,
)
from hf_deltamatch.hf.modules import (
    Patterns,
    attention_modules,
    check_patterns,
    choice_of,
    is_ours,
)
from hf_deltamatch.recipes import AttentionRecipe, LinearRecipe


class Running(NamedTuple):
    """The recipe of every attention module and of every linear and fused experts module, by name;
    None is not ours."""

    attention: dict[str, AttentionRecipe | None]
    linear: dict[str, LinearRecipe | None]

    @property
    def anything(self) -> bool:
        return any(r is not None for kind in self for r in kind.values())


def running(model: nn.Module) -> Running:
    fp8 = fp8_linears(model)
    return Running(
        {
            n: choice_of(m).recipe if is_ours(m) else None
            for n, m in attention_modules(model).items()
        },
        {n: recipe_of(fp8[n]) if n in fp8 else None for n in linear_modules(model)},
    )


def would_run(config: DeltaMatchConfig, model: nn.Module) -> Running:
    """What ``model`` would run if its checkpoint were loaded with ``config``."""
    attention: dict = dict.fromkeys(attention_modules(model))
    if config.attention is not None:
        layers = layers_of(config, model, "attention")
        patterns = Patterns(layers)
        for name in attention:
            pattern = patterns.most_specific(name)
            attention[name] = config.attention if pattern is None else layers[pattern]
    linear: dict = dict.fromkeys(linear_modules(model))
    if config.linear is not None:
        plan = plan_linears(model, config.linear, **linear_options(config, model), as_loaded=True)
        linear = {n: None if isinstance(r, str) else r for n, r in plan.items()}
    return Running(attention, linear)


def linear_options(config: DeltaMatchConfig, model: nn.Module) -> dict[str, Any]:
    """Arguments of :func:`plan_linears`."""
    return {
        "include": [own_name(p, model) for p in config.include or ()],
        "leave": [own_name(p, model) for p in config.modules_to_not_convert or ()],
        "layers": layers_of(config, model, "linear"),
    }


def own_name(pattern: str, model: nn.Module) -> str:
    """A base model (``AutoModel``) has no prefix; patterns saved with a whole model have one."""
    return pattern.removeprefix(_prefix(model))


def _prefix(model: nn.Module) -> str:
    is_base = getattr(model, "base_model", None) is model
    return f"{model.base_model_prefix}." if is_base and model.base_model_prefix else ""


def layers_of(config: DeltaMatchConfig, model: nn.Module, kind: str) -> dict[str, Any]:
    """Pattern to recipe for the patterns of ``layers`` that say something about modules of ``kind``
    in this model."""
    if getattr(config, kind) is None:
        return {}
    names = attention_modules(model) if kind == "attention" else linear_modules(model)
    layers = {own_name(p, model): d[kind] for p, d in _patterns(config, model).items() if kind in d}
    used = Patterns(layers).used(names)
    return {p: r for p, r in layers.items() if p in used}


def _patterns(config: DeltaMatchConfig, model: nn.Module) -> dict[str, dict[str, Any]]:
    if not isinstance(config.layers, str):
        return config.layers or {}
    both = {"attention": AttentionRecipe.from_name("bf16"), "linear": HIGH_PRECISION}
    return dict.fromkeys(first_and_last("DeltaMatchConfig: `layers`", model), both)


def resolved(config: DeltaMatchConfig, model: nn.Module) -> DeltaMatchConfig:
    """The config with the layers of this model by name, where a word stood for them."""
    if not isinstance(config.layers, str):
        return config
    layers: dict[str, dict] = {}
    for kind in ("attention", "linear"):
        for name, recipe in layers_of(config, model, kind).items():
            layers.setdefault(_prefix(model) + name, {})[kind] = recipe
    if not layers:
        raise ValueError(
            f"DeltaMatchConfig: layers={config.layers!r} has no effect on {type(model).__name__}: its "
            "first and last layer hold no module of a kind that is converted."
        )
    config = copy.copy(config)
    config.layers = layers
    return config


def check_layer_patterns(config: DeltaMatchConfig, model: nn.Module) -> None:
    """Raises for a pattern of ``layers`` that changes nothing."""
    patterns = [own_name(p, model) for p in _patterns(config, model)]
    check_patterns("DeltaMatchConfig: `layers`", patterns, [n for n, _ in model.named_modules()])
    used = {**layers_of(config, model, "attention"), **layers_of(config, model, "linear")}
    for pattern in patterns:
        if pattern not in used:
            raise ValueError(
                f"DeltaMatchConfig: layers[{pattern!r}] has no effect: it names no module of the "
                "kind that its recipe is for, or that kind is None for the whole model."
            )


def config_of(model: nn.Module, before: DeltaMatchConfig) -> DeltaMatchConfig:
    """A config under which the model runs what it runs now: ``before`` if that still holds, with as
    many of its patterns as possible otherwise, and in the end with every exception by name."""
    now = running(model)
    if would_run(before, model) == now:
        return before
    base = {kind: _most_common(getattr(now, kind)) for kind in ("attention", "linear")}
    kept = _patterns_of(before, base)
    for patterns in (kept, {}):
        candidate = DeltaMatchConfig(**base, **patterns, backend=before.backend)
        if would_run(candidate, model) == now:
            return candidate
    return DeltaMatchConfig(**base, **_by_name(model, now, base), backend=before.backend)


def _most_common(recipes: dict[str, Any]) -> Any:
    counts = Counter(r for r in recipes.values() if r is not None)
    return counts.most_common(1)[0][0] if counts else None


def _patterns_of(config: DeltaMatchConfig, base: dict[str, Any]) -> dict[str, Any]:
    """The patterns of ``config`` that still mean something with these recipes."""
    layers = {
        p: {kind: r for kind, r in d.items() if base[kind] is not None}
        for p, d in (config.layers or {}).items()
    }
    out: dict[str, Any] = {"layers": {p: d for p, d in layers.items() if d} or None}
    if base["linear"] is not None:
        out["modules_to_not_convert"] = config.modules_to_not_convert
        out["include"] = config.include
    return out


def _by_name(model: nn.Module, now: Running, base: dict[str, Any]) -> dict[str, Any]:
    layers: dict[str, dict] = {}
    leave, include = [], []
    prefix = _prefix(model)
    if base["attention"] is not None:
        for name, recipe in now.attention.items():
            if recipe not in (base["attention"], None):
                layers[prefix + name] = {"attention": recipe}
    if base["linear"] is not None:
        default = would_run(DeltaMatchConfig(None, base["linear"]), model).linear
        for name, recipe in now.linear.items():
            saved = prefix + name.removesuffix(".base_layer")  # PEFT wraps what it adapts
            if recipe is None and default[name] is not None:
                leave.append(saved)
            if recipe is not None and default[name] is None:
                include.append(saved)
            if recipe not in (base["linear"], None):
                layers.setdefault(saved, {})["linear"] = recipe
    return {
        "layers": layers or None,
        "modules_to_not_convert": leave or None,
        "include": include or None,
    }
