"""``attn_implementation="fp8_delta_matching"``: the function Transformers calls in every layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from hf_deltamatch.hf.masks import fp8_delta_matching_mask, usable_mask
from hf_deltamatch.hf.modules import ATTN_IMPLEMENTATION, choice_of
from hf_deltamatch.hf.packing import drop_redundant_mask, refuse_unmasked_packing
from hf_deltamatch.ops import delta_matching_attention
from hf_deltamatch.ops.attention_args import has_autocast

# Arguments that models send along and that do not change what attention computes.
IGNORED = frozenset(
    {
        "position_ids",  # already in the rotary embedding and, for packing, in the mask
        "cache_position",
        "use_cache",
        "user_cache",  # the same, as Nemotron-H of Transformers 5.4 spells it
        "output_attentions",  # weights are never formed; the result is None, as with SDPA
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "max_length_q",
        "max_length_k",
        "deterministic",
        "layer_idx",
        "logits_to_keep",
        "labels",
    }
)
_MEANING = {
    "position_bias": "an additive bias on the logits",
    "indices": "sparse attention over selected keys",
    "block_indices": "sparse attention over selected blocks",
}


def fp8_delta_matching_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """The attention interface of Transformers on :func:`delta_matching_attention`.

    Layout ``BHTD`` in, ``BTHD`` out. Everything a model sends is implemented, known to be without
    effect, or refused by name.

    Raises:
        NotImplementedError: an argument with a meaning the op does not implement, dropout, or
            active context parallelism.
        ValueError: a mask of integers or one that is a bias, packed sequences that nothing
            separates, or half of their description.
    """
    _refuse(dropout, kwargs)
    if cu_seq_lens_q is None and cu_seq_lens_k is not None:
        raise ValueError(
            "fp8_delta_matching: `cu_seq_lens_k` came without `cu_seq_lens_q`, so the sequences "
            "would attend to each other. Pass both; for self-attention they are the same tensor."
        )
    query, key, value = _one_dtype(module, query, key, value)
    choice = choice_of(module)
    # A layer left in high precision has no kernel to be asked for by name.
    by_device = choice.backend == "triton" and not choice.recipe.quantize
    options = {}
    mask = None if attention_mask is None else usable_mask(attention_mask)
    # Aligned bottom-right: a single query, the newest token, sees all keys of its window.
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = sliding_window if causal else None
    if cu_seq_lens_q is not None:
        cu_seqlens = (cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k)
        options["cu_seqlens"] = cu_seqlens
        if mask is not None:
            mask = drop_redundant_mask(
                module, mask, cu_seqlens, query.shape[2], key.shape[2], causal, window
            )
    else:
        refuse_unmasked_packing(module, kwargs.get("position_ids"), seq_idx, mask, query.shape[2])
    if mask is None:  # else it says it all
        options |= {"is_causal": causal, "window": window}
    output = delta_matching_attention(
        query,
        key,
        value,
        mask=mask,
        softmax_scale=scaling,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.reshape(-1),
        recipe=choice.recipe,
        backend=None if by_device else choice.backend,
        **options,
    )
    return output.transpose(1, 2), None


def _refuse(dropout: float, kwargs: dict) -> None:
    if dropout:
        raise NotImplementedError(
            f"fp8_delta_matching: attention dropout is {dropout}; it is not implemented. Set the "
            "model's attention dropout to 0 before it is built (config.attention_dropout = 0.0; in other "
            "configs attn_pdrop, attention_probs_dropout_prob, dropout_rate), or use "
            'attn_implementation="sdpa".'
        )
    for name, value in kwargs.items():
        if value is None or name in IGNORED:
            continue
        meaning = _MEANING.get(name, "an argument this version does not know")
        raise NotImplementedError(
            f"fp8_delta_matching: the model sends `{name}` ({_describe(value)}): {meaning}; ignoring "
            'it would give wrong results. Use attn_implementation="sdpa" or "eager" for this model.'
        )
    if _context_parallel():
        raise NotImplementedError(
            "fp8_delta_matching: context parallelism is active (it replaces "
            "scaled_dot_product_attention); this implementation would attend to the local shard "
            'only. Turn it off, or use attn_implementation="sdpa".'
        )


def _describe(value) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


@torch.compiler.assume_constant_result
def _context_parallel() -> bool:
    """True inside ``torch.distributed.tensor.experimental.context_parallel``, which patches SDPA."""
    patched = torch.nn.functional.scaled_dot_product_attention
    if (getattr(patched, "__module__", None) or "").startswith("torch.distributed"):
        return True
    modes = torch.overrides._get_current_function_mode_stack()
    return any("context_parallel" in type(m).__module__ for m in modes)


def _one_dtype(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One dtype for q, k, v. Rotary embeddings and norms in FP32 leave q and k wider than v; norms
    that PEFT keeps in FP32 widen all three beyond the layer's weights."""
    dtype = value.dtype
    device = query.device.type
    autocast = has_autocast(device) and torch.is_autocast_enabled(device)
    if dtype == torch.float32 and not autocast:
        linear = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
        if linear is not None and linear.weight.dtype in (torch.bfloat16, torch.float16):
            dtype = linear.weight.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def register() -> None:
    """Register attention and mask function under one name. Importing the package does it; doing it
    again is harmless."""
    AttentionInterface.register(ATTN_IMPLEMENTATION, fp8_delta_matching_attention)
    AttentionMaskInterface.register(ATTN_IMPLEMENTATION, fp8_delta_matching_mask)
