"""Launchers of the attention kernels under ``mx``, into buffers that ``attention.py`` made.

Memory, per token and head at head_dim D (bytes; D padded to 16 for payloads and to a power of two
for codes):

* saved for the backward: 3·D of FP8 payload, 3·D / 32 of codes, 4 of lse; under an unmatched δ
  also the op's own output;
* forward, temporary: D + D / 32 of the re-encoded V;
* backward, temporary: 4·(D + D / 32) (dO, and re-encoded Q, K, dO) and 16 of row statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_deltamatch.kernels import attention_config as config
from hf_deltamatch.kernels.attention import Forward, _columns, _rows, _whole_rows, finite_or_nan
from hf_deltamatch.kernels.attention_dkdv import _attention_bwd_dkdv_kernel
from hf_deltamatch.kernels.attention_dq import _attention_bwd_dq_kernel
from hf_deltamatch.kernels.attention_fwd import _attention_fwd_kernel
from hf_deltamatch.kernels.attention_operands_mx import (
    mean_key_mx,
    quantize_do_mx,
    quantize_mx,
    reencode,
)
from hf_deltamatch.kernels.attention_problem import Problem
from hf_deltamatch.kernels.launch import code_columns


def _whole_codes(codes: Tensor, D: int) -> Tensor:
    """Saved codes ``[B, H, T, ceil(D / 32)]`` with the padding that their rows are stored with."""
    B, H, T, columns = codes.shape
    stride = code_columns(D)
    strides = (H * T * stride, T * stride, stride, 1)
    if codes.stride() != strides:
        # Something between forward and backward (offloading) copied them without the padding.
        return torch.nn.functional.pad(codes.contiguous(), (0, stride - columns), value=127)
    return codes.as_strided((B, H, T, stride), strides)


def forward(
    q: Tensor, k: Tensor, v: Tensor, x: Problem, saved: dict[str, tuple[Tensor, Tensor]], o: Tensor,
    lse: Tensor,
) -> None:  # fmt: skip
    """Fills ``saved``, ``o`` and ``lse``; arguments as ``attention.attention_fwd``."""
    (q8, q_codes), (k8, k_codes), (v8, v_codes) = (saved[which] for which in "qkv")
    quantize_mx(q, "q", q8, q_codes, x)
    quantize_mx(k, "k", k8, k_codes, x)
    vt, vt_codes, _ = quantize_mx(v, "v", v8, v_codes, x, copy=True)
    BD, BDV = x.BLOCK_D, x.BLOCK_DV
    c = config.mx_fwd_config(BD, BDV, x.device)
    bounds = x.bounds(by_key=False)
    grid, order = x.programs(c.BLOCK_M, 3)
    _attention_fwd_kernel[grid](
        _rows(q8, c.BLOCK_M, BD), _rows(k8, c.BLOCK_N, BD), _columns(vt, BDV, c.BLOCK_N), o, lse,
        q_codes, k_codes, vt_codes, x.sinks, x.mask_bytes, bounds, x.pack_q.cu, x.pack_k.cu,
        x.pack_q.segment, *order, x.Hq, x.Hq // x.Hkv, x.Tq, x.Tk, x.Dv,
        vt.shape[2], x.pack_q.slots, x.pack_k.slots, x.softmax_scale, x.softcap or 1.0,
        x.window or 0, x.mask_heads, *o.stride()[:3], *x.mask_strides, SINKS=x.sinks is not None,
        BLOCK_DV=BDV, MX=True, **x.flags(), **c.launch(),
    )  # fmt: skip


def backward(
    do: Tensor, dlse: Tensor | None, saved: Forward, x: Problem,
    grads: tuple[Tensor, Tensor, Tensor], delta: Tensor, sums: Tensor | None,
    ds: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """Fills ``grads``, ``delta`` and the debug outputs that are not None; arguments as
    ``attention.attention_bwd``."""
    dq, dk, dv = grads
    q8, k8, v8 = (_whole_rows(t) for t in (saved.q_fp8, saved.k_fp8, saved.v_fp8))
    q_codes, k_codes = (_whole_codes(t, x.D) for t in (saved.q_descale, saved.k_descale))
    v_codes = _whole_codes(saved.v_descale, x.Dv)
    dlse = finite_or_nan(dlse)
    do8, do_codes, (do_t, do_t_codes, do_fold), lse2, shifted = quantize_do_mx(
        do, saved.o, saved.lse, dlse, delta, x
    )
    kt, kt_codes, _ = k_copy = reencode(k8, k_codes, x.pack_k)
    BD, BDV = x.BLOCK_D, x.BLOCK_DV
    bounds = x.bounds(by_key=False)
    mean_key = mean_key_mx(k_copy, x) if x.recipe.project_row_sum else None

    def rows_pass(is_delta: bool) -> None:
        c = (config.mx_delta_config if is_delta else config.mx_dq_config)(BD, BDV, x.device)
        grid, order = x.programs(c.BLOCK_M, 3)
        debug = not is_delta
        _attention_bwd_dq_kernel[grid](
            _rows(q8, c.BLOCK_M, BD), _rows(do8, c.BLOCK_M, BDV), _rows(k8, c.BLOCK_N, BD),
            _rows(v8, c.BLOCK_N, BDV), _columns(kt, BD, c.BLOCK_N), dq, delta, shifted, dlse, lse2,
            q_codes, do_codes, k_codes, v_codes, kt_codes, x.sinks, mean_key,
            None if ds is None else ds[0], None, sums, x.mask_bytes, bounds, x.pack_q.cu, x.pack_k.cu,
            x.pack_q.segment, *order, x.Hq, x.Hq // x.Hkv, x.Tq, x.Tk,
            x.D, kt.shape[2], x.pack_q.slots, x.pack_k.slots, x.segments, x.softmax_scale,
            x.softcap or 1.0, x.window or 0, x.mask_heads, lse2.stride(1), *dq.stride()[:3],
            *x.mask_strides, SINKS=x.sinks is not None, DLSE=dlse is not None, DELTA=is_delta,
            PROJECT=mean_key is not None and debug, ROW_SUMS=sums is not None and debug,
            STORE_DS=ds is not None and debug, BLOCK_D=BD, MX=True, **x.flags(), **c.launch(),
        )  # fmt: skip

    if x.recipe.delta == "matched":
        rows_pass(True)
    rows_pass(False)
    qt, qt_codes, q_fold = reencode(q8, q_codes, x.pack_q, fold=True)
    key_bounds = x.bounds(by_key=True)
    for c, wants_dk, wants_dv in config.mx_dkdv_configs(BD, BDV, x.device):
        grid, order = x.programs(c.BLOCK_N, 2, by_key=True)
        _attention_bwd_dkdv_kernel[grid](
            _rows(q8, c.BLOCK_M, BD), _rows(do8, c.BLOCK_M, BDV), _columns(qt, BD, c.BLOCK_M),
            _columns(do_t, BDV, c.BLOCK_M), _rows(k8, c.BLOCK_N, BD), _rows(v8, c.BLOCK_N, BDV), dk,
            dv, lse2, shifted, q_codes, do_codes, k_codes, v_codes, q_fold, do_fold,
            None if ds is None else ds[1], x.mask_bytes, key_bounds, x.pack_q.cu, x.pack_k.cu,
            x.pack_k.segment, *order, x.Hkv, x.Hq // x.Hkv, x.Tq, x.Tk,
            x.D, x.Dv, x.pack_q.slots, x.pack_k.slots, x.softmax_scale, x.softcap or 1.0,
            x.window or 0, min(x.mask_heads, x.Hkv), lse2.stride(1), *dk.stride()[:3],
            *dv.stride()[:3], *x.mask_strides, DLSE=dlse is not None, GROUPED=x.Hq != x.Hkv,
            STORE_DS=ds is not None and wants_dk, DK=wants_dk, DV=wants_dv, qt_code_ptr=qt_codes,
            dot_code_ptr=do_t_codes, MX=True, **x.blocks(), **x.flags(), **c.launch(),
        )  # fmt: skip
