"""Packed sequences never see each other: the guard cannot be passed by, and says what helps."""

from __future__ import annotations

import pytest
import torch
from tiny_models import (
    batch,
    build,
    one_thread,  # noqa: F401
    use,
)

from hf_deltamatch.hf import attention
from hf_deltamatch.hf.masks import crosses
from hf_deltamatch.testing import assert_close

RESTART = "`position_ids` restart.*cu_seq_lens_q and cu_seq_lens_k.*use_cache=False"
LENGTHS = (12, 18)
PACKED = torch.cat([torch.arange(n) for n in LENGTHS])[None]
CU = torch.tensor([0, 12, 30], dtype=torch.int32)


@pytest.fixture
def ids() -> torch.Tensor:
    return batch(1, 30)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_positions_once_hidden_by_a_mask(family: str, ids: torch.Tensor) -> None:
    """Padding over the restart is fine; the same tensor without it is not."""
    model, positions = use(build(family)), PACKED.clone()
    mask = torch.ones_like(ids)
    mask[:, :12] = 0
    model(ids, position_ids=positions, attention_mask=mask)
    with pytest.raises(ValueError, match=RESTART):
        model(ids, position_ids=positions)
    model(ids, position_ids=positions, attention_mask=mask)
    with pytest.raises(ValueError, match=RESTART):
        model(ids, position_ids=positions, attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize("where", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("made_in_inference_mode", [False, True])
def test_positions_changed_in_place(where: str, made_in_inference_mode: bool, ids) -> None:
    """A buffer that is filled again, in every mode; tensors of inference mode count no versions."""
    if made_in_inference_mode and where != "inference":
        return  # they cannot be changed outside
    model = use(build("llama"))
    with torch.inference_mode(made_in_inference_mode):
        buffer = torch.arange(30)[None].clone()
    contexts = {"grad": torch.enable_grad, "no_grad": torch.no_grad}
    with contexts.get(where, torch.inference_mode)():
        model(ids, position_ids=buffer)
        buffer.copy_(PACKED)
        with pytest.raises(ValueError, match=RESTART):
            model(ids, position_ids=buffer)


def test_mask_changed_in_place(ids: torch.Tensor) -> None:
    """A prepared compact mask, which generate hands over as it is."""
    model, positions = use(build("llama")), PACKED.clone()
    mask = attention.fp8_delta_matching_mask(
        1, 30, 30, attention_mask=torch.arange(30)[None] >= 12, config=model.config
    )
    model(ids, position_ids=positions, attention_mask=mask)
    mask[:, 0, 0] = torch.arange(30, dtype=torch.int32)
    with pytest.raises(ValueError, match=RESTART):
        model(ids, position_ids=positions, attention_mask=mask)


def test_one_look_per_forward(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the positions waits for the device: once per kind of mask, and not per layer."""
    model, looks = use(build("gemma3_text", num_hidden_layers=6, layer_types=None)), []
    original = attention.own_key_shown
    monkeypatch.setattr(
        attention, "own_key_shown", lambda *args: looks.append(1) or original(*args)
    )
    model(ids, position_ids=torch.arange(30)[None])
    assert len(looks) == 1  # the sliding mask; the full one is None


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen2"])
@torch.no_grad()
def test_what_the_error_advises(family: str, ids: torch.Tensor) -> None:
    """gpt_oss hands no positions to its mask: use_cache=False does not help there, cu_seq_lens do."""
    model = use(build(family), recipe="bf16")
    with pytest.raises(ValueError, match=RESTART):
        model(ids, position_ids=PACKED.clone())
    if family == "gpt_oss":
        with pytest.raises(ValueError, match=RESTART):
            model(ids, position_ids=PACKED.clone(), use_cache=False)
    packed = model(ids, position_ids=PACKED, cu_seq_lens_q=CU, cu_seq_lens_k=CU).logits[0]
    alone = torch.cat([model(part).logits[0] for part in ids.split(LENGTHS, dim=1)])
    assert_close(packed, alone, rms=1e-6)


@pytest.mark.parametrize("positions", [False, True])
@torch.no_grad()
def test_index_of_the_sequence(positions: bool, ids: torch.Tensor) -> None:
    """`seq_idx`, which collators make for state-space layers: harmless beside a separation, refused
    where it is the only one."""
    model = use(build("llama"), recipe="bf16")
    index = torch.tensor([[0] * 12 + [1] * 18], dtype=torch.int32)
    alone = torch.cat([model(part).logits[0] for part in ids.split(LENGTHS, dim=1)])
    told = {"cu_seq_lens_q": CU} | ({"position_ids": PACKED} if positions else {})
    packed = model(ids, seq_idx=index, position_ids=PACKED, use_cache=False).logits[0]
    assert_close(packed, alone, rms=1e-6)
    if positions:
        assert_close(model(ids, seq_idx=index, **told).logits[0], alone, rms=1e-6)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=RESTART.replace("restart", "restart .or `seq_idx` ch")
        ):
            model(ids, seq_idx=index)
    model(ids, seq_idx=torch.zeros_like(index))
    mask = torch.ones_like(ids)
    mask[:, :12] = 0
    model(ids, seq_idx=index, attention_mask=mask)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
@torch.no_grad()
def test_boolean_masks_must_separate(family: str, ids: torch.Tensor) -> None:
    """A mask of the user's own is no promise: one that is causal alone would let sequences meet."""
    model = use(build(family), recipe="bf16")
    causal = torch.ones(30, 30).tril().bool()[None, None]
    document = (PACKED == 0).cumsum(-1)
    apart = causal & (document[:, None, :, None] == document[:, None, None, :])
    for _ in range(2):
        with pytest.raises(ValueError, match=RESTART):
            model(ids, position_ids=PACKED, attention_mask=causal)
    packed = model(ids, position_ids=PACKED, attention_mask=apart).logits[0]
    alone = torch.cat([model(part).logits[0] for part in ids.split(LENGTHS, dim=1)])
    assert_close(packed, alone, rms=1e-6)
    hidden = causal.clone()
    hidden[..., :12] = False  # padding, whose positions mean nothing
    model(ids, position_ids=PACKED, attention_mask=hidden)


def test_crosses() -> None:
    """With keys of a cache before, keys not written yet behind, windows, and one mask for all rows."""
    restarts = torch.zeros(1, 5, dtype=torch.bool)
    restarts[0, 2] = True  # the fourth token starts a sequence
    for before, behind in ((0, 0), (4, 0), (0, 3), (4, 3)):
        query = before + torch.arange(6)[:, None]
        key = torch.arange(before + 6 + behind)
        causal = (key <= query)[None, None]
        start = before + 3
        apart = causal & ~((query >= start) & (key < start))
        assert crosses(causal, restarts) and not crosses(apart, restarts)
        assert crosses(causal & (query - key < 2), restarts)
        assert not crosses(causal & (query - key < 1), restarts)
        assert not crosses(causal & (key >= start), restarts)  # padding up to there
        both = torch.cat((apart, causal))
        assert crosses(both, restarts) and crosses(both.expand(2, 4, -1, -1), restarts)
        assert not crosses(both, torch.stack((restarts[0], ~restarts[0] & restarts[0])))
        assert not crosses(torch.ones_like(causal), restarts)  # everybody sees everything
    assert not crosses(torch.ones(2, 1, 1, 6, dtype=torch.bool), restarts)


def test_half_of_a_description(ids: torch.Tensor) -> None:
    model = use(build("llama"))
    with pytest.raises(ValueError, match="`cu_seq_lens_k` came without `cu_seq_lens_q`.*Pass both"):
        model(ids, cu_seq_lens_k=CU)
