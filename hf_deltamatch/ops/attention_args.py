"""Validation of attention arguments. Every message: what, what was given, what is allowed, what to do."""

from __future__ import annotations

import numbers
import sys

import torch
from torch import Tensor

from hf_deltamatch.ops.saved import distinct
from hf_deltamatch.recipes import AttentionRecipe
from hf_deltamatch.reference.visibility import NO_WINDOW

_FN = "delta_matching_attention"

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the ops quantise, and that autocast may cast: it must not make data of integers,
FP8 payloads without their descales or FP64."""


def require_tensors(op: str, **arguments: object) -> None:
    """TypeError for the first argument that is no tensor; before anything reads its attributes."""
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: `{name}` is a {type(x).__name__}; it must be a torch.Tensor.")
        if x.is_nested or x.layout != torch.strided:
            kind = "a nested tensor" if x.is_nested else f"{x.layout}"
            raise TypeError(
                f"{op}: `{name}` is {kind}; it must be a dense torch.Tensor (x.to_dense(), or for a "
                "nested one torch.nested.to_padded_tensor)."
            )


def require_alike(op: str, **pair: Tensor) -> None:
    """ValueError unless both tensors have one shape, dtype and device."""
    (a, x), (b, y) = pair.items()
    if x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
        raise ValueError(
            f"{op}: {a} is {x.dtype} {tuple(x.shape)} on {x.device}, {b} {y.dtype} {tuple(y.shape)} on "
            f"{y.device}; they go together, so all three must be the same."
        )


def autocast_dtype(*inputs: Tensor) -> torch.dtype | None:
    """Dtype to cast ``inputs`` to under autocast, as SDPA does; None outside of it and where one of
    them is not FP32, BF16 or FP16 (left as they are, for the validation or for FP64)."""
    for x in inputs:
        if x.dtype not in HIGH_PRECISION:
            return None
    kind = "cuda" if inputs[0].is_cuda else inputs[0].device.type
    known = kind in ("cuda", "cpu") or has_autocast(kind)
    if not known or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


@torch.compiler.assume_constant_result
def has_autocast(device_type: str) -> bool:
    """A fact of the build, which torch 2.11 cannot trace."""
    return torch.amp.is_autocast_available(device_type)


def refuse_double_backward(op: str) -> None:
    """Called in a backward. Gradients of gradients would silently lack the part through the saved
    operands, so a graph of the backward (``create_graph=True``) is an error."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{op}: its backward was run with create_graph=True, but it has no second derivative. "
            "Use SDPA or nn.Linear where one is needed."
        )


def refuse_transforms(op: str) -> None:
    """Within ``torch.func.vmap``, ``grad``, ``jvp`` … torch would say what the author of an op has to
    override."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{op}: called within a transform of torch.func (vmap, grad, jvp …), which it does not "
            "support. Use torch.autograd.grad for gradients, a larger batch instead of vmap, or SDPA "
            "or nn.Linear there."
        )


def split_cu_seqlens(
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None,
) -> tuple[Tensor | None, Tensor | None]:
    """The offsets for q and for k, as two tensor objects."""
    if cu_seqlens is None:
        return None, None
    if isinstance(cu_seqlens, Tensor):
        return tuple(distinct(cu_seqlens, cu_seqlens))
    if (
        isinstance(cu_seqlens, (tuple, list))
        and len(cu_seqlens) == 2
        and all(isinstance(c, Tensor) for c in cu_seqlens)
    ):
        return tuple(distinct(*cu_seqlens))
    raise TypeError(
        f"{_FN}: `cu_seqlens` is a {type(cu_seqlens).__name__}; it must be one int32 tensor [n + 1] "
        "or a pair of them for q and k."
    )


def number(
    name: str, value: object, *, instead: str, most: float = sys.float_info.max
) -> float | None:
    """``softmax_scale`` or ``softcap`` as a finite float of at most ``most``; None stays None.

    A tensor that wants a gradient would silently get none, so it is refused; ``instead`` says what
    to do.
    """
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise ValueError(
                f"{_FN}: `{name}` is a tensor that requires grad; it would get no gradient. {instead}"
            )
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(
                f"{_FN}: `{name}` is a tensor, {value.dtype} {tuple(value.shape)}; it must be one "
                "finite number."
            )
        value = value.item()
    known = isinstance(value, (int, float, torch.SymInt, torch.SymFloat))
    if not known and isinstance(value, numbers.Real):  # NumPy's scalars
        value, known = float(value), True
    if not known or isinstance(value, bool):
        raise TypeError(
            f"{_FN}: `{name}` is {value!r} ({type(value).__name__}); it must be a finite number or "
            "None."
        )
    # One comparison, which is false for NaN too, and which symbolic numbers know.
    if not abs(value) <= most:
        range_ = "" if most == sys.float_info.max else f" of at most {most:g}, as logits are FP32,"
        raise ValueError(
            f"{_FN}: `{name}` is {value!r}; it must be a finite number{range_} or None."
        )
    return float(value)


def check_window(window: int | None, is_causal: bool) -> int | None:
    """The window to use: None where it is too long to hide a key of any sequence, so that no
    backend has to hold it in 32 bits.

    Raises:
        ValueError: not a positive int, or without ``is_causal``.
    """
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, (int, torch.SymInt)) or window < 1:
        raise ValueError(
            f"{_FN}: `window` is {window!r}; it must be a positive int (it counts the query "
            "itself) or None."
        )
    if not is_causal:
        raise ValueError(
            f"{_FN}: `window` is {window} with is_causal=False; a window reaches back from the "
            "query. Pass is_causal=True, or a boolean mask for other patterns."
        )
    return None if window >= NO_WINDOW else window


def check_types(
    q: object, k: object, v: object, mask: object, sinks: object, is_causal: object
) -> None:
    """Types alone, before anything reads a dtype or a shape."""
    require_tensors(_FN, q=q, k=k, v=v)
    require_tensors(_FN, **{n: x for n, x in (("mask", mask), ("sinks", sinks)) if x is not None})
    if not isinstance(is_causal, (bool, torch.SymBool)):
        raise TypeError(
            f"{_FN}: `is_causal` is {is_causal!r} ({type(is_causal).__name__}); it must be True or "
            "False."
        )


def validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    recipe: AttentionRecipe,
) -> None:
    """Raises on the first argument that does not fit."""
    _validate_qkv(q, k, v, recipe)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{_FN}: `softcap` is {softcap!r}; it must be positive, or None for none.")
    if softcap is not None and not 1e-30 <= softcap <= 1e30:
        raise ValueError(
            f"{_FN}: `softcap` is {softcap!r}; logits are FP32, so it must lie between 1e-30 and 1e30. "
            "Pass None for none."
        )
    for name, x in (("mask", mask), ("sinks", sinks), ("cu_seqlens", cu_q), ("cu_seqlens", cu_k)):
        if x is not None and x.device != q.device:
            raise ValueError(f"{_FN}: `{name}` is on {x.device}, q on {q.device}; move it there.")
    if mask is not None:
        _validate_mask(mask, q, k, is_causal)
    allowed = (*HIGH_PRECISION, torch.float64)
    if sinks is not None and (sinks.shape != (q.shape[1],) or sinks.dtype not in allowed):
        raise ValueError(
            f"{_FN}: `sinks` is {sinks.dtype} {tuple(sinks.shape)}; it must be floating point (not "
            f"FP8) with one logit per query head, ({q.shape[1]},)."
        )
    if cu_q is not None:
        _validate_cu_seqlens(q, k, cu_q, cu_k)
    leaks = is_causal or mask is not None
    if recipe.quantize and recipe.block == "128xD" and recipe.descale == "fp32" and leaks:
        raise ValueError(
            f"{_FN}: recipe {recipe.name!r} has FP32 descales of 128-token tiles with a causal or "
            "masked attention; a later token would change the rounding of earlier ones. Use "
            "descale='pow2', or block='1xD' for FP32 descales."
        )


def _validate_qkv(q: Tensor, k: Tensor, v: Tensor, recipe: AttentionRecipe) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(
                f"{_FN}: `{name}` is {tuple(x.shape)}; it must be [B, H, T, D] (layout BHTD)."
            )
    allowed = HIGH_PRECISION if recipe.quantize else (*HIGH_PRECISION, torch.float64)
    given = f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}"
    if any(x.dtype not in allowed for x in (q, k, v)):
        raise ValueError(
            f"{_FN}: {given}; recipe {recipe.name!r} takes {', '.join(str(d) for d in allowed)}, one "
            "dtype for all. Cast them."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"{_FN}: {given}; they must share one dtype. Cast them, or (not FP64) run under "
            "torch.autocast."
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"{_FN}: q, k, v are on {q.device}, {k.device}, {v.device}; move them to one device."
        )
    B, Hq, _, D = q.shape
    if k.shape[0] != B or v.shape[0] != B or k.shape[1:3] != v.shape[1:3] or k.shape[3] != D:
        raise ValueError(
            f"{_FN}: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit; q is "
            "[B, Hq, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv]."
        )
    if k.shape[1] == 0 or Hq % k.shape[1]:
        raise ValueError(
            f"{_FN}: {Hq} query heads over {k.shape[1]} key heads; Hq must be a multiple of Hkv."
        )
    if D == 0 or v.shape[3] == 0:
        raise ValueError(f"{_FN}: head_dim is {D} and {v.shape[3]} for v; both must be positive.")


def _validate_mask(mask: Tensor, q: Tensor, k: Tensor, is_causal: bool) -> None:
    B, Hq, Tq, _ = q.shape
    Tk = k.shape[2]
    if mask.dtype == torch.int32:
        # `==` and not `in`: lengths may be symbolic under torch.compile.
        batch_fits = mask.dim() == 4 and (mask.shape[0] == B or mask.shape[0] == 1)
        if not batch_fits or mask.shape[1:] != (3, 1, Tk):
            raise ValueError(
                f"{_FN}: the compact int32 `mask` is {tuple(mask.shape)}; it must be "
                f"[B, 3, 1, Tk] = {(B, 3, 1, Tk)}."
            )
        if is_causal:
            raise ValueError(
                f"{_FN}: is_causal=True together with the compact int32 `mask`, which carries "
                "causality and window itself. Leave is_causal and window at their defaults."
            )
        return
    if mask.dtype != torch.bool:
        raise ValueError(
            f"{_FN}: `mask` is {mask.dtype}; it must be boolean (True = attend) or the compact "
            "int32 [B, 3, 1, Tk]. An additive bias is not supported; for a mask of 0 and −inf pass "
            "`mask == 0`."
        )
    wanted = (B, Hq, Tq, Tk)
    fits = mask.dim() <= 4 and all(
        m == 1 or m == w for m, w in zip(reversed(mask.shape), reversed(wanted), strict=False)
    )
    if not fits:
        raise ValueError(
            f"{_FN}: `mask` is {tuple(mask.shape)}; it must broadcast to [B, Hq, Tq, Tk] = {wanted}."
        )


def _validate_cu_seqlens(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    for name, cu in (("q", cu_q), ("k", cu_k)):
        if cu.dtype not in (torch.int32, torch.int64) or cu.dim() != 1 or cu.numel() < 2:
            raise ValueError(
                f"{_FN}: `cu_seqlens` of {name} is {cu.dtype} {tuple(cu.shape)}; it must be int32 "
                "[n + 1], rising from 0 to the number of tokens."
            )
    if cu_q.numel() != cu_k.numel():
        raise ValueError(
            f"{_FN}: `cu_seqlens` names {cu_q.numel() - 1} sequences for q and "
            f"{cu_k.numel() - 1} for k; the numbers must agree."
        )
    if q.shape[0] != 1:
        raise ValueError(
            f"{_FN}: `cu_seqlens` with batch {q.shape[0]}; packed sequences lie in one row, B = 1."
        )
