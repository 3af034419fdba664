"""``quantization_config=DeltaMatchConfig()``: attention and linears at load time, kept in config.json.

The weights stay what they are, in high precision under their usual names; only the arithmetic is
FP8. A checkpoint saved so loads in Transformers without this package as the plain model (with a
warning that it does not know the quantisation).
"""

from __future__ import annotations

import copy
import warnings

from torch import nn
from transformers import PreTrainedConfig
from transformers.quantizers import HfQuantizer, auto
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)

from hf_deltamatch.hf.check import modules_without_kernel, what_runs
from hf_deltamatch.hf.config import QUANT_METHOD, DeltaMatchConfig
from hf_deltamatch.hf.linear import SwapReport, plan_linears, swap_by_plan, unswap_linears
from hf_deltamatch.hf.modules import (
    ATTN_IMPLEMENTATION,
    attention_modules,
    is_ours,
    plain_implementation,
    require_module,
    set_attention_recipe,
)
from hf_deltamatch.hf.running import (
    check_layer_patterns,
    config_of,
    layers_of,
    linear_options,
    resolved,
    running,
    would_run,
)
from hf_deltamatch.hf.snapshot import QUANTISED, snapshot
from hf_deltamatch.recipes import LinearRecipe


class DeltaMatchQuantizer(HfQuantizer):
    """Swaps classes before the weights are loaded and checks the result after; adds no tensors."""

    requires_calibration = False
    swap_report: SwapReport | None = None

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs) -> nn.Module:
        self._apply(model, self._plan(model))
        return model

    def _plan(self, model: nn.Module) -> dict[str, LinearRecipe | str] | None:
        """Raises whatever is wrong with the config for this model; changes nothing."""
        config: DeltaMatchConfig = self.quantization_config
        asked = vars(config).pop("asked_layers", None)
        if asked is not None:
            again = copy.copy(config)
            again.layers = asked
            if resolved(again, model).layers != config.layers:
                config.refuse_change("layers", asked)
        config = self.quantization_config = resolved(config, model)
        check_layer_patterns(config, model)
        if config.attention is not None:
            _check_attention(model)
        if config.linear is None:
            return None
        return plan_linears(model, config.linear, **linear_options(config, model))

    def _apply(self, model: nn.Module, plan: dict[str, LinearRecipe | str] | None) -> None:
        config: DeltaMatchConfig = self.quantization_config
        if plan is not None:  # first, since it may find nothing to do and raise
            self.swap_report = swap_by_plan(model, plan, config.backend)
        if config.attention is not None:
            model.set_attn_implementation(ATTN_IMPLEMENTATION)
            if not any(is_ours(m) for m in attention_modules(model).values()):
                raise ValueError(
                    f"DeltaMatchConfig: model.set_attn_implementation does not reach the attention "
                    f"modules of {type(model).__name__}, whose configs are copies. Build or load it "
                    f'with attn_implementation="{ATTN_IMPLEMENTATION}" and use set_attention_recipe '
                    "and swap_linears, or choose attention=None."
                )
            layers = layers_of(config, model, "attention")
            set_attention_recipe(model, config.attention, layers, config.backend)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs) -> nn.Module:
        what_runs(model)
        without_kernel = modules_without_kernel(model)
        if without_kernel is not None:
            # Not an error: the model may go elsewhere, or be given a backend.
            warnings.warn(f"DeltaMatchConfig: {without_kernel}", stacklevel=2)
        return model

    def apply_to(self, model: nn.Module) -> nn.Module:
        """See :meth:`DeltaMatchConfig.apply_to`."""
        require_module("DeltaMatchConfig.apply_to", model)
        if not isinstance(getattr(model, "config", None), PreTrainedConfig):
            raise TypeError(
                f"DeltaMatchConfig.apply_to: `model` is a {type(model).__name__} without a config of "
                "Transformers, which this one would become part of. Call swap_linears(model) for the "
                "linears of any module."
            )
        restore = snapshot(model)
        for mark in QUANTISED:
            vars(model).pop(mark, None)  # so that nothing follows the steps on the way
        try:
            plan = self._plan(model)
            self._apply(model, plan)
        except Exception:
            restore()
            raise
        if self.quantization_config.linear is None:
            unswap_linears(model)
        if self.quantization_config.attention is None:
            _plain_attention(model)
        model.is_quantized, model.quantization_method = True, QUANT_METHOD
        model.hf_quantizer = self
        return self.postprocess_model(model)

    def follow(self, model: nn.Module) -> None:
        """Make the config that ``model`` would save say what it runs."""
        if not running(model).anything:
            # Saved as the plain model that it is; the quantiser stays, for a later choice.
            vars(model.config).pop("quantization_config", None)
            return
        self.quantization_config = config_of(model, self.quantization_config)
        model.config.quantization_config = self.quantization_config

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[None, dict]:
        """Called by ``save_pretrained`` before it writes config.json."""
        self.follow(model)
        if hasattr(model.config, "quantization_config"):
            self._warn_of_what_cannot_be_saved(model)
        return None, {}

    def _warn_of_what_cannot_be_saved(self, model: nn.Module) -> None:
        now, saved = running(model), would_run(self.quantization_config, model)
        for kind in ("attention", "linear"):
            wrong = [n for n, r in getattr(now, kind).items() if getattr(saved, kind)[n] != r]
            if wrong:
                warnings.warn(
                    f"DeltaMatchConfig: {len(wrong)} {kind} modules, such as {wrong[0]}, will run "
                    "something else when this checkpoint is loaded again; a config cannot say what "
                    "they run now. Choose it again after loading.",
                    stacklevel=3,
                )

    def _dequantize(self, model: nn.Module, dtype=None) -> nn.Module:
        unswap_linears(model)
        _plain_attention(model)
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


def _plain_attention(model: nn.Module) -> None:
    if any(is_ours(m) for m in attention_modules(model).values()):
        model.set_attn_implementation(plain_implementation(model))


def _check_attention(model: nn.Module) -> None:
    found = attention_modules(model)
    if not found or not model._can_set_attn_implementation():
        raise ValueError(
            f"DeltaMatchConfig: {type(model).__name__} does not use the attention interface of "
            "Transformers, so it would run its own attention whatever is asked for. Use "
            "DeltaMatchConfig(attention=None) for FP8 linears alone."
        )
    asked = model.config._attn_implementation
    if asked not in (plain_implementation(model), ATTN_IMPLEMENTATION):
        warnings.warn(
            f"DeltaMatchConfig: attn_implementation={asked!r} is not used; attention runs on "
            f"{ATTN_IMPLEMENTATION!r}. Use DeltaMatchConfig(attention=None) to keep it.",
            stacklevel=2,
        )


def register() -> None:
    """Register config and quantizer; harmless when done again."""
    if QUANT_METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(QUANT_METHOD)(DeltaMatchConfig)
    if QUANT_METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(QUANT_METHOD)(DeltaMatchQuantizer)
    # Transformers asks only configs in this tuple what of them counts beside a checkpoint's own.
    # Without it, a backend that is passed to from_pretrained would be dropped.
    types = getattr(auto, "LOADING_ATTRIBUTES_CONFIG_TYPES", None)
    if types is not None and DeltaMatchConfig not in types:
        auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*types, DeltaMatchConfig)
