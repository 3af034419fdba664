"""Which modules of a model do attention, and which recipe each of them uses.

The attention interface hands its module to the attention function; the recipe lives on that module
(``module.deltamatch``), so it survives copies, pickling and checkpointing, and nothing is global.
"""

from __future__ import annotations

import ast
import difflib
import fnmatch
import functools
import inspect
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from hf_deltamatch.ops import backend as backends
from hf_deltamatch.recipes import AttentionRecipe

ATTN_IMPLEMENTATION = "fp8_delta_matching"


class AttentionChoice(NamedTuple):
    """What one attention module runs."""

    recipe: AttentionRecipe
    backend: str | None = None


DEFAULT_CHOICE = AttentionChoice(AttentionRecipe.from_name("delta_matching"))


def choice_of(module: nn.Module) -> AttentionChoice:
    return getattr(module, "deltamatch", DEFAULT_CHOICE)


def is_ours(module: nn.Module) -> bool:
    """Does the config of this attention module ask for our function?"""
    config = getattr(module, "config", None)
    return getattr(config, "_attn_implementation", None) == ATTN_IMPLEMENTATION


def plain_implementation(model: PreTrainedModel) -> str:
    """What Transformers would run by itself."""
    return "sdpa" if model._supports_sdpa else "eager"


@functools.cache
def _classes_of_module(name: str) -> dict[str, str]:
    """Source of every class at the top of a module. ``inspect.getsource`` of a class parses the
    whole file, for each class again."""
    try:
        source = inspect.getsource(sys.modules[name])
        tree = ast.parse(source)
    except (KeyError, OSError, TypeError, SyntaxError):
        return {}
    lines = source.splitlines(keepends=True)
    return {
        node.name: "".join(lines[node.lineno - 1 : node.end_lineno])
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def source_of(cls: type) -> str:
    """Source of a class without its decorators.

    Raises:
        OSError, TypeError: there is none.
    """
    known = _classes_of_module(cls.__module__)
    return known[cls.__qualname__] if cls.__qualname__ in known else inspect.getsource(cls)


@functools.cache
def _uses_interface(cls: type) -> bool:
    for base in cls.__mro__:
        # PreTrainedModel itself mentions the interface: whole models are not attention modules.
        if base is object or issubclass(base, PreTrainedModel):
            continue
        if base.__module__.startswith("torch."):  # long sources, and never an attention interface
            continue
        try:
            source = source_of(base)
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


class Patterns:
    """Module patterns, looked up fast: a saved config may name thousands of modules."""

    def __init__(self, patterns: Iterable[str]) -> None:
        patterns = list(patterns)
        self.literal = {p for p in patterns if not any(c in _WILD for c in p)}
        self.wild = [p for p in patterns if p not in self.literal]

    def matching(self, name: str) -> list[str]:
        found = [p for p in _with_parents(name) if p in self.literal]
        return found + [p for p in self.wild if matches(name, p)]

    def most_specific(self, name: str) -> str | None:
        """The matching pattern with the most literal characters; order plays no part, since a saved
        config sorts its keys."""
        key = lambda p: (sum(c not in _WILD for c in p), p)
        return max(self.matching(name), key=key, default=None)

    def used(self, names: Iterable[str]) -> set[str]:
        """The patterns that match any of the names."""
        return {p for name in names for p in self.matching(name)}


_WILD = "*?[]"


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def pattern_list(what: str, patterns: Iterable[str] | None) -> list[str]:
    """The patterns; a single string, which would be read letter by letter, raises."""
    if isinstance(patterns, str):
        raise TypeError(
            f"{what} is the string {patterns!r}; it must be a list of module patterns. "
            f"Write [{patterns!r}]."
        )
    try:
        found = [] if patterns is None else list(patterns)
    except TypeError:
        found = [None]
    _require_text(what, patterns, found)
    return found


def _require_text(what: str, given: Any, patterns: Iterable[Any]) -> None:
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"{what} is {given!r}; a module pattern is text, such as 'model.layers.0' or '*.mlp', "
                f"not {'this' if pattern is None else repr(pattern)}."
            )


def require_module(what: str, model: Any) -> None:
    """TypeError for what is no model; before anything reads its attributes."""
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"{what}: `model` is {given}; it must be a torch.nn.Module.")


def pattern_dict(what: str, patterns: dict[str, Any] | None) -> dict[str, Any]:
    if patterns is not None and not isinstance(patterns, dict):
        raise TypeError(
            f"{what} is a {type(patterns).__name__}; it must be a dict of module pattern to recipe, "
            'for example {"model.layers.0": "bf16"}.'
        )
    _require_text(what, patterns, patterns or {})
    return patterns or {}


def check_patterns(what: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raises where a pattern matches no name, with the names that come nearest."""
    patterns, names = list(patterns), list(names)
    used = Patterns(patterns).used(names)
    for pattern in patterns:
        if pattern not in used:
            raise ValueError(
                f"{what}: pattern {pattern!r} matches no module. {_nearest(pattern, names)}"
            )


def _nearest(pattern: str, names: list[str]) -> str:
    names = [n for n in names if n]
    if not names:
        return "There is no module that it could name."
    if any(n.endswith("." + pattern) for n in names):
        return f"It must match from the first component: write '*.{pattern}' (as in {names[0]})."
    every = dict.fromkeys(p for n in names for p in _with_parents(n))
    near = difflib.get_close_matches(pattern, every, n=3, cutoff=0.0)
    return f"The nearest names are {', '.join(near)}; names look like {max(names, key=len)}."


def check_backend(what: str, backend: str | None) -> None:
    """Raises for a backend that no op has, when it is chosen and not in the first forward."""
    if backend is not None and backend not in backends.BACKENDS:
        raise ValueError(
            f"{what}: `backend` is {backend!r}; allowed are None (choose by device), "
            f"{', '.join(repr(b) for b in backends.BACKENDS)}."
        )


def update_saved_config(model: nn.Module) -> None:
    """What ``model`` would save about itself follows what it runs. Models without a quantisation
    config of this package save nothing."""
    for module in model.modules():
        quantizer = vars(module).get("hf_quantizer")
        if hasattr(quantizer, "follow"):
            quantizer.follow(module)


def set_attention_recipe(
    model: nn.Module,
    recipe: str | AttentionRecipe | None = None,
    layers: dict[str, str | AttentionRecipe] | str | None = None,
    backend: str | None = None,
) -> dict[str, AttentionRecipe]:
    """Choose the attention recipe of a model that runs ``attn_implementation="fp8_delta_matching"``.

    A model loaded with a ``DeltaMatchConfig`` saves the new choice. One without saves none, as
    Transformers saves no ``attn_implementation``: see ``DeltaMatchConfig.apply_to``.

    Args:
        recipe: name or recipe for every attention module; None keeps what each has.
        layers: module pattern to recipe; the most specific pattern wins over ``recipe``. "bf16"
            keeps a layer in high precision. ``"first_last_bf16"`` instead of a dict does so with the
            first and the last layer.
        backend: ``"reference"``, ``"triton"`` …; ``None`` keeps what each module has (by device
            where none was ever named).

    Returns:
        the recipe of each attention module that runs our function, by name.

    Raises:
        ValueError: the model has no attention module to set or runs another implementation, or a
            pattern matches none, or there is no such backend.
        TypeError: ``layers`` is neither a dict nor a word.
    """
    from hf_deltamatch.hf.layer_words import named_layers  # which finds modules by this module

    what = "set_attention_recipe"
    require_module(what, model)
    check_backend(what, backend)
    if not isinstance(layers, str):
        layers = pattern_dict(f"{what}: `layers`", layers)
    found = attention_modules(model)
    if not found:
        raise ValueError(
            f"{what}: {type(model).__name__} has no module that uses the attention interface of "
            "Transformers, so no recipe would have an effect."
        )
    modules = {name: m for name, m in found.items() if is_ours(m)}
    if not modules:
        asked = getattr(
            getattr(next(iter(found.values())), "config", None), "_attn_implementation", None
        )
        raise ValueError(
            f"{what}: the attention of {type(model).__name__} is {asked!r}, so no recipe would have "
            f'an effect. Call model.set_attn_implementation("{ATTN_IMPLEMENTATION}") first.'
        )
    layers = named_layers(f"{what}: `layers`", layers, model, modules)
    check_patterns(what, layers, modules)
    resolved = {p: AttentionRecipe.resolve(r) for p, r in layers.items()}
    base = None if recipe is None else AttentionRecipe.resolve(recipe)
    out, patterns = {}, Patterns(resolved)
    for name, module in modules.items():
        pattern, before = patterns.most_specific(name), choice_of(module)
        chosen = resolved[pattern] if pattern is not None else base or before.recipe
        module.deltamatch = AttentionChoice(chosen, backend or before.backend)
        out[name] = chosen
    update_saved_config(model)
    return out
