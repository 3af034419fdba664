"""The ``compare`` command: results of lm-eval side by side, evaluated first where they are not there."""

from __future__ import annotations

import argparse
import gc
import json
import re
from collections.abc import Callable
from pathlib import Path

from hf_deltamatch.evaluation import command
from hf_deltamatch.evaluation.comparison import compare
from hf_deltamatch.evaluation.results import load, results_files

DESCRIPTION = """\
Scores of evaluations with standard errors, and their differences to the first one.

  hf-deltamatch compare mp=results/mp dm=results/dm --json mp_dm.json
  hf-deltamatch compare mp=PATH,attention=none,linear=none dm=PATH --output results \\
      -- --tasks delta_matching --batch_size 8

A RESULT is a results file of lm-eval or a folder with some (the newest is taken), and what follows
`NAME=` is what it is called in the table. After `--`, a RESULT may be a model too, with model_args after
a comma: it is evaluated with the options after `--` (lm-eval's), samples logged, into OUTPUT/NAME.

The standard error of a difference is taken over the documents' own differences where both sides logged
samples (--log_samples), which is said as `paired`; else from both standard errors: `unpaired`. Results
of other tasks, versions, documents or settings are refused.
"""


def parser() -> argparse.ArgumentParser:
    """The command's own arguments, without those after ``--``."""
    out = argparse.ArgumentParser(
        prog="hf-deltamatch compare",
        usage="hf-deltamatch compare [NAME=]RESULT [NAME=]RESULT … [options] [-- LM-EVAL OPTIONS]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = out.add_argument
    add("results", nargs="+", metavar="RESULT", help="two or more; the first is the baseline")
    add("--tasks", nargs="+", metavar="TASK", help="tasks and groups to compare (default: all)")
    add("--json", type=Path, metavar="FILE", help="also write the comparison to this file")
    add("--output", type=Path, metavar="FOLDER", help="where evaluations of models are written")
    return out


def run(argv: list[str], write: Callable[[Path, dict], None]) -> int:
    """Compare, print a table, and hand the comparison to ``write`` if ``--json`` is given.

    Raises:
        ValueError, OSError: what cannot be compared, and why; the errors of ``eval`` besides.
    """
    at = argv.index("--") if "--" in argv else len(argv)
    args, options = parser().parse_args(argv[:at]), argv[at + 1 :]
    if len(args.results) < 2:
        raise ValueError(f"one result is given, {args.results[0]!r}; a comparison needs two.")
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise ValueError(f"--json is {args.json}; it must be a file in a folder that exists.")
    named = _named(args.results)
    if at < len(argv):
        named = _evaluated(named, options, args.output)
        if named is None:
            return 0
    runs = [load(Path(what), name) for name, what in named.items()]
    found = compare(runs, args.tasks)
    print(to_markdown(found))
    if args.json is not None:
        write(args.json, found)
    return 0


def _named(given: list[str]) -> dict[str, str]:
    """Name to result, in the order given."""
    named = {}
    for text in given:
        name, equals, what = text.partition("=")
        if not equals or Path(text).exists() or not re.fullmatch(r"[\w.+-]+", name):
            path = Path(text.split(",")[0])
            name, what = path.parent.name if path.suffix == ".json" else path.name, text
        if name in named:
            raise ValueError(f"two results are called {name!r}; name them, as in mp={text} dm=…")
        named[name] = what
    return named


def _evaluated(named: dict[str, str], options: list[str], output: Path | None) -> dict | None:
    """``named`` with models replaced by their results; None in a process that has nothing to print."""
    if any(o.startswith(("--output_path", "-o")) for o in options):
        raise ValueError("--output_path after `--`: results go to OUTPUT/NAME, choose --output.")
    if any(o in ("--log_samples", "-s") for o in options):
        options = [o for o in options if o not in ("--log_samples", "-s")]
    models = {name: what for name, what in named.items() if not _has_results(Path(what))}
    if models and output is None:
        raise ValueError(f"--output is missing: a folder for the results of {', '.join(models)}.")
    for name, what in models.items():
        folder = output / name
        before = results_files(folder)
        into = ["--output_path", str(folder), "--log_samples"]
        status = command.run(["--model_args", json.dumps(_model_args(what)), *options, *into])
        gc.collect()  # the model, before the next one is loaded
        if not _is_first_process():
            continue
        new = [f for f in results_files(folder) if f not in before]
        if status or not new:
            raise ValueError(f"the evaluation of {name} wrote no results into {folder}.")
        named = {**named, name: str(new[-1])}
    return named if _is_first_process() else None


def _has_results(path: Path) -> bool:
    if path.is_dir():
        return not (path / "config.json").exists() and bool(results_files(path))
    return path.suffix == ".json"


def _model_args(text: str) -> dict[str, str]:
    """``PATH,key=value,…`` as lm-eval's model_args."""
    if Path(text).exists():
        return {"pretrained": text}
    path, *rest = text.split(",")
    if wrong := [r for r in rest if "=" not in r]:
        raise ValueError(f"{wrong[0]!r} in {text!r} is not key=value, one of the model_args.")
    return {"pretrained": path, **dict(r.split("=", 1) for r in rest)}


def _is_first_process() -> bool:
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def to_markdown(found: dict) -> str:
    """The comparison as a table, with what it is about below."""
    labels = list(found["runs"])
    base, others = found["baseline"], [n for n in labels if n != found["baseline"]]
    heads = ["task", "metric", "n", *labels, *(f"{n} − {base}" for n in others), "standard error"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in found["rows"]:
        arrow = {True: " ↑", False: " ↓"}.get(row["higher_is_better"], "")
        kind = "" if row["filter"] == "none" else f" ({row['filter']})"
        hows = list(dict.fromkeys(d["how"] for d in row["differences"].values()))
        cells = [
            f"**{row['task']}**" if row["group"] else row["task"],
            row["metric"] + kind + arrow,
            str(row["documents"]),
            *(_cell(row["scores"][n]) for n in labels),
            *(_cell(row["differences"][n], sign="+") for n in others),
            ", ".join(hows),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "± is one standard error, of a difference: as the last column says. Runs:", ""]
    for name, facts in found["runs"].items():
        said = [
            f"{what} {_recipes(facts[what]) or 'not in FP8'}"
            for what in ("attention", "linear")
            if facts[what] is not None  # else lm-eval's own model, which does not say
        ]
        if facts["stored_as"]:
            said.append(f"weights stored as `{facts['stored_as']}`")
        lines.append(f"* {name}: " + ", ".join([str(facts["model"]), *said]))
    lines += [f"* note: {note}" for note in found["notes"]]
    return "\n".join(lines)


def _recipes(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} × {n}" for name, n in counts.items())


def _cell(value: dict, sign: str = "") -> str:
    form = lambda x, s="": f"{x:{s}.4f}" if abs(x) < 1e4 else f"{x:{s}.3e}"
    if value["stderr"] is None:
        return form(value["value"], sign)
    return f"{form(value['value'], sign)} ± {form(value['stderr'])}"
