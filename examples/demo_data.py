"""Text for the demo: byte-level tokens of real source code, and two small lm-eval tasks on held-out text.

The default corpus is the Python standard library's own source, which every machine has; `datasets`
reads anything else, by hub name or local path.
"""

from __future__ import annotations

import json
import random
import sysconfig
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_deltamatch.hf.byte_tokenizer import byte_tokenizer

HELD_OUT_EVERY = 10
CONTEXT, CONTINUATION, CHOICES = 160, 40, 4  # characters, characters, candidates
MIN_CHARS = 4 * (CONTEXT + CONTINUATION)


def load_tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    """``name`` through ``AutoTokenizer``, or UTF-8 bytes (256 values and 3 specials, no files)."""
    return AutoTokenizer.from_pretrained(name) if name else byte_tokenizer()


def load_corpus(name: str | None, text_column: str, limit_chars: int) -> tuple[list, list]:
    """Training and held-out texts, at most ``limit_chars`` (and one text) for training.

    ``name`` is a hub name, or a local file or folder that ``datasets`` can read.
    """
    texts = _standard_library() if name is None else _read(name, text_column, 2 * limit_chars)
    held = [t for i, t in enumerate(texts) if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    train, chars = [], 0
    for i, text in enumerate(texts):
        if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1 and chars < limit_chars:
            train.append(text)
            chars += len(text)
    if not held or not train:
        raise SystemExit(
            f"--dataset {name}: {len(texts)} documents of at least {MIN_CHARS} characters; at least "
            f"{HELD_OUT_EVERY} are needed, since every {HELD_OUT_EVERY}th is held out for evaluation."
        )
    return train, held


def _read(name: str, text_column: str, limit_chars: int) -> list[str]:
    """Texts of a data set, neighbours joined until they are long enough to evaluate on (a `.txt`
    file has one row a line)."""
    try:
        documents = _load(name)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--dataset {name}: {error}") from error
    if text_column not in documents.column_names:
        raise SystemExit(
            f"--dataset {name}: no column {text_column!r}; columns are "
            f"{', '.join(documents.column_names)}. Choose one with --text-column."
        )
    texts, parts, chars, total = [], [], 0, 0
    for row in documents.select_columns([text_column]):
        text = row[text_column]
        if text is not None and not isinstance(text, str):
            raise SystemExit(
                f"--dataset {name}: column {text_column!r} holds {type(text).__name__}, not text. "
                "Choose another with --text-column."
            )
        parts.append(text or "")
        chars += len(parts[-1])
        if chars >= MIN_CHARS:
            texts.append("\n".join(parts))
            total += chars
            parts, chars = [], 0
        if total >= limit_chars and len(texts) >= HELD_OUT_EVERY:
            break
    return texts


def _load(name: str) -> Dataset:
    path = Path(name)
    if not path.is_file():
        return load_dataset(name, split="train")
    kind = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    return load_dataset(kind.get(path.suffix, "text"), data_files=str(path), split="train")


def _standard_library() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(f for f in root.glob("*.py") if f.stat().st_size > 4096)
    texts = [f.read_text(encoding="utf-8", errors="replace") for f in files]
    random.Random(0).shuffle(texts)
    return texts


def pack(texts: list[str], tokenizer: PreTrainedTokenizerBase, seq_len: int) -> torch.Tensor:
    """All documents as one stream of tokens with an end token between them, cut to ``[n, seq_len]``."""
    stream: list[int] = []
    for text in texts:
        stream += tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokenizer.eos_token_id is not None:
            stream.append(tokenizer.eos_token_id)
    n = len(stream) // seq_len
    if n == 0:
        raise SystemExit(
            f"The training text has {len(stream)} tokens, fewer than one sequence of {seq_len}; "
            "give more text or a smaller --seq-len."
        )
    return torch.tensor(stream[: n * seq_len]).view(n, seq_len)


def write_eval_tasks(
    held_out: list[str],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    documents: int,
    seed: int,
    seq_len: int,
) -> list[dict]:
    """Two lm-eval tasks on the held-out text, as inline configs over files in ``folder``.

    ``continuation``: which of four snippets follows the context (accuracy, chance 0.25);
    ``held_out``: rolling log-likelihood (bits per byte).
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    texts = [t for t in held_out if len(t) >= MIN_CHARS]

    def snippet() -> tuple[str, str]:
        text = rng.choice(texts)
        at = rng.randrange(len(text) - CONTEXT - CONTINUATION)
        return text[at : at + CONTEXT], text[at + CONTEXT : at + CONTEXT + CONTINUATION]

    questions = []
    for _ in range(documents):
        context, right = snippet()
        choices = [snippet()[1] for _ in range(CHOICES - 1)]
        answer = rng.randrange(CHOICES)
        choices.insert(answer, right)
        questions.append({"question": context, "choices": choices, "answer": answer})
    pages = [{"text": "".join(snippet())} for _ in range(documents)]
    _refuse_truncation(questions, tokenizer, seq_len)
    for name, rows in (("continuation", questions), ("held_out", pages)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)

    def data(name: str) -> dict:
        path = str((folder / f"{name}.jsonl").resolve())
        return {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": path}}}

    return [
        {
            "task": "continuation",
            **data("continuation"),
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
            "metadata": {"version": 1.0},
        },
        {
            "task": "held_out",
            **data("held_out"),
            "test_split": "test",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [
                {
                    "metric": "bits_per_byte",
                    "aggregation": "bits_per_byte",
                    "higher_is_better": False,
                }
            ],
            "metadata": {"version": 1.0},
        },
    ]


def _refuse_truncation(
    questions: list[dict], tokenizer: PreTrainedTokenizerBase, seq_len: int
) -> None:
    """lm-eval would cut the context of a question that is longer than a sequence."""
    texts = [q["question"] + choice for q in questions for choice in q["choices"]]
    longest = max(len(tokenizer(text)["input_ids"]) for text in texts)
    if longest > seq_len:
        raise SystemExit(
            f"--seq-len is {seq_len}, too short for the evaluation, whose questions have up to {longest} "
            f"tokens; give at least {longest}."
        )
