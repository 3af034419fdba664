"""Documents of tokens to rows of one length, and rows to what a model's forward takes.

A row says of every token its position in its document, starting at 0 again in each row: where it is
0, a segment begins. Boundaries, labels and ``cu_seq_lens`` all follow from that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""A label that takes no part in the loss."""


@dataclass(frozen=True, eq=False)
class Rows:
    """``ids``, ``positions``, ``labels``, each int64 ``[n, seq_len]``. A label belongs to its own
    token (models shift them); the first token of a segment has none."""

    ids: Tensor
    positions: Tensor
    labels: Tensor

    def __getitem__(self, index: slice | Tensor) -> Rows:
        return Rows(self.ids[index], self.positions[index], self.labels[index])

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def targets(self) -> int:
        """Tokens that take part in the loss."""
        return int((self.labels != IGNORED).sum())


class Packer:
    """Packs documents into rows, in order.

    Args:
        seq_len: tokens of a row.
        split: True cuts a document that does not fit and goes on with it in the next row, as a
            segment of its own; False moves it to the next row, pads the rest, and cuts off what is
            longer than a row (``cut`` counts those documents).
        pad: token of the padding, which only sees itself and has no labels.
    """

    def __init__(self, seq_len: int, *, split: bool = True, pad: int = 0) -> None:
        if seq_len < 2:
            raise ValueError(f"Packer: `seq_len` is {seq_len}; at least 2 tokens are needed.")
        self.seq_len, self.split, self.pad = seq_len, split, pad
        self.cut = 0
        self._carry = torch.empty(3, 0, dtype=torch.int64)

    def feed(self, ids: Sequence[int], labels: Sequence[int] | None = None) -> list[Rows]:
        """Rows that this document completes. ``labels`` default to the tokens themselves."""
        tokens = torch.as_tensor(ids, dtype=torch.int64)
        targets = tokens if labels is None else torch.as_tensor(labels, dtype=torch.int64)
        if tokens.shape != targets.shape or tokens.dim() != 1:
            raise ValueError(
                f"Packer: a document of {tuple(tokens.shape)} tokens has {tuple(targets.shape)} "
                "labels; both are flat and of one length."
            )
        done = []
        if not self.split:
            self.cut += len(tokens) > self.seq_len
            tokens, targets = tokens[: self.seq_len], targets[: self.seq_len]
            if self._carry.shape[1] + len(tokens) > self.seq_len:
                done += self.flush()
        done += self._fill(tokens, targets)
        return done

    def _fill(self, tokens: Tensor, targets: Tensor) -> list[Rows]:
        T = self.seq_len
        need = T - self._carry.shape[1]
        first = torch.cat([self._carry, _segment(tokens[:need], targets[:need])], 1)
        if first.shape[1] < T:
            self._carry = first
            return []
        rest, labels = tokens[need:], targets[need:]
        whole = len(rest) // T
        self._carry = _segment(rest[whole * T :], labels[whole * T :])
        if not whole:
            return [_row(first)]
        labels = labels[: whole * T].view(whole, T).clone()
        labels[:, 0] = IGNORED
        positions = torch.arange(T).expand(whole, T)
        return [_row(first), Rows(rest[: whole * T].view(whole, T).clone(), positions, labels)]

    def flush(self) -> list[Rows]:
        """What is left as a padded row (only without ``split``)."""
        missing = self.seq_len - self._carry.shape[1]
        if self.split or missing == self.seq_len:
            return []
        pad = torch.full((missing,), self.pad)
        padding = _segment(pad, torch.full_like(pad, IGNORED))
        row = _row(torch.cat([self._carry, padding], 1))
        self._carry = self._carry[:, :0]
        return [row]

    def state_dict(self) -> dict:
        return {"carry": self._carry.clone(), "cut": self.cut}

    def load_state_dict(self, state: dict) -> None:
        self._carry, self.cut = state["carry"].clone(), state["cut"]


def _segment(tokens: Tensor, labels: Tensor) -> Tensor:
    labels = labels.clone()
    labels[:1] = IGNORED  # nothing comes before it
    return torch.stack([tokens, torch.arange(len(tokens)), labels])


def _row(packed: Tensor) -> Rows:
    return Rows(*(t.clone()[None] for t in packed))


def join(rows: Iterable[Rows]) -> Rows:
    """Rows one after the other."""
    parts = list(rows)
    return Rows(
        torch.cat([r.ids for r in parts]),
        torch.cat([r.positions for r in parts]),
        torch.cat([r.labels for r in parts]),
    )


def model_inputs(rows: Rows, *, flat: bool, separate: bool = True) -> dict[str, Tensor]:
    """Keyword arguments of a model's forward; also pass ``use_cache=False``.

    Args:
        flat: all rows as one ``[1, n · seq_len]`` with ``cu_seq_lens_q`` and ``cu_seq_lens_k``, which
            our attention takes; else ``[n, seq_len]`` with positions that restart, in which
            Transformers finds the boundaries for its own attention. Same results.
        separate: False lets documents of a row see each other (plain causal rows).
    """
    ids, positions, labels = rows.ids, rows.positions, rows.labels
    if not separate:
        return {"input_ids": ids, "labels": labels}
    if not flat:
        return {"input_ids": ids, "position_ids": positions, "labels": labels}
    starts = (positions.flatten() == 0).nonzero().flatten().to(torch.int32)
    cu = F.pad(starts, (0, 1), value=ids.numel())
    longest = int(cu.diff().max())
    return {
        "input_ids": ids.reshape(1, -1),
        "position_ids": positions.reshape(1, -1),
        "labels": labels.reshape(1, -1),
        # Else Transformers reads the restarts too and makes a mask of all tokens by all tokens.
        "attention_mask": torch.ones_like(ids).reshape(1, -1),
        "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu,
        "max_length_q": longest,
        "max_length_k": longest,
    }
