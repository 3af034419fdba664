"""The ``bench`` command: its arguments, and which benchmark they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_parser(commands) -> None:
    """The command's arguments, on the subparsers of the main command."""
    bench = commands.add_parser(
        "bench",
        help="our kernels beside BF16 and FP8 of others, on a CUDA device",
        description="Times as a training step sees them (many calls queued), and of one call; every "
        "row is checked first. Exit status 2 if one of ours fails its check.",
    )
    benches = bench.add_subparsers(dest="what", required=True, metavar="WHAT")
    attention = benches.add_parser("attention", help="attention, forward and backward")
    attention.add_argument(
        "--shape",
        action="append",
        metavar="B,Hq,Hkv,T,D,MASK",
        help="MASK is causal, full or windowN, as in 1,16,16,32768,128,window128; may be repeated "
        "(default: the shapes of examples/benchmarks)",
    )
    attention.add_argument(
        "--recipe",
        action="append",
        metavar="'NAME [BLOCK]'",
        help="may be repeated (default: delta_matching; for the first shape also "
        "'delta_matching 1xD' and stale_delta)",
    )
    linear = benches.add_parser("linear", help="linear layers, forward and both gradients")
    linear.add_argument(
        "--shape",
        action="append",
        metavar="TOKENS,IN,OUT",
        help="as in 16384,4096,14336; may be repeated (default: three shapes of a model of 8B)",
    )
    linear.add_argument(
        "--recipe",
        action="append",
        metavar="'NAME [compiled]'",
        help="may be repeated (default: blockwise, 'blockwise compiled', rowwise, mx)",
    )
    step = benches.add_parser("step", help="training steps of a Llama: forward, backward, AdamW")
    for flag, default, what in (
        ("--layers", 20, "layers"),
        ("--hidden", 2048, "width; a multiple of 256, the feed-forward has four of it"),
        ("--tokens", 8192, "tokens of a sequence"),
        ("--batch", 4, "sequences in a step"),
    ):
        step.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{what} (default: {default})"
        )
    step.add_argument(
        "--arm",
        action="append",
        metavar="NAME",
        help="fp8 (attention and linears, feed-forwards of one op), fp8-gated (only their product and last "
        "linear in one), fp8-attention or fp8-linears; may be repeated (default: fp8), beside bf16",
    )
    step.add_argument(
        "--weights",
        default="bf16",
        help="bf16: weights and optimiser state too; fp32: those in FP32, autocast to BF16 "
        "(default: %(default)s)",
    )
    for one in (attention, linear, step):
        one.add_argument(
            "--json",
            type=Path,
            metavar="FILE",
            help="also write the times to this file, as they come",
        )


def run_command(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> list[str]:
    """What went wrong, a sentence each: rows of ours that failed, or why nothing can be timed.

    Args:
        keep: gets the result so far, several times.

    Raises:
        ValueError: arguments that do not fit, or no Triton.
    """
    try:
        from hf_deltamatch.benchmarks import tables
    except ImportError as error:
        raise ValueError(
            f"speed is measured on a CUDA device with kernels, which need Triton ({error})."
        ) from error
    run = {"attention": _attention, "linear": _linear, "step": _step}[args.what]
    report = {"progress": lambda text: print(text, flush=True), "keep": keep}
    try:
        return tables.failures(run(args, report))
    except tables.BenchError as error:
        return [str(error)]


def _attention(args: argparse.Namespace, report: dict[str, Any]) -> dict[str, Any]:
    from hf_deltamatch.benchmarks import attention, shapes

    chosen = _parsed(args.shape, shapes.parse_shape)
    _parsed(args.recipe, shapes.parse_recipe)
    return attention.bench_attention(chosen, args.recipe and tuple(args.recipe), **report)


def _linear(args: argparse.Namespace, report: dict[str, Any]) -> dict[str, Any]:
    from hf_deltamatch.benchmarks import linear, linear_shapes

    chosen = _parsed(args.shape, linear_shapes.parse_linear_shape)
    _parsed(args.recipe, linear_shapes.parse_linear_recipe)
    return linear.bench_linear(chosen, args.recipe and tuple(args.recipe), **report)


def _step(args: argparse.Namespace, report: dict[str, Any]) -> dict[str, Any]:
    from hf_deltamatch.benchmarks import step

    size = step.Size(args.layers, args.hidden, args.tokens, args.batch)
    return step.bench_step(size, args.arm, args.weights, **report)


def _parsed(texts: list[str] | None, parse: Callable[[str], Any]) -> tuple | None:
    return None if texts is None else tuple(parse(text) for text in texts)
