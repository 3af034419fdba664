"""What is looked at before the first run: what would end runs late, or one after the other."""

from __future__ import annotations

from hf_deltamatch.study.corpus import load_corpus
from hf_deltamatch.study.evaluate import Evaluate, check_tasks, require_lm_eval
from hf_deltamatch.study.model import check_leave
from hf_deltamatch.study.spec import Run, Study


def check(study: Study, missing: list[Run]) -> None:
    """
    Raises:
        ValueError: the corpus, lm-eval, one of its tasks, or an arm's `leave`.
    """
    evaluation = missing[0].config.get("evaluate")
    if evaluation is not None:
        require_lm_eval()
    corpus = load_corpus(**study.corpus)
    if evaluation is not None:
        check_tasks(Evaluate(**evaluation), corpus)
    for run in {(r.setting, r.arm): r for r in missing if "leave" in r.config}.values():
        try:
            check_leave(run.config)
        except ValueError as error:
            raise ValueError(f"study: arm {run.arm!r} in {run.setting!r}: {error}") from error
