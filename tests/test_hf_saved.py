"""What a checkpoint says about itself is what the model ran, however that was chosen; and what counts
when it is loaded with another config."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
from tiny_models import (
    OURS,
    batch,
    build,
    one_thread,  # noqa: F401
)
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_deltamatch import (
    AttentionRecipe,
    DeltaMatchConfig,
    check_model,
    set_attention_recipe,
    swap_linears,
    unswap_linears,
)
from hf_deltamatch.hf.linear import fp8_linears
from hf_deltamatch.hf.modules import attention_modules, choice_of
from hf_deltamatch.hf.running import running
from hf_deltamatch.testing import assert_bitwise_equal


def configured(*args, family: str = "llama", **kwargs):
    """A model that runs a config; the default has an exception of every kind."""
    if not args and not kwargs:
        kwargs = {"layers": {"model.layers.1.mlp": "rowwise", "model.layers.0": "bf16"}}
        kwargs |= {"modules_to_not_convert": ["*.q_proj"], "include": ["lm_head"]}
    return DeltaMatchConfig(*args, **kwargs).apply_to(build(family))


def saved_config(path: Path) -> dict | None:
    return json.loads((path / "config.json").read_text()).get("quantization_config")


def implementation(model) -> str:
    return model.config._attn_implementation


def switch_off_attention(model):
    model.set_attn_implementation("sdpa")


def swap_but_some(model):
    swap_linears(model, "mx", lambda module, name: "layers.1" in name, include=["lm_head"])


def by_hand(model):
    """Nothing tells the config of this before it is saved."""
    attention = list(attention_modules(model).values())[0]
    attention.deltamatch = choice_of(attention)._replace(recipe=AttentionRecipe(block="1xD"))


CHANGES = {
    "nothing": lambda model: None,
    "set_attention_recipe": lambda model: set_attention_recipe(model, "stale_delta"),
    "set_attention_recipe-layers": lambda model: set_attention_recipe(
        model, layers={"*.1.*": AttentionRecipe(block="1xD")}
    ),
    "swap_linears": lambda model: swap_linears(model, "rowwise"),
    "swap_linears-layers": lambda model: swap_linears(model, "mx", layers={"*.1.*": "bf16"}),
    "swap_linears-filter": swap_but_some,
    "unswap_linears": unswap_linears,
    "sdpa": switch_off_attention,
    "apply-no-linear": lambda model: DeltaMatchConfig("stale_delta", None).apply_to(model),
    "apply-no-attention": lambda model: DeltaMatchConfig(None, "rowwise").apply_to(model),
    "apply-layers": lambda model: DeltaMatchConfig(layers={"*.0.*": "bf16"}).apply_to(model),
    "by-hand": by_hand,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("start", ["exceptions", "plain", "attention", "linear"])
def test_saved_config_is_what_runs(start: str, change: str, tmp_path: Path) -> None:
    kwargs = {"exceptions": {}, "plain": {"linear": "blockwise"}}
    kwargs |= {"attention": {"linear": None}, "linear": {"attention": None}}
    model = configured(**kwargs[start])
    if start == "linear" and change.startswith(("set_attention", "by-hand")):
        model.set_attn_implementation(OURS)
    CHANGES[change](model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert running(reloaded) == running(model)
    assert_bitwise_equal(reloaded(batch()).logits, model(batch()).logits)
    if running(model).anything:
        assert implementation(reloaded) == implementation(model)
        assert saved_config(tmp_path) == model.config.quantization_config.to_dict()
    else:
        assert saved_config(tmp_path) is None
    if change == "nothing":
        assert (
            model.config.quantization_config.to_dict()
            == DeltaMatchConfig(
                **{
                    k: v
                    for k, v in saved_config(tmp_path).items()
                    if v is not None or k in kwargs[start]
                }
            ).to_dict()
        )


def test_config_of_a_model_follows_at_once() -> None:
    """Not only when it is saved; patterns that still hold stay, exceptions are named otherwise."""
    model = configured(layers={"model.layers.1": "bf16"})
    config = lambda: model.config.quantization_config
    set_attention_recipe(model, "stale_delta", {"model.layers.1": "bf16"})
    assert config().attention.name == "stale_delta" and list(config().layers) == ["model.layers.1"]
    assert config() is model.hf_quantizer.quantization_config
    unswap_linears(model)
    assert config().linear is None
    swap_linears(model, "rowwise", include=["lm_head"], modules_to_not_convert=["*.k_proj"])
    assert config().include == ["lm_head"] and config().linear.name == "rowwise"
    assert config().modules_to_not_convert == [
        f"model.layers.{i}.self_attn.k_proj" for i in range(2)
    ]


def test_nothing_in_fp8_is_saved_plain(tmp_path: Path) -> None:
    """And a later choice is saved again."""
    model = configured(None, "rowwise")
    unswap_linears(model)
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path / "plain")
    assert saved_config(tmp_path / "plain") is None
    swap_linears(model, "mx")
    model.save_pretrained(tmp_path / "mx")
    assert saved_config(tmp_path / "mx")["linear"]["scaling"] == "mx"


def test_plain_model_saves_no_choice(tmp_path: Path) -> None:
    """Without a config Transformers saves no attn_implementation either."""
    model = build("llama")
    model.set_attn_implementation(OURS)
    set_attention_recipe(model, "stale_delta")
    swap_linears(model)
    model.save_pretrained(tmp_path)
    assert saved_config(tmp_path) is None


def test_copy_saves_its_own_choice(tmp_path: Path) -> None:
    model = configured()
    copied = copy.deepcopy(model)
    swap_linears(copied, "rowwise")
    for name, one in (("model", model), ("copied", copied)):
        one.save_pretrained(tmp_path / name)
        assert running(AutoModelForCausalLM.from_pretrained(tmp_path / name)) == running(one)


def test_base_model_saves_names_of_the_whole(tmp_path: Path) -> None:
    """A base model has no prefix in its names; what it saves loads as either."""
    configured(layers={"model.layers.1": "bf16"}).save_pretrained(tmp_path / "whole")
    base = AutoModel.from_pretrained(tmp_path / "whole")
    assert saved_config(tmp_path / "whole") == base.config.quantization_config.to_dict()
    swap_linears(base, "mx", lambda module, name: name.endswith("q_proj"))
    base.save_pretrained(tmp_path / "base")
    assert running(AutoModel.from_pretrained(tmp_path / "base")) == running(base)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    names = {f"model.{n}" for n in fp8_linears(base)}
    assert set(fp8_linears(whole)) == names and len(names) == 2


def test_what_no_config_can_say_warns(tmp_path: Path) -> None:
    model = configured()
    other = copy.copy(model.config)
    other._attn_implementation_internal = "sdpa"
    model.model.layers[1].self_attn.config = other
    with pytest.warns(UserWarning, match=r"1 attention modules, such as model.layers.1.self_attn"):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("half", ["attention", "linear"])
def test_apply_to_undoes_the_other_half(half: str) -> None:
    model = DeltaMatchConfig().apply_to(build("llama"))
    DeltaMatchConfig(**{half: None}).apply_to(model)
    assert bool(fp8_linears(model)) == (half == "attention")
    assert implementation(model) == ("sdpa" if half == "attention" else OURS)
    fresh = DeltaMatchConfig(**{half: None}).apply_to(build("llama"))
    assert_bitwise_equal(model(batch()).logits, fresh(batch()).logits)


@pytest.mark.parametrize(
    "config",
    [
        {"layers": {"model.layers.9": "bf16"}},
        {"modules_to_not_convert": ["*"]},
        {"attention": "stale_delta", "modules_to_not_convert": ["nope"]},
    ],
    ids=["pattern", "nothing-swapped", "linear-pattern"],
)
def test_apply_to_that_fails_keeps_the_config_before(config: dict) -> None:
    model = configured("stale_delta", "rowwise")
    before, expected = running(model), model.config.quantization_config.to_dict()
    with pytest.raises(ValueError):
        DeltaMatchConfig(**config).apply_to(model)
    assert running(model) == before and model.is_quantized
    assert model.config.quantization_config.to_dict() == expected
    assert model.hf_quantizer.quantization_config is model.config.quantization_config


def test_check_model_finds_a_config_that_was_never_applied(tmp_path: Path) -> None:
    """from_config runs no quantiser: plain SDPA, under a config that says FP8."""
    configured("stale_delta", "rowwise").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    for choice in ({}, {"attn_implementation": OURS}):
        model = AutoModelForCausalLM.from_config(config, **choice)
        with pytest.raises(ValueError, match=r"check_model: .*from_config.*\.apply_to\(model\)"):
            check_model(model)
    saved = DeltaMatchConfig.from_dict(dict(model.config.quantization_config))
    assert len(check_model(saved.apply_to(model)).linears) == 14
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(check_model(loaded).attention) == len(check_model(loaded.model).attention) == 2


def backends(model) -> set:
    found = {choice_of(m).backend for m in attention_modules(model).values()}
    return found | {m.fp8_backend for m in fp8_linears(model).values()}


def test_backend_passed_for_a_saved_checkpoint(tmp_path: Path) -> None:
    """A GPU without a kernel: the recipes of the checkpoint, on the backend that is asked for."""
    model = configured()
    model.save_pretrained(tmp_path)
    config = DeltaMatchConfig(backend="reference")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert backends(loaded) == {"reference"} and running(loaded) == running(model)
    assert "backend" not in loaded.config.quantization_config.to_dict()
    # The same after loading.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert backends(loaded) == {None}
    set_attention_recipe(loaded, backend="reference")
    swap_linears(loaded, backend="reference")
    assert backends(loaded) == {"reference"} and running(loaded) == running(model)


@pytest.mark.parametrize(
    "passed,parts",
    [
        ({"attention": "delta_matching"}, ("attention is 'delta_matching'", "'stale_delta'")),
        ({"linear": "blockwise"}, ("linear is 'blockwise'", "'rowwise'")),
        ({"linear": None}, ("linear is None", "'rowwise'")),
        ({"layers": {"model.layers.0": "bf16"}}, ("layers is", "None")),
        ({"modules_to_not_convert": ["*.k_proj"]}, ("modules_to_not_convert", "*.q_proj")),
    ],
    ids=["attention", "linear", "none", "layers", "not_convert"],
)
def test_recipe_that_contradicts_a_saved_checkpoint(passed, parts, tmp_path: Path) -> None:
    configured("stale_delta", "rowwise", modules_to_not_convert=["*.q_proj"]).save_pretrained(
        tmp_path
    )
    load = AutoModelForCausalLM.from_pretrained
    with pytest.raises(ValueError) as error:
        load(tmp_path, quantization_config=DeltaMatchConfig(**passed, backend="reference"))
    for part in (*parts, "set_attention_recipe(model", "swap_linears(model"):
        assert part in str(error.value)
    same = DeltaMatchConfig("stale_delta", "rowwise", ["*.q_proj"])
    model = load(tmp_path, quantization_config=same)
    DeltaMatchConfig(**passed).apply_to(model)  # the remedy


@torch.no_grad()
def test_backend_of_none_keeps_the_one_before() -> None:
    model = configured(backend="reference")
    set_attention_recipe(model, "stale_delta")
    swap_linears(model, "rowwise")
    swap_linears(model)
    DeltaMatchConfig("delta_matching", "mx").apply_to(model)
    assert backends(model) == {"reference"}
    set_attention_recipe(model, backend="triton")
    swap_linears(model, backend="triton")
    assert backends(model) == {"triton"}


@pytest.mark.parametrize(
    "choose",
    [
        lambda model: set_attention_recipe(model, backend="slow"),
        lambda model: swap_linears(model, backend="slow"),
        lambda model: DeltaMatchConfig(backend="slow"),
    ],
    ids=["set_attention_recipe", "swap_linears", "DeltaMatchConfig"],
)
def test_unknown_backend(choose) -> None:
    """At once, and not in the first forward."""
    model = configured()
    with pytest.raises(ValueError, match=r"`backend` is 'slow'; allowed are None .*'reference'"):
        choose(model)
    assert backends(model) == {None}


def test_recipe_without_effect_raises() -> None:
    model = build("llama")
    with pytest.raises(ValueError, match=f"is 'sdpa'.*set_attn_implementation.\"{OURS}\""):
        set_attention_recipe(model, "stale_delta")
    model.set_attn_implementation(OURS)
    set_attention_recipe(model, "stale_delta")
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="is 'eager', so no recipe would have an effect"):
        set_attention_recipe(model, backend="reference")
