"""Measure every causal-LM family of the installed Transformers and write docs/coverage.json and
docs/COVERAGE.md:

    python tests/coverage_table.py                # all of them, 5 to 15 minutes on one core
    python tests/coverage_table.py llama qwen3    # these again, the other rows stay
    python tests/coverage_table.py --table        # the table from the results that are there

Ends with 1 if a family runs silently without our op or gives a wrong number.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from coverage_measure import EXACT, FP8_OVER_EXACT, OURS, first_line, measure
from coverage_models import families, tiny_model

from hf_deltamatch import check_model, swap_linears
from hf_deltamatch.environment import environment

ROOT = Path(__file__).parent.parent
JSON, TABLE = ROOT / "docs" / "coverage.json", ROOT / "docs" / "COVERAGE.md"
SECONDS = 90
STATUS = {
    "works": "every attention that ran is ours, and right",
    "partly": "some attention is ours and right; `check_model` lists the modules that run their own code",
    "own attention": "the model's code never calls the attention interface; building it warns, `check_model` raises",
    "attention-free": "nothing to replace; building it warns, `check_model` raises",
    "refused": "an error in loading or in the first forward",
    "cannot be run": "its tiny model does not run with Transformers' own attention either",
    "cannot be built": "no tiny model of it was built with Transformers' own attention either",
    "failed": "the measurement ended without a result",
    "silent": "DEFECT: runs without our op and nothing says so",
    "wrong": "DEFECT: numbers differ beyond the bound",
}
ON_OUR_OP, DEFECTS = ("works", "partly"), ("silent", "wrong", "failed")


def guarded(family: str) -> dict[str, Any]:
    """:func:`measure` in a process of its own, so that a crash or an endless loop costs one row."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            row = measure(family)
        except BaseException as error:
            row = {"family": family, "status": "failed", "error": first_line(error)}
        with os.fdopen(write, "w") as out:
            json.dump(row, out)
        os._exit(0)
    os.close(write)
    text, end = b"", time.monotonic() + SECONDS
    while True:
        if not select.select([read], [], [], max(0.0, end - time.monotonic()))[0]:
            os.kill(child, signal.SIGKILL)
            break
        part = os.read(read, 1 << 16)
        if not part:
            break
        text += part
    os.close(read)
    status = os.waitpid(child, 0)[1]
    try:
        return json.loads(text)
    except ValueError:
        why = "more than the time limit" if status == signal.SIGKILL else f"exit status {status}"
        return {"family": family, "status": "failed", "error": why}


def counts(rows: list[dict[str, Any]]) -> dict[str, int]:
    found = Counter(r["status"] for r in rows)
    return {s: found[s] for s in STATUS if found[s]}


def table(results: dict[str, Any]) -> str:
    """The Markdown of the results."""
    rows = list(results["families"].values())
    packages = results["environment"]["packages"]
    ours = [r for r in rows if r["status"] in ON_OUR_OP]
    lines = [
        "# Families of causal language models",
        "",
        f"Every family that `AutoModelForCausalLM` of Transformers {packages['transformers']} knows, built tiny "
        "with random weights and run forward and backward on one full and one left-padded row, on a CPU in "
        f'FP32. {len(ours)} of {len(rows)} run on `attn_implementation="fp8_delta_matching"`; '
        f"{sum(r['status'] in DEFECTS for r in rows)} run silently without it or give a wrong number.",
        "Written by `python tests/coverage_table.py` from `coverage.json`; do not edit.",
        "",
        "| status | families | meaning |",
        "|---|---|---|",
        *(f"| {s} | {n} | {STATUS[s]} |" for s, n in counts(rows).items()),
        "",
        "## On our op",
        "",
        "Calls in one forward and the attention modules of the model (cross-attention without an encoder "
        "is not called; some models call a module twice). Relative differences from Transformers' own "
        "attention, forward / gradient: recipe `bf16` (nothing is quantised; below "
        f"{results['limits']['exact']:.0e}), `delta_matching` (FP8), and with `swap_linears` too.",
        "",
        "| family | calls / modules | unquantised | FP8 attention | with FP8 linears | linears |",
        "|---|---|---|---|---|---|",
    ]
    pair = lambda d, form: (
        " / ".join(format(d[k], form) for k in ("forward", "gradient")) if "forward" in d else "–"
    )
    for r in ours:
        linears = r["linears"]
        swapped = linears.get("swapped", linears.get("error"))
        lines.append(
            f"| {r['family']} | {r['calls']} / {r['modules']} | {pair(r['exact'], '.1e')} | "
            f"{pair(r['fp8'], '.3f')} | {pair(linears, '.3f')} | {swapped} |"
        )
    lines += [
        "",
        "Partly: what runs code of its own.",
        "",
        "| family | modules | why |",
        "|---|---|---|",
    ]
    for r in ours:
        if r["status"] == "partly":
            lines.append(f"| {r['family']} | {r['other']} | {'; '.join(r['why_other'])} |")
    lines += ["", "## The rest", "", "| family | status | the error |", "|---|---|---|"]
    for r in rows:
        if r["status"] not in ON_OUR_OP:
            error = r.get("error", "").replace("|", "\\|")
            lines.append(f"| {r['family']} | {r['status']} | {error} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("families", nargs="*", help="only these; default: all")
    parser.add_argument("--table", action="store_true", help="only write the table again")
    parser.add_argument("--out", type=Path, default=JSON.parent, help="folder for both files")
    args = parser.parse_args(argv)
    unknown = set(args.families) - set(families())
    if unknown:
        parser.error(f"no such causal-LM families: {', '.join(sorted(unknown))}")
    args.out.mkdir(exist_ok=True, parents=True)
    path = args.out / JSON.name
    rows: dict[str, Any] = {}
    if path.exists() and (args.families or args.table):
        rows = json.loads(path.read_text())["families"]
    if not args.table:
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        # What is read of classes of torch is kept for the processes to come. No backward here.
        warm = tiny_model("llama", OURS)
        check_model(warm)
        swap_linears(warm)
        for family in args.families or families():
            start = time.monotonic()
            rows[family] = guarded(family)
            took = time.monotonic() - start
            print(f"{family}: {rows[family]['status']} ({took:.1f} s)", flush=True)
        results = {
            "environment": environment(),
            "limits": {"exact": EXACT, "fp8_over_exact": FP8_OVER_EXACT},
            "counts": counts(list(rows.values())),
            "families": dict(sorted(rows.items())),
        }
        path.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(path.read_text())
    (args.out / TABLE.name).write_text(table(results))
    print(results["counts"])
    return int(any(r["status"] in DEFECTS for r in results["families"].values()))


if __name__ == "__main__":
    sys.exit(main())
