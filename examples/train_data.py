"""Text for the training examples: from `datasets` or the standard library, as tokens in packed rows."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetsError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_deltamatch.hf.byte_tokenizer import byte_tokenizer
from hf_deltamatch.training import Packer, Rows, join
from hf_deltamatch.training.options import Options
from hf_deltamatch.training.samplers import RowSampler, Sampler, StreamSampler

KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


def load_tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    """``name`` through ``AutoTokenizer``, or UTF-8 bytes (256 values and 3 specials, no files)."""
    try:
        return AutoTokenizer.from_pretrained(name) if name else byte_tokenizer()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(
            f"tokenizer {name!r}: neither a folder with a tokenizer nor a hub name that can be loaded "
            f"here ({error})"
        ) from error


def load_examples(o: Options) -> Dataset | IterableDataset:
    """The data set that the options name.

    Raises:
        SystemExit: it cannot be read, or lacks the column.
    """
    if o.data == "stdlib":
        return Dataset.from_dict({"text": standard_library(o)})
    path = Path(o.data)
    how = {"split": o.split, "streaming": o.streaming}
    try:
        if path.is_file():
            return load_dataset(KINDS.get(path.suffix, "text"), data_files=str(path), **how)
        return load_dataset(o.data, o.data_config, **how)
    except StopIteration as error:
        raise SystemExit(f"data {o.data!r}: it is empty.") from error
    except (OSError, ValueError, DatasetsError) as error:
        what = "" if path.exists() else "no such file or folder here; as a name of the hub: "
        raise SystemExit(f"data {o.data!r}: {what}{error.__cause__ or error}") from error


def standard_library(o: Options) -> list[str]:
    """The running Python's own modules in a fixed shuffled order, as many as the run needs."""
    enough = 2 * o.steps * o.batch_size * o.seq_len  # characters
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(files)
    texts: list[str] = []
    for file in files:
        if sum(map(len, texts)) < enough or len(texts) < 4 * o.held_out:
            texts.append(file.read_text(encoding="utf-8", errors="replace"))
    return [t for t in texts if t]


def need_column(examples: Dataset | IterableDataset, column: str, o: Options) -> None:
    names = examples.column_names
    if names is not None and column not in names:
        raise SystemExit(f"data {o.data!r}: no column {column!r}; columns are {', '.join(names)}.")


def load_text(o: Options, tokenizer: PreTrainedTokenizerBase) -> tuple[Sampler, Rows | None]:
    """Training rows and held-out rows (None with ``held_out: 0``)."""
    examples = load_examples(o)
    need_column(examples, o.text_column, o)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(text: str) -> list[int]:
        if not isinstance(text, str):
            raise SystemExit(
                f"data {o.data!r}: column {o.text_column!r} holds {text!r}, a {type(text).__name__}; it "
                "must be text. Name another with --text-column."
            )
        return tokenizer(text, add_special_tokens=False)["input_ids"] + end

    if isinstance(examples, IterableDataset):
        held = [encode(e[o.text_column]) for e in examples.take(o.held_out)]
        source = examples.skip(o.held_out)
        sampler = StreamSampler(source, lambda e: encode(e[o.text_column]), Packer(o.seq_len))
        return sampler, held_out_rows(held, o)
    with PartialState().main_process_first():  # the others read its cache
        encoded = examples.map(
            lambda batch: {"ids": [encode(t) for t in batch[o.text_column]]},
            batched=True,
            remove_columns=examples.column_names,
            desc="tokens",
        )
    tokens = list(encoded["ids"])
    if o.held_out >= len(tokens):
        raise SystemExit(
            f"held_out is {o.held_out}; data {o.data!r} has {len(tokens)} documents, and one at least must be "
            "left to train on. Give a smaller --held-out, or 0 for no evaluation."
        )
    n = o.held_out
    chosen = {i * len(tokens) // n for i in range(n)} if n > 0 else set()
    held = [t for i, t in enumerate(tokens) if i in chosen]
    packed = pack((t for i, t in enumerate(tokens) if i not in chosen), o)
    if packed is None:
        raise SystemExit(
            f"data {o.data!r}: the text fills no row of {o.seq_len} tokens; give more text or a "
            "smaller --seq-len."
        )
    return RowSampler(packed, o.seed), held_out_rows(held, o)


def pack(documents: Iterable[list[int]], o: Options) -> Rows | None:
    packer = Packer(o.seq_len)
    rows = [row for document in documents for row in packer.feed(document)]
    return join(rows) if rows else None


def held_out_rows(documents: list[list[int]], o: Options) -> Rows | None:
    if o.held_out == 0:
        return None
    rows = pack(documents, o)
    if rows is None:
        raise SystemExit(
            f"data {o.data!r}: {len(documents)} held-out documents fill no row of {o.seq_len} tokens; "
            "raise --held-out, or set it to 0."
        )
    return rows[: o.eval_rows]
