"""Recipes layer by layer, and the first and last layer in high precision in one word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import (
    batch,
    build,
    build_seq2seq,
    one_thread,  # noqa: F401
    run,
    use,
)
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from hf_deltamatch import DeltaMatchConfig, check_model, set_attention_recipe, swap_linears
from hf_deltamatch.diagnostics import count_calls
from hf_deltamatch.hf.layer_words import FIRST_LAST, first_and_last
from hf_deltamatch.hf.linear import fp8_linears
from hf_deltamatch.hf.running import running
from hf_deltamatch.testing import assert_bitwise_equal

NAMES = ["model.layers.0", "model.layers.3"]


def in_layers(names) -> set[str]:
    return {".".join(n.split(".")[:3]) for n in names}


def assert_first_last(model) -> None:
    """Four layers, of which the first and the last run in high precision."""
    attention = {n: r.name for n, r in check_model(model).attention.items()}
    expected = {0: "bf16", 1: "delta_matching", 2: "delta_matching", 3: "bf16"}
    assert attention == {f"model.layers.{i}.self_attn": r for i, r in expected.items()}
    assert in_layers(fp8_linears(model)) == {"model.layers.1", "model.layers.2"}


def test_one_word_for_each_half() -> None:
    model = use(build("llama", num_hidden_layers=4))
    set_attention_recipe(model, layers=FIRST_LAST)
    report = swap_linears(model, layers=FIRST_LAST)
    assert_first_last(model)
    assert report.skipped["model.layers.3.mlp.up_proj"] == "layers['model.layers.3'] is 'bf16'"
    with count_calls() as calls:
        ids = batch()
        run(model, input_ids=ids, labels=ids)
    assert calls["linear_fwd"] == calls["linear_bwd_weight"] == 14


def test_word_is_the_patterns_it_stands_for() -> None:
    """The same logits as the patterns written out, and as the recipes in a star pattern."""
    written = {**dict.fromkeys(NAMES, "bf16"), "*": "delta_matching"}
    logits = []
    for config in (
        DeltaMatchConfig(linear=None, layers=FIRST_LAST),
        DeltaMatchConfig("stale_delta", None, layers=written),
    ):
        model = config.apply_to(build("llama", num_hidden_layers=4))
        names = [r.name for r in check_model(model).attention.values()]
        assert names == ["bf16", "delta_matching", "delta_matching", "bf16"]
        logits.append(model(batch()).logits)
    assert_bitwise_equal(*logits)


def test_word_is_saved_as_names(tmp_path: Path) -> None:
    build("llama", num_hidden_layers=4).save_pretrained(tmp_path / "plain")
    config = DeltaMatchConfig(layers=FIRST_LAST)
    load = AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "plain", quantization_config=config)
    assert_first_last(model)
    assert config.layers == FIRST_LAST  # as it was, for a model of another depth
    assert sorted(model.config.quantization_config.layers) == NAMES
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert sorted(saved["layers"]) == NAMES
    assert saved["layers"][NAMES[0]]["attention"]["quantize"] is False
    assert saved["layers"][NAMES[0]]["linear"] == "bf16"
    assert_first_last(load(tmp_path / "saved"))
    # Said again it is no contradiction; of another choice it is.
    assert_first_last(load(tmp_path / "saved", quantization_config=config))
    set_attention_recipe(model, layers={"model.layers.1": "bf16"})
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="layers is 'first_last_bf16', but the checkpoint"):
        load(tmp_path / "other", quantization_config=config)


def test_word_in_a_base_model(tmp_path: Path) -> None:
    """Saved with the names of the whole model, which then loads the same."""
    build("llama", num_hidden_layers=4).save_pretrained(tmp_path / "plain")
    config = DeltaMatchConfig(layers=FIRST_LAST)
    base = AutoModel.from_pretrained(tmp_path / "plain", quantization_config=config)
    assert sorted(base.config.quantization_config.layers) == NAMES
    base.save_pretrained(tmp_path / "base")
    again = AutoModel.from_pretrained(tmp_path / "base")
    assert running(again) == running(base)


def test_word_before_there_is_a_model(tmp_path: Path) -> None:
    """A config on its own holds the word, and a config.json may."""
    config = DeltaMatchConfig(layers=FIRST_LAST)
    assert DeltaMatchConfig.from_dict(config.to_dict()).layers == FIRST_LAST
    build("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "quantization_config": config.to_dict()}))
    assert_first_last(AutoModelForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    "make,expected",
    [
        (lambda: build("gpt2"), ["transformer.h.0", "transformer.h.1"]),
        (lambda: build("llama", num_hidden_layers=1), ["model.layers.0"]),
        (lambda: build("mixtral"), ["model.layers.0", "model.layers.1"]),  # not its experts
        (lambda: build("qwen3_next"), ["model.layers.0", "model.layers.3"]),
        (lambda: build("mamba"), ["backbone.layers.0", "backbone.layers.1"]),
        (lambda: build_seq2seq("bart"), ["model.decoder.layers.0", "model.decoder.layers.1"]),
    ],
)
def test_first_and_last(make, expected: list[str]) -> None:
    assert first_and_last("layers", make()) == expected


def test_first_and_last_of_the_text_model() -> None:
    """Of a model that sees, the layers that read; its image encoder is longer here."""
    from coverage_models import tiny_model

    model = tiny_model("gemma3", "sdpa")
    assert first_and_last("layers", model) == [
        f"model.language_model.layers.{i}" for i in (0, len(model.model.language_model.layers) - 1)
    ]


def test_hybrid_keeps_what_the_word_can_mean() -> None:
    """The first layer of Qwen3-Next has linear attention: nothing of ours to leave out."""
    model = DeltaMatchConfig(linear=None, layers=FIRST_LAST).apply_to(build("qwen3_next"))
    assert list(model.config.quantization_config.layers) == ["model.layers.3"]
    model = DeltaMatchConfig(layers=FIRST_LAST).apply_to(build("qwen3_next"))
    assert list(model.config.quantization_config.layers) == ["model.layers.3", "model.layers.0"]


@pytest.mark.parametrize(
    "choose",
    [
        lambda word: DeltaMatchConfig(layers=word),
        lambda word: set_attention_recipe(use(build("llama")), layers=word),
        lambda word: swap_linears(build("llama"), layers=word),
    ],
)
def test_unknown_word(choose) -> None:
    with pytest.raises(ValueError, match="'first_bf16'; it must be 'first_last_bf16' or a dict"):
        choose("first_bf16")


def test_word_without_effect() -> None:
    with pytest.raises(ValueError, match="Sequential has no list of layers. Name the modules"):
        swap_linears(nn.Sequential(nn.Linear(64, 64)), layers=FIRST_LAST)
    with pytest.raises(ValueError, match="layers='first_last_bf16' has no effect on Llama"):
        # Layers that hold nothing to convert.
        model = build("llama")
        model.model.layers = nn.ModuleList([nn.Identity(), model.model.layers[0], nn.Identity()])
        DeltaMatchConfig(linear=None, layers=FIRST_LAST).apply_to(model)
    with pytest.raises(ValueError, match="neither the first nor the last layer of Llama"):
        swap_linears(model, layers=FIRST_LAST)


def test_gradients_of_layers_in_high_precision_are_exact() -> None:
    """All but one layer left out: what differs comes from that one layer alone."""
    ids = batch()
    model = use(build("llama", num_hidden_layers=3), recipe="bf16")
    logits, _ = run(model, input_ids=ids, labels=ids)
    hidden = model(ids, output_hidden_states=True).hidden_states
    set_attention_recipe(model, "delta_matching", layers=FIRST_LAST)
    mixed = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(mixed[1], hidden[1]) and not torch.equal(mixed[2], hidden[2])
    assert not torch.equal(model(ids).logits, logits)
