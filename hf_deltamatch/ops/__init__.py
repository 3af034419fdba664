"""Custom ops, autograd and the choice between reference and kernel."""

from hf_deltamatch.ops.attention import delta_matching_attention
from hf_deltamatch.ops.attention_op import attention_bwd, attention_fwd
from hf_deltamatch.ops.experts import fp8_experts_linear
from hf_deltamatch.ops.gated import fp8_gated_linear
from hf_deltamatch.ops.linear import fp8_linear
from hf_deltamatch.ops.swiglu import fp8_swiglu

__all__ = [
    "attention_bwd",
    "attention_fwd",
    "delta_matching_attention",
    "fp8_experts_linear",
    "fp8_gated_linear",
    "fp8_linear",
    "fp8_swiglu",
]
