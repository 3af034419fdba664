"""DeltaMatchConfig: load, save, reload with and without the package, and its error messages."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from tiny_models import (
    batch,
    build,
    linear_calls,
    one_thread,  # noqa: F401
)
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments

from hf_deltamatch import AttentionRecipe, DeltaMatchConfig, LinearRecipe, check_model, swap_linears
from hf_deltamatch.diagnostics import count_calls
from hf_deltamatch.hf import class_tables
from hf_deltamatch.hf.linear import fp8_linears
from hf_deltamatch.testing import assert_bitwise_equal, rel_rms

OURS = "fp8_delta_matching"


@pytest.fixture
def saved(tmp_path: Path):
    """Saves a tiny plain model; returns its directory."""

    def save(family: str = "llama", *, dtype=torch.float32, **kwargs) -> Path:
        path = tmp_path / f"{family}-plain"
        build(family, **kwargs).to(dtype).save_pretrained(path)
        return path

    return save


def load(path: Path, config: DeltaMatchConfig | None = None, **kwargs):
    if config is not None:
        kwargs["quantization_config"] = config
    return AutoModelForCausalLM.from_pretrained(path, **kwargs).eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(batch()).logits


def recipes(model) -> dict[str, str]:
    """Name of the recipe of every attention module and every linear."""
    linears = {n: "bf16" for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    linears |= {n: m.fp8_recipe.name for n, m in fp8_linears(model).items()}
    return linears | {n: r.name for n, r in check_model(model).attention.items()}


def config_json(path: Path) -> dict:
    return json.loads((path / "config.json").read_text())["quantization_config"]


def edit_config_json(path: Path, **changes) -> None:
    whole = json.loads((path / "config.json").read_text())
    whole["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss", "qwen3_next"])
def test_from_pretrained(family: str, dtype: torch.dtype, saved) -> None:
    """The same model as loading it plain and then asking for both by hand."""
    path = saved(family, dtype=dtype)
    model = load(path, DeltaMatchConfig(), dtype=dtype)
    by_hand = load(path, dtype=dtype, attn_implementation=OURS)
    swap_linears(by_hand)
    assert recipes(model) == recipes(by_hand)
    assert model.is_quantized and model.quantization_method == "delta_matching"
    assert {p.dtype for p in model.parameters()} == {p.dtype for p in by_hand.parameters()}
    assert model.get_input_embeddings().weight.dtype == dtype
    assert_bitwise_equal(logits(model), logits(by_hand))
    with count_calls() as calls:
        logits(model)
    assert calls["linear_fwd"] == linear_calls(model, fp8_linears(model)) > 0
    assert calls["attention_fwd"] == len(check_model(model).attention) > 0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "config",
    [
        DeltaMatchConfig(),
        DeltaMatchConfig("stale_delta", "rowwise"),
        DeltaMatchConfig(
            AttentionRecipe(block="1xD", do_format="e5m2"), LinearRecipe("mx", "pow2")
        ),
        DeltaMatchConfig(attention=None),
        DeltaMatchConfig(linear=None),
        DeltaMatchConfig(modules_to_not_convert=["*.1.*"]),
        DeltaMatchConfig(layers={"*.1.*": "bf16", "*.0.*": {"attention": "stale_delta"}}),
    ],
    ids=["default", "names", "objects", "linear", "attention", "not_convert", "layers"],
)
def test_save_pretrained_and_reload(family: str, config, saved, tmp_path: Path) -> None:
    model = load(saved(family), config)
    model.save_pretrained(tmp_path / "again")
    reloaded = load(tmp_path / "again")
    assert recipes(reloaded) == recipes(model)
    assert reloaded.config._attn_implementation == model.config._attn_implementation
    assert_bitwise_equal(logits(reloaded), logits(model))
    reloaded.save_pretrained(tmp_path / "third")
    assert config_json(tmp_path / "third") == config_json(tmp_path / "again")


def test_config_json(saved, tmp_path: Path) -> None:
    config = DeltaMatchConfig(
        attention="stale_delta",
        modules_to_not_convert=["*.down_proj"],
        layers={"model.layers.1": "bf16"},
        backend="reference",
    )
    load(saved(), config).save_pretrained(tmp_path / "again")
    attention = AttentionRecipe(delta="stale").to_dict()
    assert config_json(tmp_path / "again") == {
        "quant_method": "delta_matching",
        "format_version": 1,
        "attention": attention,
        "linear": {
            "scaling": "blockwise",
            "descale": "fp32",
            "grad_format": "e4m3",
            "grad_weight_hp": False,
        },
        "modules_to_not_convert": ["*.down_proj"],
        "layers": {
            "model.layers.1": {
                "attention": AttentionRecipe(quantize=False).to_dict(),
                "linear": "bf16",
            }
        },
    }  # resolved, and not the backend, which is a choice of one run
    assert attention["delta"] == "stale" and len(attention) == 7


def test_config_round_trip() -> None:
    config = DeltaMatchConfig(layers={"a": "mx", "b": "bf16", "c": AttentionRecipe(block="1xD")})
    text = config.to_json_string()
    assert "delta_matching" in repr(config)
    again = DeltaMatchConfig.from_dict(json.loads(text))
    assert again.to_dict() == config.to_dict() == dict(config)
    assert again.attention == config.attention and again.layers == config.layers


def test_config_unknown_keys_warn(saved, tmp_path: Path) -> None:
    model = load(saved(), DeltaMatchConfig())
    model.save_pretrained(tmp_path / "newer")
    edit_config_json(tmp_path / "newer", kv_cache="fp8", colour=3)
    with pytest.warns(UserWarning, match="DeltaMatchConfig: unknown colour, kv_cache; ignored"):
        reloaded = load(tmp_path / "newer")
    assert_bitwise_equal(logits(reloaded), logits(model))


@pytest.mark.parametrize(
    "changes,parts",
    [
        ({"format_version": 2}, ("format_version is 2", "Upgrade hf_deltamatch")),
        ({"format_version": "new"}, ("'new'", "Upgrade")),
        ({"attention": "matching"}, ("'matching'", "delta_matching", "stale_delta")),
        ({"linear": "tensorwise"}, ("'tensorwise'", "blockwise", "rowwise")),
        ({"attention": {"block": "64xD"}}, ("`block`", "'64xD'", "128xD")),
        ({"attention": {"p_format": "e5m2"}}, ("p_format", "newer hf_deltamatch")),
        ({"layers": {"model.layers.0": "fast"}}, ("model.layers.0", "'fast'", "rowwise")),
        ({"layers": {"model.layers.7": "bf16"}}, ("'model.layers.7'", "matches no module")),
        ({"modules_to_not_convert": ["nope"]}, ("modules_to_not_convert", "'nope'")),
        ({"attention": None, "linear": None}, ("both None",)),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_config_errors_on_load(changes: dict, parts: tuple, saved, tmp_path: Path) -> None:
    """A checkpoint that this version cannot run as it was meant does not load."""
    load(saved(), DeltaMatchConfig()).save_pretrained(tmp_path / "bad")
    edit_config_json(tmp_path / "bad", **changes)
    with pytest.raises(ValueError) as error:
        load(tmp_path / "bad")
    for part in parts:
        assert part in str(error.value)


def test_config_arguments() -> None:
    """A misspelt argument is an error; only a file may be from a newer version."""
    with pytest.raises(TypeError, match="no argument 'attn'; did you mean 'attention'"):
        DeltaMatchConfig(attn="bf16")
    with pytest.raises(TypeError, match="no argument 'x'. Known are attention, linear"):
        DeltaMatchConfig(x=1)
    for name in ("modules_to_not_convert", "include"):
        with pytest.raises(ValueError, match=f"{name} is .'zzz'. with linear=None"):
            DeltaMatchConfig(linear=None, **{name: ["zzz"]})
    with pytest.warns(UserWarning, match="unknown attn; ignored"):
        DeltaMatchConfig.from_dict({"attn": "bf16"})


def test_config_layers_order(saved, tmp_path: Path) -> None:
    """Saved with sorted keys; the most specific pattern wins all the same."""
    layers = {
        "model.layers.1.mlp": "mx",
        "model.layers.1": "bf16",
        "model.layers.*": {"linear": "rowwise", "attention": "stale_delta"},
        "model.layers.10.self_attn": "dequantized_delta",
    }
    path = saved(num_hidden_layers=11)
    expected = recipes(load(path, DeltaMatchConfig(layers=layers)))
    assert expected["model.layers.1.mlp.up_proj"] == "mx"
    assert expected["model.layers.1.self_attn.q_proj"] == "bf16"
    assert expected["model.layers.1.self_attn"] == "bf16"
    assert expected["model.layers.10.self_attn"] == "dequantized_delta"
    assert expected["model.layers.10.self_attn.q_proj"] == "rowwise"
    assert expected["model.layers.0.self_attn"] == "stale_delta"
    for order in (sorted(layers), sorted(layers, reverse=True)):
        model = load(path, DeltaMatchConfig(layers={p: layers[p] for p in order}))
        assert recipes(model) == expected
    model.save_pretrained(tmp_path / "again")
    assert list(config_json(tmp_path / "again")["layers"]) == sorted(layers)
    assert recipes(load(tmp_path / "again")) == expected


@pytest.mark.parametrize(
    "family,pattern", [("llama", "model.layers.1"), ("gpt2", "transformer.h.1")]
)
def test_config_layers_keeps_a_layer(family: str, pattern: str, saved) -> None:
    """ "bf16" means both kinds, whatever class the model's linears are."""
    model = load(saved(family), DeltaMatchConfig(layers={pattern: "bf16"}))
    assert fp8_linears(model)
    assert not [n for n in fp8_linears(model) if n.startswith(pattern + ".")]
    quantized = {n: r.quantize for n, r in check_model(model).attention.items()}
    assert sorted(quantized.values()) == [False, True]


@pytest.mark.parametrize(
    "config",
    [
        {"attention": None, "layers": {"model.layers.0": {"attention": "delta_matching"}}},
        {"linear": None, "layers": {"model.layers.0": {"linear": "blockwise"}}},
        {"layers": {"model.layers.0.mlp": {"attention": "stale_delta"}}},
        {"layers": {"model.layers.0.input_layernorm": {"linear": "rowwise"}}},
    ],
    ids=["attention-off", "linear-off", "no-attention-there", "no-linear-there"],
)
def test_config_layers_without_effect(config: dict, saved) -> None:
    """A recipe that would change nothing is refused, like a pattern that matches nothing."""
    with pytest.raises(ValueError, match="model.layers.0"):
        load(saved(), DeltaMatchConfig(**config))


@pytest.mark.parametrize("family", ["bloom", "gptj", "mamba"])
def test_config_refuses_family(family: str, saved) -> None:
    """Their code ignores the attention choice; FP8 linears alone work."""
    if family == "gptj" and "gptj.GPTJ_ATTENTION_CLASSES" not in class_tables.tables():
        pytest.skip("GPT-J uses the attention interface in this version")
    path = saved(family)
    with pytest.raises(ValueError) as error:
        load(path, DeltaMatchConfig())
    for part in ("attention interface", "DeltaMatchConfig(attention=None)"):
        assert part in str(error.value)
    model = load(path, DeltaMatchConfig(attention=None))
    with count_calls() as calls:
        logits(model)
    assert calls["linear_fwd"] == len(fp8_linears(model)) > 0


def test_apply_to_where_the_attention_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of T5 in Transformers 5.17, whose encoder and decoder have copies of the config; found after
    the linears were swapped."""
    model = build("llama")
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda self, name: None)
    classes = [type(m) for m in model.modules()]
    before = model.config._attn_implementation
    with pytest.raises(
        ValueError, match="does not reach the attention modules of LlamaForCausalLM"
    ):
        DeltaMatchConfig().apply_to(model)
    assert [type(m) for m in model.modules()] == classes
    assert model.config._attn_implementation == before
    assert not any("fp8_recipe" in vars(m) for m in model.modules())


@pytest.mark.parametrize("model", [None, 3, nn.Linear])
def test_apply_to_what_is_no_model(model) -> None:
    with pytest.raises(TypeError, match="DeltaMatchConfig.apply_to: `model` is .*torch.nn.Module"):
        DeltaMatchConfig().apply_to(model)


def test_apply_to_a_module_without_a_config() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(TypeError, match="without a config of Transformers.*swap_linears"):
        DeltaMatchConfig(attention=None).apply_to(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("given", [None, [], 3, "delta_matching"])
def test_from_dict_of_what_is_no_dict(given) -> None:
    with pytest.raises(TypeError, match="from_dict.*to_dict"):
        DeltaMatchConfig.from_dict(given)


def test_apply_to_that_fails_leaves_the_model_as_it_was() -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="matches no module"):
        DeltaMatchConfig(layers={"model.layers.9": "bf16"}).apply_to(model)
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model, "quantization_method")
    assert getattr(model.config, "quantization_config", None) is None


def test_config_over_another_implementation_warns(saved) -> None:
    with pytest.warns(UserWarning, match="attn_implementation='eager' is not used"):
        AutoModelForCausalLM.from_pretrained(
            saved("llama"), quantization_config=DeltaMatchConfig(), attn_implementation="eager"
        )


def test_config_without_one_half(saved) -> None:
    path = saved()
    model = load(path, DeltaMatchConfig(attention=None))
    assert model.config._attn_implementation == "sdpa" and not check_model(model).attention
    model = load(path, DeltaMatchConfig(linear=None))
    assert not fp8_linears(model) and len(check_model(model).attention) == 2
    with pytest.raises(ValueError, match="both None"):
        DeltaMatchConfig(attention=None, linear=None)
    with pytest.raises(ValueError, match="quant_method is 'fp8'"):
        DeltaMatchConfig(quant_method="fp8")


WITHOUT_PACKAGE = """
import sys, torch, transformers
model, info = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(m == "hf_deltamatch" or m.startswith("hf_deltamatch.") for m in sys.modules)
assert not info["missing_keys"] and not info["unexpected_keys"], info
linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
assert linears and all(type(m) is torch.nn.Linear for m in linears)
ids = torch.load(sys.argv[2])
torch.save(model.eval()(ids).logits, sys.argv[3])
"""


def test_load_without_package(saved, tmp_path: Path) -> None:
    """The plain model, with a warning. Nothing of ours is needed to read the checkpoint."""
    path = saved()
    load(path, DeltaMatchConfig()).save_pretrained(tmp_path / "fp8")
    torch.save(batch(), tmp_path / "ids.pt")
    arguments = [tmp_path / "fp8", tmp_path / "ids.pt", tmp_path / "logits.pt"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE, *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Unknown quantization type" in done.stderr and "delta_matching" in done.stderr
    expected = logits(load(path))
    assert rel_rms(torch.load(tmp_path / "logits.pt"), expected) < 1e-6


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_apply_to(family: str, saved, tmp_path: Path) -> None:
    """A model from a config, or loaded plain; saved as if it had been loaded with the config."""
    config = DeltaMatchConfig("stale_delta", layers={"*.1.*": "rowwise"})
    model = build(family)
    assert config.apply_to(model) is model
    model.save_pretrained(tmp_path / "applied")
    reloaded = load(tmp_path / "applied")
    assert recipes(reloaded) == recipes(model)
    assert_bitwise_equal(logits(reloaded), logits(model))
    loaded = load(saved(family), config)
    assert_bitwise_equal(logits(loaded), logits(model))
    with pytest.raises(ValueError, match="attention interface"):
        DeltaMatchConfig().apply_to(build("bloom"))
    fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "applied"))
    assert not fp8_linears(fresh)  # Transformers runs no quantizer here, hence apply_to


def test_load_into_dirty_memory(saved) -> None:
    """Every parameter and buffer is the checkpoint's or its reset value, not what memory held."""
    path = saved("gemma3_text")
    expected = load(path)
    for size in (16, 64, 256, 1024, 4096, 8192):
        dirt = [torch.full((size,), float("nan")) for _ in range(200)]
        del dirt
    gc.collect()
    model = load(path, DeltaMatchConfig())
    wanted = dict(expected.named_parameters()) | dict(expected.named_buffers())
    got = dict(model.named_parameters()) | dict(model.named_buffers())
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].isfinite().all(), name
        assert_bitwise_equal(got[name], tensor, name)


@pytest.mark.parametrize("family,implementation", [("llama", "sdpa"), ("gpt_oss", "eager")])
def test_dequantize(family: str, implementation: str, saved, tmp_path: Path) -> None:
    path = saved(family)
    model = load(path, DeltaMatchConfig())
    plain = model.dequantize()
    assert not fp8_linears(plain) and plain.config._attn_implementation == implementation
    assert not plain.is_quantized and not hasattr(plain.config, "quantization_config")
    expected = logits(load(path, attn_implementation=implementation))
    assert_bitwise_equal(logits(plain), expected)
    plain.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())


def test_trainer_full_fine_tuning(saved, tmp_path: Path) -> None:
    """Trainer refuses quantised models that cannot be trained; this one moves every weight."""
    model = load(saved(), DeltaMatchConfig())
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    rows = [{"input_ids": r, "labels": r} for r in batch(4, 24)]
    args = TrainingArguments(
        tmp_path / "out", max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        learning_rate=1e-3, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    with count_calls() as calls:
        Trainer(model=model, args=args, train_dataset=rows).train()
    assert calls["attention_bwd"] == 2 * 2 and calls["linear_bwd_weight"] == 2 * 14
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())
    model.save_pretrained(tmp_path / "trained")
    assert_bitwise_equal(logits(load(tmp_path / "trained")), logits(model.eval()))


def test_base_model_of_a_checkpoint(saved, tmp_path: Path) -> None:
    """AutoModel names modules without the prefix that the patterns were written with."""
    model = load(saved(), DeltaMatchConfig(layers={"model.layers.1": "bf16"}))
    model.save_pretrained(tmp_path / "again")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        base = AutoModel.from_pretrained(tmp_path / "again").eval()
    assert_bitwise_equal(base(batch()).last_hidden_state, model.model(batch()).last_hidden_state)
