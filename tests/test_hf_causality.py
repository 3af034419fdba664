"""No token sees a later one: whatever a model leaves to the mask, and whatever to `is_causal`."""

from __future__ import annotations

import pytest
import torch
from tiny_models import (
    FAMILIES,
    OURS,
    SEQ2SEQ,
    batch,
    build,
    build_seq2seq,
    one_thread,  # noqa: F401
    padded,
    use,
)
from transformers import LlamaConfig, PreTrainedConfig
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from hf_deltamatch.hf.masks import fp8_delta_matching_mask
from hf_deltamatch.testing import assert_bitwise_equal, assert_close

CUT = 17


def changed(ids: torch.Tensor) -> torch.Tensor:
    """The same tokens up to CUT, others after it."""
    later = ids.clone()
    later[:, CUT:] = 3 + (later[:, CUT:] + 31) % 100
    return later


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_causal_models_do_not_see_the_future(family: str) -> None:
    model, ids = use(build(family), recipe="bf16"), batch(2, 40)
    before, after = model(ids).logits, model(changed(ids)).logits
    assert_close(after[:, :CUT], before[:, :CUT], rms=1e-6)  # a mixture batches other tokens
    assert not torch.equal(after[:, CUT:], before[:, CUT:])


@pytest.mark.parametrize("recipe", ["bf16", "delta_matching"])
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("family", SEQ2SEQ)
@torch.no_grad()
def test_decoders_do_not_see_the_future(family: str, pad: bool, recipe: str) -> None:
    """Also those that leave `is_causal` of their layers False and rely on the mask."""
    model = use(build_seq2seq(family), recipe=recipe)
    source, target = padded("right", length=24), padded("right", length=40)
    inputs = {"input_ids": source.input_ids}
    if pad:
        inputs |= {"attention_mask": source.attention_mask}
        inputs |= {"decoder_attention_mask": target.attention_mask}
    before = model(**inputs, decoder_input_ids=target.input_ids).logits
    after = model(**inputs, decoder_input_ids=changed(target.input_ids)).logits
    # Descales of a tile follow its tokens; powers of two, they change only the order of rounding.
    assert_close(after[:, :CUT], before[:, :CUT], rms=1e-6)
    assert not torch.equal(after[:, CUT:], before[:, CUT:])


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("family", SEQ2SEQ)
@torch.no_grad()
def test_encoder_decoders_against_transformers(family: str, pad: bool) -> None:
    """Encoder, decoder and cross attention; models that read the mask themselves (the encoder of
    BigBird-Pegasus, the router of NLLB-MoE) get it in the form they know."""
    model = build_seq2seq(family)
    source, target = padded("right", length=24), padded("right", length=20)
    inputs = {"input_ids": source.input_ids, "decoder_input_ids": target.input_ids}
    if pad:
        inputs |= {"attention_mask": source.attention_mask}
        inputs |= {"decoder_attention_mask": target.attention_mask}
    expected = model(**inputs).logits
    actual = use(model, OURS, "bf16")(**inputs).logits
    real = target.real if pad else torch.ones_like(target.real)
    assert_close(actual[real], expected[real], rms=1e-6)


class Remote(PreTrainedConfig):
    model_type = "remote-code"


@pytest.mark.parametrize("known", [True, False])
def test_none_only_where_the_flag_can_be_trusted(known: bool) -> None:
    """None leaves causality to `is_causal` of the module: right in models that support SDPA, which
    does the same, and unknown in others, such as code from the Hub."""
    config = LlamaConfig() if known else Remote()
    config._attn_implementation = OURS
    arguments = {"config": config, "inputs_embeds": torch.zeros(2, 12, 16)}
    arguments |= {"attention_mask": None, "past_key_values": None}
    causal, both_ways = create_causal_mask(**arguments), create_bidirectional_mask(**arguments)
    if known:
        assert causal is None and both_ways is None
    else:
        assert causal.shape == (2, 3, 1, 12) and causal.dtype == torch.int32
        assert both_ways.dtype == torch.bool and both_ways.all()


@torch.no_grad()
def test_model_that_makes_its_own_mask() -> None:
    """Doge turns the mask that it gets into one of its own: it gets the boolean one, and what comes
    out is a bias, which is refused by name (it used to be a broadcasting error)."""
    model = use(build("doge"))
    for inputs in ({"input_ids": batch()}, padded("left")._asdict()):
        with pytest.raises(ValueError, match="attention_mask.*a bias on the logits"):
            model(**inputs)


@pytest.mark.parametrize("shape", [(12,), (2, 12, 12), (2, 1, 1, 1, 12)])
def test_mask_with_a_wrong_number_of_dimensions(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError) as error:
        fp8_delta_matching_mask(2, 12, 12, attention_mask=torch.ones(shape), config=LlamaConfig())
    for part in ("attention_mask", str(shape), "[B, Tk]", "[B, 1, Tq, Tk]"):
        assert part in str(error.value)
    model = use(build("llama"))
    if len(shape) == 3:
        with pytest.raises(ValueError, match=r"`attention_mask` is \(2, 12, 12\).*mask\[:, None\]"):
            model(batch(2, 12), attention_mask=torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**40])
def test_huge_window_is_none(window: int) -> None:
    """Configs that mean "no window" write a number larger than any sequence."""
    model, plain = build("mistral", sliding_window=window), build("mistral", sliding_window=None)
    inputs = padded("left")._asdict()
    actual, expected = use(model, recipe="bf16")(**inputs), use(plain, recipe="bf16")(**inputs)
    assert_bitwise_equal(actual.logits, expected.logits)
    assert_bitwise_equal(model(batch()).logits, plain(batch()).logits)


@torch.no_grad()
def test_model_that_ignores_the_choice_keeps_its_mask() -> None:
    """BLOOM runs its own attention whatever it is asked for (check_model says so). It was given no
    mask then, and saw the future."""
    model = build("bloom")
    inputs, ids = padded("left"), batch(2, 40)
    expected = [model(**inputs._asdict()).logits, model(ids).logits]
    model.config._attn_implementation = OURS
    actual = [model(**inputs._asdict()).logits, model(ids).logits]
    assert_bitwise_equal(actual[0][inputs.real], expected[0][inputs.real])
    assert_bitwise_equal(actual[1], expected[1])
