"""Ways of loading, running and saving a model that no other module covers. Which mode is tested where:
CASES.md."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_models import (
    OURS,
    VOCAB,
    batch,
    build,
    one_thread,  # noqa: F401
    rel_grads,
    run,
    use,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
)
from transformers.utils import is_optimum_quanto_available

from hf_deltamatch import (
    AttentionRecipe,
    DeltaMatchConfig,
    LinearRecipe,
    check_model,
    set_attention_recipe,
    swap_linears,
)
from hf_deltamatch.diagnostics import count_calls
from hf_deltamatch.hf.linear import fp8_linears
from hf_deltamatch.hf.running import running
from hf_deltamatch.testing import assert_bitwise_equal, assert_close, rel_rms

STEPS = 8


def greedy(model, **kwargs) -> torch.Tensor:
    """One row: assisted decoding takes no batch."""
    kwargs = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False} | kwargs
    return model.generate(batch(1, 13), attention_mask=torch.ones(1, 13).long(), **kwargs)


# --- generation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("fp8", [False, True])
def test_assisted_decoding(family: str, fp8: bool) -> None:
    """A draft model, ours too: several queries at once against the cache, of which some are taken
    back. The tokens of greedy decoding."""
    recipe = AttentionRecipe(block="1xD") if fp8 else "bf16"
    model = use(build(family), recipe=recipe)
    draft = use(build(family, seed=0, num_hidden_layers=1, layer_types=None), recipe=recipe)
    with count_calls() as calls:
        tokens = greedy(model, assistant_model=draft)
    assert calls["attention_fwd"] > 0
    assert torch.equal(tokens, greedy(model))


def test_prompt_lookup_decoding() -> None:
    model = use(build("llama"), recipe="bf16")
    prompt = batch(1, 6).repeat(1, 4)
    options = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
    options["attention_mask"] = torch.ones_like(prompt)
    with count_calls() as calls:
        tokens = model.generate(prompt, prompt_lookup_num_tokens=3, **options)
    assert calls["attention_fwd"] > 0
    assert torch.equal(tokens, model.generate(prompt, **options))


@pytest.mark.slow  # quanto compiles an extension
@pytest.mark.skipif(not is_optimum_quanto_available(), reason="needs optimum-quanto")
def test_quantized_cache() -> None:
    """It holds its newest tokens as they are, here all of them."""
    model = use(build("llama"), recipe="bf16")
    config = {"backend": "quanto", "nbits": 4, "residual_length": 64, "q_group_size": 16}
    tokens = greedy(model, cache_implementation="quantized", cache_config=config)
    assert torch.equal(tokens, greedy(model))


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("recipe", ["bf16", AttentionRecipe(block="1xD")], ids=["bf16", "1xD"])
def test_offloaded_caches(cache: str, recipe) -> None:
    """Keys and values that come back from the CPU for each layer. (Two steps: kernels round a longer
    cache otherwise, and after a near tie the tokens differ.)"""
    model, ids = use(build("llama").cuda(), recipe=recipe), batch(1, 13).cuda()
    options = dict(max_new_tokens=2, min_new_tokens=2, do_sample=False, output_logits=True)
    options |= dict(return_dict_in_generate=True, attention_mask=torch.ones_like(ids))
    expected = model.generate(ids, **options)
    found = model.generate(ids, cache_implementation=cache, disable_compile=True, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert rel_rms(torch.stack(found.logits), torch.stack(expected.logits)) < 0.003


def test_continuous_batching_is_refused() -> None:
    """By Transformers, which wants an implementation of its own kind for it, with what it takes."""
    config = GenerationConfig(max_new_tokens=2, do_sample=False)
    with pytest.raises(ValueError, match="fp8_delta_matching.* is not supported.*paged"):
        use(build("llama")).generate_batch(inputs=[[5, 6, 7]], generation_config=config)


# --- models that read and see, and encoder-decoders ---------------------------------------------


def seeing(kind: str, **kwargs):
    """A tiny model that reads text around 4 image tokens: LLaVA on Llama and CLIP, or Qwen2-VL."""
    text = dict(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    vision = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        image_size=8, patch_size=4, projection_dim=32,
    )  # fmt: skip
    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": kind, **text},
        vision_config={"model_type": "clip_vision_model", **vision},
        image_token_id=VOCAB - 1,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, **kwargs).eval()


def with_an_image() -> dict[str, torch.Tensor]:
    ids = batch(2, 20).clamp(max=VOCAB - 2)
    ids[:, 3:7] = VOCAB - 1
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    labels = ids.masked_fill((ids == VOCAB - 1) | (mask == 0), -100)
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    return dict(input_ids=ids * mask, attention_mask=mask, labels=labels, pixel_values=pixels)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_models_that_see(kind: str) -> None:
    """Text and image attention on our op: the numbers of SDPA, and close ones in FP8."""
    inputs = with_an_image()
    expected, expected_grads = run(seeing(kind, attn_implementation="sdpa"), **inputs)
    model = seeing(kind, attn_implementation=OURS)
    assert len(check_model(model).attention) == 4
    real = inputs["attention_mask"].bool()
    set_attention_recipe(model, "bf16")
    with count_calls() as calls:
        logits, grads = run(model, **inputs)
    assert calls["attention_fwd"] == 4
    assert_close(logits[real], expected[real], rms=1e-6)
    assert rel_grads(grads, expected_grads) < 2e-6
    set_attention_recipe(model, "delta_matching")
    report = swap_linears(model)
    assert any("vision" in n for n in report.swapped)
    logits, grads = run(model, **inputs)
    # Measured: 0.05 and 0.06.
    assert 1e-3 < rel_rms(logits[real], expected[real]) < 0.08
    assert rel_grads(grads, expected_grads) < 0.1


def test_text_alone_of_a_model_that_sees() -> None:
    """One implementation for each part, in Transformers' own words."""
    model = seeing("llama", attn_implementation={"text_config": OURS, "vision_config": "sdpa"})
    check = check_model(model)
    assert len(check.attention) == 2 and all("language_model" in n for n in check.attention)
    assert all("vision" in n for n in check.other_attention)
    with count_calls() as calls:
        run(model, **with_an_image())
    assert calls["attention_fwd"] == calls["attention_bwd"] == 2


def test_relative_position_bias_is_refused() -> None:
    """T5 adds a bias to its logits. Encoder-decoders without one run (test_hf_causality.py)."""
    config = AutoConfig.for_model(
        "t5", vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4
    )
    try:
        model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation=OURS).eval()
        check_model(model)
        with pytest.raises(NotImplementedError, match="`position_bias`.*additive bias"):
            model(input_ids=batch(), labels=batch())
    except ValueError as error:  # where T5 has attention of its own
        assert "runs without FP8 attention" in str(error)


# --- where the weights lie ----------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_device_map(device_map, saved: Path) -> None:
    load = AutoModelForCausalLM.from_pretrained
    expected = load(saved, quantization_config=DeltaMatchConfig())
    model = load(saved, quantization_config=DeltaMatchConfig(), device_map=device_map)
    assert running(model) == running(expected)
    assert_bitwise_equal(model(batch()).logits, expected(batch()).logits)


def test_weights_on_disk(saved: Path, tmp_path: Path) -> None:
    """Layers that Accelerate fetches for every forward: FP8 as if they lay in memory, trained or not."""
    offload = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    offload |= {"model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    load = AutoModelForCausalLM.from_pretrained
    expected = load(saved, quantization_config=DeltaMatchConfig())
    model = load(
        saved,
        quantization_config=DeltaMatchConfig(),
        device_map=offload,
        offload_folder=tmp_path / "offload",
    )
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    assert check_model(model).linears == sorted(fp8_linears(expected))
    with count_calls() as calls:
        logits = model(batch()).logits
    assert calls["linear_fwd"] == 14 and calls["attention_fwd"] == 2
    assert_bitwise_equal(logits, expected(batch()).logits)


def test_offloaded_by_accelerate(saved: Path, tmp_path: Path) -> None:
    """``cpu_offload`` and ``disk_offload`` of a model that was swapped."""
    from accelerate import cpu_offload, disk_offload

    def swapped():
        model = use(build("llama"))
        swap_linears(model)
        return model

    expected = swapped()(batch()).logits
    for move in (
        lambda m: cpu_offload(m, execution_device=torch.device("cpu")),
        lambda m: disk_offload(m, tmp_path / "disk", execution_device=torch.device("cpu")),
    ):
        model = move(swapped())
        assert_bitwise_equal(model(batch()).logits, expected)


# --- what is saved ------------------------------------------------------------------------------


def test_folder_is_ready_to_be_pushed(saved: Path, tmp_path: Path) -> None:
    """The files of a plain model, with its keys and values, in shards too; nothing of ours but an entry
    in config.json."""
    model = AutoModelForCausalLM.from_pretrained(saved, quantization_config=DeltaMatchConfig())
    model.save_pretrained(tmp_path / "one")
    names = lambda folder: sorted(p.name for p in folder.iterdir())
    assert names(tmp_path / "one") == names(saved)
    with (
        safe_open(tmp_path / "one" / "model.safetensors", "pt") as ours,
        safe_open(saved / "model.safetensors", "pt") as plain,
    ):
        assert sorted(ours.keys()) == sorted(plain.keys())
        for key in plain.keys():
            assert_bitwise_equal(ours.get_tensor(key), plain.get_tensor(key), key)
        assert ours.metadata() == plain.metadata()
    model.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(names(tmp_path / "many")) > len(names(saved))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "many")
    assert_bitwise_equal(again(batch()).logits, model(batch()).logits)


def test_from_config_with_the_choice_of_attention() -> None:
    config = build("llama").config
    model = AutoModelForCausalLM.from_config(config, attn_implementation=OURS)
    with count_calls() as calls:
        model(batch())
    assert calls["attention_fwd"] == len(check_model(model).attention) == 2
    assert not check_model(DeltaMatchConfig(None).apply_to(build("llama"))).attention


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("layers", [None, {"model.layers.0": "bf16"}, "first_last_bf16"])
def test_configs_are_copied(how: str, layers) -> None:
    again = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}[how]
    config = DeltaMatchConfig("stale_delta", "rowwise", layers=layers, backend="reference")
    copied = again(config)
    assert copied is not config and copied.to_dict() == config.to_dict()
    assert copied.backend == "reference"
    model = copied.apply_to(build("llama", num_hidden_layers=3))
    assert running(model) == running(config.apply_to(build("llama", num_hidden_layers=3)))
    assert again(model.config).quantization_config.to_dict() == (
        model.config.quantization_config.to_dict()
    )
    for recipe in (AttentionRecipe(block="1xD"), LinearRecipe.from_name("rowwise")):
        assert again(recipe) == recipe and hash(again(recipe)) == hash(recipe)


def test_config_is_unpickled_elsewhere(tmp_path: Path) -> None:
    """In a process that has imported nothing yet, as data loaders and launchers do."""
    path = tmp_path / "config.pkl"
    path.write_bytes(pickle.dumps(DeltaMatchConfig(layers={"model.layers.0": "bf16"})))
    code = f"import pickle; print(pickle.load(open({str(path)!r}, 'rb')).attention.name)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "delta_matching"
