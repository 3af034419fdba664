"""Packed sequences: the mask that Transformers makes beside ``cu_seq_lens`` must say the same, and
without either the sequences must not see each other."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.utils.import_utils import is_tracing

from hf_deltamatch.hf.masks import NO_WINDOW, crosses, has_values, own_key_shown

# Answers about tensors that are as they were, newest last, with the layers that have asked: one look
# per forward and kind of mask, as all layers are handed the same tensors.
_answers: tuple[tuple[tuple, tuple, bool, weakref.WeakSet], ...] = ()
_ROWS = 2048


def drop_redundant_mask(
    asker: nn.Module,
    mask: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    q_length: int,
    k_length: int,
    causal: bool,
    window: int | None,
) -> Tensor | None:
    """None if ``mask`` hides nothing of what ``cu_seqlens``, causality and the window leave, and shows
    no later token that causality would hide.

    Transformers finds packing in the positions and makes a mask of it, and a sliding window brings
    one of its own, also where ``cu_seq_lens`` say it all. Values cannot be read in a compiled graph:
    there the graph asserts that nothing is lost.
    """
    square = q_length == k_length and mask.shape[-1] == k_length
    if not square or mask.dim() != 4 or mask.shape[0] != 1 or mask.is_meta:
        return mask
    if is_tracing(mask):
        shown = _shows_all(mask, *cu_seqlens, causal, window, rows=q_length)
        torch._assert_async(
            shown,
            "fp8_delta_matching: `attention_mask` hides tokens that cu_seq_lens show, or shows later "
            "ones. Pass one of them: padding-free batches need no attention_mask.",
        )
        return None
    redundant = _once(
        asker,
        lambda: bool(_shows_all(mask, *cu_seqlens, causal, window, rows=_ROWS)),
        (mask, *cu_seqlens),
        (causal, window),
    )
    return None if redundant else mask


def _shows_all(
    mask: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool, window: int | None, rows: int
) -> Tensor:
    """Scalar bool: does the mask show every pair that the rest lets through, and no later token of
    the same sequence where the rest is causal?"""
    T = mask.shape[-1]
    index = torch.arange(T, device=mask.device, dtype=torch.int32)
    same_ends = (
        (cu_q == cu_k).all() if cu_q.shape == cu_k.shape else index.new_zeros((), dtype=bool)
    )
    if mask.dtype == torch.int32:
        # Keys in order, none hidden, queries beside their own keys: what is left is the window.
        position, reach, offset = mask[0, :, 0].unbind(0)
        wide = reach >= (min(window or NO_WINDOW, NO_WINDOW) if causal else NO_WINDOW)
        in_order = (position == index) & (offset == 0)
        return same_ends & (in_order & (wide | (reach >= T))).all() & causal
    segment = torch.searchsorted(cu_k[1:].int().contiguous(), index, right=True, out_int32=True)
    mask = mask.expand(-1, -1, T, -1)
    shown = same_ends
    for first in range(0, T, rows):
        some = index[first : first + rows, None]
        part = mask[:, :, first : first + rows]
        through = segment[first : first + rows, None] == segment
        if causal:
            later = index > some
            shown = shown & ~(part & through & later).any()
            through = through & ~later
            if window is not None:
                through = through & (some - index < window)
        shown = shown & (part | ~through).all()
    return shown


def refuse_unmasked_packing(
    asker: nn.Module,
    position_ids: Tensor | None,
    seq_idx: Tensor | None,
    mask: Tensor | None,
    q_length: int,
) -> None:
    """Positions that restart, or another index of the sequence, mean packed sequences; without a mask
    they would see each other.

    Transformers looks for packing only without a cache and without an ``attention_mask``, and only
    in models that hand their positions to the mask; its masks are then boolean, and separate the
    sequences. Values cannot be read in a compiled graph.

    Raises:
        ValueError: sequences change between tokens that are no padding, and no mask separates them.
    """
    position_ids, seq_idx = (
        t if t is not None and t.dim() == 2 else None for t in (position_ids, seq_idx)
    )
    given = [t for t in (position_ids, seq_idx) if t is not None]
    if not given or q_length == 1 or not all(map(has_values, given)):
        return

    def meet() -> bool:
        restarts = torch.zeros((), dtype=torch.bool, device=given[0].device)
        if position_ids is not None:
            restarts = restarts | (position_ids.diff(dim=-1) <= 0)
        if seq_idx is not None:
            restarts = restarts | (seq_idx.diff(dim=-1) != 0)
        if mask is not None and mask.dtype == torch.int32:  # positions of padding are arbitrary
            shown = own_key_shown(mask, q_length)
            restarts = restarts & shown[:, 1:] & shown[:, :-1]
        boolean = mask is not None and mask.dtype == torch.bool
        return bool(restarts.any()) and (not boolean or crosses(mask, restarts))

    if _once(asker, meet, (position_ids, seq_idx, mask)):
        raise ValueError(
            "fp8_delta_matching: `position_ids` restart (or `seq_idx` changes) within a row (packed "
            "sequences), but no mask separates them, so they would attend to each other. Pass "
            "cu_seq_lens_q and cu_seq_lens_k (DataCollatorWithFlattening with "
            "return_flash_attn_kwargs=True makes them), which works for every model that hands "
            "keyword arguments on; or, for models that look for packing in their positions, "
            "use_cache=False and no attention_mask."
        )


def _once(
    asker: nn.Module, look: Callable[[], bool], tensors: tuple[Tensor | None, ...], *options
) -> bool:
    """``look()``, or its answer of last time where the tensors have not changed since. A look waits
    for the device.

    Writes through ``.data``, NumPy, a collective or a kernel count no version, so an answer is good
    for one forward: a layer that asks for it a second time has it looked at again.
    """
    global _answers
    for seen, seen_options, answer, askers in _answers:
        if len(seen) == len(tensors) and seen_options == options and asker not in askers:
            if all(map(_unchanged, seen, tensors)):
                askers.add(asker)
                return answer
    answer = look()
    # Inference tensors count no versions: a change in place would go unseen.
    if not torch.is_inference_mode_enabled() and not any(
        t is not None and t.is_inference() for t in tensors
    ):
        entry = tuple(map(_remember, tensors)), options, answer, weakref.WeakSet((asker,))
        others = (a for a in _answers if not _same_question(a, entry))
        _answers = (*others, entry)[-4:]
    return answer


def _same_question(a: tuple, b: tuple) -> bool:
    return a[1] == b[1] and len(a[0]) == len(b[0]) and all(map(_same_tensor, a[0], b[0]))


def _same_tensor(a: tuple | None, b: tuple | None) -> bool:
    if a is None or b is None:
        return a is b
    return a[0]() is b[0]()


def _remember(tensor: Tensor | None) -> tuple | None:
    return None if tensor is None else (weakref.ref(tensor), tensor._version)


def _unchanged(seen: tuple | None, tensor: Tensor | None) -> bool:
    if seen is None or tensor is None:
        return seen is tensor
    return seen[0]() is tensor and not tensor.is_inference() and seen[1] == tensor._version
