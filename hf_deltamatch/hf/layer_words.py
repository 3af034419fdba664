"""Values of ``layers``: a recipe or ``"bf16"`` for a pattern, or one word for the first and the last layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from hf_deltamatch.hf.modules import Patterns, attention_modules, pattern_dict
from hf_deltamatch.recipes import AttentionRecipe, LinearRecipe

FIRST_LAST = "first_last_bf16"
HIGH_PRECISION = "bf16"
R = TypeVar("R", AttentionRecipe, LinearRecipe)


def named_layers(
    what: str, layers: str | dict[str, Any] | None, model: nn.Module, names: Iterable[str]
) -> dict[str, Any]:
    """``layers`` as a dict of patterns, of which those of a word match any of ``names``.

    Raises:
        TypeError: neither a dict nor a word.
        ValueError: an unknown word, or one that matches nothing.
    """
    if not isinstance(layers, str):
        return pattern_dict(what, layers)
    check_word(what, layers)
    names = list(names)
    found = [p for p in first_and_last(what, model) if Patterns([p]).used(names)]
    if not found:
        raise ValueError(
            f"{what} is {layers!r}, but neither the first nor the last layer of "
            f"{type(model).__name__} holds a module that it could leave in high precision."
        )
    return dict.fromkeys(found, HIGH_PRECISION)


def check_word(what: str, word: str) -> None:
    if word != FIRST_LAST:
        raise ValueError(
            f"{what} is {word!r}; it must be {FIRST_LAST!r} or a dict of module pattern to recipe, "
            'for example {"model.layers.0": "bf16"}.'
        )


def first_and_last(what: str, model: nn.Module) -> list[str]:
    """Names of the first and the last layer of the (text) decoder: of its longest list of modules
    with attention, or of its longest list where nothing attends.

    Raises:
        ValueError: the model has no list of layers.
    """
    get_decoder = getattr(model, "get_decoder", None)
    decoder = (get_decoder() if callable(get_decoder) else None) or model
    own = {id(m): n for n, m in model.named_modules()}
    attends = {id(m) for m in attention_modules(decoder).values()}
    lists, inside = [], set()
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) and id(module) not in inside:
            inside |= {id(m) for m in module.modules()}
            lists.append((any(id(m) in attends for m in module.modules()), len(module), module))
    if not lists:
        raise ValueError(
            f"{what} is {FIRST_LAST!r}, but {type(model).__name__} has no list of layers. Name the "
            "modules: a dict of module pattern to recipe."
        )
    layers = max(lists, key=lambda found: found[:2])[2]
    return list(dict.fromkeys(own[id(layers[i])] for i in (0, -1)))


def linear_or_bf16(what: str, pattern: str, value: Any) -> str | LinearRecipe:
    """The value of ``layers[pattern]``: a recipe, or ``"bf16"``.

    Raises:
        ValueError: no name of a recipe.
        TypeError: nothing that could be one.
    """
    if isinstance(value, str) and value == HIGH_PRECISION:
        return HIGH_PRECISION
    more = f"{HIGH_PRECISION!r} leaves the module in high precision."
    return resolve_layer(LinearRecipe, what, pattern, value, more)


def resolve_layer(kind: type[R], what: str, pattern: str, value: Any, more: str = "") -> R:
    """The recipe of ``layers[pattern]``; an error says where it stands, and ``more``."""
    try:
        return kind.resolve(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{what}: layers[{pattern!r}]: {error} {more}".rstrip()) from None
