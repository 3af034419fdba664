"""A sequence in a batch, padded or packed, gets the logits and gradients it gets alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import (
    batch,
    build,
    grads_of,
    one_thread,  # noqa: F401
    rel_grads,
    use,
)
from torch import Tensor

from hf_deltamatch import AttentionRecipe, swap_linears
from hf_deltamatch.testing import assert_bitwise_equal, rel_rms

SHORT = (23, 40, 9, 1)  # together within one tile of 128
LONG = (23, 150, 9, 1)
WINDOW = {"mistral": {"sliding_window": 8}, "gemma3_text": {"sliding_window": 8}}
FAMILIES = ["llama", "mistral", "gemma3_text", "gpt2"]
# A sum in another order changes the last bit, which may tip an FP8 rounding; one that tips moves
# the logits of these models by 3e-4 (measured), a token that is seen by mistake by 1e-2 and more.
TIPPED = 1e-3
FORMS = ["left", "right", "packed", "cu_seq_lens"]
# Every family with the default block, one with the others.
RECIPES = [(family, "128xD") for family in FAMILIES] + [("llama", "1xD"), ("llama", "mx")]


def sequences(lengths: tuple[int, ...]) -> list[Tensor]:
    return [batch(1, n, seed=10 + i)[0] for i, n in enumerate(lengths)]


def forward(model, form: str, seqs: list[Tensor]) -> list[Tensor]:
    """Logits of each sequence, from one call."""
    if form in ("left", "right"):
        side = "left" if form == "left" else "right"
        ids = torch.nn.utils.rnn.pad_sequence(seqs, batch_first=True, padding_side=side)
        ones = [torch.ones_like(s) for s in seqs]
        mask = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True, padding_side=side)
        positions = (mask.cumsum(-1) - 1).clamp(0)
        out = model(ids, attention_mask=mask, position_ids=positions).logits
        return [row[m.bool()] for row, m in zip(out, mask, strict=True)]
    lengths = [len(s) for s in seqs]
    kwargs = {
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(seqs[0].device)
    }
    if form == "cu_seq_lens":
        cu = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(seqs[0].device, torch.int32)
        kwargs |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
        kwargs |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        # As a training loop with a cache left on: the mask is plain causal, cu_seq_lens must do.
        kwargs["use_cache"] = True
    else:
        kwargs["use_cache"] = False
    out = model(torch.cat(seqs)[None], **kwargs).logits[0]
    return list(out.split(lengths))


def loss_of(logits: list[Tensor], seqs: list[Tensor]) -> Tensor:
    """A sum over tokens, so that the gradient of a batch is the sum of its sequences'."""
    pairs = zip(logits, seqs, strict=True)
    return sum(F.cross_entropy(l[:-1], s[1:], reduction="sum") for l, s in pairs if len(s) > 1)


def together(model, form: str, lengths=SHORT) -> tuple[Tensor, dict[str, Tensor]]:
    seqs = sequences(lengths)
    model.zero_grad()
    logits = forward(model, form, seqs)
    loss_of(logits, seqs).backward()
    return torch.cat(logits).detach(), grads_of(model)


def alone(model, lengths=SHORT) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = []
    for s in sequences(lengths):
        logits.append(model(s[None], use_cache=False).logits[0])
        if len(s) > 1:
            loss_of(logits[-1:], [s]).backward()
    return torch.cat(logits).detach(), grads_of(model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_batches_fp64(family: str, form: str) -> None:
    """In FP64, without quantisation: nothing crosses."""
    model = use(build(family, **WINDOW.get(family, {})).double(), recipe="bf16")
    expected, expected_grads = alone(model, LONG)
    logits, grads = together(model, form, LONG)
    assert logits.dtype == torch.float64
    assert rel_rms(logits, expected) < 1e-14  # measured: 3e-16
    assert rel_grads(grads, expected_grads) < 1e-14  # measured: 5e-16


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_batches_bf16_recipe(family: str, form: str) -> None:
    model = use(build(family, **WINDOW.get(family, {})), recipe="bf16")
    expected, expected_grads = alone(model, LONG)
    logits, grads = together(model, form, LONG)
    assert rel_rms(logits, expected) < 5e-7  # measured: 3.4e-7
    assert rel_grads(grads, expected_grads) < 8e-7  # measured: 5.3e-7


@pytest.mark.parametrize("linears", [False, True], ids=["attention", "all"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family,block", RECIPES)
def test_batches_fp8(family: str, block: str, form: str, linears: bool) -> None:
    """Within a tile a sequence is even quantised as alone; grad_weight of an FP8 linear is not: its
    descales lie along the tokens of the call."""
    model = use(build(family, **WINDOW.get(family, {})), recipe=AttentionRecipe(block=block))
    if linears:
        swap_linears(model)
    expected, expected_grads = alone(model)
    logits, grads = together(model, form)
    assert rel_rms(logits, expected) < TIPPED  # measured: 3e-7, and 3e-4 in two cases
    # Measured: 0.018 to 0.027, and 2.7e-7 without FP8 linears.
    assert rel_grads(grads, expected_grads) < (0.031 if linears else TIPPED)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block", ["128xD", "1xD", "mx"])
def test_batches_fp8_tiles(block: str, form: str) -> None:
    """Over several tiles P is cast after another running maximum than alone, unless the tiles
    start with the sequence."""
    model = use(build("llama"), recipe=AttentionRecipe(block=block))
    expected, expected_grads = alone(model, LONG)
    logits, grads = together(model, form, LONG)
    # Measured: 0.0008 to 0.0015 and 0.0013 to 0.0027 (left, packed); 2e-8 and 2e-7.
    same_tiles = form in ("right", "cu_seq_lens")
    assert rel_rms(logits, expected) < (TIPPED if same_tiles else 0.002)
    assert rel_grads(grads, expected_grads) < (TIPPED if same_tiles else 0.0035)


@pytest.mark.parametrize("block", ["128xD", "1xD", "mx"])
@pytest.mark.parametrize("scale", [1.0, 2.0**-10])
def test_batches_ignored_labels(block: str, scale: float) -> None:
    """Tokens that the loss ignores (a prompt; always the last one) send a zero dO into the last
    layer. They must not coarsen what the others get, however small the loss is scaled."""
    model, ids = build("llama"), batch(2, 120)
    labels = ids.clone()
    labels[:, :60] = -100
    labels[:, 60::2] = -100
    grads = {}
    for recipe in ("bf16", AttentionRecipe(block=block)):
        use(model, recipe=recipe).zero_grad()
        (model(ids, labels=labels).loss * scale).backward()
        grads[recipe == "bf16"] = grads_of(model)
    assert rel_grads(grads[False], grads[True]) < 0.025  # measured: 0.0166
    for layer in (0, 1):
        name = f"model.layers.{layer}.self_attn.v_proj.weight"
        assert rel_rms(grads[False][name], grads[True][name]) < 0.05, name  # measured: 0.041


def step_with_padding(model, side: str, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of a batch whose padding holds the random ids of ``seed``."""
    ids = batch(3, 40)
    mask = torch.ones_like(ids)
    for row, hidden in ((1, 7), (2, 31)):
        mask[row, slice(0, hidden) if side == "left" else slice(40 - hidden, 40)] = 0
    real = mask.bool()
    model.zero_grad()
    contents = torch.where(real, ids, batch(3, 40, seed=seed))
    logits = model(contents, attention_mask=mask).logits[real]
    F.cross_entropy(logits, ids[real]).backward()
    return logits.detach(), grads_of(model)


@pytest.mark.parametrize("linears", [False, True], ids=["attention", "all"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family,block", [*RECIPES, ("gemma3_text", "1xD")])
def test_batches_contents_of_padding(family: str, block: str, side: str, linears: bool) -> None:
    """What stands in the padding moves no bit of a real token's logits, nor of a gradient."""
    model = use(build(family, **WINDOW.get(family, {})), recipe=AttentionRecipe(block=block))
    if linears:
        swap_linears(model)
    first, first_grads = step_with_padding(model, side, 21)
    second, second_grads = step_with_padding(model, side, 22)
    assert_bitwise_equal(second, first)
    if not linears:  # grad_weight of an FP8 linear has descales over tokens, padding included
        for name, grad in first_grads.items():
            assert_bitwise_equal(second_grads[name], grad, name)


@pytest.mark.parametrize("block", ["128xD", "1xD"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_large_padding(side: str, block: str) -> None:
    """Nor if q, k and v of the padding are a million times those of real tokens."""
    model = use(build("llama", num_hidden_layers=1), recipe=AttentionRecipe(block=block))
    model.model.layers[0].input_layernorm = torch.nn.Identity()
    expected, _ = step_with_padding(model, side, 21)
    model.model.embed_tokens = Louder(model.model.embed_tokens, side)
    logits, grads = step_with_padding(model, side, 21)
    assert_bitwise_equal(logits, expected)
    assert all(g.isfinite().all() for g in grads.values())


class Louder(torch.nn.Module):
    """Embeddings that are a million times larger in the padding of ``step_with_padding``."""

    def __init__(self, embedding: torch.nn.Embedding, side: str) -> None:
        super().__init__()
        self.embedding, self.side = embedding, side

    def forward(self, ids: Tensor) -> Tensor:
        factor = torch.ones(3, 40, 1)
        for row, hidden in ((1, 7), (2, 31)):
            where = slice(0, hidden) if self.side == "left" else slice(40 - hidden, 40)
            factor[row, where] = 1e6
        return self.embedding(ids) * factor
