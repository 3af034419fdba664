"""The numerics table: what each δ rule costs against FP64, from stated inputs.

B4 H1 T1024 D128 causal, inputs in BF16: Q = N(0,1); K = N(0,1) + offset · (one N(0,1) vector per
head); V = 0.5·N(0,1) + 0.5 · (one N(0,1) vector per head); dO = 1e-3 · N(0,1) · exp(N(0,1)) per row.
Truth: FP64 attention on the same BF16 inputs. Run it with ``hf-deltamatch numerics``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_deltamatch import reference
from hf_deltamatch.recipes import AttentionRecipe
from hf_deltamatch.testing import rel_rms, row_sum_parts

SHAPE = {"B": 4, "H": 1, "T": 1024, "D": 128}
OFFSETS = (0.0, 2.0, 6.0)
RULES = {
    "stale": AttentionRecipe.from_name("stale_delta"),
    "dequantized": AttentionRecipe.from_name("dequantized_delta"),
    "forward": AttentionRecipe.from_name("forward_delta"),
    "matched": AttentionRecipe.from_name("delta_matching"),
    "matched + row-sum projection": AttentionRecipe.from_name(
        "delta_matching", project_row_sum=True
    ),
}


def rules_of(block: str) -> dict[str, AttentionRecipe]:
    """:data:`RULES` with another block; ``mx`` has no rule ``forward``."""
    return {
        name: AttentionRecipe.from_dict({**recipe.to_dict(), "block": block})
        for name, recipe in RULES.items()
        if block != "mx" or not recipe.two_terms
    }


class Measured(NamedTuple):
    """Errors relative to FP64 and the row-sum residual of one δ rule on one input."""

    o: float
    dq: float
    dk: float
    dv: float
    delta: float
    residual: float


def make_inputs(
    offset: float, seed: int, B: int, H: int, T: int, D: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``q, k, v, do``, BF16 ``[B, H, T, D]``, as the module docstring states them."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    q = normal(B, H, T, D)
    k = normal(B, H, T, D) + offset * normal(1, H, 1, D)
    v = 0.5 * normal(B, H, T, D) + 0.5 * normal(1, H, 1, D)
    do = 1e-3 * normal(B, H, T, D) * normal(B, H, T, 1).exp()
    return tuple(x.bfloat16() for x in (q, k, v, do))


def run_reference(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, recipe: AttentionRecipe
) -> tuple[reference.AttentionForward, reference.AttentionBackward, float]:
    """Causal forward and backward of the reference, and the row-sum residual."""
    options = {
        "mask": None,
        "sinks": None,
        "cu_seqlens_q": None,
        "cu_seqlens_k": None,
        "is_causal": True,
        "window": None,
        "softmax_scale": q.shape[-1] ** -0.5,
        "softcap": None,
        "recipe": recipe,
    }
    parts: list[tuple[float, float]] = []
    fwd = reference.attention_fwd(q, k, v, **options)
    bwd = reference.attention_bwd(
        do,
        None,
        fwd,
        None if recipe.quantize else (q, k, v),
        **options,
        ds_hook=lambda ds, sink: parts.append(row_sum_parts(ds, sink)),
    )
    return fwd, bwd, sum(p[0] for p in parts) / sum(p[1] for p in parts)


def measure(offset: float, seed: int, rules: dict[str, AttentionRecipe] = RULES, **shape: int):
    """Each rule's :class:`Measured` on one input; shapes default to the table's."""
    q, k, v, do = make_inputs(offset, seed, **{**SHAPE, **shape})
    exact = (x.double() for x in (q, k, v, do))
    truth_fwd, truth, _ = run_reference(*exact, AttentionRecipe(quantize=False))
    out = {}
    for name, recipe in rules.items():
        fwd, bwd, residual = run_reference(q, k, v, do, recipe)
        out[name] = Measured(
            rel_rms(fwd.o, truth_fwd.o),
            *(rel_rms(a, b) for a, b in zip(bwd[:3], truth[:3], strict=True)),
            rel_rms(bwd.delta, truth.delta),
            residual,
        )
    return out


def table(
    seeds: int = 5, block: str = "128xD", progress: Callable[[str], None] = lambda _: None
) -> dict:
    """The whole table as JSON types: per rule and offset, mean and standard deviation over seeds."""
    rules = rules_of(block)
    runs: dict[tuple[str, float], list[Measured]] = {}
    for offset in OFFSETS:
        for seed in range(seeds):
            progress(f"offset {offset:g}, seed {seed}")
            for name, measured in measure(offset, seed, rules).items():
                runs.setdefault((name, offset), []).append(measured)
    rows = {
        name: {
            f"{offset:g}": {
                field: {
                    "mean": statistics.fmean(values),
                    "std": statistics.stdev(values) if len(values) > 1 else 0.0,
                }
                for field in Measured._fields
                for values in [[getattr(m, field) for m in runs[name, offset]]]
            }
            for offset in OFFSETS
        }
        for name in rules
    }
    return {"shape": SHAPE, "mask": "causal", "block": block, "seeds": seeds, "rules": rows}


def format_table(result: dict) -> str:
    """The table as text: relative error of dQ per key offset, and the row-sum residual."""
    shape = " ".join(f"{k}{v}" for k, v in result["shape"].items())
    # One seed has no spread: the 0.0 in its results says nothing.
    spread, seeds = result["seeds"] > 1, result["seeds"]
    what = f", mean ± standard deviation of {seeds} seeds" if spread else ", 1 seed"
    lines = [
        f"Relative error of dQ against FP64{what} ({shape} {result['mask']}, block {result['block']})",
        "",
        f"{'δ rule':<30}"
        + "".join(f"{'key offset ' + o:>20}" for o in ("0", "2", "6"))
        + f"{'row-sum residual':>20}",
    ]
    for name, by_offset in result["rules"].items():
        cells = (
            f"{e['dq']['mean']:.3f}" + (f" ± {e['dq']['std']:.3f}" if spread else "")
            for e in by_offset.values()
        )
        residual = max(e["residual"]["mean"] for e in by_offset.values())
        lines.append(f"{name:<30}{''.join(f'{c:>20}' for c in cells)}{residual:>20.1e}")
    of = " (mean over seeds)" if spread else ""
    lines += ["", f"The residual is the largest of the three offsets{of}."]
    return "\n".join(lines)
