"""Tiny random models of every family that the tests name, built from their own config classes, and
the few things that every test does with one: choose its attention, run it, compare gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma2PreTrainedModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_deltamatch import set_attention_recipe
from hf_deltamatch.hf.experts import is_experts
from hf_deltamatch.testing import rel_rms

OURS = "fp8_delta_matching"
NEWEST = tuple(int(n) for n in transformers.__version__.split(".")[:2]) >= (5, 17)
"""Not one of the older versions, whose differences some tests name."""

HERE: dict[str, torch.device] = {"device": torch.device("cpu")}
"""Where :func:`build` and :func:`batch` put things; the tests on a GPU change it for themselves."""

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

# Families that only some tests name: chunked, sparse and linear attention, and code without the interface.
OTHERS: dict[str, dict] = {
    "qwen3_moe": {**MOE, "moe_intermediate_size": 32},
    "llama4_text": {
        "num_local_experts": 2,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 0],
    },
    "deepseek_v32": {
        **FAMILIES["deepseek_v3"][0],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
    },
    "minimax": {
        **MOE,
        "layer_types": ["linear_attention", "full_attention"],
        "block_size": 16,
    },
    "doge": {"sliding_window": None},
    "bloom": {"n_layer": 2, "n_head": 4},
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256, "rotary_dim": 8},
    "mamba": {"state_size": 8},
}

# Encoder-decoders. The last three do not support SDPA: their decoders leave `is_causal` False.
SEQ2SEQ_COMMON = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
SEQ2SEQ: dict[str, dict] = {
    "bart": {},
    "m2m_100": {},
    "marian": {},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "pegasus_x": {"block_size": 8, "num_global_tokens": 4},
    "nllb-moe": {
        "num_experts": 4,
        "expert_capacity": 64,
        "router_jitter_noise": 0.0,
        "encoder_sparse_step": 1,
        "decoder_sparse_step": 1,
        "router_ignore_padding_tokens": False,
    },
}


def _config(family: str, fields: dict) -> PreTrainedConfig:
    """Skips the test of a family that this version of Transformers cannot build."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"{family} is newer than Transformers {transformers.__version__}")
    try:
        return AutoConfig.for_model(family, **fields)
    except StrictDataclassFieldValidationError as error:
        if NEWEST or family not in ("olmo2", "m2m_100"):
            raise
        # Transformers 5.4 declares flags of theirs as int, and hub 1.x takes no bool for one.
        pytest.skip(f"{family} of Transformers {transformers.__version__}: {error}"[:200])


def build_seq2seq(family: str, *, seed: int = 0, **overrides) -> PreTrainedModel:
    """A tiny random encoder-decoder in FP32, in eval mode."""
    config = _config(family, {**SEQ2SEQ_COMMON, **SEQ2SEQ[family], **overrides})
    torch.manual_seed(seed)
    return AutoModelForSeq2SeqLM.from_config(config).eval()


def build(family: str, *, seed: int = 0, **overrides) -> PreTrainedModel:
    """A tiny random model of ``family`` in FP32, in eval mode."""
    known = OTHERS[family] if family in OTHERS else FAMILIES[family][0]
    config = _config(family, {**COMMON, **known, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().to(HERE["device"])
    if family == "gpt2" and not NEWEST:  # 5.4 misses these in its own scheme of initial weights
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("c_proj.weight"):
                    parameter *= (2 * config.n_layer) ** -0.5
    return model


def batch(rows: int = 2, length: int = 40, *, seed: int = 1) -> Tensor:
    """Random token ids ``[rows, length]``, special tokens left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, length), generator=generator).to(HERE["device"])


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Import it: tiny products are far faster on one thread, and threads of two test runs collide."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plain(family: str) -> str:
    """The implementation of Transformers to compare with; SDPA has no sinks, and no soft cap, which
    newer versions admit (to the cap of 50, logits of a tiny model are small)."""
    if family == "gemma2" and not Gemma2PreTrainedModel._supports_sdpa:
        return "eager"
    return "eager" if family == "gpt_oss" else "sdpa"


def padded_for(family: str, side: str) -> Batch:
    """:func:`padded`, to be compared with ``plain(family)``: a query of padding sees everything in
    eager attention (but a sink takes it all), and from the last one the first token is predicted."""
    inputs = padded(side)
    if side == "left" and plain(family) == "eager" and family != "gpt_oss":
        inputs.labels[1, inputs.attention_mask[1].argmax()] = -100
    return inputs


def use(model: PreTrainedModel, implementation: str = OURS, recipe=None) -> PreTrainedModel:
    """The model itself, with another attention."""
    model.set_attn_implementation(implementation)
    if recipe is not None:
        set_attention_recipe(model, recipe)
    return model


def linear_calls(model: PreTrainedModel, swapped: Iterable[str]) -> int:
    """FP8 products of one kind that a pass over the swapped modules runs: two an expert, where every
    expert gets tokens."""
    modules = [model.get_submodule(name) for name in swapped]
    return sum(2 * m.num_experts if is_experts(m) else 1 for m in modules)


class Batch(NamedTuple):
    """Arguments of a model; ``labels`` are −100 on padding."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    @property
    def real(self) -> Tensor:
        return self.attention_mask.bool()


def padded(side: str, *, length: int = 40, hidden: int = 9, seed: int = 1) -> Batch:
    """A full row and one with ``hidden`` tokens of padding."""
    ids = batch(2, length, seed=seed)
    mask = torch.ones_like(ids)
    mask[1, slice(0, hidden) if side == "left" else slice(length - hidden, length)] = 0
    return Batch(ids * mask, mask, ids.masked_fill(mask == 0, -100))


def run(model: PreTrainedModel, *, labels: Tensor, **inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and the gradients of every parameter that has one."""
    model.zero_grad()
    out = model(labels=labels, **inputs)
    out.loss.backward()
    return out.logits.detach(), grads_of(model)


def grads_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def rel_grads(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative error of all gradients as one vector."""
    assert actual.keys() == expected.keys()
    flat = lambda grads: torch.cat([grads[n].double().flatten() for n in sorted(grads)])
    return rel_rms(flat(actual), flat(expected))
