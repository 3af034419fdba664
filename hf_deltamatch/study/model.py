"""Transformers' own classes in the arithmetic of an arm, and a forward that waits for nothing."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from hf_deltamatch.hf import ATTN_IMPLEMENTATION, check_model, set_attention_recipe, swap_linears
from hf_deltamatch.hf.model_config import config_of_fields
from hf_deltamatch.ops.backend import explain
from hf_deltamatch.training.study_rows import recipes_of_config

DIRECT = (
    "bamba",
    "deepseek_v3",
    "kimi_linear",
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_next",
    "smollm3",
)
"""Model types whose layers :func:`logits_of` calls itself."""
_NORMS = {
    name: lambda x, m: F.rms_norm(x, m.weight.shape, m.weight, m.variance_epsilon)
    for name in (
        "BambaRMSNorm",
        "DeepseekV3RMSNorm",
        "KimiLinearRMSNorm",
        "LlamaRMSNorm",
        "Qwen2RMSNorm",
        "Qwen3RMSNorm",
        "SmolLM3RMSNorm",
    )
}
# Its weight is the distance from one, which BF16 would round away.
_NORMS["Qwen3NextRMSNorm"] = lambda x, m: F.rms_norm(
    x.float(), m.weight.shape, 1.0 + m.weight.float(), m.eps
).type_as(x)
_KEPT = ("A_log", "dt_bias")
"""Parameters of recurrent layers that stay in FP32: the state decays by an exponential of theirs."""


def build_model(config: dict, device: torch.device, backend: str | None) -> PreTrainedModel:
    """The model of a run's ``config`` in FP32 on ``device``, drawn from its seed on the CPU: the same
    weights for every arm and machine. ``backend`` names the FP8 backend (None: by device).

    Raises:
        ValueError, NotImplementedError: a config that Transformers refuses, or no kernel.
    """
    model_config = config_of_fields(config["model"])
    attention, linear = recipes_of_config(config)
    torch.manual_seed(config["seed"])
    model = AutoModelForCausalLM.from_config(
        model_config,
        attn_implementation="sdpa" if attention is None else ATTN_IMPLEMENTATION,
        dtype=torch.float32,
    )
    model.to(device)
    if attention is not None:
        set_attention_recipe(model, attention, backend=backend)
    if linear is not None:
        # A device without a kernel for linears has the reference, slow but the same numbers.
        has_kernel = explain("linear", device, backend).backend is not None
        chosen = backend if has_kernel else "reference"
        swap_linears(model, linear, modules_to_not_convert=config.get("leave"), backend=chosen)
    if attention is not None or linear is not None:
        check_model(model)
    fuse_norms(model)
    return model.train()


def is_known(config: dict) -> bool:
    """Does the installed Transformers have the model type of this run?"""
    return config["model"]["model_type"] in CONFIG_MAPPING


def check_leave(config: dict) -> None:
    """A run's ``leave`` against its model without weights.

    Raises:
        ValueError: a pattern that matches no linear, or none is left to be swapped.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of_fields(config["model"]))
    except Exception:  # a model that cannot be built is the failure of its own runs
        return
    _, linear = recipes_of_config(config)
    swap_linears(model, linear, modules_to_not_convert=config["leave"], backend="reference")


def fuse_norms(model: nn.Module) -> None:
    """torch's fused RMSNorm in place of its five separate operations: the same formula."""
    for module in model.modules():
        fused = _NORMS.get(type(module).__name__)
        if fused is not None:
            module.forward = functools.partial(fused, m=module)


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
    places = {}
    if hasattr(inner, "rotary_emb"):
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        places["position_embeddings"] = inner.rotary_emb(x, position_ids=positions)
    for layer in inner.layers:
        x = layer(x, attention_mask=None, use_cache=False, **places)
        x = x[0] if isinstance(x, tuple) else x
    norm = inner.norm if hasattr(inner, "norm") else inner.final_layernorm
    return model.lm_head(norm(x))


def load_weights(model: nn.Module, weights: list[Tensor]) -> None:
    """The trainable parameters, in their order, from ``weights``.

    Raises:
        ValueError: they are another model's.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    if [p.shape for p in params] != [w.shape for w in weights]:
        raise ValueError(
            "study: the second stage's model has other parameters than the first one's; `then.model` "
            "may change positions (rope_parameters, max_position_embeddings), not sizes or layers."
        )
    with torch.no_grad():
        torch._foreach_copy_(params, weights)


def decays(model: nn.Module) -> list[bool]:
    """Of every trainable parameter: is it a matrix, so that weight decay is for it?"""
    return [
        p.dim() >= 2 and name.rpartition(".")[2] not in _KEPT
        for name, p in model.named_parameters()
        if p.requires_grad
    ]


def to_working_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters to ``dtype``, but for decays; buffers stay, as RoPE's frequencies would lose their
    precision."""
    for name, p in model.named_parameters():
        if name.rpartition(".")[2] not in _KEPT:
            p.data = p.data.to(dtype)
