"""Text as bytes: a stream to train on, another that is held out, and the hashes of both."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

VOCABULARY = 256
END = b"\0"
"""Between documents; no text file holds it."""
_LEAVE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}


class Corpus(NamedTuple):
    """``train`` and ``held_out`` are uint8 ``[n]``; ``facts`` goes into results."""

    train: Tensor
    held_out: Tensor
    facts: dict

    def to(self, device: torch.device) -> Corpus:
        return Corpus(self.train.to(device), self.held_out.to(device), self.facts)


def load_corpus(source: str, held_out_every: int, limit_bytes: int) -> Corpus:
    """Bytes of text files, joined in a fixed shuffled order.

    Args:
        source: ``stdlib`` (the running Python's own library, without its tests) or a text file, or a
            folder of ``.py``, ``.txt`` and ``.md`` files.
        held_out_every: every so manieth document is held out (a single file: its last part).
        limit_bytes: at most so many bytes in all.

    Raises:
        ValueError: no such source, or too little text.
    """
    documents = _documents(source)
    if len(documents) == 1:
        cut = len(documents[0]) - len(documents[0]) // held_out_every
        train, held = documents[0][:cut], documents[0][cut:]
    else:
        random.Random(0).shuffle(documents)
        parts: dict[bool, list[bytes]] = {True: [], False: []}
        total = 0
        for at, document in enumerate(documents):
            if total >= limit_bytes:
                break
            parts[at % held_out_every == 0].append(document[: limit_bytes - total])
            total += len(document)
        train, held = (END.join(parts[is_held]) for is_held in (False, True))
    facts = {
        "source": source if source == "stdlib" else Path(source).name,
        "documents": len(documents),
        "train_bytes": len(train),
        "train_sha256": hashlib.sha256(train).hexdigest(),
        "held_out_bytes": len(held),
        "held_out_sha256": hashlib.sha256(held).hexdigest(),
    }
    tensor = lambda data: torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if not train or not held:
        raise ValueError(f"study: corpus {source!r} has too little text: {facts}.")
    return Corpus(tensor(train), tensor(held), facts)


def _documents(source: str) -> list[bytes]:
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        found = (f for f in root.rglob("*.py") if not _LEAVE & set(f.relative_to(root).parts))
    elif Path(source).is_dir():
        found = (f for f in Path(source).rglob("*") if f.suffix in (".py", ".txt", ".md"))
    elif Path(source).is_file():
        found = iter([Path(source)])
    else:
        raise ValueError(
            f"study: corpus source {source!r} is neither `stdlib` nor a file or folder."
        )
    texts = (f.read_bytes() for f in sorted(found) if f.is_file())
    return [t.replace(END, b"") for t in texts if t]
