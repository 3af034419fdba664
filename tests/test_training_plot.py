"""``hf-deltamatch plot``: a panel for each kind of number that a run logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_deltamatch import cli
from hf_deltamatch.training import plot as plots
from hf_deltamatch.training.metrics import MetricsFile, read_metrics


def make(folder: Path, **more: float) -> Path:
    metrics = MetricsFile(folder / "metrics.jsonl", 0)
    for step in range(1, 6):
        metrics.add(step, {"loss": 5.0 / step, "grad_norm": 1.0, "lr": 1e-3, **more})
    metrics.add(6, {"loss": float("nan"), "grad_norm": float("inf"), "lr": 1e-3})
    return folder


def test_plot_has_a_panel_for_what_is_there(tmp_path: Path, capsys, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import figure

    seen, save = [], figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda f, *a, **k: (seen.append(f), save(f, *a, **k))
    )
    run = make(tmp_path / "a", **{"attention/row_sum_residual": 1e-7, "eval_loss": 3.0})
    assert cli.main(["plot", str(run)]) == 0
    assert (run / "plot.png").stat().st_size > 10_000
    assert f"Written: {run / 'plot.png'}" in capsys.readouterr().out
    axes = seen[0].axes
    assert [len(a.lines) for a in axes] == [2, 2, 1]
    assert list(axes[0].lines[0].get_ydata()) == [5.0 / s for s in range(1, 6)]  # NaN is left out
    other = make(tmp_path / "b")
    plots.plot([run, other], tmp_path / "both.png")
    labels = [t.get_text() for t in seen[1].axes[0].get_legend().get_texts()]
    assert labels == ["a: loss", "a: eval_loss", "b: loss"]


def test_a_folder_without_numbers(tmp_path: Path, capsys) -> None:
    assert cli.main(["plot", str(tmp_path)]) == 2
    assert "metrics.jsonl has no numbers" in capsys.readouterr().err


def test_metrics_go_on_from_a_step(tmp_path: Path) -> None:
    """Numbers after the step are dropped, and so is half a line of a killed process."""
    path = make(tmp_path) / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 7, "lo')
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4, 5, 6]
    assert read_metrics(path)[-1]["loss"] is None
    MetricsFile(path, 3).add(4, {"loss": 9.0})
    assert [(r["step"], r["loss"]) for r in read_metrics(path)][2:] == [(3, 5.0 / 3), (4, 9.0)]
    MetricsFile(path, 0)
    assert read_metrics(path) == []
