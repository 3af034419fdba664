"""A tiny random model of any causal-LM family, from its default config: every size is shrunk by the
name of its field, nested configs too, and a family adds only what names cannot tell."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

VOCAB, LAYERS, LENGTH = 128, 2, 24

# Field name (a regular expression, whole) to value; the first match wins. Only fields that a config
# has, that are numbers and that are larger than the value are changed.
SIZES: list[tuple[str, Any]] = [
    (r".*vocab_size|n_words|vocab_size_per_layer_input", VOCAB),
    (r"hidden_size(_global)?|d_model|n_embd|dim|word_embed_proj_dim|emb_dim|embed_dim|embedding_(size|dim)|attention_hidden_size", 64),
    (r"(?!shared_intermediate).*(intermediate_size|ffn_dim|d_ff|dim_ff|n_inner|d_inner|ffn_hidden_size)(_mlp)?", 96),
    (r"(shared_)?intermediate_size", 96),
    (r"(de|en)coder_layers|num_hidden_layers|num_layers|n_layers?|num_(de|en)coder_layers", LAYERS),
    (r"((de|en)coder_)?(num_)?(attention_)?heads|n_heads?|num_attention_heads|(de|en)coder_attention_heads", 4),
    (r"num_(de|en)coder_attention_heads|swa_num_attention_heads|num_mem_heads", 4),
    (r".*(num_key_value_heads|n_head_kv|kv_n_heads)", 2),
    (r"head_dim|global_head_dim|swa_head_dim|attention_head_dim|d_kv|kv_channels|v_head_dim", 16),
    (r"qk_nope_head_dim", 16),
    (r"(qk_)?rope_head_dim|index_head_dim|rotary_dim", 8),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank", 32),
    (r"index_n_heads", 2),
    (r"index_topk", 8),
    (r"(num_)?(local_|routed_)?experts|n_routed_experts|num_local_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_top_?k|experts_per_token|top_k_experts|num_experts_per_token|moe_k", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"sliding_window(_size)?|attention_window_size|attention_chunk_size|window_size|local_attention|swa_window_size", 8),
    (r"max_position_embeddings|n_positions|max_target_positions|max_seq_len|n_ctx|context_length", 256),
    (r"mamba_n_heads|linear_num_value_heads|mamba_num_heads", 8),
    (r"linear_num_(key_)?heads", 4),
    (r"mamba_d_head|linear_((key|value)_)?head_dim|mamba_head_dim|mamba_headdim", 16),
    (r"mamba_d_state|state_size|ssm_state_size|mamba_d_ssm", 16),
    (r"mamba_n_groups|mamba_ngroups|n_groups", 1),
    (r"(mamba_)?chunk_size|block_size", 8),
    (r"mamba_dt_rank|time_step_rank", 4),
    (r"num_nextn_predict_layers|num_mtp_layers", 0),
    (r"hidden_size_per_layer_input", 16),
]  # fmt: skip
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODERS = re.compile(r"(vision|audio|image|speech|vq|embd_layer|quantizer|img).*")

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

# What a name cannot tell.
_DBRX = {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}
_DBRX_FFN = {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2}
_ZAMBA = {"attention_hidden_size": 128, "attention_head_dim": 32}
_GEMMA4 = {"drop": ["per_layer_config"], "num_kv_shared_layers": 0}
# Drafters of Gemma 4: every layer attends to keys and values of the model that they draft for.
_ASSISTANT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_kv_shared_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 0,
    "hidden_size_per_layer_input": 0,
}
_QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
FAMILY: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"start": {"rope_parameters": {"full_attention": _ROPE}}},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "hrm_text": {"drop": ["num_layers_per_stack"]},
    "zamba": {**_ZAMBA, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {
        **_ZAMBA,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "drop": ["layer_types"],
    },
    "blt": {"encoder_hash_byte_group_vocab": 64, "num_hidden_layers": 2},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dbrx": {"drop": ["ffn_config", "attn_config"], "ffn_config": _DBRX_FFN, "attn_config": _DBRX},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0, "laurel_rank": 8},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "phi4_multimodal": {
        "vision_config": {"num_hidden_layers": 2},
        "audio_config": {"num_blocks": 2},
    },
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "xlnet": {"d_head": 16},
    # Their own configs hold a text encoder and a codec too, and the causal LM takes the decoder's.
    "musicgen": {"decoder": "MusicgenDecoderConfig", "num_codebooks": 1},
    "musicgen_melody": {"decoder": "MusicgenMelodyDecoderConfig", "num_codebooks": 1},
    "gemma4_assistant": {
        "start": {"text_config": {"model_type": "gemma4_text", **_ASSISTANT}},
        "text_config": {"drop": ["per_layer_config"], **_ASSISTANT},
        "backbone_hidden_size": 64,
    },
    "gemma4_unified_assistant": {
        "start": {"text_config": {"model_type": "gemma4_unified_text", **_ASSISTANT}},
        "text_config": {"drop": ["per_layer_config"], **_ASSISTANT},
        "backbone_hidden_size": 64,
    },
    "dots3_note": {"text_config": {"drop": ["per_layer_config"]}},
    "dots3_note_text": {"drop": ["per_layer_config"]},
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "drop": ["layer_types"],
    },
    "moss_transcribe_diarize": {"audio_config": {"num_hidden_layers": 2, "encoder_layers": 2}},
}


def families() -> list[str]:
    """Every model type that ``AutoModelForCausalLM`` builds."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _size(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if "drop" in name and isinstance(value, float) or name in ("dropout", "router_jitter_noise"):
        return 0.0
    for pattern, small in SIZES:
        if re.fullmatch(pattern, name):
            return min(value, small)
    return value


def _kinds(fields: dict[str, Any]) -> list[str]:
    """One layer of each type, in their order, and two at the least."""
    types = list(dict.fromkeys(fields["layer_types"]))
    return types * 2 if len(types) == 1 else types


def shrink(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config, small."""
    names = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
    before = next((fields[n] for n in names if isinstance(fields.get(n), int)), None)
    out = {k: _size(k, v) for k, v in fields.items()}
    layers = LAYERS
    if fields.get("layer_types"):
        out["layer_types"] = _kinds(fields)
        layers = len(out["layer_types"])
        out.update({n: layers for n in names if n in out})
    for name, value in fields.items():
        if isinstance(value, list) and before and len(value) == before and name != "layer_types":
            out[name] = value[:layers]
        elif isinstance(value, dict) and name.endswith("_config") and not _ENCODERS.match(name):
            out[name] = shrink(value)
        elif name in SPECIAL:
            out[name] = SPECIAL[name]
    if out.get("kv_lora_rank"):  # latent keys: as many heads as queries, and RoPE on a part
        heads = next(out[n] for n in ("num_attention_heads", "n_head") if n in out)
        out.update({n: heads for n in ("num_key_value_heads",) if n in out})
        if out.get("qk_rope_head_dim"):
            out.update({"head_dim": out["qk_rope_head_dim"]} if "head_dim" in out else {})
            out.pop("qk_head_dim", None)
    return out


def _update(fields: dict[str, Any], extra: dict[str, Any]) -> None:
    for name, value in extra.items():
        if name == "drop":
            for unwanted in value:
                fields.pop(unwanted, None)
        elif isinstance(value, dict) and isinstance(fields.get(name), dict):
            _update(fields[name], value)
        else:
            fields[name] = value


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    cls = CONFIG_MAPPING[family]
    extra = {**FAMILY.get(family, {}), **overrides}
    start = copy.deepcopy(extra.pop("start", {}))
    cls = getattr(transformers, extra.pop("decoder", ""), cls)
    fields = shrink(cls(**start).to_dict())
    for derived in ("model_type", "transformers_version", "architectures", "dtype"):
        fields.pop(derived, None)
    _update(fields, extra)
    if "is_decoder" in fields:
        fields["is_decoder"] = True
    return cls(**fields)


def tiny_model(family: str, implementation: str, *, seed: int = 0) -> PreTrainedModel:
    """In FP32, in eval mode. No parameter is left at 0 or 1: a gate or a sink at its first value
    would hide what it does."""
    config = tiny_config(family)
    torch.manual_seed(seed)
    options = {"attn_implementation": implementation, "dtype": torch.float32}
    if "decoder" in FAMILY.get(family, {}):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]]._from_config(config, **options)
    else:
        model = AutoModelForCausalLM.from_config(config, **options)
    model = model.eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.nan_to_num_().clamp_(-4, 4)
                parameter += 0.04 * torch.randn(parameter.shape, generator=generator)
        # Gemma 3n and 4 norm queries and keys and do not scale their products: with the weights that
        # a norm starts from, logits have a deviation of 22, and BF16 alone moves gradients by 0.18.
        for module in model.modules():
            if getattr(module, "scaling", None) == 1.0 and hasattr(module, "q_norm"):
                module.q_norm.weight *= module.head_dim**-0.5
    return model
