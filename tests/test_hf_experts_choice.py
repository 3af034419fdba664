"""Fused experts of mixtures in FP8: which are swapped, how they are reported, saved and undone."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from test_hf_experts import EVERY_FAMILY, MIXTURES, experts_of, only_experts, routed
from tiny_models import (
    NEWEST,
    batch,
    build,
    one_thread,  # noqa: F401
)
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from hf_deltamatch import (
    DeltaMatchConfig,
    check_model,
    swap_linears,
    unswap_linears,
)
from hf_deltamatch.diagnostics import count_calls
from hf_deltamatch.hf.experts import EXPERTS_IMPLEMENTATION, is_fp8_experts
from hf_deltamatch.hf.running import running
from hf_deltamatch.testing import assert_bitwise_equal, rel_rms


def recipes(model: nn.Module) -> dict[str, str]:
    return {n: m.fp8_recipe.name for n, m in experts_of(model).items() if is_fp8_experts(m)}


def experts_in_fp8(model: nn.Module) -> list[str]:
    return [n for n, m in experts_of(model).items() if is_fp8_experts(m)]


@EVERY_FAMILY
def test_experts_are_swapped_and_reported(family: str) -> None:
    """One line for a layer's experts; parameters, keys and classes stay; unswapping undoes it."""
    model = build(family)
    before = dict(model.named_parameters())
    state, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    plain = model(batch()).logits
    mixtures = experts_of(model)
    assert mixtures
    report = swap_linears(model)
    for name in mixtures:
        assert report.swapped[name] == f"experts {MIXTURES[family]}, blockwise"
    assert f" x experts {MIXTURES[family]}, blockwise" in str(report)
    assert f"linears and the experts of {len(mixtures)} mixtures in FP8" in str(report)
    assert not [n for n in report.skipped if "experts" in n and "shared" not in n]
    assert set(mixtures) <= set(check_model(model).linears)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[n] is before[n] for n in before)
    assert list(model.state_dict()) == state
    with count_calls() as calls:
        swapped = model(batch()).logits
    linears = len(report.swapped) - len(mixtures)
    assert linears < calls["linear_fwd"] <= linears + 2 * 4 * len(mixtures)
    assert rel_rms(swapped, plain) > 1e-3
    assert unswap_linears(model) == len(report.swapped)
    assert not any("fp8" in key for m in model.modules() for key in vars(m))
    assert all(m.config is model.config for m in experts_of(model).values())
    assert_bitwise_equal(model(batch()).logits, plain)
    swap_linears(model, filter_fn=only_experts)
    assert [type(m) for m in model.modules()] == classes  # experts keep theirs


@EVERY_FAMILY
def test_experts_choice(family: str) -> None:
    """Patterns name the experts module, as they name a linear; the rest runs what it ran."""
    layers = ["model.layers.1.mlp.experts", "model.layers.0.mlp.experts"]
    names = [n for n in layers if n in experts_of(build(family))]
    for kwargs in (
        {"modules_to_not_convert": names[:1]},
        {"layers": {names[0]: "bf16"}},
        {"filter_fn": lambda module, name: name != names[0]},
    ):
        model = build(family)
        report = swap_linears(model, **kwargs)
        assert names[0] in report.skipped and set(recipes(model)) == set(names[1:])
        module = model.get_submodule(names[0])
        assert module.config is model.config
        with count_calls() as calls:
            module(*routed(9))
        assert not calls
    model = build(family)
    swap_linears(model, "rowwise", layers={names[0]: "mx"})
    assert recipes(model) == {**dict.fromkeys(names, "rowwise"), names[0]: "mx"}
    # Again, for the backend only: recipes stay. Then with an exception that undoes one.
    swap_linears(model, backend="reference")
    assert recipes(model)[names[0]] == "mx"
    assert {m.fp8_backend for m in experts_of(model).values()} == {"reference"}
    swap_linears(model, layers={names[0]: "bf16"})
    assert set(recipes(model)) == set(names[1:])
    with pytest.raises(ValueError, match="matches no module"):
        swap_linears(build(family), modules_to_not_convert=["model.layers.1.mlp.experts.down_proj"])


def test_experts_default_reasons() -> None:
    small = MixtralExperts(MixtralConfig(hidden_size=32, intermediate_size=8, num_local_experts=2))
    tied = MixtralExperts(MixtralConfig(hidden_size=32, intermediate_size=32, num_local_experts=2))
    stored = copy.deepcopy(tied)
    fp8 = torch.zeros(2, 32, 32, dtype=torch.float8_e4m3fn)
    stored.down_proj = nn.Parameter(fp8, requires_grad=False)
    model = nn.ModuleDict({"a": tied, "b": copy.deepcopy(tied), "small": small, "stored": stored})
    model["b"].down_proj = tied.down_proj
    model["linear"] = nn.Linear(32, 32)
    report = swap_linears(model)
    assert report.skipped == {
        "a": "down_proj tied with b.down_proj",
        "b": "down_proj tied with a.down_proj",
        "small": "down_proj has a side of 8 < 16",
        "stored": "down_proj is stored as torch.float8_e4m3fn",
    }
    report = swap_linears(model, include=["a", "b", "small"])
    assert set(report.skipped) == {"stored"}


@EVERY_FAMILY
def test_experts_are_saved(family: str, tmp_path: Path) -> None:
    """config.json brings the experts back, with their exceptions, and says what was changed since."""
    names = list(experts_of(build(family)))
    build(family).save_pretrained(tmp_path / "plain")
    config = DeltaMatchConfig(layers={names[0]: "rowwise"})
    load = lambda where, **kwargs: AutoModelForCausalLM.from_pretrained(
        tmp_path / where, **kwargs
    ).eval()
    model = load("plain", quantization_config=config)
    assert recipes(model) == {**dict.fromkeys(names, "blockwise"), names[0]: "rowwise"}
    changes = {
        "as loaded": lambda: None,
        "recipe": lambda: swap_linears(model, "mx"),
        "left": lambda: swap_linears(model, modules_to_not_convert=[names[0]]),
        "plain": lambda: unswap_linears(model),
        "only experts": lambda: swap_linears(model, filter_fn=only_experts),
    }
    for number, (what, change) in enumerate(changes.items()):
        change()
        model.save_pretrained(tmp_path / str(number))
        reloaded = load(str(number))
        assert recipes(reloaded) == recipes(model), what
        assert running(reloaded) == running(model), what
        assert_bitwise_equal(reloaded(batch()).logits, model(batch()).logits, what)
    DeltaMatchConfig(linear=None).apply_to(model)
    assert not recipes(model)
    assert all(m.config is model.config for m in experts_of(model).values())


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_experts_copies(how: str) -> None:
    model = build("mixtral")
    names = list(experts_of(model))
    swap_linears(model, layers={names[0]: "mx", names[1]: "bf16"})
    copied = pickle.loads(pickle.dumps(model)) if how == "pickle" else copy.deepcopy(model)
    assert recipes(copied) == recipes(model) == {names[0]: "mx"}
    assert_bitwise_equal(copied(batch()).logits, model(batch()).logits)
    unswap_linears(copied)
    assert all(m.config is copied.config for m in experts_of(copied).values())
    assert recipes(model) == {names[0]: "mx"}


@pytest.mark.skipif(not NEWEST, reason="Transformers 5.4 takes no names but its own")
def test_experts_by_name() -> None:
    """Transformers' own switch runs every mixture with the default recipe; swapping then narrows."""
    model = build("mixtral")
    names = list(experts_of(model))
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    logits = model(batch()).logits
    assert {n: r.name for n, r in running(model).linear.items() if r} == dict.fromkeys(
        names, "blockwise"
    )
    assert set(check_model(model).linears) == set(names)
    swapped = build("mixtral")
    swap_linears(swapped, filter_fn=only_experts)
    assert_bitwise_equal(swapped(batch()).logits, logits)
    swap_linears(model, modules_to_not_convert=[names[0]], filter_fn=only_experts)
    assert recipes(model) == {names[1]: "blockwise"}
    assert unswap_linears(model) == 1 and not experts_in_fp8(model)
    assert_bitwise_equal(model(batch()).logits, build("mixtral")(batch()).logits)


def test_experts_of_a_part() -> None:
    """The config of a model is shared: swapping one layer's experts leaves the others', which go on
    following it."""
    model = build("mixtral")
    first, second = experts_of(model).values()
    swap_linears(model.model.layers[0])
    assert is_fp8_experts(first) and not is_fp8_experts(second)
    model.set_experts_implementation("eager")
    assert is_fp8_experts(first) and second.config._experts_implementation == "eager"
    unswap_linears(model)
    assert first.config._experts_implementation == "eager"
