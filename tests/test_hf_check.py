"""check_model and set_attention_recipe: what runs in FP8 is counted, and a choice without effect is
an error."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from tiny_models import (
    FAMILIES,
    OURS,
    batch,
    build,
    linear_calls,
    one_thread,  # noqa: F401
    use,
)
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_deltamatch import (
    AttentionRecipe,
    DeltaMatchConfig,
    ModelCheck,
    check_model,
    kernels,
    set_attention_recipe,
    swap_linears,
)
from hf_deltamatch.diagnostics import count_calls
from hf_deltamatch.hf.modules import (
    ATTN_IMPLEMENTATION,
    attention_modules,
    own_attention_modules,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_check_model(family: str) -> None:
    """The counts are those of the ops that a forward executes."""
    model = use(build(family))
    report = swap_linears(model)
    check = check_model(model)
    assert isinstance(check, ModelCheck)
    with count_calls() as calls:
        model(batch())
    assert len(check.attention) == calls["attention_fwd"] == FAMILIES[family][1]
    assert calls["linear_fwd"] == linear_calls(model, report.swapped)
    assert check.linears == sorted(report.swapped)
    assert all(r.name == "delta_matching" for r in check.attention.values())
    lines = str(check).splitlines()
    assert lines[0] == f"{len(check.attention)} attention modules on {OURS} (delta_matching)"
    assert lines[1] == f"{len(check.linears)} FP8 linears"


def test_check_model_recipes() -> None:
    model = use(build("llama"))
    set_attention_recipe(model, "stale_delta", {"model.layers.1": "bf16"})
    check = check_model(model)
    names = {n: r.name for n, r in check.attention.items()}
    assert names == {"model.layers.0.self_attn": "stale_delta", "model.layers.1.self_attn": "bf16"}
    assert str(check).startswith(f"2 attention modules on {OURS} (bf16, stale_delta)")


def test_set_attention_recipe() -> None:
    """Per module: a base, patterns over it, and what is not named keeps what it has."""
    model = use(build("llama", num_hidden_layers=11))
    default = AttentionRecipe()
    assert set(set_attention_recipe(model).values()) == {default}
    chosen = set_attention_recipe(model, "stale_delta", {"model.layers.1": "bf16"})
    for name, recipe in chosen.items():
        assert recipe.name == ("bf16" if name == "model.layers.1.self_attn" else "stale_delta")
    assert check_model(model).attention == chosen
    kept = set_attention_recipe(model, layers={"*.10.*": AttentionRecipe(block="1xD")})
    assert kept == {**chosen, "model.layers.10.self_attn": AttentionRecipe(block="1xD")}
    with pytest.raises(ValueError, match="'model.layers.11' matches no module"):
        set_attention_recipe(model, layers={"model.layers.11": "bf16"})
    with pytest.raises(ValueError, match="Unknown attention recipe 'rowwise'"):
        set_attention_recipe(model, "rowwise")
    with pytest.raises(ValueError, match="no module that uses the attention"):
        set_attention_recipe(nn.Sequential(nn.Linear(4, 4)), "bf16")


@pytest.mark.parametrize("family", ["bloom", "mamba"])
def test_check_model_ignored_choice(family: str, tmp_path: Path) -> None:
    """Transformers accepts the name for every model; these run their own attention."""
    build(family).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=OURS)
    with count_calls() as calls:
        model(batch())
    assert calls["attention_fwd"] == 0
    with pytest.raises(ValueError) as error:
        check_model(model)
    for part in (type(model).__name__, OURS, "runs without FP8 attention", "swap_linears(model)"):
        assert part in str(error.value)
    swap_linears(model)
    with pytest.raises(ValueError, match="runs without FP8 attention"):
        check_model(model)  # FP8 linears do not make the choice of attention work


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_check_model_plain(implementation: str) -> None:
    model = use(build("llama"), implementation)
    with pytest.raises(ValueError) as error:
        check_model(model)
    for part in ("neither FP8 attention nor FP8 linears", repr(implementation), "DeltaMatchConfig"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="Sequential has neither"):
        check_model(nn.Sequential(nn.Linear(32, 32)))


def test_check_model_linears_only() -> None:
    model = use(build("llama"), "sdpa")
    swap_linears(model)
    check = check_model(model)
    assert not check.attention and len(check.linears) == 14
    assert check.other_attention["model.layers.0.self_attn"] == "its config asks for 'sdpa'"
    assert "not ours: model.layers.1.self_attn: its config asks for 'sdpa'" in str(check)


def test_check_model_mixed_implementations() -> None:
    """Parts of a model may have another attention; the check names them."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.other = use(build("llama")), use(build("qwen2"), "sdpa")

    check = check_model(Two())
    assert set(check.attention) == {f"text.model.layers.{i}.self_attn" for i in (0, 1)}
    assert set(check.other_attention) == {f"other.model.layers.{i}.self_attn" for i in (0, 1)}


def test_check_model_own_attention() -> None:
    """A module that is called attention, has weights and does not use the interface is listed."""

    class SparseAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(64, 64)

    class WeightlessAttention(nn.Module):
        pass

    model = use(build("llama"))
    model.model.layers[1].extra = SparseAttention()
    model.model.layers[1].nothing = WeightlessAttention()
    check = check_model(model)
    assert len(check.attention) == 2
    assert check.other_attention == {
        "model.layers.1.extra": "SparseAttention does not use the attention interface"
    }


@pytest.mark.parametrize(
    "family,names,kind",
    [
        ("minimax", ["model.layers.0.self_attn"], "MiniMaxLightningAttention"),
        (
            "qwen3_next",
            [f"model.layers.{i}.linear_attn" for i in range(3)],
            "Qwen3NextGatedDeltaNet",
        ),
    ],
)
def test_check_model_hybrid(family: str, names: list[str], kind: str) -> None:
    """Layers of linear attention run code of their own: listed, and not counted."""
    model = use(build(family))
    check = check_model(model)
    assert len(check.attention) == 1 and not set(names) & set(check.attention)
    assert not set(names) & set(attention_modules(model))
    assert list(check.other_attention) == names
    for name in names:
        assert f"not ours: {name}: {kind} does not use the attention interface" in str(check)


def test_own_attention_modules() -> None:
    assert {type(m).__name__ for m in own_attention_modules(build("bloom")).values()} == {
        "BloomAttention"
    }
    assert not own_attention_modules(build("llama"))


@torch.no_grad()
def test_check_model_of_a_wrapped_model() -> None:
    """Wrappers that hold the model, such as DDP or a value head, are checked the same."""

    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.module = model

    model = use(build("llama"))
    assert len(check_model(Wrapper(model)).attention) == 2
    with pytest.raises(ValueError, match="neither"):
        check_model(Wrapper(use(build("llama"), "sdpa")))


@pytest.mark.parametrize("op", ["attention", "linear"])
def test_check_model_before_the_first_forward(op: str, tmp_path: Path, monkeypatch) -> None:
    """A backend that cannot run is named at load and by the check, with what helps."""
    why = "this machine has none"
    monkeypatch.setattr(kernels, "missing", lambda asked, device: why if asked == op else None)
    build("llama").save_pretrained(tmp_path)
    config = DeltaMatchConfig(layers={"model.layers.1": "bf16"}, backend="triton")
    found = f"{1 if op == 'attention' else 7} {op} modules, such as model.layers.0.*{why}"
    with pytest.warns(UserWarning, match=f"{found}.*backend=.reference"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    with pytest.raises(NotImplementedError, match=f"check_model: {found}.*backend=.reference"):
        check_model(model)
    set_attention_recipe(model, backend="reference")
    swap_linears(model, backend="reference")
    assert len(check_model(model).linears) == 7


@pytest.mark.parametrize(
    ("model_type", "sizes", "words"),
    [
        (
            "bloom",
            {"hidden_size": 32, "n_layer": 1, "n_head": 2},
            "none of its attention modules uses it",
        ),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 1}, "it has no attention modules"),
    ],
)
def test_building_a_model_that_ignores_the_choice_warns(
    model_type: str, sizes: dict, words: str, tmp_path
) -> None:
    """Also where check_model is never called; once a model, and for one that uses it not at all."""
    config = lambda: AutoConfig.for_model(model_type, **sizes, vocab_size=64)  # it keeps the choice
    build_it = lambda **kw: AutoModelForCausalLM.from_config(config(), **kw)
    with pytest.warns(
        UserWarning, match=f"fp8_delta_matching: .*{words}.*without FP8 attention"
    ) as seen:
        model = build_it(attn_implementation=ATTN_IMPLEMENTATION)
    assert len([w for w in seen if "fp8_delta_matching" in str(w.message)]) == 1
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=words):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=ATTN_IMPLEMENTATION)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        build_it()
        AutoModelForCausalLM.from_config(
            build("llama").config, attn_implementation=ATTN_IMPLEMENTATION
        )
