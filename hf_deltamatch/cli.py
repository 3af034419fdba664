"""The ``hf-deltamatch`` command."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path

from hf_deltamatch.benchmarks import command as bench
from hf_deltamatch.evaluation import command as evaluation
from hf_deltamatch.evaluation import compare_command as compare
from hf_deltamatch.export import command as export
from hf_deltamatch.study import command as study
from hf_deltamatch.training import plot

EPILOG = """\
examples:
  hf-deltamatch env
  hf-deltamatch recipe delta_matching
  hf-deltamatch recipe delta_matching --block 1xD --project-row-sum
  hf-deltamatch numerics --seeds 5 --json numerics.json
  hf-deltamatch bench attention --json attention.json
  hf-deltamatch bench linear --shape 16384,4096,14336 --recipe blockwise
  hf-deltamatch bench step --layers 8 --json step.json
  hf-deltamatch study examples/configs/study_table.yaml --output runs/table
  hf-deltamatch plot runs/pretrain_tiny
  hf-deltamatch export runs/pretrain_tiny --output out/my-model
  hf-deltamatch eval PATH --tasks delta_matching --batch_size 8 --output_path results --log_samples
  hf-deltamatch eval ls tasks
  hf-deltamatch compare mp=results/mp dm=results/dm --json mp_dm.json
"""

RECIPE_FLAGS = {
    "block": "attention: 128xD, 1xD or mx",
    "delta": "attention: matched, stale, dequantized or forward",
    "do_format": "attention: e4m3 or e5m2",
    "project_row_sum": "attention: remove what rounding leaks along the mean key",
    "deterministic": "attention: no atomics",
    "quantize": "attention: FP8 or high precision",
    "scaling": "linear: blockwise, rowwise or mx",
    "grad_format": "linear: e4m3 or e5m2",
    "grad_weight_hp": "linear: the grad_weight GEMM in high precision",
    "descale": "both: pow2 or fp32",
}


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["eval"]:
        return _eval(argv[1:])
    if argv[:1] == ["compare"]:
        return _compare(argv[1:])
    args = _parser().parse_args(argv)
    try:
        run = {"env": _env, "recipe": _recipe, "numerics": _numerics, "bench": _bench}
        run["study"] = study.run_command
        run["plot"] = plot.run_command
        run["export"] = export.run_command
        return run[args.command](args)
    except (ValueError, OSError) as error:
        return _failed(args.command, error)


def _parser() -> argparse.ArgumentParser:
    from hf_deltamatch import __version__

    parser = argparse.ArgumentParser(
        prog="hf-deltamatch",
        description="FP8 training of language models with a matched row correction.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hf-deltamatch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    env = commands.add_parser("env", help="versions, device, and which backend each op will use")
    env.add_argument("--json", action="store_true", help="print JSON")
    recipe = commands.add_parser("recipe", help="print a recipe as its equations")
    recipe.add_argument("name", nargs="?", help="attention or linear recipe; all if left out")
    for field, text in RECIPE_FLAGS.items():
        flag = "--" + field.replace("_", "-")
        if field in ("project_row_sum", "deterministic", "quantize", "grad_weight_hp"):
            recipe.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            recipe.add_argument(flag, metavar="VALUE", help=text)
    numerics = commands.add_parser("numerics", help="what each δ rule costs against FP64")
    numerics.add_argument(
        "--seeds",
        type=int,
        default=5,
        metavar="N",
        help="random inputs for each of three key offsets, seeds 0 to N - 1, some seconds each "
        "(default: %(default)s; 1 gives no spread)",
    )
    numerics.add_argument(
        "--block", default="128xD", help="128xD, 1xD or mx (default: %(default)s)"
    )
    numerics.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the table to this file"
    )
    bench.add_parser(commands)
    study.add_parser(commands)
    plot.add_parser(commands)
    export.add_parser(commands)
    # Only for --help: these two hand arguments on to lm-eval.
    commands.add_parser("eval", help="lm-eval with the model `hf-deltamatch` (lm-eval's options)")
    commands.add_parser("compare", help="evaluations side by side, with standard errors")
    return parser


def _failed(command: str, error: Exception, hint: str = "") -> int:
    """One line for an error of the user's; the exit status."""
    # KeyError quotes its text.
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    line = " ".join(str(text).split()) or type(error).__name__
    print(f"hf-deltamatch {command}: {line}{hint}", file=sys.stderr)
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
    fields = {f: v for f in RECIPE_FLAGS if (v := getattr(args, f)) is not None}
    if args.name is None:
        if fields:
            raise ValueError(
                f"--{next(iter(fields)).replace('_', '-')} changes a recipe; name it, as in "
                "`hf-deltamatch recipe delta_matching --block 1xD`."
            )
        print("\n\n".join(_equations(kind.from_name(n)) for kind in kinds for n in kind.NAMES))
        return 0
    for kind in kinds:
        if args.name in kind.NAMES:
            try:
                print(_equations(kind.from_name(args.name, **fields)))
            except TypeError as error:  # a field of the other kind of recipe
                raise ValueError(error) from error
            return 0
    known = ", ".join(sorted(name for kind in kinds for name in kind.NAMES))
    raise ValueError(
        f"unknown recipe {args.name!r}. Known names: {known}. Fields are flags here, as in "
        "`hf-deltamatch recipe delta_matching --block 1xD`, and arguments in Python: "
        'AttentionRecipe.from_name("delta_matching", block="1xD").'
    )


def _equations(recipe) -> str:
    legend = getattr(recipe, "legend", None)
    return f"{recipe}\n{legend}" if legend else str(recipe)


def _numerics(args: argparse.Namespace) -> int:
    from hf_deltamatch import numerics

    if args.seeds < 1:
        raise ValueError(f"--seeds is {args.seeds}; it must be at least 1.")
    _check_json(args.json)

    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    result = numerics.table(args.seeds, args.block, progress)
    print(numerics.format_table(result))
    _write_json(args.json, result)
    return 0


def _check_json(path: Path | None) -> None:
    """Before minutes of work, not after it."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"--json is {path}; it must be a file in a folder that exists.")


def _write_json(path: Path | None, result: dict) -> None:
    """Whole or not at all: a file that was there stays until the new one is complete."""
    from hf_deltamatch.environment import environment

    if path is None:
        return
    whole = _finite({**result, "environment": environment()})
    text = json.dumps(whole, indent=2, allow_nan=False) + "\n"
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _finite(value):
    """NaN and Inf as null: JSON has neither, and most readers refuse the file."""
    if isinstance(value, dict):
        return {key: _finite(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _bench(args: argparse.Namespace) -> int:
    _check_json(args.json)
    failed = bench.run_command(args, keep=lambda result: _write_json(args.json, result))
    for text in failed:
        _failed("bench", RuntimeError(text))
    return 2 if failed else 0


def _eval(argv: list[str]) -> int:
    try:
        return evaluation.run(argv)
    except (ImportError, ValueError, KeyError, TypeError, OSError, NotImplementedError) as error:
        if "DEBUG" in map(str.upper, argv):
            raise
        return _failed("eval", error, " (--verbosity DEBUG shows where)")


def _compare(argv: list[str]) -> int:
    try:
        return compare.run(argv, write=_write_json)
    except (ImportError, ValueError, KeyError, TypeError, OSError, NotImplementedError) as error:
        if "DEBUG" in map(str.upper, argv):
            raise
        return _failed("compare", error)
