"""What :mod:`share_gpu` repeats: our kernels, others' and the smallest ones that specialise warps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_deltamatch.kernels import HOPPER_VARIABLE

Compute = Callable[[], dict[str, Tensor | None]]


class Kind(NamedTuple):
    make: Callable[[], Compute]
    env: dict[str, str] = {}  # noqa: RUF012 - read only


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(len(shape))
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def _heads(B: int, H: int, T: int, D: int) -> list[Tensor]:
    return [_random(B, T, H, D).transpose(1, 2) * (1 + i / 8) for i in range(4)]


def cublas() -> Compute:
    a, b = _random(4096, 4096), _random(4096, 4096)
    return lambda: {"product": a @ b}


def cudnn() -> Compute:
    """Forward and backward: warp-specialised kernels as well, with ``setmaxnreg``."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    *qkv, do = _heads(8, 8, 1024, 128)
    qkv = [x.detach().requires_grad_() for x in qkv]

    def compute() -> dict:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            o = F.scaled_dot_product_attention(*qkv, is_causal=True)
        # Its dQ is added up in no order.
        _, dk, dv = torch.autograd.grad(o, qkv, do)
        return {"o": o, "dk": dk, "dv": dv}

    return compute


def ours(D: int, *, only: str | None = None, recipe: str = "delta_matching") -> Compute:
    """Forward and backward; ``only`` one of the Hopper kernels, the rest plain."""
    from hf_deltamatch.kernels import attention as launchers
    from hf_deltamatch.ops.attention_op import attention_bwd, attention_fwd
    from hf_deltamatch.recipes import AttentionRecipe

    q, k, v, do = _heads(32, 8, 512, D) if D == 64 else _heads(8, 8, 1024, D)
    options = (None, None, None, None, True, None, D**-0.5, None)
    backend = (AttentionRecipe.resolve(recipe).encoded, "triton")
    if only is not None:
        _restrict(launchers, only)

    def compute() -> dict:
        o, lse, *saved = attention_fwd(q, k, v, *options, *backend)
        dq, dk, dv, _, delta = attention_bwd(do, None, o, lse, *saved, *options, *backend)
        return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "delta": delta}

    return compute


def _restrict(launchers, only: str) -> None:
    """The backward asks twice whether to take the Hopper kernels: for δ and dQ, then for dK and dV."""
    true, asked = launchers.config.has_hopper, [0]

    def has_hopper(*args) -> bool:
        asked[0] += 1
        return (asked[0] % 2 == 0) == (only == "dkdv") and true(*args)

    launchers.config.has_hopper = has_hopper
    if only == "delta":
        from hf_deltamatch.kernels import attention_dq_hopper

        launchers.config.has_one_pass = lambda *args, **kwargs: False
        both = attention_dq_hopper.dq_hopper
        attention_dq_hopper.dq_hopper = lambda which, *a: (
            both(which, *a) if which == "delta" else a[4].zero_()
        )


def gluon(mma: bool) -> Compute:
    import share_gpu_gluon

    x = _random(512 * 16 * 64, 128)
    return lambda: {"sum": share_gpu_gluon.run(x, tiles=16, mma=mma)}


PLAIN, HOPPER = {HOPPER_VARIABLE: "0"}, {HOPPER_VARIABLE: "1"}
KINDS = {
    "cublas": Kind(cublas),
    "cudnn": Kind(cudnn),
    "gluon": Kind(lambda: gluon(False)),
    "gluon-mma": Kind(lambda: gluon(True)),
    "plain-64": Kind(lambda: ours(64)),
    "plain-128": Kind(lambda: ours(128), PLAIN),
    "delta-128": Kind(lambda: ours(128, only="delta"), HOPPER),
    "dq-128": Kind(lambda: ours(128, only="dq", recipe="stale_delta"), HOPPER),
    "one-pass-128": Kind(lambda: ours(128, only="dq"), HOPPER),
    "dkdv-128": Kind(lambda: ours(128, only="dkdv"), HOPPER),
    "hopper-128": Kind(lambda: ours(128), HOPPER),
}
"""Of others first: what a fault of ours is compared with."""
