"""What a model runs, to go back to where a change of it fails half-way."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from transformers import PreTrainedConfig

QUANTISED = ("hf_quantizer", "is_quantized", "quantization_method")
"""What Transformers sets on a model that a quantiser has been at."""
_OF_MODULES = (
    *QUANTISED, "config", "deltamatch", "fp8_recipe", "fp8_backend", "fp8_shared_config",
)  # fmt: skip
_OF_CONFIGS = ("_attn_implementation_internal", "_experts_implementation_internal")


def snapshot(model: nn.Module) -> Callable[[], None]:
    """A function that puts classes, recipes and implementations back as they are now."""
    modules = [(m, type(m), _of(m, _OF_MODULES)) for m in model.modules()]
    configs: dict[int, tuple] = {}

    def note(config) -> None:
        if isinstance(config, PreTrainedConfig) and id(config) not in configs:
            configs[id(config)] = config, _of(config, _OF_CONFIGS)
            for inner in vars(config).values():
                note(inner)

    for module, _, marks in modules:
        note(marks.get("config", getattr(module, "config", None)))

    def restore() -> None:
        for module, cls, marks in modules:
            if type(module) is not cls:
                module.__class__ = cls
            _put(module, marks, _OF_MODULES)
        for config, marks in configs.values():
            _put(config, marks, _OF_CONFIGS)

    return restore


def _of(x, names: tuple[str, ...]) -> dict:
    return {k: vars(x)[k] for k in names if k in vars(x)}


def _put(x, marks: dict, names: tuple[str, ...]) -> None:
    for name in names:
        if name in marks:
            vars(x)[name] = marks[name]
        else:
            vars(x).pop(name, None)
