"""``hf-deltamatch bench``: times of our kernels beside the best BF16 attention, in one run.

A speed is printed only if the comparison with the reference holds for that shape and recipe. Our
times include quantisation, which is also shown apart. FLOPs: forward 4·B·Hq·T²·D, half of it if
causal; backward 2.5 times as many.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_deltamatch import reference
from hf_deltamatch.ops import attention_kernels
from hf_deltamatch.ops.attention import delta_matching_attention
from hf_deltamatch.recipes import AttentionRecipe
from hf_deltamatch.testing import rel_rms


class Shape(NamedTuple):
    """One benchmark shape; ``BHTD``, BF16."""

    B: int
    Hq: int
    Hkv: int
    T: int
    D: int
    causal: bool

    def __str__(self) -> str:
        heads = f"H{self.Hq}" if self.Hq == self.Hkv else f"H{self.Hq}/{self.Hkv}"
        return f"B{self.B} {heads} T{self.T} D{self.D} {'causal' if self.causal else 'full'}"

    @property
    def flops(self) -> float:
        """Of the forward."""
        return 4.0 * self.B * self.Hq * self.T**2 * self.D * (0.5 if self.causal else 1.0)


SHAPES = (
    Shape(4, 16, 16, 8192, 128, True),
    Shape(16, 16, 16, 2048, 128, True),
    Shape(1, 16, 16, 32768, 128, True),
    Shape(4, 16, 16, 8192, 128, False),
    Shape(4, 32, 32, 8192, 64, True),
    Shape(2, 8, 8, 8192, 256, True),
    Shape(4, 64, 8, 8192, 128, True),
)
MAX_DIFFERENCE = 0.015
QUANTISERS = ("_quantize_kernel", "_transpose_kernel")
RECIPES = ("delta_matching", "delta_matching 1xD", "stale_delta")


class BenchError(RuntimeError):
    """No device, or numbers that are wrong: nothing to time."""


def parse_shape(text: str) -> Shape:
    """``B,Hq,Hkv,T,D,causal`` or ``…,full``."""
    *numbers, mask = text.split(",")
    if len(numbers) != 5 or not all(n.isdigit() and int(n) > 0 for n in numbers):
        raise ValueError(
            f"--shape is {text!r}; it must be B,Hq,Hkv,T,D,causal or B,Hq,Hkv,T,D,full."
        )
    if mask not in ("causal", "full"):
        raise ValueError(f"--shape is {text!r}; it must end in `causal` or `full`.")
    shape = Shape(*(int(n) for n in numbers), mask == "causal")
    if shape.Hq % shape.Hkv:
        raise ValueError(f"--shape is {text!r}; Hq must be a multiple of Hkv.")
    return shape


def parse_recipe(text: str) -> AttentionRecipe:
    """``NAME`` or ``NAME BLOCK``."""
    name, *block = text.split()
    return AttentionRecipe.from_name(name, **({"block": block[0]} if block else {}))


def median_ms(function: Callable[[], Any], repeats: int = 11) -> float:
    """Median of event-timed calls, after three warm-ups."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def make_inputs(s: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """N(0, 1), ``BHTD`` views of ``BTHD`` storage, as models send them."""
    g = torch.Generator(device="cuda").manual_seed(0)

    def normal(H: int) -> Tensor:
        x = torch.randn(s.B, s.T, H, s.D, device="cuda", dtype=torch.bfloat16, generator=g)
        return x.transpose(1, 2)

    q, k, v, do = (normal(H) for H in (s.Hq, s.Hkv, s.Hkv, s.Hq))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def verify(s: Shape, recipe: AttentionRecipe) -> float:
    """Largest relative difference of o, dq, dk, dv between the kernels and the reference that
    emulates their tiles, on two heads per group and up to 1024 tokens.

    Raises:
        BenchError: above 1.5 %, where FP8 itself costs 3 to 8 %.
    """
    small = s._replace(B=1, Hq=2 * s.Hq // s.Hkv, Hkv=2, T=min(s.T, 1024))
    q, k, v, do = (x.detach() for x in make_inputs(small))
    options = dict(
        mask=None, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None, is_causal=s.causal, window=None,
        softmax_scale=s.D**-0.5, softcap=None, recipe=recipe,
    )  # fmt: skip
    forward, backward = attention_kernels.reference_blocks(s.D, s.D, q.device, recipe.block)
    fwd = attention_kernels.attention_fwd(q, k, v, **options)
    ours = (fwd.o, *attention_kernels.attention_bwd(do, None, fwd, **options)[:3])
    ref = reference.attention_fwd(q, k, v, **options, **forward)
    theirs = (ref.o, *reference.attention_bwd(do, None, ref, None, **options, **backward)[:3])
    worst = max(rel_rms(a.float(), b.float()) for a, b in zip(ours, theirs, strict=True))
    if not worst < MAX_DIFFERENCE:
        raise BenchError(
            f"kernels and reference differ by {worst:.3g} for {small!s}, recipe "
            f"{recipe.name}; allowed is {MAX_DIFFERENCE}. No speed is printed for wrong numbers."
        )
    return worst


def time_pass(forward: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> dict[str, float]:
    """``fwd_ms`` and ``bwd_ms`` of an attention function on ``q, k, v, do``."""
    *qkv, do = inputs
    with torch.no_grad():
        fwd = median_ms(lambda: forward(*qkv))
    o = forward(*qkv)
    bwd = median_ms(lambda: torch.autograd.grad(o, qkv, do, retain_graph=True))
    return {"fwd_ms": fwd, "bwd_ms": bwd}


def kernel_times(function: Callable[[], Any], repeats: int = 3) -> dict[str, float]:
    """Milliseconds of each CUDA kernel of a call, by name."""
    from torch.profiler import ProfilerActivity, profile

    function()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as run:
        for _ in range(repeats):
            function()
        torch.cuda.synchronize()
    events = {e.key: e.device_time_total / repeats / 1e3 for e in run.key_averages()}
    return {k: v for k, v in events.items() if v > 0}


def baselines(s: Shape) -> dict[str, Callable[..., Tensor]]:
    """BF16 attention to compare with: what is installed and takes the shape."""

    def sdpa(kind: SDPBackend) -> Callable[..., Tensor]:
        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(kind):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=s.causal, enable_gqa=s.Hq != s.Hkv
                )

        return forward

    found = {
        "cuDNN SDPA, BF16": sdpa(SDPBackend.CUDNN_ATTENTION),
        "FlashAttention-2 SDPA, BF16": sdpa(SDPBackend.FLASH_ATTENTION),
    }
    if importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute"):
        from flash_attn.cute import flash_attn_func

        def flash4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=s.causal)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        found["FlashAttention-4, BF16"] = flash4
    return found


def fp8_peak(size: int = 8192) -> float:
    """FP8 matmul rate of this device now, TFLOP/s (``torch._scaled_mm``, tensorwise)."""
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    ms = median_ms(
        lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    )
    return 2 * size**3 / ms / 1e9


def bench_attention(
    shapes: tuple[Shape, ...] = SHAPES,
    recipes: tuple[str, ...] = RECIPES,
    progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Time every shape with every recipe and baseline.

    Raises:
        BenchError: no CUDA device, or a comparison that fails.
    """
    if not torch.cuda.is_available():
        raise BenchError("attention kernels are timed on a CUDA device; none is available.")
    peak = fp8_peak()
    progress(f"FP8 matmul {peak:.0f} TFLOP/s")
    result: dict[str, Any] = {"fp8_peak_tflops": peak, "shapes": []}
    for shape in shapes:
        rows = bench_shape(shape, recipes, peak)
        result["shapes"].append({"shape": shape._asdict(), "rows": rows})
        progress(format_shape(shape, rows))
    return result


def bench_shape(shape: Shape, recipes: tuple[str, ...], peak: float) -> dict[str, Any]:
    """Rows of one shape: baselines, then our recipes."""
    inputs = make_inputs(shape)
    rows: dict[str, Any] = {}
    for name, forward in baselines(shape).items():
        try:
            rows[name] = time_pass(forward, inputs)
        except RuntimeError as error:  # a backend that does not take this shape
            rows[name] = {"error": str(error).splitlines()[0]}
    for text in recipes:
        recipe = parse_recipe(text)
        difference = verify(shape, recipe)

        def ours(q: Tensor, k: Tensor, v: Tensor, recipe: AttentionRecipe = recipe) -> Tensor:
            return delta_matching_attention(q, k, v, is_causal=shape.causal, recipe=recipe)

        def both(ours: Callable[..., Tensor] = ours) -> None:
            torch.autograd.grad(ours(*inputs[:3]), inputs[:3], inputs[3])

        kernels = kernel_times(both)
        rows[text] = {
            **time_pass(ours, inputs),
            "difference": difference,
            "quantize_ms": sum(kernels.get(k, 0.0) for k in QUANTISERS),
            "kernels_ms": kernels,
        }
    for row in rows.values():
        if "fwd_ms" in row:
            _add_rates(row, shape, peak)
    return rows


def _add_rates(row: dict[str, Any], shape: Shape, peak: float) -> None:
    both = row["fwd_ms"] + row["bwd_ms"]
    row["fwd_tflops"] = shape.flops / row["fwd_ms"] / 1e9
    row["bwd_tflops"] = 2.5 * shape.flops / row["bwd_ms"] / 1e9
    row["both_tflops"] = 3.5 * shape.flops / both / 1e9
    row["share_of_fp8_peak"] = row["both_tflops"] / peak


def format_shape(shape: Shape, rows: dict[str, Any]) -> str:
    lines = [f"{shape!s:<36} fwd ms  bwd ms    both  TFLOP/s  of FP8 peak  quantise ms"]
    for name, r in rows.items():
        if "error" in r:
            lines.append(f"  {name:<34} {r['error'][:60]}")
            continue
        quantise = f"{r['quantize_ms']:.2f}" if "quantize_ms" in r else ""
        lines.append(
            f"  {name:<34} {r['fwd_ms']:>6.2f}  {r['bwd_ms']:>6.2f}  {r['fwd_ms'] + r['bwd_ms']:>6.2f}"
            f"  {r['both_tflops']:>7.0f}  {r['share_of_fp8_peak']:>11.2f}  {quantise:>11}"
        )
    return "\n".join(lines)
