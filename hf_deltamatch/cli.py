"""The ``hf-deltamatch`` command."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

EPILOG = """\
examples:
  hf-deltamatch env
  hf-deltamatch recipe delta_matching
  hf-deltamatch numerics --seeds 5 --json numerics.json
  hf-deltamatch eval --model_args pretrained=PATH --tasks lambada_openai --batch_size 8
"""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["eval"]:
        return _eval(argv[1:])
    parser = argparse.ArgumentParser(
        prog="hf-deltamatch",
        description="FP8 training of language models with a matched row correction.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    env = commands.add_parser("env", help="versions, device, and which backend each op will use")
    env.add_argument("--json", action="store_true", help="print JSON")
    recipe = commands.add_parser("recipe", help="print a recipe as its equations")
    recipe.add_argument("name", nargs="?", help="attention or linear recipe; all if left out")
    numerics = commands.add_parser("numerics", help="what each δ rule costs against FP64")
    numerics.add_argument("--seeds", type=int, default=5)
    numerics.add_argument("--block", default="128xD", help="128xD, 1xD or mx")
    numerics.add_argument("--json", type=Path, help="also write the table to this file")
    # Only for --help: `eval` hands everything to lm-eval.
    commands.add_parser("eval", help="lm-eval with the model `hf-deltamatch` (lm-eval's options)")
    args = parser.parse_args(argv)
    try:
        return {"env": _env, "recipe": _recipe, "numerics": _numerics}[args.command](args)
    except ValueError as error:
        print(f"hf-deltamatch {args.command}: {error}", file=sys.stderr)
        return 2


def _env(args: argparse.Namespace) -> int:
    import torch

    import hf_deltamatch  # noqa: F401 - registers, so that what is printed is what is used
    from hf_deltamatch.environment import device_name, environment
    from hf_deltamatch.ops.backend import OPS, explain

    device = "cuda" if torch.cuda.is_available() else "cpu"
    choices = {op: explain(op, device) for op in OPS}
    if args.json:
        ops = {op: c._asdict() for op, c in choices.items()}
        print(json.dumps({**environment(), "ops": ops}, indent=2))
        return 0
    env = environment()
    print(f"python {env['python']}, {env['platform']}, {env['cpus']} CPUs")
    for package, version in env["packages"].items():
        print(f"  {package:<14} {version}")
    print(f"device: {device_name()}")
    for op, choice in choices.items():
        print(f"  {op:<10} {choice.backend or 'raises'}: {choice.reason}")
    return 0


def _recipe(args: argparse.Namespace) -> int:
    from hf_deltamatch.recipes import AttentionRecipe, LinearRecipe

    kinds = (AttentionRecipe, LinearRecipe)
    known = [name for kind in kinds for name in kind.NAMES]
    if args.name is not None and args.name not in known:
        raise ValueError(f"unknown recipe {args.name!r}. Known names: {', '.join(sorted(known))}.")
    names = known if args.name is None else [args.name]
    texts = [str(kind.from_name(n)) for kind in kinds for n in names if n in kind.NAMES]
    print("\n\n".join(texts))
    return 0


def _numerics(args: argparse.Namespace) -> int:
    from hf_deltamatch import numerics
    from hf_deltamatch.environment import environment

    if args.seeds < 1:
        raise ValueError(f"--seeds is {args.seeds}; it must be at least 1.")

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{text:<40}", end="", file=sys.stderr, flush=True)

    result = numerics.table(args.seeds, args.block, progress)
    progress("\r")
    print(numerics.format_table(result))
    if args.json is not None:
        text = json.dumps({**result, "environment": environment()}, indent=2) + "\n"
        args.json.write_text(text)
    return 0


def _eval(argv: list[str]) -> int:
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        print(
            f"hf-deltamatch eval: lm-eval is not installed ({error}). "
            'Install it with: pip install "hf-deltamatch[eval]"',
            file=sys.stderr,
        )
        return 2
    import hf_deltamatch.hf.lm_eval  # noqa: F401 - registers the model

    if not any(a in ("-h", "--help") for a in argv) and not any(
        a in ("--model", "-M") or a.startswith("--model=") for a in argv
    ):
        argv = ["--model", "hf-deltamatch", *argv]
    if argv[:1] != ["run"]:
        argv = ["run", *argv]
    saved, sys.argv = sys.argv, ["lm-eval", *argv]
    try:
        cli_evaluate()
    finally:
        sys.argv = saved
    return 0
