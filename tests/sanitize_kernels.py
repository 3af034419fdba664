"""One small call of every kernel, forward and backward, compared with the reference; a script, for
NVIDIA's checkers, which slow everything down too much for the test suite:

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize_kernels.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize_kernels.py causal 1xD

Arguments pick cases by the start of their name; `--list` prints the names. Exits with 1 if a result is
wrong. Without the caching allocator, as a checker needs it to see where a buffer ends.
"""

from __future__ import annotations

import os
import sys
import time

if __name__ == "__main__":
    # Read when torch starts: every tensor gets an allocation of its own.
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from attention_cases import Shape, compact, padded_positions  # noqa: E402
from kernel_cases import (  # noqa: E402
    BWD,
    DEVICE,
    FWD,
    difference,
    make_call,
    through_kernels,
    through_reference,
)

# Tails everywhere: 150 is no multiple of a tile, 40 of no power of two.
S = Shape(B=1, Hq=2, Hkv=1, Tq=150, Tk=150, D=64, Dv=64)
WIDE = S._replace(D=128, Dv=128)  # Gluon on 9.0
ROW = dict(block="1xD")


def on(x: torch.Tensor) -> torch.Tensor:
    return x.to(DEVICE)


def cases() -> dict[str, tuple[Shape, dict]]:
    sinks = on(torch.tensor([0.5, -1.0]))
    holes = on(torch.rand(1, 2, 150, 150, generator=torch.Generator().manual_seed(1)) > 0.3)
    left = on(compact(padded_positions([110], 150, "left"), window=60))
    packed = on(torch.tensor([0, 37, 37, 150], dtype=torch.int32))
    return {
        "causal": (S, {}),
        "full-D128": (WIDE, dict(is_causal=False)),
        "causal-D128": (WIDE, dict(dlse=True, sinks=sinks)),
        "window-D128": (WIDE._replace(Tq=70), dict(window=20, softcap=5.0)),
        "compact-D128": (WIDE, dict(mask=left, is_causal=False)),
        "packed-D128": (WIDE._replace(Hkv=2), dict(cu_seqlens=packed)),
        "1xD": (S, dict(fields=ROW)),
        "1xD-full": (S._replace(Hkv=2), dict(fields=ROW, is_causal=False)),
        "one-query": (S._replace(Tq=1), {}),
        "window": (S._replace(Tq=70), dict(window=20)),
        "window-1xD": (S._replace(Tq=70), dict(window=20, fields=ROW)),
        "compact": (S, dict(mask=left, is_causal=False)),
        "compact-1xD": (S, dict(mask=left, is_causal=False, fields=ROW)),
        "bool": (S, dict(mask=holes)),
        "bool-1xD-sinks": (S, dict(mask=holes, fields=ROW, sinks=sinks)),
        "packed": (S, dict(cu_seqlens=packed)),
        "packed-1xD-window": (S, dict(cu_seqlens=packed, fields=ROW, window=30)),
        "softcap-sinks-dlse": (S, dict(softcap=5.0, sinks=sinks, dlse=True)),
        "stale": (S, dict(recipe="stale_delta")),
        "dequantized": (S, dict(recipe="dequantized_delta")),
        "forward": (S, dict(recipe="forward_delta")),
        "forward-1xD-window": (S, dict(recipe="forward_delta", window=30, fields=ROW)),
        "projection": (S, dict(fields=dict(project_row_sum=True))),
        "projection-packed": (S, dict(fields=dict(project_row_sum=True), cu_seqlens=packed)),
        "e5m2-D80-Dv40": (S._replace(D=80, Dv=40), dict(fields=dict(do_format="e5m2"))),
        "D7": (S._replace(D=7, Dv=7, Tq=40, Tk=40), {}),
        "D192-Dv128": (S._replace(D=192, Dv=128), {}),
        "D256": (S._replace(D=256, Dv=256), {}),
        "bf16": (S, dict(dtype=torch.bfloat16)),
    }


def check(shape: Shape, options: dict) -> dict[str, float]:
    """Differences by field; where no other kernels run for it, of a call that also sums and stores dS."""
    call = make_call(shape, **options)
    debug = shape.D != 128
    fwd, bwd = through_kernels(call, store_ds=debug, row_sums=debug)
    ref_fwd, ref_bwd = through_reference(call)
    pairs = [(n, a, b) for n, a, b in zip(FWD, fwd, ref_fwd, strict=True) if n in ("o", "lse")]
    pairs += list(zip(BWD, bwd[:5], ref_bwd, strict=True))
    return {name: difference(a, b) for name, a, b in pairs}


def main(wanted: list[str]) -> int:
    known = cases()
    if wanted == ["--list"]:
        print("\n".join(known))
        return 0
    chosen = [n for n in known if not wanted or any(n.startswith(w) for w in wanted)]
    unmatched = [w for w in wanted if not any(n.startswith(w) for n in known)]
    if unmatched:
        print(f"no case starts with {', '.join(unmatched)}; --list prints them", file=sys.stderr)
        return 2
    failed = []
    for name in chosen:
        start = time.time()
        differences = check(*known[name])
        # As in test_kernels_attention.py, for a device: outputs in BF16, sums of 14 bits.
        wrong = {n: d for n, d in differences.items() if not d < 1.5e-2}
        failed += [name] if wrong else []
        worst = max(differences, key=differences.get)
        print(
            f"{'WRONG' if wrong else 'ok':<6}{name:<20} {worst} {differences[worst]:.2e}, "
            f"{time.time() - start:.1f} s",
            flush=True,
        )
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    print(f"{len(chosen)} cases, {len(failed)} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
