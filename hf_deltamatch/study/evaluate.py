"""lm-eval's scores of a run's final weights."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from hf_deltamatch.study import checks
from hf_deltamatch.study.corpus import Corpus
from hf_deltamatch.study.tokenizer import byte_tokenizer

CONTINUATION = "continuation"
"""The task that a study makes itself: which of four snippets of held-out text follows the context."""
CONTEXT, SNIPPET, CHOICES = 96, 24, 4
"""Bytes, bytes, and snippets of a question."""


@dataclass(frozen=True)
class Evaluate:
    """The file's ``evaluate``: tasks of lm-eval by name, ``continuation`` among them."""

    tasks: tuple[str, ...] = (CONTINUATION,)
    include: str | None = None
    """A folder with files of further tasks."""
    limit: int | None = None
    """Documents of each task; ``continuation`` has 256 without it."""
    num_fewshot: int | None = None
    batch_size: int = 32

    def __post_init__(self) -> None:
        checks.texts("evaluate.tasks", self.tasks)
        object.__setattr__(self, "tasks", tuple(self.tasks))
        if self.include is not None:
            checks.text("evaluate.include", self.include)
        for name in ("limit", "num_fewshot", "batch_size"):
            value = getattr(self, name)
            if value is not None or name == "batch_size":
                checks.whole(f"evaluate.{name}", value, 0 if name == "num_fewshot" else 1)


class ScoringError(RuntimeError):
    """A run was trained and could not be scored."""


def require_lm_eval() -> None:
    """
    Raises:
        ValueError: lm-eval is not installed. Said before anything is trained.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            'study: `evaluate` needs lm-eval: pip install "hf-deltamatch[eval]", or leave '
            "`evaluate` out of the file."
        )


def check_tasks(options: Evaluate, corpus: Corpus) -> None:
    """What scoring needs, before anything is trained.

    Raises:
        ValueError: a task that lm-eval does not know, or too little held-out text for ours.
    """
    if CONTINUATION in options.tasks:
        questions(corpus, 1)
    names = [t for t in options.tasks if t != CONTINUATION]
    if names or options.include is not None:
        from hf_deltamatch.hf.lm_eval_scores import check_tasks

        try:
            check_tasks(names, options.include)
        except ValueError as error:
            raise ValueError(f"study: evaluate: {error}") from error


def questions(corpus: Corpus, documents: int) -> list[dict]:
    """``question``, ``choices`` and ``answer``, the same for every run on the same text.

    Raises:
        ValueError: less held-out text than one question needs.
    """
    text = corpus.held_out.cpu().numpy().tobytes()
    last = len(text) - CONTEXT - SNIPPET
    if last < 1:
        raise ValueError(
            f"study: {len(text)} held-out bytes are fewer than a question of {CONTINUATION!r} needs, "
            f"{CONTEXT + SNIPPET + 1}; give more text or a smaller corpus.held_out_every."
        )
    draw = random.Random(0)
    # Cut between characters; what is left of one that was cut is dropped.
    words = lambda at, n: text[at : at + n].decode("utf-8", errors="ignore").replace("\0", "")
    out = []
    while len(out) < documents:
        at = draw.randrange(last)
        wrong = [words(draw.randrange(last), SNIPPET) for _ in range(CHOICES - 1)]
        answer = draw.randrange(CHOICES)
        choices = [*wrong[:answer], words(at + CONTEXT, SNIPPET), *wrong[answer:]]
        out.append({"question": words(at, CONTEXT), "choices": choices, "answer": answer})
    return out


def evaluate(
    model: PreTrainedModel, options: Evaluate, corpus: Corpus, max_length: int
) -> dict[str, dict[str, list]]:
    """``{task: {metric: [value, standard error or None]}}``; the model is as it was afterwards."""
    from hf_deltamatch.hf.lm_eval_scores import scores

    with tempfile.TemporaryDirectory() as folder:
        tasks = [
            _continuation(corpus, options.limit or 256, Path(folder)) if t == CONTINUATION else t
            for t in options.tasks
        ]
        found = scores(
            model,
            byte_tokenizer(),
            tasks,
            include=options.include,
            limit=options.limit,
            num_fewshot=options.num_fewshot,
            batch_size=options.batch_size,
            max_length=max_length,
        )
    as_json = lambda x: x if x is not None and math.isfinite(x) else None
    return {
        task: {metric: [as_json(x) for x in pair] for metric, pair in metrics.items()}
        for task, metrics in found.items()
    }


def _continuation(corpus: Corpus, documents: int, folder: Path) -> dict:
    """The task in lm-eval's words, over a file in ``folder``."""
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(q) + "\n" for q in questions(corpus, documents)))
    return {
        "task": CONTINUATION,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(folder)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
