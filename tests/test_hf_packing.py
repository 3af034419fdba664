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

from hf_deltamatch.hf import attention, packing
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
    original = packing.own_key_shown
    monkeypatch.setattr(packing, "own_key_shown", lambda *args: looks.append(1) or original(*args))
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


def masks_seen(monkeypatch: pytest.MonkeyPatch) -> list:
    seen, original = [], attention.delta_matching_attention

    def recorded(*args, mask, **kwargs):
        seen.append(mask)
        return original(*args, mask=mask, **kwargs)

    monkeypatch.setattr(attention, "delta_matching_attention", recorded)
    return seen


SIZES = {"llama": {}, "mistral": {"sliding_window": 8}, "gemma3_text": {"sliding_window": 8}}


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("family", SIZES)
@torch.no_grad()
def test_mask_beside_cu_seq_lens(
    family: str, use_cache: bool, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers makes a mask of the restarts (without a cache) or of the window: the kernels take
    cu_seqlens alone, so it goes where it says no more; one look per kind of mask."""
    model = use(build(family, **SIZES[family]), recipe="bf16")
    alone = torch.cat([model(part, use_cache=False).logits[0] for part in ids.split(LENGTHS, 1)])
    described = dict(position_ids=PACKED, cu_seq_lens_q=CU, cu_seq_lens_k=CU, use_cache=use_cache)
    seen, looks = masks_seen(monkeypatch), []
    original = packing._shows_all
    monkeypatch.setattr(packing, "_shows_all", lambda *a, **k: looks.append(1) or original(*a, **k))
    assert_close(model(ids, **described).logits[0], alone, rms=1e-6)
    assert seen and all(mask is None for mask in seen)
    assert len(looks) == (family != "llama" or not use_cache) + (
        family == "gemma3_text" and not use_cache
    )
    # A mask that hides more is no ornament.
    hiding = torch.ones_like(ids)
    hiding[:, 3] = 0
    seen.clear()
    logits = model(ids, attention_mask=hiding, **described).logits[0]
    assert seen and all(mask is not None for mask in seen)
    assert (logits[3:12] - alone[3:12]).abs().max() > 1e-3
    assert_close(logits[12:], alone[12:], rms=1e-6)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
@torch.no_grad()
def test_mask_beside_cu_seq_lens_compiled(
    family: str, hidden: bool, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph cannot look; it asserts."""
    model = use(build(family, **SIZES[family]))
    described = dict(position_ids=PACKED, cu_seq_lens_q=CU, cu_seq_lens_k=CU, use_cache=False)
    expected = model(ids, **described).logits
    seen = masks_seen(monkeypatch)
    compiled = torch.compile(lambda **kw: model(**kw).logits, fullgraph=True, backend="aot_eager")
    if not hidden:
        assert_close(compiled(input_ids=ids, **described), expected, rms=1e-6)
        assert seen and all(mask is None for mask in seen)
        return
    hiding = torch.ones_like(ids)
    hiding[:, 3] = 0
    with pytest.raises(RuntimeError, match="hides tokens that cu_seq_lens show"):
        compiled(input_ids=ids, attention_mask=hiding, **described)


def test_mask_of_other_ends(ids: torch.Tensor) -> None:
    """Ends of q and k that differ are no self-attention: nothing is dropped."""
    mask = torch.ones(1, 1, 30, 30, dtype=torch.bool).tril()
    other = torch.tensor([0, 10, 30], dtype=torch.int32)
    assert drop(mask, (CU, CU.clone())) is None
    assert drop(mask, (CU, other)) is mask
    assert drop(mask[..., :20, :], (CU, CU), 20, 30).shape[2] == 20


def drop(mask, cu_seqlens, q_length=30, k_length=30, causal=True, window=None):
    asker = torch.nn.Module()
    return packing.drop_redundant_mask(asker, mask, cu_seqlens, q_length, k_length, causal, window)


@pytest.mark.parametrize("rows", [7, 2048])
def test_mask_that_broadcasts(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row for all queries, one column for all keys; long ones are looked at in parts."""
    monkeypatch.setattr(packing, "_ROWS", rows)
    row = torch.ones(1, 1, 1, 30, dtype=torch.bool)
    assert drop(row, (CU, CU), causal=False) is None
    assert drop(row, (CU, CU)) is row  # shows later tokens
    row = row.clone()
    row[..., 25] = False
    assert drop(row, (CU, CU), causal=False) is row
    column = torch.ones(1, 1, 30, 1, dtype=torch.bool)
    assert drop(column, (CU, CU), causal=False) is column
    for mask in (row[0, 0], row[0].expand(1, 30, 30)):
        assert drop(mask, (CU, CU), causal=False) is mask


def packed_attention(mask: torch.Tensor, **options) -> torch.Tensor:
    module = torch.nn.Module()
    module.is_causal = True
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 30, 16, generator=g) for _ in range(3))
    return attention.fp8_delta_matching_attention(
        module, q, k, v, mask, cu_seq_lens_q=CU, cu_seq_lens_k=CU, **options
    )[0]


def test_mask_that_shows_later_tokens() -> None:
    """Image tokens that see each other, in a causal model: the mask says it, causality does not."""
    segment = torch.searchsorted(CU[1:], torch.arange(30), right=True)
    mask = (segment[:, None] == segment).tril()[None, None]
    plain = packed_attention(mask)
    assert_close(packed_attention(mask.tril()), plain, rms=1e-6)
    mask = mask.clone()
    mask[..., 15:20, 15:20] = True
    assert drop(mask, (CU, CU)) is mask
    seen = packed_attention(mask)
    changed = (seen - plain).abs().amax((0, 2, 3)) > 1e-3
    assert changed[15:19].all() and not changed[:15].any() and not changed[19:].any()
    # The same as the mask alone, which separates the sequences too.
    module = torch.nn.Module()
    module.is_causal = True
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 30, 16, generator=g) for _ in range(3))
    alone = attention.fp8_delta_matching_attention(module, q, k, v, mask)[0]
    assert_close(seen, alone, rms=1e-2)


UNCOUNTED = {
    "data": lambda x, new: x.data.copy_(new),
    "numpy": lambda x, new: x.numpy().__setitem__(..., new.numpy()),
    "set data": lambda x, new: setattr(x, "data", new.clone()),
}


@pytest.mark.parametrize("how", UNCOUNTED)
@torch.no_grad()
def test_changes_that_no_version_counts(how: str, ids: torch.Tensor) -> None:
    """Collectives and kernels write like this too: an answer lasts for one forward."""
    model, positions = use(build("llama")), torch.arange(30)[None].clone()
    model(ids, position_ids=positions)
    version = positions._version
    UNCOUNTED[how](positions, PACKED)
    assert positions._version == version
    with pytest.raises(ValueError, match=RESTART):
        model(ids, position_ids=positions)


@pytest.mark.parametrize("how", UNCOUNTED)
def test_mask_changed_without_a_version(how: str) -> None:
    mask = torch.ones(1, 1, 30, 30, dtype=torch.bool).tril()
    hiding = mask.clone()
    hiding[..., 3] = False
    layers = [torch.nn.Module() for _ in range(2)]
    ask = lambda layer: packing.drop_redundant_mask(layer, mask, (CU, CU), 30, 30, True, None)
    assert all(ask(layer) is None for layer in layers)
    UNCOUNTED[how](mask, hiding)
    assert all(ask(layer) is mask for layer in layers)


def test_layers_that_are_recomputed(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradient checkpointing asks again, from the last layer back: one more look, not one a layer."""
    model, looks = use(build("mistral", num_hidden_layers=4, sliding_window=8)), []
    original = packing._shows_all
    monkeypatch.setattr(packing, "_shows_all", lambda *a, **k: looks.append(1) or original(*a, **k))
    model.train()
    model.gradient_checkpointing_enable()
    described = dict(position_ids=PACKED, cu_seq_lens_q=CU, cu_seq_lens_k=CU, use_cache=False)
    model(ids, **described).logits.sum().backward()
    assert len(looks) == 2
