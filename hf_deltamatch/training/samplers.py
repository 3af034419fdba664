"""Where the next rows come from, and a state from which exactly the same rows follow."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from hf_deltamatch.training.order import order_positions
from hf_deltamatch.training.packing import Packer, Rows, join


class Sampler(Protocol):
    """Rows of training, endless. The same on every process: each takes its share of them."""

    def next(self, count: int) -> Rows: ...
    def state_dict(self) -> dict: ...
    def load_state_dict(self, state: dict) -> None: ...
    def identity(self) -> dict:
        """Facts of the data that belong to the run (JSON types)."""
        ...


class RowSampler:
    """Rows in memory, in an order that is a function of the seed: the state is a number."""

    def __init__(self, rows: Rows, seed: int) -> None:
        if not len(rows):
            raise ValueError("RowSampler: the training text fills no row; give more text or a "
                             "smaller seq_len.")  # fmt: skip
        self.rows, self.seed, self.position = rows, seed, 0

    def next(self, count: int) -> Rows:
        chosen = order_positions(len(self.rows), self.seed, self.position, count)
        self.position += count
        return self.rows[chosen]

    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]

    def identity(self) -> dict:
        digest = hashlib.sha256()
        for t in (self.rows.ids, self.rows.positions, self.rows.labels):
            digest.update(t.contiguous().numpy().data)
        return {"rows": len(self.rows), "sha256": digest.hexdigest()}


class StreamSampler:
    """Rows packed from a stream of documents, in its own order, starting again at its end.

    Args:
        source: iterable of examples with ``state_dict`` and ``load_state_dict``, as the streaming
            data sets of `datasets` are.
        encode: an example to tokens.
        packer: with ``split``.
    """

    def __init__(self, source: Any, encode: Callable[[Any], Sequence[int]], packer: Packer) -> None:
        self.source, self.encode, self.packer = source, encode, packer
        self.epoch = 0
        self._beginning = source.state_dict()
        self._ready: list[Rows] = []
        self._documents: Iterator | None = None

    def next(self, count: int) -> Rows:
        while sum(map(len, self._ready)) < count:
            self._ready += self.packer.feed(self.encode(self._next_document()))
        rows = join(self._ready)
        self._ready = [rows[count:]] if len(rows) > count else []
        return rows[:count]

    def _next_document(self) -> Any:
        for _ in range(2):
            if self._documents is None:
                self._documents = iter(self.source)
            for document in self._documents:
                return document
            self._documents = None
            self.epoch += 1
            # Else a stream that was once resumed would begin there in every epoch.
            self.source.load_state_dict(self._beginning)
        raise ValueError("StreamSampler: the stream has no documents.")

    def state_dict(self) -> dict:
        ready = join(self._ready) if self._ready else None
        return {
            "source": self.source.state_dict(),
            "started": self._documents is not None,
            "packer": self.packer.state_dict(),
            "epoch": self.epoch,
            "ready": None if ready is None else [ready.ids, ready.positions, ready.labels],
        }

    def load_state_dict(self, state: dict) -> None:
        self._documents = None
        if state["started"]:
            self.source.load_state_dict(state["source"])
        self.packer.load_state_dict(state["packer"])
        self.epoch = state["epoch"]
        self._ready = [] if state["ready"] is None else [Rows(*state["ready"])]

    def identity(self) -> dict:
        return {"stream": True}


def share(rows: Rows, rank: int, world: int, micro_batch: int) -> list[Rows]:
    """The micro-batches of one process: together, the processes see every row once.

    Raises:
        ValueError: the rows do not divide.
    """
    each = world * micro_batch
    if len(rows) % each:
        raise ValueError(
            f"batch_size is {len(rows)}; it must be a multiple of {each}: micro_batch {micro_batch} "
            f"on {world} processes."
        )
    starts = range(rank * micro_batch, len(rows), each)
    return [rows[s : s + micro_batch] for s in starts]


def padded_share(rows: Rows, rank: int, world: int, micro_batch: int) -> list[Rows]:
    """As :func:`share` of any number of rows: rows without labels fill up what is missing."""
    missing = -len(rows) % (world * micro_batch)
    if missing:
        fill = Rows(
            rows.ids[:1].expand(missing, -1),
            rows.positions[:1].expand(missing, -1),
            torch.full_like(rows.labels[:1], -100).expand(missing, -1),
        )
        rows = join([rows, fill])
    return share(rows, rank, world, micro_batch)
