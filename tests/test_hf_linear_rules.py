"""What swap_linears leaves because nothing would run it, what it says about itself, and its errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import (
    FAMILIES,
    build,
    one_thread,  # noqa: F401
    use,
)
from torch import nn
from transformers import AutoModel, WavLMConfig
from transformers.pytorch_utils import Conv1D

from hf_deltamatch import DeltaMatchConfig, check_model, set_attention_recipe, swap_linears
from hf_deltamatch.diagnostics import count_calls
from hf_deltamatch.hf.linear import fp8_linears
from hf_deltamatch.hf.linear_rules import weights_read_by


def linear() -> nn.Linear:
    return nn.Linear(32, 32)


class Mixer(nn.Module):
    """Every way in which code may touch the weight of a linear that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.asked, self.typed, self.read = linear(), linear(), linear(), linear()
        self.slow, self.inner, self.reset = linear(), nn.ModuleDict({"deep": linear()}), linear()
        nn.init.zeros_(self.used.weight)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.reset.weight)

    def _fast(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.slow.weight, self.slow.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A text that says self.used.weight is not code."""
        x = self.used(x.to(self.asked.weight.dtype)[: self.asked.weight.shape[0]])
        if isinstance(self.typed.weight, torch.Tensor):
            x = self.typed(self.asked(x))
        return self.reset(F.linear(x, self.read.weight) + self.slow(x))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.proj = Mixer(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.mixer(x)) @ self.mixer.inner.deep.weight.T


class Derived(Mixer):
    pass


def test_weights_read_by() -> None:
    assert weights_read_by(Mixer) == weights_read_by(Derived) == {"read", "slow"}
    assert weights_read_by(Outer) == {"mixer.inner.deep"}
    assert weights_read_by(nn.Sequential) == frozenset()
    assert weights_read_by(type("NoSource", (nn.Module,), {})) == frozenset()


def test_weight_that_the_code_around_reads_is_left() -> None:
    """Its products would not go through the module: in FP8 by the report, in high precision really."""
    model = Outer()
    report = swap_linears(model)
    left = {"mixer.read": "Mixer", "mixer.slow": "Mixer", "mixer.inner.deep": "Outer"}
    assert report.skipped == {
        name: f"{reader} multiplies by this weight itself, past the module"
        for name, reader in left.items()
    }
    with count_calls() as calls:
        model(torch.randn(4, 32))
    assert calls["linear_fwd"] == len(report.swapped)
    assert (
        "mixer.slow" in swap_linears(Outer(), include=["mixer.slow"]).swapped
    )  # asked for by name


def test_encoder_layer_of_torch() -> None:
    """Its fast path, without gradients, hands the weights to one fused function."""
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    with pytest.raises(ValueError) as error:
        swap_linears(model)
    for part in ("linear1: TransformerEncoderLayer multiplies", "out_proj"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "family,left,swapped",
    [
        ("mamba", {"dt_proj", "out_proj", "x_proj"}, {"in_proj"}),
        ("bamba", {"out_proj"}, {"in_proj", "down_proj", "q_proj"}),
    ],
)
def test_state_space_models(family: str, left: set, swapped: set) -> None:
    """Their CUDA kernels take weights, their slow path calls modules."""
    report = swap_linears(build(family))
    named = {n.rsplit(".", 1)[-1] for n, r in report.skipped.items() if "past the module" in r}
    assert named and named <= left
    assert swapped <= {n.rsplit(".", 1)[-1] for n in report.swapped}
    assert not named & {n.rsplit(".", 1)[-1] for n in report.swapped}


def test_wavlm() -> None:
    config = WavLMConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
        conv_dim=[16], conv_kernel=[4], conv_stride=[2], num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, apply_spec_augment=False,
    )  # fmt: skip
    model = AutoModel.from_config(config).eval()
    report = swap_linears(model)
    left = {n.rsplit(".", 1)[-1] for n, r in report.skipped.items() if "WavLMAttention" in r}
    assert left == {"q_proj", "k_proj", "v_proj", "out_proj"}
    with count_calls() as calls:
        model(torch.randn(1, 200))
    assert calls["linear_fwd"] == len(report.swapped) > 0


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "bamba"])
def test_rule_leaves_no_more_than_it_must(family: str) -> None:
    """Models that only call their linears lose none of them."""
    reasons = swap_linears(build(family)).skipped.values()
    assert not [r for r in reasons if "past the module" in r]


@pytest.mark.parametrize("make", [linear, lambda: Conv1D(32, 32)])
def test_model_that_is_a_linear(make) -> None:
    """Its name is empty, and its own weight is not tied with anything."""
    model = make()
    report = swap_linears(model)
    assert report.swapped == {"": "32 -> 32, blockwise"} and fp8_linears(model) == {"": model}
    with pytest.raises(ValueError, match="left the module itself: out_features 8 < 16"):
        swap_linears(nn.Linear(32, 8))


def test_second_swap_without_a_recipe_changes_no_recipe() -> None:
    model = build("llama")
    swap_linears(model, "rowwise", modules_to_not_convert=["*.q_proj"], layers={"*.k_proj": "mx"})
    before = {n: m.fp8_recipe for n, m in fp8_linears(model).items()}
    report = swap_linears(model, backend="reference")
    assert {n: m.fp8_recipe for n, m in fp8_linears(model).items()} == before
    assert report.skipped["model.layers.0.self_attn.q_proj"] == (
        "was not in FP8 before; name a recipe to swap it"
    )
    swap_linears(model, layers={"*.0.self_attn.q_proj": "rowwise"}, include=["lm_head"])
    changed = {n: m.fp8_recipe.name for n, m in fp8_linears(model).items() if n not in before}
    assert changed == {"model.layers.0.self_attn.q_proj": "rowwise", "lm_head": "blockwise"}


def test_failed_swap_changes_nothing() -> None:
    model = build("llama")
    swap_linears(model, "rowwise")
    before = {n: m.fp8_recipe for n, m in fp8_linears(model).items()}
    for kwargs in ({"modules_to_not_convert": ["*"]}, {"filter_fn": lambda module, name: False}):
        with pytest.raises(ValueError, match="can be swapped"):
            swap_linears(model, "mx", **kwargs)
        assert {n: m.fp8_recipe for n, m in fp8_linears(model).items()} == before


@pytest.mark.parametrize("argument", ["include", "modules_to_not_convert"])
@pytest.mark.parametrize("where", ["swap_linears", "DeltaMatchConfig"])
def test_string_instead_of_a_list(where: str, argument: str) -> None:
    """It would be read letter by letter."""
    call = (
        DeltaMatchConfig
        if where == "DeltaMatchConfig"
        else lambda **kw: swap_linears(Outer(), **kw)
    )
    with pytest.raises(
        TypeError, match=rf"{where}: `{argument}` is the string 'lm_head'.*\['lm_head'\]"
    ):
        call(**{argument: "lm_head"})


def test_layers_must_be_a_dict() -> None:
    model = use(build("llama"))
    for name, call in (
        ("swap_linears", lambda layers: swap_linears(model, layers=layers)),
        ("set_attention_recipe", lambda layers: set_attention_recipe(model, layers=layers)),
        ("DeltaMatchConfig", lambda layers: DeltaMatchConfig(layers=layers)),
    ):
        with pytest.raises(TypeError, match=f"{name}: `layers` is a list; it must be a dict"):
            call(["model.layers.0"])


@pytest.mark.parametrize(
    "pattern,nearest",
    [
        ("model.layers.7", "model.layers.1"),
        ("model.layer.0.mlp", "model.layers.0.mlp"),
        ("model.layers.0.self_atn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("q_proj", "'*.q_proj'"),
    ],
)
def test_pattern_that_matches_nothing_names_the_nearest(pattern: str, nearest: str) -> None:
    for call in (
        lambda: swap_linears(build("llama"), modules_to_not_convert=[pattern]),
        lambda: DeltaMatchConfig(layers={pattern: "bf16"}).apply_to(build("llama")),
    ):
        with pytest.raises(ValueError) as error:
            call()
        message = str(error.value)
        assert f"pattern {pattern!r} matches no module" in message and nearest in message
        assert ": ," not in message and " , " not in message  # the model itself has no name
    with pytest.raises(ValueError, match="There is no module"):
        swap_linears(nn.ReLU(), include=["x"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_weights_are_noted(dtype: torch.dtype) -> None:
    """A master weight in BF16 rounds small updates away, whatever the arithmetic."""
    model = build("llama").to(dtype)
    report = swap_linears(model)
    short = str(dtype).removeprefix("torch.")
    for text in (str(report), str(check_model(model))):
        assert f"note: 14 FP8 linears train {short} weights" in text
        assert "dtype=torch.float32" in text and 'mixed_precision="bf16"' in text
    for frozen in (model.requires_grad_(False), build("llama")):
        report = swap_linears(frozen)
        assert not report.notes and "note" not in str(check_model(frozen))


def test_low_precision_weights_are_noted_at_load(tmp_path) -> None:
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    config = DeltaMatchConfig(attention=None)
    model = AutoModel.from_pretrained(tmp_path, quantization_config=config, dtype=torch.bfloat16)
    assert "bfloat16" in model.hf_quantizer.swap_report.notes[0]
    assert check_model(model).notes
