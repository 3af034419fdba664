"""The attention custom ops: schema, fake implementation, choice of backend.

Opaque to ``torch.compile`` and blind to autograd; :mod:`hf_deltamatch.ops.attention` adds both
validation and the autograd formula. Annotations are evaluated here (the schema is inferred from
them), so this file has no ``from __future__ import annotations``.
"""

import functools

import torch
from torch import Tensor

from hf_deltamatch import kernels, reference
from hf_deltamatch.ops import observe
from hf_deltamatch.ops.backend import refuse_unsupported
from hf_deltamatch.ops.library import NAMESPACE, define_op
from hf_deltamatch.recipes import AttentionRecipe
from hf_deltamatch.reference.attention import AttentionForward, empty_saved

_OPTIONS = (
    "mask", "sinks", "cu_seqlens_q", "cu_seqlens_k", "is_causal", "window", "softmax_scale",
    "softcap", "recipe",
)  # fmt: skip


@define_op
def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    is_causal: bool,
    window: int | None,
    softmax_scale: float,
    softcap: float | None,
    recipe: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns ``o, lse, q_fp8, q_descale, k_fp8, k_descale, v_fp8, v_descale``: the fields of
    :class:`hf_deltamatch.reference.AttentionForward`; with ``backend="triton"`` and block ``mx``
    the descales are uint8 E8M0 codes."""
    decoded = AttentionRecipe.decode(recipe)
    options = _options(
        mask, sinks, cu_seqlens_q, cu_seqlens_k, is_causal, window, softmax_scale, softcap, decoded
    )
    if backend == "triton":
        refuse_unsupported(
            "delta_matching_attention",
            kernels.unsupported_attention(
                decoded,
                (q.shape[-1], v.shape[-1]),
                softmax_scale,
                q.device,
                masked_packing=mask is not None and cu_seqlens_q is not None,
                boolean_mask=mask is not None and mask.dtype == torch.bool,
                heads=q.shape[0] * q.shape[1],
                tokens=max(q.shape[2], k.shape[2]),
            ),
        )
        observe.CALLS["attention_fwd"] += 1
        return tuple(_kernels().attention_fwd(q, k, v, **options))
    observe.CALLS["attention_fwd"] += 1
    return tuple(reference.attention_fwd(q, k, v, **options))


def _options(*values) -> dict:
    """The arguments that forward and backward share, by the names of the implementations."""
    return dict(zip(_OPTIONS, values, strict=True))


@functools.cache
def _kernels():
    """Triton is imported only where it is used."""
    from hf_deltamatch.ops import attention_kernels

    return attention_kernels


@torch.library.register_fake(f"{NAMESPACE}::attention_fwd")
def _(
    q, k, v, mask, sinks, cu_seqlens_q, cu_seqlens_k, is_causal, window, softmax_scale, softcap,
    recipe, backend,
):  # fmt: skip
    B, H, T, _ = q.shape
    o = q.new_empty(B, T, H, v.shape[-1]).transpose(1, 2)
    stat = torch.float64 if q.dtype == torch.float64 else torch.float32
    make = empty_saved if backend == "reference" else _kernels().empty_saved
    saved = make(q, k, v, mask, cu_seqlens_q, AttentionRecipe.decode(recipe))
    return o, q.new_empty(B, H, T, dtype=stat), *(t for which in "qkv" for t in saved[which])


@define_op
def attention_bwd(
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor | None,
    lse: Tensor,
    q: Tensor,
    q_descale: Tensor,
    k: Tensor,
    k_descale: Tensor,
    v: Tensor,
    v_descale: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    is_causal: bool,
    window: int | None,
    softmax_scale: float,
    softcap: float | None,
    recipe: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns ``dq, dk, dv, dsinks, delta``. ``q, k, v`` are the FP8 payloads of the forward, or the
    inputs themselves for a recipe with ``quantize=False``. Under the matched δ ``o`` may be None: kernels
    that would compute δ and dQ in one pass then take two."""
    observe.CALLS["attention_bwd"] += 1
    decoded = AttentionRecipe.decode(recipe)
    collector = observe.DsCollector()
    options = _options(
        mask, sinks, cu_seqlens_q, cu_seqlens_k, is_causal, window, softmax_scale, softcap, decoded
    )
    saved = AttentionForward(o, lse, q, q_descale, k, k_descale, v, v_descale)
    if backend == "triton":
        hook = None if collector.hook is None else collector.parts.append
        grads = _kernels().attention_bwd(do, dlse, saved, parts_hook=hook, **options)
    else:
        qkv = None if decoded.quantize else (q, k, v)
        grads = reference.attention_bwd(do, dlse, saved, qkv, ds_hook=collector.hook, **options)
    collector.finish()
    return tuple(grads)


@torch.library.register_fake(f"{NAMESPACE}::attention_bwd")
def _(
    do, dlse, o, lse, q, q_descale, k, k_descale, v, v_descale, mask, sinks, cu_seqlens_q,
    cu_seqlens_k, is_causal, window, softmax_scale, softcap, recipe, backend,
):  # fmt: skip
    if backend == "reference":
        dq, dk, dv = (x.new_empty(x.shape, dtype=do.dtype) for x in (q, k, v))
    else:
        dq, dk, dv = (_empty_bthd(x, do.dtype) for x in (q, k, v))
    n_sinks = 0 if sinks is None else q.shape[1]
    return dq, dk, dv, lse.new_empty(n_sinks), torch.empty_like(lse)


def _empty_bthd(x: Tensor, dtype: torch.dtype) -> Tensor:
    B, H, T, D = x.shape
    return x.new_empty(B, T, H, D, dtype=dtype).transpose(1, 2)
