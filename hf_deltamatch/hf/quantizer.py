"""``quantization_config=DeltaMatchConfig()``: attention and linears at load time, kept in config.json.

The weights stay what they are, in high precision under their usual names; only the arithmetic is
FP8. A checkpoint saved so loads in Transformers without this package as the plain model (with a
warning that it does not know the quantisation).
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_deltamatch.hf.check import check_model
from hf_deltamatch.hf.linear import HIGH_PRECISION, SwapReport, swap_linears, unswap_linears
from hf_deltamatch.hf.modules import (
    ATTN_IMPLEMENTATION,
    attention_modules,
    check_patterns,
    matches,
    set_attention_recipe,
)
from hf_deltamatch.recipes import AttentionRecipe, LinearRecipe

QUANT_METHOD = "delta_matching"
FORMAT_VERSION = 1


class DeltaMatchConfig(QuantizationConfigMixin):
    """FP8 attention and FP8 linears as a quantisation config of Transformers.

    Args:
        attention: recipe (name, object or dict) of every attention module; None leaves attention.
        linear: recipe of every linear; None leaves them.
        modules_to_not_convert: patterns of linears to leave in high precision.
        layers: module pattern to recipe, the most specific one wins. A value is the name of an
            attention or a linear recipe, ``"bf16"`` (both in high precision), or a dict with keys
            ``attention`` and ``linear``.
        backend: ``None`` (by device) or ``"reference"``. A choice of this run: not saved.

    Raises:
        ValueError: unknown recipe, nothing to do, or a config written by a newer version.

    >>> config = DeltaMatchConfig(layers={"model.layers.0": "bf16"})
    >>> model = AutoModelForCausalLM.from_pretrained(name, quantization_config=config)
    """

    def __init__(
        self,
        attention: str | AttentionRecipe | dict | None = "delta_matching",
        linear: str | LinearRecipe | dict | None = "blockwise",
        modules_to_not_convert: list[str] | None = None,
        layers: dict[str, Any] | None = None,
        *,
        backend: str | None = None,
        **kwargs,
    ) -> None:
        self.quant_method = QUANT_METHOD
        _check_header(kwargs)
        self.attention = None if attention is None else AttentionRecipe.resolve(attention)
        self.linear = None if linear is None else LinearRecipe.resolve(linear)
        if self.attention is None and self.linear is None:
            raise ValueError(
                "DeltaMatchConfig: attention and linear are both None; name a recipe for at least "
                "one, or load the model without a quantization_config."
            )
        self.modules_to_not_convert = (
            None if modules_to_not_convert is None else list(modules_to_not_convert)
        )
        self.layers = {p: _resolve_layer(p, r) for p, r in (layers or {}).items()} or None
        self.backend = backend

    def to_dict(self) -> dict[str, Any]:
        """JSON types, recipes resolved to all their fields."""
        return {
            "quant_method": QUANT_METHOD,
            "format_version": FORMAT_VERSION,
            "attention": _plain(self.attention),
            "linear": _plain(self.linear),
            "modules_to_not_convert": self.modules_to_not_convert,
            "layers": self.layers
            and {p: {k: _plain(r) for k, r in d.items()} for p, d in self.layers.items()},
        }

    def __iter__(self):
        yield from self.to_dict().items()

    def apply_to(self, model: nn.Module) -> nn.Module:
        """Apply to a model that is already built (``from_config``, or loaded plain), in place.

        The config is then saved with the model as if it had been loaded with it.
        """
        quantizer = DeltaMatchQuantizer(self, pre_quantized=False)
        try:
            quantizer.preprocess_model(model)
            model.hf_quantizer = quantizer
            quantizer.postprocess_model(model)
        except ValueError:
            quantizer.remove_quantization_config(model)
            raise
        return model


def _check_header(kwargs: dict) -> None:
    method = kwargs.pop("quant_method", QUANT_METHOD)
    if method != QUANT_METHOD:
        raise ValueError(
            f"DeltaMatchConfig: quant_method is {method!r}; this class reads {QUANT_METHOD!r}."
        )
    version = kwargs.pop("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
        raise ValueError(
            f"DeltaMatchConfig: format_version is {version!r}; this hf_deltamatch reads 1 to "
            f"{FORMAT_VERSION}. Upgrade hf_deltamatch to load this checkpoint."
        )
    if kwargs:
        warnings.warn(
            f"DeltaMatchConfig: unknown {', '.join(sorted(kwargs))}; ignored. The config may come "
            "from a newer hf_deltamatch.",
            stacklevel=3,
        )


def _plain(recipe: Any) -> Any:
    return recipe.to_dict() if isinstance(recipe, (AttentionRecipe, LinearRecipe)) else recipe


def _resolve_layer(pattern: str, value: Any) -> dict[str, Any]:
    """``{"attention": recipe, "linear": recipe or "bf16"}``, either key optional."""
    if isinstance(value, AttentionRecipe):
        return {"attention": value}
    if isinstance(value, LinearRecipe):
        return {"linear": value}
    if isinstance(value, str):
        out = {}
        if value in AttentionRecipe.NAMES:
            out["attention"] = AttentionRecipe.from_name(value)
        if value in LinearRecipe.NAMES or value == HIGH_PRECISION:
            out["linear"] = _linear_or_bf16(value)
        if out:
            return out
    if isinstance(value, dict) and value and set(value) <= {"attention", "linear"}:
        out = {}
        if "attention" in value:
            out["attention"] = AttentionRecipe.resolve(value["attention"])
        if "linear" in value:
            out["linear"] = _linear_or_bf16(value["linear"])
        return out
    raise ValueError(
        f"DeltaMatchConfig: layers[{pattern!r}] is {value!r}; it must be the name of an attention "
        f"recipe ({', '.join(sorted(AttentionRecipe.NAMES))}), of a linear recipe "
        f"({', '.join(sorted(LinearRecipe.NAMES))}), or a dict with keys attention and linear."
    )


def _linear_or_bf16(value: Any) -> str | LinearRecipe:
    return HIGH_PRECISION if value == HIGH_PRECISION else LinearRecipe.resolve(value)


class DeltaMatchQuantizer(HfQuantizer):
    """Swaps classes before the weights are loaded and checks the result after; adds no tensors."""

    requires_calibration = False
    swap_report: SwapReport | None = None

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs) -> nn.Module:
        config: DeltaMatchConfig = self.quantization_config
        _check_layer_patterns(config, model)
        if config.attention is not None:
            _set_attention(config, model)
        if config.linear is not None:
            self.swap_report = swap_linears(
                model,
                config.linear,
                modules_to_not_convert=[
                    _own_name(p, model) for p in config.modules_to_not_convert or ()
                ],
                layers=_layers_of(config, model, "linear"),
                backend=config.backend,
            )
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs) -> nn.Module:
        check_model(model)
        return model

    def _dequantize(self, model: nn.Module, dtype=None) -> nn.Module:
        unswap_linears(model)
        if self.quantization_config.attention is not None:
            model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _own_name(pattern: str, model: nn.Module) -> str:
    """A base model (``AutoModel``) has no prefix; patterns saved with a whole model have one."""
    if getattr(model, "base_model", None) is not model:
        return pattern
    return pattern.removeprefix(f"{model.base_model_prefix}.")


def _layers_of(config: DeltaMatchConfig, model: nn.Module, kind: str) -> dict[str, Any]:
    """Pattern to recipe for the patterns of ``layers`` that say something about modules of ``kind``
    in this model."""
    if getattr(config, kind) is None:
        return {}
    if kind == "attention":
        names = list(attention_modules(model))
    else:
        names = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))]
    layers = {_own_name(p, model): d[kind] for p, d in (config.layers or {}).items() if kind in d}
    return {p: r for p, r in layers.items() if any(matches(n, p) for n in names)}


def _check_layer_patterns(config: DeltaMatchConfig, model: nn.Module) -> None:
    patterns = [_own_name(p, model) for p in config.layers or ()]
    check_patterns("DeltaMatchConfig: `layers`", patterns, [n for n, _ in model.named_modules()])
    used = {**_layers_of(config, model, "attention"), **_layers_of(config, model, "linear")}
    for pattern in patterns:
        if pattern not in used:
            raise ValueError(
                f"DeltaMatchConfig: layers[{pattern!r}] has no effect: it names no module of the "
                "kind that its recipe is for, or that kind is None for the whole model."
            )


def _set_attention(config: DeltaMatchConfig, model: nn.Module) -> None:
    found = attention_modules(model)
    if not found or not model._can_set_attn_implementation():
        raise ValueError(
            f"DeltaMatchConfig: {type(model).__name__} does not use the attention interface of "
            "Transformers, so it would run its own attention whatever is asked for. Use "
            "DeltaMatchConfig(attention=None) for FP8 linears alone."
        )
    default = "sdpa" if model._supports_sdpa else "eager"
    if model.config._attn_implementation not in (default, ATTN_IMPLEMENTATION):
        warnings.warn(
            f"DeltaMatchConfig: attn_implementation={model.config._attn_implementation!r} is not "
            f"used; attention runs on {ATTN_IMPLEMENTATION!r}. Use DeltaMatchConfig(attention=None) "
            "to keep it.",
            stacklevel=2,
        )
    model.set_attn_implementation(ATTN_IMPLEMENTATION)
    layers = _layers_of(config, model, "attention")
    set_attention_recipe(model, config.attention, layers, config.backend)


def register() -> None:
    """Register config and quantizer; harmless when done again."""
    if QUANT_METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(QUANT_METHOD)(DeltaMatchConfig)
    if QUANT_METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(QUANT_METHOD)(DeltaMatchQuantizer)
