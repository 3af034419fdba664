"""Launchers of the attention kernels: tensors in, tensors out.

Memory, per token and head at head_dim D (bytes; D padded to 16):

* saved for the backward: 3·D of FP8 payload (Q, K, V; K and V only once per group), a descale of 4
  per 128 tokens and operand (``128xD``) or per token (``1xD``), 4 of lse; where one pass computes δ
  and dQ, and under an unmatched δ, also the op's own output;
* forward, temporary: D of transposed V;
* backward, temporary: 4·D (dO, and transposed Q, K, dO), 12 of row statistics (28 with ``1xD``, where
  dO has a descale, and Q, K, dO a fold, per token), beside dQ, dK, dV in the dtype of dO.

Block ``mx`` has launchers of its own: ``attention_mx_launch``. The Hopper kernels are of the backward,
which is the same under every unmatched δ.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hf_deltamatch.kernels import attention_config as config
from hf_deltamatch.kernels.attention_dkdv import _attention_bwd_dkdv_kernel
from hf_deltamatch.kernels.attention_dq import _attention_bwd_dq_kernel
from hf_deltamatch.kernels.attention_fwd import _attention_fwd_kernel
from hf_deltamatch.kernels.attention_operands import quantize_do, quantize_qkv, transpose_qk
from hf_deltamatch.kernels.attention_problem import Problem, saved_views
from hf_deltamatch.kernels.attention_rows import _mean_key_kernel
from hf_deltamatch.kernels.launch import assert_rising


class Forward(NamedTuple):
    """``o [B, Hq, Tq, Dv]`` stored as ``BTHD``; ``lse [B, Hq, Tq]``; payloads ``[B, H, T, D]`` in
    rows of a multiple of 16 bytes; descales ``[B, H, slots]`` or ``[B, H, T]``, or for ``mx`` uint8
    E8M0 codes ``[B, H, T, ceil(D / 32)]``."""

    o: Tensor
    lse: Tensor
    q_fp8: Tensor
    q_descale: Tensor
    k_fp8: Tensor
    k_descale: Tensor
    v_fp8: Tensor
    v_descale: Tensor


class Backward(NamedTuple):
    """Gradients stored as ``BTHD``; ``dsinks [Hq]``, summed from ``ds_sink [B, Hq, Tq]`` (None
    without sinks); ``delta [B, Hq, Tq]``; ``row_sums [2, B, Hq, Tq]`` (ΣdS and
    Σ|dS| of every row, FP64) and ``ds``: of the dQ and of the dK/dV kernel, where asked for."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor
    delta: Tensor
    row_sums: Tensor | None
    ds: tuple[Tensor, Tensor] | None
    ds_sink: Tensor | None


def _rows(x: Tensor, block_rows: int, block_features: int) -> TensorDescriptor:
    """Tiles of a payload ``[B, H, T, D padded]``, addressed by row and feature."""
    D = x.shape[-1]
    return TensorDescriptor(x, [x.numel() // D, D], [D, 1], [block_rows, block_features])


def _columns(x: Tensor, block_features: int, block_tokens: int) -> TensorDescriptor:
    """Tiles of a transposed copy ``[B, H, D padded, tokens]``."""
    T = x.shape[-1]
    return TensorDescriptor(x, [x.numel() // T, T], [T, 1], [block_features, block_tokens])


def _whole_rows(x: Tensor) -> Tensor:
    """A saved payload ``[B, H, T, D]`` with the padding that its rows are stored with."""
    B, H, T, D = x.shape
    stride = -(-D // 16) * 16
    if stride == D and x.is_contiguous():
        return x
    if x.stride() != (H * T * stride, T * stride, stride, 1):
        # Something between forward and backward (offloading) copied it without the padding.
        raw = torch.nn.functional.pad(x.contiguous().view(torch.uint8), (0, stride - D))
        return raw.view(x.dtype)
    return x.as_strided((B, H, T, stride), (H * T * stride, T * stride, stride, 1))


def _like_bthd(B: int, H: int, T: int, D: int, dtype: torch.dtype, device) -> Tensor:
    return torch.empty(B, T, H, D, dtype=dtype, device=device).transpose(1, 2)


def finite_or_nan(dlse: Tensor | None) -> Tensor | None:
    """Contiguous. An infinite gradient of lse makes dS infinite, and a cast to FP8 a number of that."""
    return None if dlse is None else torch.where(dlse.isfinite(), dlse, torch.nan).contiguous()


def attention_fwd(q: Tensor, k: Tensor, v: Tensor, x: Problem) -> Forward:
    """Quantise q, k, v (any strides) and attend. ``q.dtype`` is the dtype of the output."""
    o = _like_bthd(x.B, x.Hq, x.Tq, x.Dv, q.dtype, q.device)
    lse = torch.empty(x.B, x.Hq, x.Tq, device=q.device)
    saved = {which: x.empty_operand(which) for which in "qkv"}
    (q8, qd), (k8, kd), (v8, vd) = saved.values()
    result = Forward(
        o,
        lse,
        *saved_views(q8, qd, x.D, x.recipe.block),
        *saved_views(k8, kd, x.D, x.recipe.block),
        *saved_views(v8, vd, x.Dv, x.recipe.block),
    )
    if lse.numel() == 0 or x.Tk == 0 or x.Dv == 0:
        lse.fill_(float("-inf"))
        o.zero_()
        return result
    assert_rising(x.Tq, x.Tk, x.pack_q, x.pack_k)
    if x.recipe.block == "mx":
        from hf_deltamatch.kernels import attention_mx_launch

        attention_mx_launch.forward(q, k, v, x, saved, o, lse)
        return result
    vt, v_fold = quantize_qkv(q, k, v, saved, x)
    BD, BDV = x.BLOCK_D, x.BLOCK_DV
    c = config.fwd_config(BD, BDV, x.device, tile=x.tile)
    bounds = x.bounds(by_key=False)
    grid, order = x.programs(c.BLOCK_M, 3)
    _attention_fwd_kernel[grid](
        _rows(q8, c.BLOCK_M, BD), _rows(k8, c.BLOCK_N, BD), _columns(vt, BDV, c.BLOCK_N), o, lse,
        qd, kd, vd if x.tile else v_fold, x.sinks, x.mask_bytes, bounds, x.pack_q.cu, x.pack_k.cu,
        x.pack_q.segment, *order, x.Hq, x.Hq // x.Hkv, x.Tq, x.Tk, x.Dv,
        vt.shape[2], x.pack_q.slots, x.pack_k.slots, x.softmax_scale, x.softcap or 1.0,
        x.window or 0, x.mask_heads, *o.stride()[:3], *x.mask_strides, SINKS=x.sinks is not None,
        BLOCK_DV=BDV, TWO_TERMS=x.recipe.two_terms, IN_UNITS=config.sums_in_units(BD, BDV),
        **x.flags(), **c.launch(),
    )  # fmt: skip
    return result


def attention_bwd(
    do: Tensor,
    dlse: Tensor | None,
    saved: Forward,
    x: Problem,
    *,
    row_sums: bool = False,
    store_ds: bool = False,
) -> Backward:
    """Gradients of :func:`attention_fwd`.

    Args:
        do: ``[B, Hq, Tq, Dv]``, any strides.
        dlse: gradient of lse, ``[B, Hq, Tq]``, or None.
        row_sums: also sum dS and its magnitude of every row in FP64, in the dQ kernel (which runs once
            more for it where one pass computes δ and dQ).
        store_ds: also store FP32 dS ``[B, Hq, Tq, Tk]``, once by each kernel (tests).
    """
    dq = _like_bthd(x.B, x.Hq, x.Tq, x.D, do.dtype, do.device)
    dk = _like_bthd(x.B, x.Hkv, x.Tk, x.D, do.dtype, do.device)
    dv = _like_bthd(x.B, x.Hkv, x.Tk, x.Dv, do.dtype, do.device)
    delta = torch.empty(x.B, x.Hq, x.Tq, device=do.device)
    sums = torch.zeros(2, *delta.shape, dtype=torch.float64, device=do.device) if row_sums else None
    ds = None
    if store_ds:
        ds = tuple(torch.zeros(*delta.shape, x.Tk, device=do.device) for _ in range(2))
    if x.B * x.Hq * x.Tq * x.Tk * x.D * x.Dv == 0:
        for t in (dq, dk, dv, delta):
            t.zero_()
        dsinks = delta.new_zeros(0 if x.sinks is None else x.Hq)
        return Backward(dq, dk, dv, dsinks, delta, sums, ds, None)
    if x.recipe.block == "mx":
        from hf_deltamatch.kernels import attention_mx_launch

        attention_mx_launch.backward(do, dlse, saved, x, (dq, dk, dv), delta, sums, ds)
        ds_sink = _ds_sink(x, saved.lse, delta, dlse)
        dsinks = delta.new_empty(0) if ds_sink is None else ds_sink.sum((0, 2))
        return Backward(dq, dk, dv, dsinks, delta, sums, ds, ds_sink)
    q8, k8, v8 = (_whole_rows(t) for t in (saved.q_fp8, saved.k_fp8, saved.v_fp8))
    qd, kd, vd = saved.q_descale, saved.k_descale, saved.v_descale
    dlse = finite_or_nan(dlse)
    do8, dod, do_t, do_fold, lse2, shifted = quantize_do(do, saved.o, saved.lse, dlse, delta, x)
    qt, q_fold, kt, k_fold = transpose_qk(q8, qd, k8, kd, x)
    BD, BDV = x.BLOCK_D, x.BLOCK_DV
    bounds = x.bounds(by_key=False)
    mean_key = _mean_key(k8, kd, x) if x.recipe.project_row_sum else None
    tiles = {}

    hopper = x.tile and do8.dtype == k8.dtype
    # Triton 3.6 fails on a store inside the loops of those kernels under a compact mask.
    hopper = hopper and not (store_ds and x.mask_kind)
    hopper_rows = hopper and config.has_hopper(BD, BDV, x.device)
    one_pass = x.one_pass and saved.o is not None
    p = torch.zeros_like(ds[0]) if store_ds and one_pass else None

    def rows_pass(which: str, *, store: bool = store_ds, sums=None, dq: Tensor = dq) -> None:
        """``which``: ``delta``, ``dq`` or ``one_pass``, which is both."""
        store = store and which != "delta"
        if hopper_rows and sums is None and (which != "dq" or mean_key is None):
            # Only where it runs: Gluon is experimental in Triton.
            from hf_deltamatch.kernels.attention_dq_hopper import dq_hopper

            dq_hopper(
                which, x, (q8, do8, k8, v8, kt), (lse2, shifted, delta, dlse), (qd, dod, kd, vd),
                dq, (ds[0], p) if store else (None, None), bounds,
            )  # fmt: skip
            return
        if which == "one_pass":
            c = config.one_pass_config(BD, BDV, x.device)
        else:
            passes = config.delta_config if which == "delta" else config.dq_config
            c = passes(BD, BDV, x.device, tile=x.tile)
        if store_ds:
            c = c._replace(STAGES=1)  # dS changes its layout in shared memory
        block = c.BLOCK_M, c.BLOCK_N
        if block not in tiles:
            tiles[block] = (
                _rows(q8, c.BLOCK_M, BD), _rows(do8, c.BLOCK_M, BDV), _rows(k8, c.BLOCK_N, BD),
                _rows(v8, c.BLOCK_N, BDV), _columns(kt, BD, c.BLOCK_N),
            )  # fmt: skip
        grid, order = x.programs(c.BLOCK_M, 3)
        _attention_bwd_dq_kernel[grid](
            *tiles[block], dq, delta, shifted, dlse, lse2, qd, dod, kd, vd, k_fold, x.sinks,
            mean_key, None if ds is None else ds[0], p, sums, x.mask_bytes, bounds, x.pack_q.cu,
            x.pack_k.cu, x.pack_q.segment, *order, x.Hq, x.Hq // x.Hkv,
            x.Tq, x.Tk, x.D, kt.shape[2], x.pack_q.slots, x.pack_k.slots, x.segments,
            x.softmax_scale, x.softcap or 1.0, x.window or 0, x.mask_heads, lse2.stride(1),
            *dq.stride()[:3], *x.mask_strides, SINKS=x.sinks is not None, DLSE=dlse is not None,
            DELTA=which == "delta", PROJECT=mean_key is not None and which == "dq",
            ROW_SUMS=sums is not None, STORE_DS=store, BLOCK_D=BD, ONE_PASS=which == "one_pass",
            **x.flags(), **c.launch(),
        )  # fmt: skip

    if one_pass:
        estimate = delta.clone() if store_ds else None
        rows_pass("one_pass")
        if store_ds:
            # The sweep stored P (dP − z), as it knows δ at its end only.
            z, end = (d if dlse is None else d - dlse for d in (estimate, delta))
            off = end - torch.where(z.isfinite(), z, 0.0)
            ds[0].sub_(off[..., None] * p)
        if row_sums:
            rows_pass("dq", store=False, sums=sums, dq=torch.empty_like(dq))
    else:
        if x.recipe.delta == "matched":
            rows_pass("delta")
        rows_pass("dq", sums=sums)
    key_bounds = x.bounds(by_key=True)
    if hopper and config.has_hopper(BD, BDV, x.device):
        from hf_deltamatch.kernels.attention_dkdv_hopper import dkdv_hopper

        dkdv_hopper(
            x, (q8, do8, qt, do_t), (k8, v8), (lse2, shifted), (qd, dod, kd, vd), do_fold, dk, dv,
            None if ds is None else ds[1], key_bounds, has_dlse=dlse is not None,
        )  # fmt: skip
        configs = []
    else:
        configs = config.dkdv_configs(BD, BDV, x.device, tile=x.tile)
    for c, wants_dk, wants_dv in configs:
        grid, order = x.programs(c.BLOCK_N, by_key=True)
        _attention_bwd_dkdv_kernel[grid](
            q8, do8, qt, do_t, k8, v8, dk, dv, lse2, shifted, qd, dod, kd, vd, q_fold, do_fold,
            None if ds is None else ds[1], x.mask_bytes, key_bounds, x.pack_q.cu, x.pack_k.cu,
            x.pack_k.segment, *order, x.Hkv, x.Hq // x.Hkv, x.Tq, x.Tk,
            x.D, x.Dv, x.pack_q.slots, x.pack_k.slots, x.softmax_scale, x.softcap or 1.0,
            x.window or 0, min(x.mask_heads, x.Hkv), lse2.stride(1), *dk.stride()[:3],
            *dv.stride()[:3], *x.mask_strides, DLSE=dlse is not None, GROUPED=x.Hq != x.Hkv,
            STORE_DS=store_ds and wants_dk, DK=wants_dk, DV=wants_dv, **x.blocks(), **x.flags(),
            **c.launch(),
        )  # fmt: skip
    ds_sink = _ds_sink(x, saved.lse, delta, dlse)
    dsinks = delta.new_empty(0) if ds_sink is None else ds_sink.sum((0, 2))
    return Backward(dq, dk, dv, dsinks, delta, sums, ds, ds_sink)


def _ds_sink(x: Problem, lse: Tensor, delta: Tensor, dlse: Tensor | None) -> Tensor | None:
    """The sink's column of dS, ``−P_sink · (δ − dlse)``: ``[B, Hq, Tq]`` FP32."""
    if x.sinks is None:
        return None
    p = torch.exp(x.sinks.float()[None, :, None] - lse)
    grad = p * (delta if dlse is None else delta - dlse)
    # The product, not P alone: the gradient of a row that sees nothing may be no number.
    return -torch.where(lse == float("-inf"), 0.0, grad)


def _mean_key(k8: Tensor, descale: Tensor, x: Problem) -> Tensor:
    """Mean of the dequantised visible keys, ``[B · Hkv, segments, D]``."""
    mean = torch.empty(x.B * x.Hkv, x.segments, x.D, device=k8.device)
    state = x.facts.key_state
    sb, sh = (0, 0) if state is None else state.expand(x.B, x.Hkv, x.Tk).stride()[:2]
    _mean_key_kernel[(x.segments * x.B * x.Hkv,)](
        k8, descale, state, mean, x.pack_k.cu, x.pack_q.cu, x.Hkv, x.Tk, x.Tq, x.D, k8.shape[-1],
        x.pack_k.slots, x.segments, x.hide(keys=True), sb, sh, TILE=x.tile, BLOCK_D=x.BLOCK_D,
    )  # fmt: skip
    return mean
