"""Tiny random models of every family that the tests name, built from their own config classes."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 128
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}

# model_type: (config overrides, number of softmax attention layers)
FAMILIES: dict[str, tuple[dict, int]] = {
    "llama": ({}, 2),
    "mistral": ({"sliding_window": 8}, 2),
    "qwen2": ({}, 2),
    "qwen3": ({}, 2),
    "gemma2": ({"sliding_window": 8, "query_pre_attn_scalar": 16}, 2),
    "gemma3_text": (
        {"sliding_window": 8, "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
        3,
    ),
    "phi3": ({"resid_pdrop": 0.0, "embd_pdrop": 0.0}, 2),
    "olmo2": ({}, 2),
    "gpt2": (
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        2,
    ),
    "gpt_neox": ({"rotary_pct": 0.5, "hidden_dropout": 0.0}, 2),
    "mixtral": ({**MOE}, 2),
    "gpt_oss": ({**MOE, "sliding_window": 8}, 2),
    "deepseek_v3": (
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
        2,
    ),
    "qwen3_next": (
        {
            **MOE,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        1,
    ),
    "bamba": (
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_chunk_size": 16,
        },
        1,
    ),
}  # fmt: skip


def build(family: str, *, seed: int = 0, **overrides) -> PreTrainedModel:
    """A tiny random model of ``family`` in FP32, in eval mode."""
    known, _ = FAMILIES[family]
    config = AutoConfig.for_model(family, **{**COMMON, **known, **overrides})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def batch(rows: int = 2, length: int = 40, *, seed: int = 1) -> torch.Tensor:
    """Random token ids ``[rows, length]``, special tokens left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, length), generator=generator)
