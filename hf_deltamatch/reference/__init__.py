"""Pure-torch numerics, any device: the specification that kernels are compared with."""

from hf_deltamatch.reference.attention import AttentionForward, attention_fwd
from hf_deltamatch.reference.attention_bwd import AttentionBackward, attention_bwd
from hf_deltamatch.reference.gated import gated, gated_bwd
from hf_deltamatch.reference.linear import (
    linear_bwd_input,
    linear_bwd_weight,
    linear_bwd_weight_hp,
    linear_fwd,
    linear_save_input,
)
from hf_deltamatch.reference.quantize import Quantized, dequantize, quantize

__all__ = [
    "AttentionBackward",
    "AttentionForward",
    "Quantized",
    "attention_bwd",
    "attention_fwd",
    "dequantize",
    "gated",
    "gated_bwd",
    "linear_bwd_input",
    "linear_bwd_weight",
    "linear_bwd_weight_hp",
    "linear_fwd",
    "linear_save_input",
    "quantize",
]
