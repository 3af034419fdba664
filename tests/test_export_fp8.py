"""`hf-deltamatch export --fp8`: the stored numbers are those that training multiplied with, bit for bit,
and Transformers' own fine-grained FP8 reads them back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

import torch  # noqa: E402
from export_runs import MODEL, bitwise, checkpoint_of  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_models import NEWEST, one_thread  # noqa: E402, F401
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config  # noqa: E402

from hf_deltamatch import DeltaMatchConfig, LinearRecipe, cli, fp8_linear  # noqa: E402
from hf_deltamatch.export.fp8 import Fp8Plan, quantize_weight  # noqa: E402
from hf_deltamatch.formats import BLOCKWISE_1X128, E4M3  # noqa: E402
from hf_deltamatch.reference import dequantize, quantize  # noqa: E402

# Transformers 5.4 needs Triton for it.
finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8", exc_type=ImportError)

FAMILIES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "head_dim": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
}


def tiny(**changes):
    fields = {**MODEL, **changes}
    torch.manual_seed(0)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # biases and norms are constants in a new model
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.01)
    return model


def export(*argv: object) -> int:
    return cli.main(["export", *map(str, argv)])


def failed(capsys, *argv: object) -> str:
    assert export(*argv) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("hf-deltamatch export: ")
    return line


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model with FP32 weights, and its export."""
    folder = tmp_path_factory.mktemp("fp8")
    model = tiny(attention_bias=True)
    run = checkpoint_of(model, folder / "run")
    assert export(run, "--fp8", "--output", folder / "out") == 0
    return model, folder / "out"


def trained_with(model, recipe: LinearRecipe) -> dict[str, torch.Tensor]:
    """The weights of the blocks as both GEMMs of training read them, from the specification."""
    out = {}
    for name, p in model.named_parameters():
        if p.dim() == 2 and ".layers." in name:
            forward, backward = (
                dequantize(*quantize(p.detach(), E4M3, block, recipe.descale), block)
                for block in recipe.weight_blocks
            )
            assert bitwise(forward, backward)
            out[name] = forward
    return out


def test_payload_times_scale_is_what_training_multiplied_with(exported) -> None:
    model, out = exported
    stored = load_file(out / "model.safetensors")
    trained = trained_with(model, LinearRecipe())
    assert len(trained) == 14
    for name, expected in trained.items():
        payload, scale = stored[name], stored[f"{name}_scale_inv"]
        assert payload.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
        assert scale.shape == (payload.shape[0] // 128, payload.shape[1] // 128)
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert bitwise(payload.float() * wide, expected), name
    others = {n for n in stored if n.removesuffix("_scale_inv") not in trained}
    state = model.state_dict()
    assert others == set(state) - set(trained) - {"lm_head.weight"}
    assert all(bitwise(stored[n], state[n].to(torch.bfloat16)) for n in others)


def test_the_op_itself_multiplies_with_them(exported) -> None:
    """Through the public linear: its output is that of the stored numbers."""
    model, out = exported
    stored = load_file(out / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    x = torch.randn(5, 128)
    output = fp8_linear(x, model.get_submodule(name).weight, recipe="blockwise")
    scale = stored[f"{name}.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    rows = dequantize(*quantize(x, E4M3, BLOCKWISE_1X128, "fp32"), BLOCKWISE_1X128)
    assert bitwise(output, rows @ (stored[f"{name}.weight"].float() * scale).T)


IN_FP32 = pytest.mark.skipif(not NEWEST, reason="Transformers 5.4 dequantises in the model's dtype")


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=IN_FP32)])
def test_transformers_gives_them_back(exported, dtype) -> None:
    """Dequantised in FP32 and rounded to the dtype of the model: bitwise in FP32."""
    model, out = exported
    how = FineGrainedFP8Config(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=dtype, quantization_config=how)
    trained, state = trained_with(model, LinearRecipe()), model.state_dict()
    for name, tensor in loaded.state_dict().items():
        expected = trained[name] if name in trained else state[name].to(torch.bfloat16)
        assert bitwise(tensor, expected.to(dtype)), name


@IN_FP32
def test_without_a_word_a_cpu_reads_bf16(exported) -> None:
    model, out = exported
    loaded = AutoModelForCausalLM.from_pretrained(out)
    name = "model.layers.0.self_attn.q_proj.weight"
    expected = trained_with(model, LinearRecipe())[name]
    assert bitwise(loaded.state_dict()[name], expected.to(torch.bfloat16))


def fp8_model(folder: Path):
    """Of Transformers' FP8 modules, as it builds them on a GPU; without memory."""
    config = AutoConfig.from_pretrained(folder)
    quantization = FineGrainedFP8Config(**config_of(folder))
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    skip = quantization.modules_to_not_convert
    return finegrained.replace_with_fp8_linear(model, skip, quantization, pre_quantized=True)


def test_transformers_builds_fp8_modules_of_the_same_tensors(exported) -> None:
    """What it would load on a GPU has the names, shapes and dtypes of the file."""
    _, out = exported
    stored = load_file(out / "model.safetensors")
    wanted = fp8_model(out).state_dict()
    wanted.pop("lm_head.weight")  # tied
    assert wanted.keys() == stored.keys()
    for name, tensor in wanted.items():
        assert stored[name].shape == tensor.shape, name
        if not name.endswith(".bias"):  # made in torch's default dtype, which loading sets
            assert stored[name].dtype == tensor.dtype, name


def test_powers_of_two_are_exact_in_bf16(tmp_path) -> None:
    model = tiny()
    recipe = LinearRecipe(descale="pow2")
    DeltaMatchConfig(attention=None, linear=recipe).apply_to(model).save_pretrained(tmp_path / "m")
    assert export(tmp_path / "m", "--fp8", "--output", tmp_path / "out") == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for name, expected in trained_with(model, recipe).items():
        assert bitwise(loaded.state_dict()[name].float(), expected), name


def test_layers_in_high_precision_are_named(tmp_path, capsys) -> None:
    model = tiny(num_hidden_layers=3)
    DeltaMatchConfig(layers="first_last_bf16").apply_to(model).save_pretrained(tmp_path / "m")
    assert export(tmp_path / "m", "--fp8", "--output", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "7 linears in FP8" in said and "model.layers.2.mlp.up_proj: layers[" in said
    left = config_of(tmp_path / "out")["modules_to_not_convert"]
    assert len(left) == 15 and all(n == "lm_head" or ".layers.1." not in n for n in left)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    scales = [n for n in stored if n.endswith("_scale_inv")]
    assert len(scales) == 7 and all(".layers.1." in n for n in scales)
    kinds = {n: type(m).__name__ for n, m in fp8_model(tmp_path / "out").named_modules()}
    assert kinds["model.layers.0.mlp.up_proj"] == "Linear"
    assert kinds["model.layers.1.mlp.up_proj"] == "FP8Linear"


def test_what_the_format_cannot_say_is_left_and_named(tmp_path, capsys) -> None:
    """Two key heads of 32: k and v are 64 wide. And one layer of another recipe."""
    model = tiny(num_key_value_heads=2)
    layers = {"model.layers.1.mlp.down_proj": "rowwise"}
    DeltaMatchConfig(layers=layers).apply_to(model).save_pretrained(tmp_path / "m")
    assert export(tmp_path / "m", "--fp8", "--output", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "9 linears in FP8" in said and "64 x 128 is not divisible into 128 x 128" in said
    assert "trained with rowwise, which the format cannot say" in said
    assert set(config_of(tmp_path / "out")["modules_to_not_convert"]) == {
        "lm_head",
        "model.layers.1.mlp.down_proj",
        *(f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "kv"),
    }
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["weights"]["fp8"]["left_count"] == 6


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, {"linear": None}, ["trained in high precision", "linear: blockwise"]),
        ({}, {"linear": None, "arm": "mp"}, ["nothing says", "trained in FP8"]),
        ({}, {"linear": "rowwise"}, ["none of", "trained with rowwise", "output embedding"]),
        ({}, {"linear": "mx"}, ["trained with mx, which the format cannot say"]),
        (
            {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2},
            {},
            ["64 x 64 is not divisible into 128 x 128"],
        ),
    ],
)
def test_runs_without_fp8_weights_are_refused(changes, options, words, tmp_path, capsys) -> None:
    run = checkpoint_of(tiny(**changes), tmp_path / "run", **options)
    line = failed(capsys, run, "--fp8", "--output", tmp_path / "out")
    assert all(word in line for word in words), line
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not NEWEST, reason="Transformers 5.4 leaves the scales of experts unread")
@pytest.mark.parametrize("family", FAMILIES)
def test_experts(family, tmp_path, capsys) -> None:
    """Experts, one matrix each on disk, in Transformers' form; routers stay."""
    model = tiny(model_type=family, tie_word_embeddings=False, **FAMILIES[family])
    run = checkpoint_of(model, tmp_path / "run")
    out = tmp_path / "out"
    assert export(run, "--fp8", "--output", out) == 0
    stored = load_file(out / "model.safetensors")
    experts = [n for n in stored if ".experts." in n and n.endswith("scale_inv")]
    assert len(experts) == {"mixtral": 2, "qwen3_moe": 1}[family] * 4 * 3
    assert not any(n.endswith("scale_inv") for n in stored if ".gate." in n or "lm_head" in n)
    how = FineGrainedFP8Config(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, quantization_config=how
    ).state_dict()
    block = LinearRecipe().weight_blocks[0]
    count = 0
    for name, p in model.named_parameters():
        if ".experts." in name:
            expected = torch.stack(
                [dequantize(*quantize(e, E4M3, block, "fp32"), block) for e in p]
            )
            assert bitwise(loaded[name], expected.detach()), name
            count += 1
    assert count == {"mixtral": 4, "qwen3_moe": 2}[family]
    kinds = {n: type(m).__name__ for n, m in fp8_model(out).named_modules()}
    assert kinds["model.layers.0.mlp.experts"] == "FP8Experts"


def test_names_that_begin_alike() -> None:
    """Transformers 5.17 would take `gate` for the beginning of `gate_proj`."""
    plan = Fp8Plan({"a.gate_proj": LinearRecipe()}, {"a.gate": "router", "head": "tied"})
    left = plan.quantization_config()["modules_to_not_convert"]
    assert left == ["a.gate$", "head"]
    from transformers.quantizers.quantizers_utils import should_convert_module

    assert should_convert_module("a.gate_proj", left) and not should_convert_module("a.gate", left)
    assert not should_convert_module("head", left)


def test_shards_and_their_index(tmp_path, monkeypatch) -> None:
    from transformers import PreTrainedModel

    model = tiny()
    run = checkpoint_of(model, tmp_path / "run")
    save = PreTrainedModel.save_pretrained
    monkeypatch.setattr(
        PreTrainedModel,
        "save_pretrained",
        lambda self, d, **k: save(self, d, max_shard_size="300KB", **k),
    )
    out = tmp_path / "out"
    assert export(run, "--fp8", "--output", out) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    stored = {n: f.name for f in files for n in load_file(f)}
    assert index["weight_map"] == stored
    results = json.loads((out / "results.json").read_text())
    assert set(results["weights"]["files"]) == {f.name for f in files}


def test_zero_blocks_and_tiny_values() -> None:
    weight = torch.zeros(128, 256)
    weight[:, 128:] = torch.randn(128, 128) * 1e-30
    for kind in ("fp32", "pow2"):
        payload, descale = quantize_weight(weight, LinearRecipe(descale=kind))
        assert descale[0, 0] == 1 and not payload[:, :128].float().any()
        assert descale.isfinite().all() and (payload[:, 128:].float().abs().max() > 200)
