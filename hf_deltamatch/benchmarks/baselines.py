"""What our kernels are compared with. A baseline that cannot run is named with the reason."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_deltamatch.benchmarks.shapes import Shape

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``q, k, v`` in ``BHTD`` to ``o`` in ``BHTD``."""

CUDNN, FLASH2 = "cuDNN SDPA, BF16", "FlashAttention-2 SDPA, BF16"
FLASH4, ENGINE = "FlashAttention-4, BF16", "Transformer Engine, FP8"


class Absent(RuntimeError):
    """This row cannot run here; the message says why."""


def baselines(s: Shape) -> dict[str, Callable[[], Attention]]:
    """By name, something that makes the function for ``s`` or raises (any exception)."""
    return {
        CUDNN: lambda: cudnn(s),
        FLASH2: lambda: flash2(s),
        FLASH4: lambda: flash4(s),
        ENGINE: lambda: transformer_engine(s),
    }


def _sdpa(s: Shape, kind: SDPBackend) -> Attention:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=s.causal, enable_gqa=s.Hq != s.Hkv
            )

    return forward


def cudnn(s: Shape) -> Attention:
    if s.window is not None:
        raise Absent("SDPA has no window; a dense mask would compute all of T²")
    return _sdpa(s, SDPBackend.CUDNN_ATTENTION)


def flash2(s: Shape) -> Attention:
    """SDPA's FlashAttention-2; with a window the operator behind it, which knows windows."""
    if s.window is None:
        return _sdpa(s, SDPBackend.FLASH_ATTENTION)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, s.T, s.T, 0.0, True, False, scale=s.D**-0.5,
            window_size_left=s.window - 1, window_size_right=0,
        )  # fmt: skip
        return out[0].transpose(1, 2)

    return forward


def installed(module: str) -> bool:
    """Can ``module`` be imported?"""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        return False


def flash4(s: Shape) -> Attention:
    if not installed("flash_attn.cute"):
        raise Absent("`flash_attn.cute` is not installed (pip install flash-attn-4)")
    from flash_attn.cute import flash_attn_func

    options: dict[str, Any] = {"causal": s.causal}
    if s.window is not None:
        options["window_size"] = (s.window - 1, 0)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return forward


@contextmanager
def _only_fused_attention() -> Iterator[None]:
    """Transformer Engine otherwise runs BF16 kernels where it has no FP8 one."""
    names = ("NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "0"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def transformer_engine(s: Shape) -> Attention:
    """cuDNN's FP8 attention through Transformer Engine: BF16 in and out, E4M3 forward and E5M2
    backward, delayed scaling per tensor."""
    if not installed("transformer_engine.pytorch"):
        raise Absent("`transformer_engine` is not installed")
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    recipe = DelayedScaling(fp8_format=Format.HYBRID, fp8_dpa=True, fp8_mha=False)
    if hasattr(te, "autocast"):  # 2.9 and newer
        fp8 = lambda: te.autocast(enabled=True, recipe=recipe)
    else:
        fp8 = lambda: te.fp8_autocast(enabled=True, fp8_recipe=recipe)
    mask = "causal" if s.causal else "no_mask"
    window = (-1, -1) if s.window is None else (s.window - 1, 0)
    module = te.DotProductAttention(
        s.Hq, s.D, num_gqa_groups=s.Hkv, attention_dropout=0.0, qkv_format="bshd",
        attn_mask_type=mask, window_size=window,
    )  # fmt: skip

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with _only_fused_attention(), fp8():
            out = module(q, k, v, attn_mask_type=mask, window_size=window)
        return out.view(s.B, s.T, s.Hq, s.D).transpose(1, 2)

    return forward
