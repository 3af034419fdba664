"""Public FP8 attention: validation, autocast, autograd.

What is saved for the backward, per token and head at head_dim D with the default recipe: 3·D bytes
of FP8 Q, K, V, a descale of 4 bytes per 128 tokens each, 4 bytes of lse, and the op's own output, without
a copy, where something reads it: kernels that compute the matched δ and dQ in one pass estimate δ from
it, and the other rules take it from there. The high-precision inputs are not kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_deltamatch.kernels.attention_config import has_one_pass
from hf_deltamatch.ops.attention_args import (
    autocast_dtype,
    check_types,
    check_window,
    number,
    refuse_double_backward,
    refuse_transforms,
    split_cu_seqlens,
    validate,
)
from hf_deltamatch.ops.attention_op import attention_bwd, attention_fwd
from hf_deltamatch.ops.attention_plain import plain_attention
from hf_deltamatch.ops.backend import choose, runs_plain
from hf_deltamatch.ops.saved import distinct, kept
from hf_deltamatch.recipes import AttentionRecipe
from hf_deltamatch.reference.operands import has_tile_descales


class AttentionFunction(torch.autograd.Function):
    """Saves and forwards; the work is in the custom ops. Returns ``o`` and, ``with_lse``, ``lse``: an
    output that nobody asked for would get a gradient of zeros, which costs the kernels their time."""

    @staticmethod
    def forward(
        ctx, q, k, v, mask, sinks, cu_q, cu_k, is_causal, window, softmax_scale, softcap, quantize,
        recipe, backend, with_lse, keep_output,
    ):  # fmt: skip
        o, lse, q8, qd, k8, kd, v8, vd = attention_fwd(
            q, k, v, mask, sinks, cu_q, cu_k, is_causal, window, softmax_scale, softcap, recipe,
            backend,
        )  # fmt: skip
        qkv = (q8, k8, v8) if quantize else map(kept, (q, k, v))
        ctx.save_for_backward(
            kept(o) if keep_output else None, kept(lse) if with_lse else lse, *qkv, qd, kd, vd, mask,
            sinks, cu_q, cu_k,
        )  # fmt: skip
        ctx.options = (is_causal, window, softmax_scale, softcap, recipe, backend)
        return (o, lse) if with_lse else o

    @staticmethod
    def backward(ctx, do, dlse=None):
        refuse_double_backward("delta_matching_attention")
        o, lse, q, k, v, qd, kd, vd, mask, sinks, cu_q, cu_k = ctx.saved_tensors
        dq, dk, dv, dsinks, _ = attention_bwd(
            do, dlse, o, lse, q, qd, k, kd, v, vd, mask, sinks, cu_q, cu_k, *ctx.options
        )
        dsinks = dsinks.to(sinks.dtype) if ctx.needs_input_grad[4] else None
        return dq, dk, dv, None, dsinks, *(None,) * 11


def delta_matching_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
    recipe: str | AttentionRecipe = "delta_matching",
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention with FP8 operands in all seven products and a matched row correction δ.

    Layout ``BHTD`` in and out, like ``F.scaled_dot_product_attention``; the output is stored as
    ``BTHD``, so that ``o.transpose(1, 2)`` is contiguous.

    Args:
        q: ``[B, Hq, Tq, D]``, FP32, BF16 or FP16 (FP64 too with ``quantize=False``). Any strides.
        k: ``[B, Hkv, Tk, D]``; ``Hq`` is a multiple of ``Hkv`` (GQA, MQA), nothing is repeated.
        v: ``[B, Hkv, Tk, Dv]``.
        is_causal: query i sees keys up to ``i + Tk − Tq``: aligned *bottom-right*, unlike SDPA's
            flag, so that it is right with a cache.
        window: with ``is_causal``, the newest ``window`` keys, the query's own included; 2³¹ − 1
            and more is no window.
        mask: boolean, broadcastable to ``[B, Hq, Tq, Tk]``, True = attend (and-ed with the rest);
            or the compact int32 mask ``[B, 3, 1, Tk]`` with rows key position (−1 = hidden),
            window, query offset, which carries causality itself.
        softmax_scale: temperature of the logits, of at most 1e30; default ``D ** -0.5``. It has
            no gradient (a learned one multiplies q).
        softcap: logits become ``softcap · tanh(S / softcap)``; positive, without a gradient.
        sinks: ``[Hq]``, a learned logit per head that takes probability and has no value.
        cu_seqlens: int32 offsets of packed sequences ``[n + 1]`` (or a pair for q and k), B = 1,
            rising from 0 to the number of tokens (on a CUDA device an assertion there).
            Causality and window hold within a sequence.
        recipe: a name or an :class:`AttentionRecipe`. One that does not quantise (``"bf16"``) runs
            torch's own attention on a device, unless ``backend`` or ``return_lse`` is given.
        return_lse: also return ``lse``.
        backend: ``None`` (by device), ``"reference"`` (pure torch) or ``"triton"`` (the kernels).

    Returns:
        ``o [B, Hq, Tq, Dv]`` in the dtype of q; with ``return_lse`` also ``lse [B, Hq, Tq]``, FP32,
        natural logarithm, −inf where a query sees no key (its output and gradients are 0).

    Raises:
        ValueError, TypeError: arguments that do not fit, with what was given and what is allowed.
        NotImplementedError: no kernel for the device; nothing falls back by itself.

    >>> q, k, v = (torch.randn(1, h, 128, 64, requires_grad=True) for h in (8, 2, 2))
    >>> delta_matching_attention(q, k, v, is_causal=True).shape
    torch.Size([1, 8, 128, 64])
    """
    recipe = AttentionRecipe.resolve(recipe)
    refuse_transforms("delta_matching_attention")
    check_types(q, k, v, mask, sinks, is_causal)
    window = check_window(window, is_causal)
    softmax_scale = number(
        "softmax_scale", softmax_scale, instead="Multiply q by it instead.", most=1e30
    )
    softcap = number("softcap", softcap, instead="Pass a fixed number, softcap.item() for one.")
    dtype = autocast_dtype(q, k, v)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    q, k, v = distinct(q, k, v)
    cu_q, cu_k = split_cu_seqlens(cu_seqlens)
    validate(q, k, v, is_causal, mask, softcap, sinks, cu_q, cu_k, recipe)
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    if runs_plain(recipe.quantize, q.device, backend) and not return_lse:
        return plain_attention(
            q, k, v, mask, sinks, cu_q, cu_k, is_causal, window, float(softmax_scale), softcap
        )
    chosen = choose("attention", q.device, backend)
    tile = has_tile_descales(recipe, mask)
    starts_from_output = has_one_pass(recipe, q.shape[-1], v.shape[-1], tile=tile)
    return AttentionFunction.apply(
        q, k, v, mask, sinks, cu_q, cu_k, is_causal, window, float(softmax_scale), softcap,
        recipe.quantize, recipe.encoded, chosen, bool(return_lse),
        recipe.delta != "matched" or (chosen == "triton" and starts_from_output),
    )  # fmt: skip
