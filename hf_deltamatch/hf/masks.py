"""The mask function that goes with the attention function.

Transformers drops every mask of an attention implementation that has no mask function of the same
name, without a word; so both are registered together. Three answers:

* ``None``: plain causal (or bidirectional), nothing hidden; ``is_causal`` of the module tells which.
  Only where the flag can be trusted: some decoders rely on the mask and leave their flag False
  (BigBird-Pegasus, PEGASUS-X, NLLB-MoE), and only models that support SDPA must have it right;
* the compact int32 mask ``[B, 3, 1, Tk]`` (key position or −1, window, query offset): padding,
  static caches, sliding windows, without a ``Tq x Tk`` tensor. It has four dimensions because only
  those survive the second pass that ``generate`` makes over prepared masks;
* a boolean mask ``[B, 1, Tq, Tk]`` for everything else (packing, chunks, overlays, bidirectional).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask
from transformers.utils.import_utils import is_tracing

NO_WINDOW = 2**31 - 1

# Models with other layer types index or concatenate the 4-D mask themselves.
_COMPACT_LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention", "mamba"}
# Models whose own code reads the values of the 4-D mask, beside attention: to pick keys, or to
# route tokens. They get it in the form which they read.
_OWN_READERS = {
    "axk2": sdpa_mask,
    "bigbird_pegasus": eager_mask,
    "deepseek_v4": eager_mask,  # appends a bias of 0 and -inf for its compressed keys
    "deepseek_v32": sdpa_mask,
    "doge": sdpa_mask,
    "glm_moe_dsa": sdpa_mask,
    "hy_v4": sdpa_mask,
    "nllb-moe": eager_mask,
    "qwen4_exp": sdpa_mask,
}


def fp8_delta_matching_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config=None,
    **kwargs,
) -> Tensor | None:
    """Called by ``transformers.masking_utils``, by keyword; see the module docstring.

    Raises:
        ValueError: ``attention_mask`` is not 2-D.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"fp8_delta_matching: `attention_mask` is {tuple(attention_mask.shape)}; it must be the "
            "2-D padding mask [B, Tk] (1 = token) or a boolean 4-D mask [B, 1, Tq, Tk] (True = "
            "attend). Add the missing dimension with mask[:, None]."
        )
    trusted = _flag_is_trusted(type(config))
    own_reader = _OWN_READERS.get(getattr(config, "model_type", None))
    if own_reader is None and _ignores_us(type(config)):
        own_reader = eager_mask
    chunk = getattr(config, "attention_chunk_size", None)
    plain = mask_function is causal_mask_function
    windowed = local_size is not None and local_size != chunk
    known = set(getattr(config, "layer_types", None) or ()) <= _COMPACT_LAYER_TYPES
    simple = (allow_is_causal_skip or q_length == 1) and not use_vmap and known
    if own_reader is not None or not (simple and (plain or windowed)):
        if not trusted or own_reader is not None:
            kwargs["allow_is_bidirectional_skip"] = False
        return (own_reader or sdpa_mask)(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
            **kwargs,
        )
    shown = _shown(attention_mask, kv_length, kv_offset)
    everything = kv_length == q_length and isinstance(q_offset, int) and q_offset == kv_offset == 0
    if plain and everything and allow_is_causal_skip and trusted and _all(shown):
        return None
    return compact_mask(
        batch_size, kv_length, q_offset, kv_offset, local_size if windowed else None, shown, device
    )


@torch.compiler.assume_constant_result
def _flag_is_trusted(config_class: type) -> bool:
    """Does the model of this config support SDPA, which reads ``is_causal`` where there is no mask?
    False for models that Transformers does not know."""
    return _every_model(config_class, lambda c: getattr(c, "_supports_sdpa", False))


@torch.compiler.assume_constant_result
def _ignores_us(config_class: type) -> bool:
    """Does its model run code of its own whatever ``attn_implementation`` says? (``check_model``
    says so.) Such code adds the mask to its logits."""
    return _every_model(config_class, lambda c: not c._can_set_attn_implementation())


def _every_model(config_class: type, test: Callable[[type], bool]) -> bool:
    classes = _models_of(config_class)
    return bool(classes) and all(test(c) for c in classes)


@functools.cache
def _models_of(config_class: type) -> tuple[type, ...]:
    for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):  # TrOCR is in the second alone
        try:
            classes = mapping.get(config_class, ())
        except (ValueError, AttributeError, ImportError):  # a mapping to a class that is not there
            continue
        if classes:
            return tuple(classes) if isinstance(classes, (tuple, list)) else (classes,)
    return ()


def _shown(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """``[B, Tk]`` bool of keys that are not padding; keys beyond the 2-D mask are hidden."""
    if attention_mask is None:
        return None
    missing = kv_offset + kv_length - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length].bool()


def _all(shown: Tensor | None) -> bool:
    # Without values, the compact mask is right as well.
    return shown is None or (has_values(shown) and bool(shown.all()))


def has_values(tensor: Tensor) -> bool:
    """May values be read? Not in a compiled graph, which they would break, nor on meta."""
    return not is_tracing(tensor) and not tensor.is_meta


def compact_mask(
    batch_size: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    window: int | None,
    shown: Tensor | None,
    device: torch.device | str,
) -> Tensor:
    """int32 ``[B, 3, 1, Tk]``: key position (−1 = hidden), window, query offset."""
    position = torch.arange(kv_length, device=device, dtype=torch.int32) + kv_offset
    position = position.expand(batch_size, kv_length)
    if shown is not None:
        position = torch.where(shown, position, -1)
    # Configs write huge windows for none; int32 holds up to NO_WINDOW.
    window = min(window or NO_WINDOW, NO_WINDOW)
    rows = torch.full((batch_size, kv_length), window, device=device, dtype=torch.int32)
    if isinstance(q_offset, Tensor):
        offset = q_offset.to(device=device, dtype=torch.int32).expand(batch_size, kv_length)
    else:
        offset = torch.full_like(rows, q_offset)
    return torch.stack((position.to(torch.int32), rows, offset), 1)[:, :, None]


def own_key_shown(mask: Tensor, q_length: int) -> Tensor:
    """``[B, Tq]``: is the key of the query itself shown by a compact mask? False for padding."""
    position, _, offset = mask[:, :, 0].long().unbind(1)
    index = torch.arange(position.shape[-1], device=mask.device)
    # Keys are consecutive: what is shown tells where the first one lies (a sliding cache drops some).
    first = torch.where(position >= 0, position - index, -NO_WINDOW).amax(-1, keepdim=True)
    own = offset[:, :1] - first + torch.arange(q_length, device=mask.device)
    return position.gather(1, own.clamp(0, position.shape[-1] - 1)) >= 0


def crosses(mask: Tensor, restarts: Tensor) -> bool:
    """Does a query that starts a sequence see the token before it, by a boolean mask? ``restarts`` is
    ``[B|1, Tq − 1]``, True where the sequence changes between a token and the next.

    A causal row ends at its own key. Where both rows see everything, or the one before is padding,
    nothing starts.
    """
    mask = mask.view((1,) * (4 - mask.dim()) + tuple(mask.shape))[:, 0]
    if mask.shape[1] != restarts.shape[1] + 1:
        return False
    batch = max(mask.shape[0], restarts.shape[0])
    b, t = restarts.expand(batch, -1).nonzero().unbind(1)
    mask = mask.expand(batch, -1, -1)
    first, before = mask[b, t + 1], mask[b, t]
    index = torch.arange(mask.shape[-1], device=mask.device)
    own, previous = (torch.where(rows, index, -1).amax(-1) for rows in (first, before))
    seen = first.gather(1, previous.clamp(0)[:, None])[:, 0]
    return bool(((previous >= 0) & (previous == own - 1) & seen).any())


def usable_mask(mask: Tensor) -> Tensor:
    """The mask that an attention module was handed, as the op takes it: compact or boolean.

    Raises:
        ValueError: a mask of integers, one with a dimension missing, or one that is a bias.
    """
    given = f"fp8_delta_matching: `attention_mask` is {mask.dtype} {tuple(mask.shape)}"
    allowed = (
        "Pass a boolean mask [B, 1, Tq, Tk] (True = attend), an additive one of 0 and -inf, or the "
        "2-D padding mask [B, Tk]"
    )
    if mask.dim() == 3 and mask.shape[0] != 1:
        raise ValueError(f"{given}, without a dimension for heads. {allowed}: mask[:, None].")
    if mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[1:3] == (3, 1):
        return mask  # of our own making
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"{given}: a mask of integers could mean either. {allowed}: mask.bool() if 1 means "
            "attend."
        )
    return as_boolean(mask)


def as_boolean(mask: Tensor) -> Tensor:
    """A custom additive mask of zeros and very negative values as a boolean one (True = attend).

    Raises:
        ValueError: values in between are a bias, which the op does not implement.
    """
    if mask.dtype == torch.bool:
        return mask
    attend = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if has_values(mask) and not bool((attend | hidden).all()):
        raise ValueError(
            f"fp8_delta_matching: the additive `attention_mask` {tuple(mask.shape)} holds values "
            "other than 0 and the most negative number: a bias on the logits, which is not "
            "implemented. Pass a boolean or 2-D mask, or load this model with "
            'attn_implementation="sdpa".'
        )
    if is_tracing(mask):
        raise ValueError(
            "fp8_delta_matching: an additive `attention_mask` cannot be checked under "
            "torch.compile. Pass a boolean mask (True = attend) or the 2-D padding mask."
        )
    return attend
