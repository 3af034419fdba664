"""Transformers' own classes in the arithmetic of an arm, and a forward that waits for nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_deltamatch.hf import ATTN_IMPLEMENTATION, check_model, set_attention_recipe, swap_linears
from hf_deltamatch.ops.backend import explain
from hf_deltamatch.recipes import AttentionRecipe, LinearRecipe

DIRECT = ("llama", "qwen2", "qwen3")
"""Model types whose layers :func:`logits_of` calls itself."""
_PLAIN_NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")


def build_model(config: dict, device: torch.device, backend: str | None) -> PreTrainedModel:
    """The model of a run's ``config`` in FP32 on ``device``, drawn from its seed on the CPU: the same
    weights for every arm and machine. ``backend`` names the FP8 backend (None: by device).

    Raises:
        ValueError, NotImplementedError: a config that Transformers refuses, or no kernel.
    """
    fields = dict(config["model"])
    model_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    attention, linear = config["attention"], config["linear"]
    torch.manual_seed(config["seed"])
    model = AutoModelForCausalLM.from_config(
        model_config,
        attn_implementation="sdpa" if attention == "sdpa" else ATTN_IMPLEMENTATION,
        dtype=torch.float32,
    )
    model.to(device)
    if attention != "sdpa":
        set_attention_recipe(model, AttentionRecipe.from_dict(attention), backend=backend)
    if linear is not None:
        # A device without a kernel for linears has the reference, slow but the same numbers.
        has_kernel = explain("linear", device, backend).backend is not None
        chosen = backend if has_kernel else "reference"
        swap_linears(model, LinearRecipe.from_dict(linear), backend=chosen)
    if attention != "sdpa" or linear is not None:
        check_model(model)
    fuse_norms(model)
    return model.train()


def fuse_norms(model: nn.Module) -> None:
    """torch's fused RMSNorm in place of its five separate operations: the same formula."""
    for module in model.modules():
        if type(module).__name__ in _PLAIN_NORMS:
            module.forward = lambda x, m=module: F.rms_norm(
                x, m.weight.shape, m.weight, m.variance_epsilon
            )


def is_direct(model: PreTrainedModel) -> bool:
    return model.config.model_type in DIRECT


def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits ``[B, T, V]`` of whole sequences without padding.

    Transformers' own forward looks for packing in the positions, which waits for the device in
    every step; the layers themselves are causal without a mask.
    """
    if not is_direct(model):
        return model(input_ids=ids, use_cache=False).logits
    inner = model.model
    x = inner.embed_tokens(ids)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    rotary = inner.rotary_emb(x, position_ids=positions)
    for layer in inner.layers:
        x = layer(x, attention_mask=None, position_embeddings=rotary, use_cache=False)
    return model.lm_head(inner.norm(x))


def to_working_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters to ``dtype``; buffers stay, as RoPE's frequencies would lose their precision."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
