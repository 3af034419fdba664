"""Hugging Face integration: what Transformers, PEFT and lm-eval call."""

from hf_deltamatch.hf import attention as _attention
from hf_deltamatch.hf import built as _built
from hf_deltamatch.hf import class_tables as _class_tables
from hf_deltamatch.hf import experts as _experts
from hf_deltamatch.hf import quantizer as _quantizer
from hf_deltamatch.hf.check import ModelCheck, check_model
from hf_deltamatch.hf.linear import SwapReport, swap_linears, unswap_linears
from hf_deltamatch.hf.modules import ATTN_IMPLEMENTATION, set_attention_recipe
from hf_deltamatch.hf.quantizer import DeltaMatchConfig

_attention.register()
_built.register()
_class_tables.register()
_experts.register()
_quantizer.register()

__all__ = [
    "ATTN_IMPLEMENTATION",
    "DeltaMatchConfig",
    "ModelCheck",
    "SwapReport",
    "check_model",
    "set_attention_recipe",
    "swap_linears",
    "unswap_linears",
]
