"""The report's numbers, from rows written by hand."""

from __future__ import annotations

import json
import math

import pytest

from hf_deltamatch.study import report
from hf_deltamatch.study.run import number, summary
from hf_deltamatch.study.spec import Train, parse_study

FILE = {
    "seeds": [0, 1, 2],
    "model": {"model_type": "llama"},
    "settings": [{"name": "calm"}, {"name": "edge", "train": {"lr": 6e-3}}],
}
STUDY = parse_study(FILE)
# MP, SD, DM by seed: paired gaps of SD are 0.01, 0.02, 0.03 although the seeds differ by more.
FINAL = {
    "calm": {"MP": [1.0, 1.1, 1.2], "SD": [1.01, 1.12, 1.23], "DM": [1.0, 1.1, 1.2]},
    "edge": {"MP": [1.0, 1.0, 1.0], "SD": [1.3, None, 1.1], "DM": [0.9, 1.05, 1.06]},
}
ENVIRONMENT = {"device": "somewhere", "packages": {"torch": "2"}}
CORPUS = {"source": "stdlib", "documents": 3, "train_bytes": 9, "train_sha256": "0" * 64}


def row(run, **fields) -> dict:
    final = FINAL[run.setting][run.arm][run.seed]
    return {
        "key": run.key,
        "name": run.name,
        "status": "diverged" if final is None else "done",
        "final_loss": final,
        "best_loss": 1.0,
        "held_out_loss": 2.0,
        "grad_norm_last": 1.0,
        "skipped_steps": 0,
        "seconds": 1.0,
        "tokens_per_second": 1000,
        "parameters": 10,
        "precision": "float32",
        "residual": {"steps": [1], "values": [1e-7 if run.arm == "DM" else 1e-2]},
        "loss": [2.0, 1.0],
        "corpus": CORPUS,
        "environment": ENVIRONMENT,
        **fields,
    }


def rows(**fields) -> dict[str, dict]:
    return {run.key: row(run, **fields) for run in STUDY.runs}


def test_gaps_are_paired_over_seeds() -> None:
    calm = report.build_report(STUDY, rows())["settings"]["calm"]
    assert calm["SD"]["gap"]["mean"] == pytest.approx(0.02)
    assert calm["SD"]["gap"]["std"] == pytest.approx(0.01)
    assert calm["SD"]["final_loss"]["std"] == pytest.approx(0.11)
    assert "gap" not in calm["MP"]
    assert calm["DM"]["residual"] == {"median": 1e-7, "max": 1e-7}


def test_what_is_not_finite_is_counted_not_averaged() -> None:
    edge = report.build_report(STUDY, rows())["settings"]["edge"]
    assert edge["SD"]["diverged"] == 1 and edge["SD"]["gap"]["not_finite"] == 1
    assert edge["SD"]["gap"]["mean"] == pytest.approx(0.2)
    assert edge["DM"]["gap"]["mean"] == pytest.approx(0.01 / 3)


def test_claim() -> None:
    claim = report.build_report(STUDY, rows())["claim"]
    assert claim["dm_holds"] and claim["dm_close"] == ["calm", "edge"]
    assert claim["sd_holds"] and claim["sd_worse"] == ["edge"]
    off = rows()
    for run in STUDY.runs:
        if run.arm == "DM" and run.setting == "edge":
            off[run.key]["final_loss"] = 1.03
    claim = report.build_report(STUDY, off)["claim"]
    assert not claim["dm_holds"] and claim["dm_not_close"] == ["edge"]
    page = report.to_markdown(report.build_report(STUDY, off))
    assert "Close: calm (+0.000 ± 0.000). Not close: edge (+0.030 ± 0.000)." in page
    for run in STUDY.runs:
        if run.arm == "MP" and run.setting == "edge":
            off[run.key]["status"] = "diverged"
    claim = report.build_report(STUDY, off)["claim"]
    assert claim["dm_holds"] and claim["mp_unstable"] == ["edge"]
    only_mp = {k: r for k, r in rows().items() if "/ MP /" in r["name"]}
    assert report.build_report(STUDY, only_mp)["claim"] is None


def test_rows_of_another_version_of_the_file_do_not_count() -> None:
    other = parse_study({**FILE, "train": {"clip": 3.0}})
    found = report.build_report(other, rows())
    assert found["runs"] == {"planned": 18, "present": 0} and not found["settings"]


def test_failed_runs_are_shown() -> None:
    found = rows()
    bad = next(r for r in STUDY.runs if r.arm == "DM" and r.setting == "calm")
    found[bad.key] = {"key": bad.key, "name": bad.name, "status": "failed", "error": "x"}
    page = report.to_markdown(report.build_report(STUDY, found))
    line = next(li for li in page.splitlines() if li.startswith("| DM"))
    assert "0 of 2, 1 failed" in line and "1.150 ± 0.071" in line
    assert page.count("* DM, seed 0 failed: x\n") == 1


def test_an_arm_whose_runs_all_failed_has_no_numbers_but_its_errors() -> None:
    study = parse_study({**FILE, "claims": [{"arm": "DM", "within": 0.1}]})
    found = rows()
    for run in study.runs:
        if run.arm == "DM" and run.setting == "calm":
            error = f"ValueError: no\n  kernel {'x' * 500}" if run.seed else "OSError: disk"
            found[run.key] = {"key": run.key, "status": "failed", "error": error}
    made = report.build_report(study, found)
    page = report.to_markdown(made)
    assert "| DM | failed | – | 0 of 0, 3 failed | – |  | – |  |" in page
    calm = page[page.index("## calm") : page.index("## edge")]
    assert "not finite" not in calm
    assert calm.count("\n* ") == 2 and "* DM, seed 0 failed: OSError: disk\n" in calm
    assert "* DM, seeds 1, 2 failed: ValueError: no kernel xxx" in calm and "xxx …\n" in calm
    # What diverged has numbers that are not finite, and no error.
    assert "errors" not in made["settings"]["edge"]["SD"] and "* SD, seed" not in page
    assert "| calm | DM | MP | – |  | 0.1 | MP or DM failed or is missing |" in page


def test_written_files(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    found = report.write_report(STUDY, rows(), tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(found))
    page = (tmp_path / "report.md").read_text()
    assert "| SD | 1.120 ± 0.110 | +0.020 ± 0.010 | 0 of 3 |" in page
    assert "![losses](report.png)" in page and "somewhere, torch 2; 10 parameters" in page
    assert (tmp_path / "report.png").stat().st_size > 10_000
    assert not list(tmp_path.glob("*.partial"))


def test_no_picture_no_link(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    failed = {key: {**r, "status": "failed", "error": "x"} for key, r in rows().items()}
    (tmp_path / "report.png").write_bytes(b"of other rows")
    for found in ({}, failed):
        report.write_report(STUDY, found, tmp_path)
        assert "report.png" not in (tmp_path / "report.md").read_text()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["report.json", "report.md"]


class Axis:
    """What is drawn on it."""

    def __init__(self) -> None:
        self.drawn: dict[str, list[tuple]] = {}

    def __getattr__(self, name: str):
        return lambda *args, **options: self.drawn.setdefault(name, []).append(args)


def test_gaps_of_the_picture_are_paired_over_seeds() -> None:
    """Arms 0.1 above the baseline of the same seed, whose own losses are apart; a diverged arm does not widen
    the panel, a missing loss leaves a hole."""
    from hf_deltamatch.study import plot, sections

    above = {"MP": 0.0, "DM": 0.1, "SD": 5.0}
    found = []
    for run in STUDY.runs:
        if run.setting == "calm":
            losses = [1.0 + run.seed + above[run.arm]] * 12
            status = "diverged" if run.arm == "SD" else "done"
            found.append((run, {"loss": losses, "status": status}))
    axis = Axis()
    plot._gaps(axis, STUDY, found)
    curves = {round(curve[0], 9): curve for (curve,) in axis.drawn["plot"]}
    assert set(curves) == {0.1, 5.0} and len(curves[0.1]) == 12
    assert axis.drawn["set_ylim"] == [pytest.approx((-0.15, 0.15))]
    assert axis.drawn["set_ylabel"] == [("gap to MP",)] and len(axis.drawn["fill_between"]) == 2
    sections.by_seed(found, "DM")[0]["loss"][3] = None
    axis = Axis()
    plot._gaps(axis, STUDY, found)
    holes = [i for (c,) in axis.drawn["plot"] for i, x in enumerate(c) if math.isnan(x)]
    assert holes[0] == 3


@pytest.mark.parametrize(
    ("steps", "loss", "gap"), [(6, 1, 1), (12, 1, 1), (80, 10, 10), (240, 20, 30), (9000, 20, 50)]
)
def test_labels_of_the_picture_name_what_a_point_is_the_mean_of(steps, loss, gap) -> None:
    from hf_deltamatch.study import plot

    losses = {"MP": [0.0] * steps, "DM": [0.0] * (steps // 2) + [1.0] * (steps - steps // 2)}
    found = [
        (run, {"loss": losses[run.arm], "status": "done", "best_loss": 1.0})
        for run in STUDY.runs
        if run.setting == "calm" and run.arm in losses
    ]
    for draw, width, label in (
        (plot._losses, loss, "loss (nats per token)"),
        (plot._gaps, gap, "gap to MP"),
    ):
        axis = Axis()
        draw(axis, STUDY, found)
        window = f"\ntrailing mean of {width} steps" if width > 1 else ""
        assert axis.drawn["set_ylabel"] == [(label + window,)]
        rise = axis.drawn["plot"][-1][0]
        assert [0 < x < 1 for x in rise].count(True) == width - 1 and rise[-1] == 1.0


def test_summary_of_a_run() -> None:
    options = Train(steps=10, last=2, diverged_above=0.5)
    calm = summary([3.0, 2.0, 1.0, 1.2, 1.0], [1.0] * 5, options, 0, None)
    assert calm["status"] == "done" and calm["final_loss"] == pytest.approx(1.1)
    assert calm["best_loss"] == pytest.approx(1.1) and calm["grad_norm_last"] == 1.0
    rose = summary([3.0, 1.0, 1.0, 2.0, 1.8], [1.0] * 5, options, 0, None)
    assert rose["status"] == "diverged" and rose["best_loss"] == 1.0
    # A skipped step leaves a hole; best and last windows without it are still found.
    hole = summary([3.0, math.nan, 1.0, 1.0, 1.0], [1.0, math.nan, 1.0, 1.0, 1.0], options, 1, None)
    assert hole["status"] == "done" and hole["skipped_steps"] == 1 and hole["best_loss"] == 1.0
    lost = summary([3.0, 1.0, math.nan, math.nan], [1.0, 1.0, math.nan, math.nan], options, 2, 4)
    assert lost["status"] == "diverged" and lost["final_loss"] is None
    assert lost["best_loss"] == 2.0 and lost["grad_norm_last"] is None


def test_number() -> None:
    assert number(math.nan) is None and number(math.inf) is None
    assert number(1.23456789) == 1.23457 and number(123456.7, 2) == 123000.0
