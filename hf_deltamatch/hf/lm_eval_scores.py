"""lm-eval's scores of a model in memory, in the arithmetic that it has."""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_deltamatch.hf.lm_eval import DeltaMatchLM


def scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str | dict],
    *,
    include: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
) -> dict[str, dict[str, list]]:
    """``{task: {metric: [value, standard error or None]}}``.

    Args:
        tasks: names that lm-eval knows, or tasks as dicts.
        include: a folder with files of further tasks.
        limit: documents of each task at most.
        max_length: tokens; longer texts lose their beginning.

    Raises:
        what lm-eval raises, for a task that it does not know for instance.
    """
    training = model.training
    # It bootstraps in processes of its own, which a worker process may not have.
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    level = logging.getLogger("lm_eval").level
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        # Bars of lm-eval and datasets; errors are raised, not printed.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            out = lm_eval.simple_evaluate(
                model=DeltaMatchLM(
                    pretrained=model.eval(),
                    tokenizer=tokenizer,
                    batch_size=batch_size,
                    max_length=max_length,
                    device=str(model.device),
                ),
                tasks=[dict(task) if isinstance(task, dict) else task for task in tasks],
                task_manager=_manager(include, tuple(t for t in tasks if isinstance(t, str))),
                limit=limit,
                num_fewshot=num_fewshot,
                bootstrap_iters=1000,
                log_samples=False,
                verbosity="ERROR",
            )
    finally:
        model.train(training)
        logging.getLogger("lm_eval").setLevel(level)
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
    return {task: _metrics(found) for task, found in out["results"].items()}


def check_tasks(names: Sequence[str], include: str | None = None) -> None:
    """
    Raises:
        ValueError: a name that lm-eval does not know, with those of ``include``. Nothing is loaded.
    """
    if include is not None and not Path(include).is_dir():
        raise ValueError(f"{include!r} is no folder with files of tasks.")
    known = _manager(include, tuple(names)).all_tasks
    for name in names:
        if name not in known and not Path(name).is_file():
            near = difflib.get_close_matches(name, known, 3)
            hint = f"; near are {', '.join(near)}" if near else ""
            raise ValueError(
                f"{name!r} is no task, group or tag of lm-eval{hint}. `hf-deltamatch eval ls tasks` "
                "lists its own; a folder of further ones is `include`."
            )


@functools.cache
def _manager(include: str | None, names: tuple[str, ...]) -> TaskManager:
    """Reading lm-eval's own tasks takes many seconds, so only where one of them is asked for."""
    manager = TaskManager(include_path=include, include_defaults=False)
    if set(names) <= set(manager.all_tasks):
        return manager
    return TaskManager(include_path=include)


def _metrics(found: dict) -> dict[str, list]:
    """lm-eval writes ``acc,none`` and ``acc_stderr,none``; filters other than ``none`` keep their
    name."""
    out = {}
    for key, value in found.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr"):
            continue
        error = found.get(f"{metric}_stderr,{filtered}")
        name = metric if filtered == "none" else f"{metric} ({filtered})"
        out[name] = [float(value), float(error) if isinstance(error, float) else None]
    return out
