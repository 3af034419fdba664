"""The ``plot`` command: one picture of a training run."""

from __future__ import annotations

import argparse
from itertools import cycle
from pathlib import Path

from hf_deltamatch.training.metrics import read_metrics

PANELS = (
    ("loss", ("loss", "eval_loss"), "nats per token", False),
    ("gradient norm, learning rate", ("grad_norm", "lr"), "", True),
    ("tokens per second", ("tokens_per_second",), "", False),
    (
        "row-sum residual of dS; |e|, matched minus stale δ, relative",
        ("attention/row_sum_residual", "attention/e_rel"),
        "",
        True,
    ),
    (
        "error of dQ, and its share along the mean key",
        ("attention/dq_error", "attention/dq_error_mean_key"),
        "",
        False,
    ),
    (
        "underflow of FP8 operands",
        tuple(f"attention/underflow_{w}" for w in ("q", "k", "v", "do", "p", "ds")),
        "share",
        False,
    ),
    ("largest attention logit", ("attention/logit_max",), "", False),
)


def add_parser(commands) -> None:
    """The command's arguments, on the subparsers of the main command."""
    parser = commands.add_parser("plot", help="one picture of a training run's metrics.jsonl")
    parser.add_argument(
        "run",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="folder of a run; several: a line style each",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: plot.png in the first RUN"
    )


def run_command(args: argparse.Namespace) -> int:
    output = args.output or args.run[0] / "plot.png"
    plot(args.run, output)
    print(f"Written: {output}")
    return 0


def plot(folders: list[Path], output: Path) -> list[str]:
    """Draw what the runs logged, a panel for each kind of number that is there; returns their titles.

    Raises:
        ValueError: a folder without numbers, or no matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            f'matplotlib is missing ({error}). Install it with: pip install "hf-deltamatch[train]"'
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    runs = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(
                f"there is no folder {folder}; name the output folder of a training run."
            )
        rows = read_metrics(folder / "metrics.jsonl")
        if not rows:
            raise ValueError(
                f"{folder / 'metrics.jsonl'} has no numbers; name the output folder of a "
                "training run."
            )
        runs[folder] = rows
    found = {k for rows in runs.values() for row in rows for k, v in row.items() if v is not None}
    panels = [p for p in PANELS if found & set(p[1])]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(8, 2.6 * len(panels)), sharex=True, layout="constrained", squeeze=False
    )  # fmt: skip
    for axis, (title, names, label, log) in zip(axes[:, 0], panels, strict=True):
        looks = cycle(zip(("-", "--", ":", "-."), "oxs^", strict=True))
        for folder, (style, point) in zip(runs, looks, strict=False):
            rows = runs[folder]
            for index, name in enumerate(names):
                points = [(r["step"], r[name]) for r in rows if r.get(name) is not None]
                if points:
                    # The monitor looks at other layers each time: a line would join what is not one.
                    layers = name.startswith("attention/")
                    few = len(points) < 0.5 * len(rows) or len(points) < 3
                    text = name.rpartition("/")[2]
                    text = text if len(runs) == 1 else f"{folder.name}: {text}"
                    look = {
                        "color": f"C{index}",
                        "linestyle": "" if layers else style,
                        "marker": point if layers or few else "",
                    }
                    axis.plot(*zip(*points, strict=True), **look, label=text, markersize=3)
        axis.set_title(title, fontsize=10)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if log:
            axis.set_yscale("log")
        axis.legend(fontsize=8)
    axes[-1, 0].set_xlabel("step")
    figure.suptitle(", ".join(f.name for f in runs))
    figure.savefig(output, dpi=130)
    plt.close(figure)
    return [p[0] for p in panels]
