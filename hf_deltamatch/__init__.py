"""FP8 training of language models: attention with a matched row correction δ, and FP8 linears."""

from hf_deltamatch.ops import delta_matching_attention, fp8_linear
from hf_deltamatch.recipes import AttentionRecipe, LinearRecipe

__version__ = "0.1.0"

__all__ = [
    "AttentionRecipe",
    "LinearRecipe",
    "delta_matching_attention",
    "fp8_linear",
]
