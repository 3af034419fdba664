"""The picture of a study: losses, and under them the gaps to the baseline, which losses hide."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from hf_deltamatch.study.sections import by_seed, sections
from hf_deltamatch.study.spec import Run, Study

LOSS_STEPS, GAP_STEPS = 20, 50
"""Steps that a point is the mean of, the step's own and those before it; at most an eighth of a run's."""
MOST_BANDS = 4
"""Arms; bands of more hide each other."""


def plot(study: Study, rows: dict[str, dict], path: Path) -> None:
    """Two panels per setting. Above, loss over steps: thin lines are seeds, thick ones their mean. Below, the gap
    to the baseline of the same seed: mean over seeds and, of few arms, a band of a standard deviation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    mine = [(run, rows[run.key]) for run in study.runs if run.key in rows]
    mine = [(run, row) for run, row in mine if row["status"] != "failed"]
    shown = {
        name: [(run, row) for run, row in found if row["loss"]]
        for name, found in sections(study, mine).items()
    }
    shown = {name: found for name, found in shown.items() if found}
    if not shown:
        return
    columns = 2 if len(shown) == 4 else min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure, axes = plt.subplots(
        2 * lines, columns, figsize=(5.2 * columns, 5.6 * lines), squeeze=False, layout="constrained",
        height_ratios=[3, 2] * lines,
    )  # fmt: skip
    for i in range(lines * columns):
        above, below = axes[2 * (i // columns) : 2 * (i // columns) + 2, i % columns]
        if i >= len(shown):
            above.set_visible(False)
            below.set_visible(False)
            continue
        setting, found = list(shown.items())[i]
        _losses(above, study, found)
        above.set_title(setting)
        _gaps(below, study, found)
        below.set_xlim(above.get_xlim())
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _losses(axis, study: Study, found: list[tuple[Run, dict]]) -> None:
    highest, width = 0.0, _width(found, LOSS_STEPS)
    for index, arm in enumerate(study.arms):
        curves = [_smooth(row["loss"], width) for row in by_seed(found, arm).values()]
        for curve in curves:
            axis.plot(curve, color=f"C{index}", linewidth=0.6, alpha=0.5)
            highest = max(highest, *(x for x in curve if math.isfinite(x)), 0.0)
        if curves:
            mean = [statistics.fmean(p) for p in zip(*curves, strict=False)]
            axis.plot(mean, color=f"C{index}", linewidth=1.6, label=arm)
    finals = [row["best_loss"] for _, row in found if row["best_loss"] is not None]
    if finals:
        top = max(2.2 * min(finals), 1.1 * max(finals))  # a diverged run may leave the picture
        top = min(top, 1.05 * highest) if highest > min(finals) else top
        axis.set_ylim(0.95 * min(finals), top)
    axis.set_ylabel(f"loss (nats per token){_window(width)}")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")


def _gaps(axis, study: Study, found: list[tuple[Run, dict]]) -> None:
    base = by_seed(found, study.baseline)
    largest, width = 0.0, _width(found, GAP_STEPS)
    for index, arm in enumerate(study.arms):
        here = by_seed(found, arm)
        pairs = [(row, base[seed]) for seed, row in here.items() if seed in base]
        if arm == study.baseline or not pairs:
            continue
        gaps = [_difference(row["loss"], other["loss"]) for row, other in pairs]
        curves = [_smooth(gap, width) for gap in gaps]
        points = list(zip(*curves, strict=False))
        mean = [statistics.fmean(p) for p in points]
        axis.plot(mean, color=f"C{index}", linewidth=1.4)
        if len(curves) > 1 and len(study.arms) <= MOST_BANDS:
            spread = [
                statistics.stdev(p) if all(map(math.isfinite, p)) else math.nan for p in points
            ]
            low, high = (
                [m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1)
            )
            axis.fill_between(
                range(len(mean)), low, high, color=f"C{index}", alpha=0.12, linewidth=0
            )
        if all(row["status"] == "done" for row, _ in pairs):  # a diverged one may leave the picture
            late = mean[len(mean) // 3 :]
            largest = max(largest, *(abs(x) for x in late if math.isfinite(x)), 0.0)
    limit = 1.5 * largest or 0.1
    axis.set_ylim(-limit, limit)
    axis.axhline(0.0, color="black", linewidth=0.8)
    axis.set_xlabel("step")
    axis.set_ylabel(f"gap to {study.baseline}{_window(width)}")
    axis.grid(alpha=0.3)


def _width(found: list[tuple[Run, dict]], most: int) -> int:
    steps = max(len(row["loss"]) for _, row in found)
    return max(1, min(most, steps // 8))


def _window(width: int) -> str:
    """For the label of an axis."""
    return f"\ntrailing mean of {width} steps" if width > 1 else ""


def _difference(a: list, b: list) -> list[float]:
    return [math.nan if None in (x, y) else x - y for x, y in zip(a, b, strict=False)]


def _smooth(losses: list, width: int) -> list[float]:
    values = [math.nan if x is None else x for x in losses]
    return [statistics.fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]
