"""FP8 training of language models: attention with a matched row correction δ, and FP8 linears.

Importing registers ``attn_implementation="fp8_delta_matching"`` and
``quantization_config=DeltaMatchConfig()`` with Transformers; importing again is harmless.
"""

from hf_deltamatch.hf import (
    DeltaMatchConfig,
    ModelCheck,
    SwapReport,
    check_model,
    set_attention_recipe,
    swap_linears,
    unswap_linears,
)
from hf_deltamatch.ops import delta_matching_attention, fp8_linear
from hf_deltamatch.recipes import AttentionRecipe, LinearRecipe

__version__ = "0.1.0"

__all__ = [
    "AttentionRecipe",
    "DeltaMatchConfig",
    "LinearRecipe",
    "ModelCheck",
    "SwapReport",
    "check_model",
    "delta_matching_attention",
    "fp8_linear",
    "set_attention_recipe",
    "swap_linears",
    "unswap_linears",
]
