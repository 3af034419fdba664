"""The runs of a study by what its report and picture show together."""

from __future__ import annotations

from hf_deltamatch.study.spec import Run, Study
from hf_deltamatch.training.study_rows import second_stage


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
            found[stage] = [(run, second_stage(row)) for run, row in here]
    return found


def by_seed(found: list[tuple[Run, dict]], arm: str) -> dict[int, dict]:
    return {run.seed: row for run, row in found if run.arm == arm}
