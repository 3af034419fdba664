"""Launchers of the attention kernels under ``mx``, into buffers that ``attention.py`` made.

Memory, per token and head at head_dim D (bytes; D padded to 16 for payloads and to a power of two
for codes):

* saved for the backward: 3·D of FP8 payload, 3·D / 32 of codes, 4 of lse, and the op's own output;
* forward, temporary: D + D / 32 of the re-encoded V;
* backward, temporary: 4·(D + D / 32) (dO, and re-encoded Q, K, dO) and 16 of row statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_deltamatch.kernels import attention_config as config
from hf_deltamatch.kernels.attention import Forward, _columns, _grid, _rows, _whole_rows
from hf_deltamatch.kernels.attention_dkdv import _attention_bwd_dkdv_kernel
from hf_deltamatch.kernels.attention_dq import _attention_bwd_dq_kernel
from hf_deltamatch.kernels.attention_fwd import _attention_fwd_kernel
from hf_deltamatch.kernels.attention_problem import Problem
from hf_deltamatch.kernels.attention_rows import _rows_kernel
from hf_deltamatch.kernels.launch import feature_block
from hf_deltamatch.kernels.quantize_mx import _mean_key_mx_kernel, code_columns, reencode


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
    for which, operand in (("q", q), ("k", k), ("v", v)):
        x.quantize_mx(operand, which, *saved[which])
    (q8, q_codes), (k8, k_codes), (v8, v_codes) = (saved[which] for which in "qkv")
    vt, vt_codes, _ = reencode(v8, v_codes, x.pack_k)
    BD, BDV = feature_block(x.D), feature_block(x.Dv)
    c = config.mx_fwd_config(BD, BDV, x.device)
    bounds = x.bounds(by_key=False)
    grid = _grid(x.Tq, x.pack_q.slots, c.BLOCK_M, x.cu_q is not None, x.B * x.Hq)
    _attention_fwd_kernel[grid](
        _rows(q8, c.BLOCK_M, BD), _rows(k8, c.BLOCK_N, BD), _columns(vt, BDV, c.BLOCK_N), o, lse,
        q_codes, k_codes, vt_codes, x.sinks, x.mask_bytes, bounds, x.pack_q.cu, x.pack_k.cu,
        x.pack_q.segment, x.Hq, x.Hq // x.Hkv, x.Tq, x.Tk, x.Dv, vt.shape[2], x.pack_q.slots,
        x.pack_k.slots, x.softmax_scale, x.softcap or 1.0, x.window or 0, x.mask_heads,
        *o.stride()[:3], *x.mask_strides, SINKS=x.sinks is not None, BLOCK_DV=BDV, MX=True,
        **x.flags(), **c.launch(),
    )  # fmt: skip


def backward(
    do: Tensor, dlse: Tensor | None, saved: Forward, x: Problem,
    grads: tuple[Tensor, Tensor, Tensor], delta: Tensor, sums: Tensor | None,
    ds: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """Fills ``grads``, ``delta`` and the debug outputs that are not None; returns δ − dlse.

    Arguments as ``attention.attention_bwd``.
    """
    dq, dk, dv = grads
    q8, k8, v8 = (_whole_rows(t) for t in (saved.q_fp8, saved.k_fp8, saved.v_fp8))
    q_codes, k_codes = (_whole_codes(t, x.D) for t in (saved.q_descale, saved.k_descale))
    v_codes = _whole_codes(saved.v_descale, x.Dv)
    do8, do_codes = x.empty_operand("do")
    x.quantize_mx(do, "do", do8, do_codes)
    BD, BDV = feature_block(x.D), feature_block(x.Dv)
    rule = x.recipe.delta
    lse2 = torch.empty_like(delta)
    _rows_kernel[(-(-x.Tq // 64), x.B * x.Hq)](
        saved.lse, lse2, do_codes, do, saved.o, do8, delta, x.Hq, x.Tq, x.Dv, do8.shape[-1],
        *do.stride(), *saved.o.stride(), DLSE=dlse is not None, STALE=rule == "stale",
        DEQUANTIZED=rule == "dequantized", BLOCK_D=BDV, BLOCK=64, MX=True,
    )  # fmt: skip
    dlse = None if dlse is None else dlse.contiguous()
    shifted = delta if dlse is None else torch.empty_like(delta)
    bounds = x.bounds(by_key=False)
    kt, kt_codes, _ = reencode(k8, k_codes, x.pack_k)
    mean_key = _mean_key(kt, kt_codes, x) if x.recipe.project_row_sum else None

    def rows_pass(kt: Tensor, kt_codes: Tensor, is_delta: bool) -> None:
        c = (config.mx_delta_config if is_delta else config.mx_dq_config)(BD, BDV, x.device)
        grid = _grid(x.Tq, x.pack_q.slots, c.BLOCK_M, x.cu_q is not None, x.B * x.Hq)
        debug = not is_delta
        _attention_bwd_dq_kernel[grid](
            _rows(q8, c.BLOCK_M, BD), _rows(do8, c.BLOCK_M, BDV), _rows(k8, c.BLOCK_N, BD),
            _rows(v8, c.BLOCK_N, BDV), _columns(kt, BD, c.BLOCK_N), dq, delta, shifted, dlse, lse2,
            q_codes, do_codes, k_codes, v_codes, kt_codes, x.sinks, mean_key,
            None if ds is None else ds[0], sums, x.mask_bytes, bounds, x.pack_q.cu, x.pack_k.cu,
            x.pack_q.segment, x.Hq, x.Hq // x.Hkv, x.Tq, x.Tk, x.D, kt.shape[2], x.pack_q.slots,
            x.pack_k.slots, x.segments, x.softmax_scale, x.softcap or 1.0, x.window or 0,
            x.mask_heads, *dq.stride()[:3], *x.mask_strides, SINKS=x.sinks is not None,
            DLSE=dlse is not None, DELTA=is_delta, PROJECT=mean_key is not None and debug,
            ROW_SUMS=sums is not None and debug, STORE_DS=ds is not None and debug, BLOCK_D=BD,
            MX=True, **x.flags(), **c.launch(),
        )  # fmt: skip

    if rule == "matched":
        rows_pass(kt, kt_codes, True)
    elif dlse is not None:
        torch.sub(delta, torch.where(saved.lse == float("-inf"), 0.0, dlse), out=shifted)
    rows_pass(kt, kt_codes, False)
    del kt, kt_codes
    do_t, do_t_codes, do_fold = reencode(do8, do_codes, x.pack_q, fold=True)
    qt, qt_codes, q_fold = reencode(q8, q_codes, x.pack_q, fold=True)
    key_bounds = x.bounds(by_key=True)
    for c, wants_dk, wants_dv in config.mx_dkdv_configs(BD, BDV, x.device):
        grid = _grid(x.Tk, x.pack_k.slots, c.BLOCK_N, x.cu_q is not None, x.B * x.Hkv)
        _attention_bwd_dkdv_kernel[grid](
            _rows(q8, c.BLOCK_M, BD), _rows(do8, c.BLOCK_M, BDV), _columns(qt, BD, c.BLOCK_M),
            _columns(do_t, BDV, c.BLOCK_M), _rows(k8, c.BLOCK_N, BD), _rows(v8, c.BLOCK_N, BDV),
            dk, dv, lse2, shifted, q_codes, do_codes, k_codes, v_codes, q_fold, do_fold,
            None if ds is None else ds[1], x.mask_bytes, key_bounds, x.pack_q.cu, x.pack_k.cu,
            x.pack_k.segment, x.Hkv, x.Hq // x.Hkv, x.Tq, x.Tk, x.D, x.Dv, qt.shape[2],
            do_t.shape[2], x.pack_q.slots, x.pack_k.slots, x.softmax_scale, x.softcap or 1.0,
            x.window or 0, min(x.mask_heads, x.Hkv), *dk.stride()[:3], *dv.stride()[:3],
            *x.mask_strides, DLSE=dlse is not None, GROUPED=x.Hq != x.Hkv,
            STORE_DS=ds is not None and wants_dk, DK=wants_dk, DV=wants_dv, BLOCK_D=BD,
            BLOCK_DV=BDV, qt_code_ptr=qt_codes, dot_code_ptr=do_t_codes, MX=True, **x.flags(),
            **c.launch(),
        )  # fmt: skip
    return shifted


def _mean_key(kt: Tensor, codes: Tensor, x: Problem) -> Tensor:
    """Mean of the re-encoded visible keys, ``[B · Hkv, segments, D]``."""
    mean = torch.empty(x.B * x.Hkv, x.segments, x.D, device=kt.device)
    state, first = x.facts.key_state, x.hidden_before(keys=True)
    strides = (0, 0) if state is None else state.expand(x.B, x.Hkv, x.Tk).stride()[:2]
    packed = isinstance(first, Tensor)
    _mean_key_mx_kernel[(x.segments, x.B * x.Hkv)](
        kt, codes, state, mean, x.pack_k.cu, x.Hkv, x.Tk, x.D, kt.shape[2], x.pack_k.slots,
        x.segments, first if packed else None, 0 if packed else first, *strides,
        STATE=state is not None, HIDE=packed or first > 0, PACKED=x.cu_k is not None,
        BLOCK_D=feature_block(x.D),
    )  # fmt: skip
    return mean
