"""The ``study`` command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DESCRIPTION = """\
Train arms x settings x seeds from one YAML file and write a report.

  hf-deltamatch study examples/configs/study_table.yaml --output runs/table
  hf-deltamatch study FILE --only "6e-3 DM" "6e-3 MP"    # runs whose name has all words of one
  hf-deltamatch study FILE --shard 1/2                   # every second run
  hf-deltamatch study FILE --time-limit 270              # what is not done by then is left
  hf-deltamatch study FILE --save                        # final weights, for `hf-deltamatch eval`
  hf-deltamatch study FILE --report-only

OUTPUT holds runs.jsonl (one line per run, written as it ends), report.md, report.json, report.png. The
same command again does what is missing. Results go to stdout; step, loss and time left of each run,
to stderr.
"""


def add_parser(commands) -> None:
    """The command's arguments, on the subparsers of the main command."""
    parser = commands.add_parser(
        "study",
        help="train arms x settings x seeds from one YAML file, with a report",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="the study, YAML")
    add("--output", type=Path, metavar="FOLDER", help="default: runs/NAME")
    add("--only", nargs="+", metavar="WORDS", help="runs whose name has all of these words")
    add("--shard", metavar="I/N", help="every N-th run, from the I-th on")
    add(
        "--workers",
        type=int,
        metavar="N",
        help="runs at once on each device (default: by FILE; on a CPU 1)",
    )
    add("--devices", nargs="+", metavar="DEVICE", help="default: all CUDA devices, else cpu")
    add("--backend", help="FP8 backend by name (default: by device)")
    add(
        "--cuda-graph",
        action=argparse.BooleanOptionalAction,
        help="record the step once and replay it (default: what the file says)",
    )
    add(
        "--save",
        action="store_true",
        help="keep final weights, in OUTPUT/models/KEY of runs.jsonl (a run without them is missing)",
    )
    add("--time-limit", type=float, metavar="SECONDS", help="end what is not done by then")
    add("--list", action="store_true", help="print the names of the runs and what is there of them")
    add("--report-only", action="store_true", help="write the report of what is there")


def run_command(args: argparse.Namespace) -> int:
    """Exit status 0 if every chosen run that is possible here has a result, 1 otherwise.

    Raises:
        ValueError, OSError: the file or the arguments; or nothing that is chosen is possible here.
    """
    import transformers

    from hf_deltamatch.ops.backend import BACKENDS
    from hf_deltamatch.study import before, pool, report
    from hf_deltamatch.study.model import is_known
    from hf_deltamatch.study.spec import load_study, select
    from hf_deltamatch.training.study_rows import read_rows

    study = load_study(args.file)
    chosen = select(study, args.only, args.shard)
    runs = [run for run in chosen if is_known(run.config)]
    for setting in dict.fromkeys(run.setting for run in chosen if not is_known(run.config)):
        print(
            f"{setting}: left out, Transformers {transformers.__version__} has no such model type"
        )
    devices = pool.devices_of(args.devices)
    # The file's number is for GPUs; processes on a CPU only take each other's cores.
    by_file = 1 if devices == ["cpu"] else study.runtime["workers"]
    workers = by_file if args.workers is None else args.workers
    if workers < 1:
        raise ValueError(f"--workers is {workers}; it must be at least 1.")
    if args.time_limit is not None and not 0 < args.time_limit < 1e9:
        raise ValueError(f"--time-limit is {args.time_limit}; it must be a number of seconds.")
    if args.backend not in (None, *BACKENDS):
        raise ValueError(f"--backend is {args.backend!r}; allowed are {', '.join(BACKENDS)}.")
    folder = args.output or Path("runs") / study.name
    show = lambda text: print(text, file=sys.stderr, flush=True)
    rows = read_rows(folder, show)
    kept = lambda run: not args.save or (folder / "models" / run.key).is_dir()
    done_in = lambda rows, run: (
        run.key in rows and rows[run.key]["status"] != "failed" and kept(run)
    )
    done = lambda run: done_in(rows, run)
    if args.list:
        for run in runs:
            print(f"{rows[run.key]['status'] if run.key in rows else '-':<9} {run.name}")
        return 0
    if not runs and not args.report_only and not all(done(run) for run in chosen):
        before.check_known(chosen)
    missing = [run for run in runs if not done(run)]
    if missing and not args.report_only:
        graph = study.runtime["cuda_graph"] if args.cuda_graph is None else args.cuda_graph
        before.check(study, missing, devices)
        folder.mkdir(parents=True, exist_ok=True)
        say = lambda text: print(text, flush=True)
        say(f"{len(missing)} of {len(runs)} runs to do, {workers} at once on {', '.join(devices)}")
        pool.run_all(
            missing,
            study.corpus,
            folder,
            devices=devices,
            workers=workers,
            # `auto` tries.
            cuda_graph=graph in (True, "auto"),
            backend=args.backend or study.runtime["backend"],
            time_limit=args.time_limit,
            save=args.save,
            is_done=lambda run: done_in(read_rows(folder), run),
            say=say,
            show=show,
        )
        rows = read_rows(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = report.write_report(study, rows, folder)
    print(report.to_markdown(found), flush=True)
    written = ("report.md", "report.json", "report.png", "runs.jsonl")
    there = ", ".join(name for name in written if (folder / name).exists())
    print(f"Written: {folder}/: {there}")
    return 0 if all(done(run) for run in runs) else 1
