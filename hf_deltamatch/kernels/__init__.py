"""GPU kernels: the only place that imports Triton, and only when a kernel is asked for.

What runs where is decided here, before anything is launched.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from hf_deltamatch.recipes import AttentionRecipe, LinearRecipe

CAPABILITIES: dict[tuple[int, int], str] = {
    (8, 9): "Ada",
    (9, 0): "Hopper",
    (10, 0): "Blackwell",
    (10, 3): "Blackwell",
    (12, 0): "Blackwell",
}
"""Devices with FP8 tensor cores that Triton generates code for. Measured on 9.0; the others
run the same kernels with tiles that fit their shared memory, and have not been run. Block ``mx``
multiplies by ``tl.dot_scaled``: block-scaled FP8 instructions on Blackwell, emulated in BF16 before."""

HOPPER_VARIABLE = "HF_DELTAMATCH_HOPPER"
"""Environment variable: ``0`` for the plain Triton kernels of attention's backward on 9.0, too, where Gluon
kernels of the same numbers are faster."""

NATIVE_MX = ((10, 0), (10, 3), (12, 0))
"""Where every product of block ``mx`` is a block-scaled FP8 instruction."""

SMALL_SHARED_MEMORY = ((8, 9), (12, 0))
"""About 100 KB a block: head dimensions above 128 do not fit."""

TENSOR_MEMORY = ((10, 0), (10, 3))
"""Block-scaled products read their codes from tensor memory, and take 128 rows."""

NO_BOOLEAN_MASK = ((10, 0), (10, 3))
"""Triton 3.6 and 3.9 fail to compile the dK/dV kernel with a boolean mask for these, except that of
``mx``."""

OPS = ("attention", "linear")
"""Ops that have kernels."""


def wants_hopper() -> bool:
    """
    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(HOPPER_VARIABLE) or "1"
    if value not in ("0", "1"):
        raise ValueError(
            f"{HOPPER_VARIABLE} is {value!r}; it must be 1 (the default: kernels for Hopper in the backward of "
            "attention) or 0 (the plain ones)."
        )
    return value == "1"


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability, None for anything but a CUDA device."""
    if device.type != "cuda":
        return None
    if device.index is None:  # the current one
        return torch.cuda.get_device_capability(device)
    return _capability(device.index)


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def multiprocessors(device: torch.device) -> int:
    """1 where kernels are interpreted."""
    if device.type != "cuda":
        return 1
    index = torch.cuda.current_device() if device.index is None else device.index
    return _multiprocessors(index)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def interpreted() -> bool:
    """True where Triton was told to interpret kernels on the CPU (``TRITON_INTERPRET=1``)."""
    if not installed():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


@functools.cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interprets_scaled_products() -> bool:
    """Whether this Triton's interpreter knows ``tl.dot_scaled`` (3.6's does not, 3.9's is exact)."""
    return triton_version() >= (3, 9)


def triton_version() -> tuple[int, int]:
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def missing(op: str, device: torch.device) -> str | None:
    """Why ``op`` has no kernel on ``device``, or None if it has."""
    if op not in OPS:
        return f"this version has no {op} kernel for `{device.type}` devices"
    if device.type == "cpu":
        return None if interpreted() else "the kernels need a CUDA device, and this is a `cpu`"
    if device.index is None:
        return _missing_on_cuda(op, device)
    return _cached_missing_on_cuda(op, device)


def _missing_on_cuda(op: str, device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return f"this version has no {op} kernel for `{device.type}` devices; kernels need CUDA"
    if not torch.cuda.is_available():
        return f"torch finds no `{device.type}` device"
    if not installed():
        return "the package `triton` is not installed"
    capability = capability_of(device)
    if capability not in CAPABILITIES:
        known = ", ".join(f"{a}.{b}" for a, b in CAPABILITIES)
        return (
            f"the device has capability {capability[0]}.{capability[1]}; kernels exist for {known}"
        )
    return None


# A fact of the machine: it is asked for in every call.
_cached_missing_on_cuda = functools.cache(_missing_on_cuda)


def unsupported_attention(
    recipe: AttentionRecipe,
    head_dims: tuple[int, int],
    softmax_scale: float,
    device: torch.device,
    *,
    masked_packing: bool = False,
    boolean_mask: bool = False,
    heads: int = 1,
    tokens: int = 1,
) -> str | None:
    """What of an attention call the kernels do not do, as a sentence, or None.

    ``masked_packing``: both a mask and ``cu_seqlens``. ``boolean_mask``: not a compact one. ``heads``:
    batches × query heads. ``tokens``: of the longer side.

    Raises:
        ValueError: what is asked for by :data:`HOPPER_VARIABLE` is neither 0 nor 1.
    """
    wants_hopper()  # what is wrong with the variable is said in the forward, not in the backward
    if not recipe.quantize:
        return f"recipe {recipe.name!r} does not quantise; the kernels are FP8"
    if recipe.block == "mx" and device.type == "cpu" and not interprets_scaled_products():
        return (
            f"block 'mx' multiplies by tl.dot_scaled, which the interpreter of Triton "
            f"{triton_version()[0]}.{triton_version()[1]} does not know (3.9 does); use '128xD'"
        )
    if max(head_dims) > 256:
        return f"head dimensions {head_dims} are above 256"
    capability = capability_of(device)
    if capability in NO_BOOLEAN_MASK and boolean_mask and recipe.block != "mx":
        return "boolean masks do not compile for this device; use the compact mask or is_causal"
    if capability in SMALL_SHARED_MEMORY and max(head_dims) > 128:
        return f"head dimensions {head_dims} are above 128, which does not fit this device"
    if not softmax_scale > 0:
        return f"`softmax_scale` is {softmax_scale}; the kernels need a positive one"
    if heads * tokens >= 2**31:
        return (
            f"{heads} batches × query heads of {tokens} tokens are above 2³¹ rows; split the batch"
        )
    if masked_packing:
        return "`mask` and `cu_seqlens` together; give one of them"
    return None


def unsupported_linear(recipe: LinearRecipe, device: torch.device) -> str | None:
    """What of a linear recipe torch's scaled GEMM does not do on ``device``, as a sentence, or None."""
    capability = capability_of(device)
    if capability is None:
        return None
    if recipe.scaling == "blockwise" and (capability != (9, 0) or _cuda_version() < (12, 9)):
        other = "'mx', whose blocks are native there" if capability in NATIVE_MX else "'rowwise'"
        return (
            f"block-scaled FP8 GEMMs need a device of capability 9.0 and CUDA 12.9; this one is "
            f"{capability[0]}.{capability[1]} with CUDA {torch.version.cuda}; use recipe {other}"
        )
    if recipe.scaling == "blockwise" and recipe.grad_format == "e5m2":
        return (
            "block-scaled FP8 GEMMs take E4M3 alone, and grad_format is 'e5m2' (grad_input needs it "
            "with grad_weight_hp too); use grad_format='e4m3', or recipe 'rowwise' or 'mx'"
        )
    if (
        recipe.scaling == "rowwise"
        and recipe.grad_format == "e5m2"
        and not rowwise_in_cublas(device)
    ):
        return (
            "rowwise FP8 GEMMs of E5M2 gradients need a device of capability 9.0 and CUDA 12.9; use "
            "grad_format='e4m3'"
        )
    return None


def rowwise_in_cublas(device: torch.device) -> bool:
    """Whether torch multiplies rowwise operands by cuBLAS (any format, FP32 results), not CUTLASS."""
    return capability_of(device) == (9, 0) and _cuda_version() >= (12, 9)


def _cuda_version() -> tuple[int, ...]:
    return _two_numbers(torch.version.cuda or "0.0")


@functools.cache
def _two_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split(".")[:2])
