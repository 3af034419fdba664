"""Rows of packed documents: nothing lost, boundaries known, both layouts the same model."""

from __future__ import annotations

import pytest
import torch
from tiny_models import build, one_thread, use  # noqa: F401

from hf_deltamatch.testing import assert_close
from hf_deltamatch.training import IGNORED, Packer, Rows, join, model_inputs
from hf_deltamatch.training.samplers import RowSampler, StreamSampler, padded_share, share

DOCUMENTS = [list(range(10, 10 + n)) for n in (5, 1, 30, 8, 3, 17)]


def pack(documents=DOCUMENTS, **options) -> tuple[Packer, Rows]:
    packer = Packer(8, **options)
    return packer, join([row for d in documents for row in packer.feed(d)])


def test_split_documents_lose_nothing() -> None:
    packer, rows = pack()
    stream = [t for d in DOCUMENTS for t in d]
    assert rows.ids.shape == rows.positions.shape == rows.labels.shape == (8, 8)
    assert rows.ids.flatten().tolist() == stream
    assert packer.state_dict()["carry"].shape == (3, 0)
    starts = rows.positions == 0
    assert bool(starts[:, 0].all())  # what goes on in the next row is a segment of its own
    assert rows.positions[0].tolist() == [0, 1, 2, 3, 4, 0, 0, 1]
    assert torch.equal(rows.labels, rows.ids.masked_fill(starts, IGNORED))
    assert rows.targets == 64 - int(starts.sum())


def test_whole_documents_are_padded_and_cut() -> None:
    packer, rows = pack([[1, 2, 3], [4, 5, 6, 7, 8, 9], list(range(20))], split=False, pad=99)
    assert rows.ids[0].tolist() == [1, 2, 3, 99, 99, 99, 99, 99]
    assert rows.positions[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert rows.labels[0].tolist() == [IGNORED, 2, 3] + [IGNORED] * 5
    assert rows.ids[1].tolist() == [4, 5, 6, 7, 8, 9, 99, 99]
    assert rows.ids[2].tolist() == list(range(8)) and packer.cut == 1
    assert packer.flush() == []


def test_labels_of_ones_own() -> None:
    (row,) = Packer(4).feed([1, 2, 3, 4], [IGNORED, IGNORED, 3, 4])
    assert row.labels.tolist() == [[IGNORED, IGNORED, 3, 4]]
    with pytest.raises(ValueError, match="`seq_len` is 1"):
        Packer(1)
    with pytest.raises(ValueError, match="one length"):
        Packer(4).feed([1, 2, 3], [1])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_layouts_agree_and_documents_are_alone(family: str) -> None:
    """Rows through SDPA, the same rows as one through our attention, and documents one by one."""
    _, rows = pack()
    model = build(family)
    as_rows = model(**model_inputs(rows, flat=False), use_cache=False)
    use(model, recipe="bf16")
    flat = model(**model_inputs(rows, flat=True), use_cache=False)
    assert_close(flat.logits.view_as(as_rows.logits), as_rows.logits, rms=1e-5)
    assert float(flat.loss) == pytest.approx(float(as_rows.loss), rel=1e-5)
    alone = model(torch.tensor([DOCUMENTS[0]]), use_cache=False).logits
    assert_close(flat.logits[:, :5], alone, rms=1e-5)
    joined = model(**model_inputs(rows, flat=False, separate=False), use_cache=False).logits
    assert float((joined[0, 5:] - as_rows.logits[0, 5:]).abs().max()) > 1e-3


def test_shares_are_every_row_once() -> None:
    _, rows = pack()
    parts = [share(rows, rank, 2, 2) for rank in (0, 1)]
    assert [len(p) for p in parts] == [2, 2]
    assert torch.equal(join([parts[0][0], parts[1][0], parts[0][1], parts[1][1]]).ids, rows.ids)
    with pytest.raises(ValueError, match="batch_size is 8.*multiple of 6"):
        share(rows, 0, 2, 3)
    padded = [row for rank in range(3) for row in padded_share(rows, rank, 3, 1)]
    assert len(padded) == 9 and sum(r.targets for r in padded) == rows.targets


class Stream:
    """As a streaming data set: its state is where it is, and iteration goes on from there."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        while self.at < len(DOCUMENTS):
            self.at += 1
            yield DOCUMENTS[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict:
        return {"at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("taken", [0, 1, 3, 9])
def test_samplers_go_on_from_their_state(taken: int) -> None:
    """Over the end of an epoch, too: 8 rows an epoch."""
    _, rows = pack()
    make = [
        lambda: RowSampler(rows, seed=1),
        lambda: StreamSampler(Stream(), lambda d: d, Packer(8)),
    ]
    for new in make:
        whole, first, second = new(), new(), new()
        expected = whole.next(20)
        head = [first.next(taken)] if taken else []
        second.load_state_dict(first.state_dict())
        tail = second.next(20 - taken)
        assert torch.equal(join([*head, tail]).ids, expected.ids)
        assert torch.equal(join([*head, tail]).positions, expected.positions)


def test_identity_follows_the_data() -> None:
    _, rows = pack()
    assert RowSampler(rows, 0).identity() == RowSampler(rows, 1).identity()
    assert RowSampler(rows, 0).identity() != RowSampler(rows[:4], 0).identity()
    with pytest.raises(ValueError, match="fills no row"):
        RowSampler(rows[:0], 0)
