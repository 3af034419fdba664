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
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

HELD_OUT_EVERY = 10
CONTEXT, CONTINUATION, CHOICES = 160, 40, 4  # characters, characters, candidates


def load_tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    """``name`` through ``AutoTokenizer``, or UTF-8 bytes (256 values and 3 specials, no files)."""
    return AutoTokenizer.from_pretrained(name) if name else ByT5Tokenizer(extra_ids=0)


def load_corpus(name: str | None, text_column: str, limit_chars: int) -> tuple[Dataset, Dataset]:
    """Training and held-out documents, column ``text``, at most ``limit_chars`` for training.

    ``name`` is a hub name, or a local file or folder that ``datasets`` can read.
    """
    if name is None:
        documents = Dataset.from_dict({"text": _standard_library()})
    else:
        documents = _load(name)
        if text_column not in documents.column_names:
            raise SystemExit(
                f"--dataset {name}: no column {text_column!r}; columns are "
                f"{', '.join(documents.column_names)}. Choose one with --text-column."
            )
        documents = documents.select_columns([text_column]).rename_column(text_column, "text")
    held = [i for i in range(len(documents)) if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    train, chars = [], 0
    for i in range(len(documents)):
        if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1 and chars < limit_chars:
            train.append(i)
            chars += len(documents[i]["text"])
    if not held or not train:
        raise SystemExit(
            f"--dataset {name}: {len(documents)} documents; at least {HELD_OUT_EVERY} are needed, "
            f"since every {HELD_OUT_EVERY}th is held out for evaluation."
        )
    return documents.select(train), documents.select(held)


def _load(name: str) -> Dataset:
    path = Path(name)
    if path.is_file():
        kind = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
        options = {"sample_by": "paragraph"} if path.suffix not in kind else {}
        return load_dataset(
            kind.get(path.suffix, "text"), data_files=str(path), split="train", **options
        )
    return load_dataset(name, split="train")


def _standard_library() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(f for f in root.glob("*.py") if f.stat().st_size > 4096)
    texts = [f.read_text(encoding="utf-8", errors="replace") for f in files]
    random.Random(0).shuffle(texts)
    return texts


def pack(documents: Dataset, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> torch.Tensor:
    """All documents as one stream of tokens with an end token between them, cut to ``[n, seq_len]``."""
    stream: list[int] = []
    for text in documents["text"]:
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


def write_eval_tasks(held_out: Dataset, folder: Path, *, documents: int, seed: int) -> list[dict]:
    """Two lm-eval tasks on the held-out text, as inline configs over files in ``folder``.

    ``continuation``: which of four snippets follows the context (accuracy, chance 0.25);
    ``held_out``: rolling log-likelihood (bits per byte).
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    texts = [t for t in held_out["text"] if len(t) > 4 * (CONTEXT + CONTINUATION)]
    if not texts:
        raise SystemExit("The held-out documents are too short to evaluate on.")

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
            "metric_list": [{"metric": "acc"}],
            "metadata": {"version": 1.0},
        },
        {
            "task": "held_out",
            **data("held_out"),
            "test_split": "test",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte"}],
            "metadata": {"version": 1.0},
        },
    ]
