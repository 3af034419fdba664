"""Our task groups, beside lm-eval's own tasks and those of a user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TASK_GROUPS = Path(__file__).parent / "task_groups"
"""Folder of the YAML files: what ``--include_path`` would take."""


@contextmanager
def task_groups() -> Iterator[None]:
    """Within it, every ``lm_eval.tasks.TaskManager`` made knows our groups.

    lm-eval's ``--include_path`` takes one folder, which stays the user's.
    """
    import lm_eval.tasks

    stock = lm_eval.tasks.TaskManager
    lm_eval.tasks.TaskManager = _with_ours(stock)
    try:
        yield
    finally:
        lm_eval.tasks.TaskManager = stock


def task_manager(include_path=None, **kwargs):
    """An ``lm_eval.tasks.TaskManager`` with our groups, for ``simple_evaluate(task_manager=…)``.

    Args:
        include_path: a folder or several, with task files of your own; of two tasks of the same name
            theirs is taken.
        **kwargs: lm-eval's own.
    """
    from lm_eval.tasks import TaskManager

    return _with_ours(TaskManager)(include_path=include_path, **kwargs)


def _with_ours(stock: type) -> type:
    class TaskManager(stock):
        def __init__(self, verbosity=None, include_path=None, **kwargs) -> None:
            given = [include_path] if isinstance(include_path, (str, Path)) else include_path or []
            # A later folder replaces tasks of an earlier one.
            super().__init__(verbosity, [str(TASK_GROUPS), *map(str, given)], **kwargs)

    return TaskManager
