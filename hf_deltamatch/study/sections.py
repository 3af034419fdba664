"""The runs of a study by what its report and picture show together."""

from __future__ import annotations

from hf_deltamatch.study.spec import Run, Study


def sections(study: Study, mine: list[tuple[Run, dict]]) -> dict[str, list[tuple[Run, dict]]]:
    """Runs and rows by setting; the second stage of a setting is a section of its own."""
    found: dict[str, list] = {}
    for setting in study.settings:
        here = [(run, row) for run, row in mine if run.setting == setting]
        if not here:
            continue
        found[setting] = here
        stage = here[0][0].stage
        if stage is not None:
            found[stage] = [(run, _second(row)) for run, row in here]
    return found


def _second(row: dict) -> dict:
    """The second stage of a run as if it were one. One that diverged before has none, and counts as
    diverged."""
    if row["status"] == "failed":
        return row
    nothing = dict.fromkeys(
        (
            "final_loss",
            "best_loss",
            "held_out_loss",
            "grad_norm_last",
            "seconds",
            "tokens_per_second",
        )
    )
    nothing |= {"status": "diverged", "skipped_steps": 0, "loss": [], "residual": {"values": []}}
    return row["then"] or nothing


def by_seed(found: list[tuple[Run, dict]], arm: str) -> dict[int, dict]:
    return {run.seed: row for run, row in found if run.arm == arm}
