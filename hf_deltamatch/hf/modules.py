"""Which modules of a model do attention, and which recipe each of them uses.

The attention interface hands its module to the attention function; the recipe lives on that module
(``module.deltamatch``), so it survives copies, pickling and checkpointing, and nothing is global.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from hf_deltamatch.recipes import AttentionRecipe

ATTN_IMPLEMENTATION = "fp8_delta_matching"


class AttentionChoice(NamedTuple):
    """What one attention module runs."""

    recipe: AttentionRecipe
    backend: str | None = None


DEFAULT_CHOICE = AttentionChoice(AttentionRecipe.from_name("delta_matching"))


def choice_of(module: nn.Module) -> AttentionChoice:
    return getattr(module, "deltamatch", DEFAULT_CHOICE)


@functools.cache
def _uses_interface(cls: type) -> bool:
    for base in cls.__mro__:
        # PreTrainedModel itself mentions the interface: whole models are not attention modules.
        if base in (nn.Module, object) or issubclass(base, PreTrainedModel):
            continue
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):
            continue
        if "ALL_ATTENTION_FUNCTIONS" in source:
            return True
    return False


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that call the attention interface, by name (read from their classes' source)."""
    return {name: m for name, m in model.named_modules() if _uses_interface(type(m))}


def own_attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules called attention, with parameters, that do not use the interface: they run their own
    code whatever ``attn_implementation`` says (sparse or linear attention, older models)."""
    ours = attention_modules(model)
    found = {}
    for name, module in model.named_modules():
        holds_ours = any(n == name or n.startswith(name + ".") for n in ours)
        called_attention = "Attention" in type(module).__name__ or name.endswith("attn")
        if not called_attention or holds_ours:
            continue
        inside = any(name == n or name.startswith(n + ".") for n in [*ours, *found])
        if not inside and any(True for _ in module.parameters()):
            found[name] = module
    return found


def matches(name: str, pattern: str) -> bool:
    """``pattern`` is a module name, a shell pattern, or either of a module that contains ``name``.

    Whole components only: ``model.layers.1`` does not match ``model.layers.10``.
    """
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, pattern + ".*")


def most_specific(name: str, patterns: dict[str, object]) -> str | None:
    """The matching pattern with the most literal characters; order plays no part, since a saved
    config sorts its keys."""
    found = [p for p in patterns if matches(name, p)]
    return max(found, key=lambda p: (sum(c not in "*?[]" for c in p), p), default=None)


def check_patterns(what: str, patterns, names) -> None:
    """Raises where a pattern matches no name."""
    names = list(names)
    for pattern in patterns:
        if not any(matches(n, pattern) for n in names):
            shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
            raise ValueError(
                f"{what}: pattern {pattern!r} matches no module. Names look like: {shown or 'none'}."
            )


def set_attention_recipe(
    model: nn.Module,
    recipe: str | AttentionRecipe | None = None,
    layers: dict[str, str | AttentionRecipe] | None = None,
    backend: str | None = None,
) -> dict[str, AttentionRecipe]:
    """Choose the attention recipe of a model loaded with ``attn_implementation="fp8_delta_matching"``.

    Args:
        recipe: name or recipe for every attention module; None keeps what each has.
        layers: module pattern to recipe; the most specific pattern wins over ``recipe``. "bf16"
            keeps a layer in high precision.
        backend: ``None`` (by device) or ``"reference"``.

    Returns:
        the recipe of each attention module, by name.

    Raises:
        ValueError: the model has no attention module to set, or a pattern matches none.
    """
    modules = attention_modules(model)
    if not modules:
        raise ValueError(
            f"set_attention_recipe: {type(model).__name__} has no module that uses the attention "
            "interface of Transformers, so no recipe would have an effect."
        )
    layers = layers or {}
    check_patterns("set_attention_recipe", layers, modules)
    resolved = {p: AttentionRecipe.resolve(r) for p, r in layers.items()}
    base = None if recipe is None else AttentionRecipe.resolve(recipe)
    out = {}
    for name, module in modules.items():
        pattern = most_specific(name, resolved)
        chosen = resolved[pattern] if pattern is not None else base or choice_of(module).recipe
        module.deltamatch = AttentionChoice(chosen, backend)
        out[name] = chosen
    return out
