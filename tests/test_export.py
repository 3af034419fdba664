"""`hf-deltamatch export`: what is written, that Transformers alone reads it, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("datasets")

import torch  # noqa: E402
import yaml  # noqa: E402
from export_runs import MODEL, bitwise, checkpoint_of, plain_loss, train  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_models import one_thread  # noqa: E402, F401
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)

from hf_deltamatch import DeltaMatchConfig, check_model, cli  # noqa: E402
from hf_deltamatch.export import folder as export_folder  # noqa: E402
from hf_deltamatch.hf.train_config import FILE  # noqa: E402

TEXT = Path(__file__).parent.parent / "LICENSE"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("runs"), "dm")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def export(*argv: object) -> int:
    return cli.main(["export", *map(str, argv)])


def failed(capsys, *argv: object) -> str:
    """The one line of an export that must fail."""
    assert export(*argv) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("hf-deltamatch export: ") and "Traceback" not in line
    return line


def test_folder_is_complete_and_loads_with_transformers_alone(run, tmp_path, capsys) -> None:
    out = tmp_path / "out" / "tiny"
    assert export(run, "--output", out, "--text", TEXT, "--license", "apache-2.0") == 0
    assert "Written: " in capsys.readouterr().out
    assert {p.name for p in out.iterdir()} == {
        "README.md", "config.json", "config.train.json", "generation_config.json", "model.safetensors",
        "results.json", "tokenizer.json", "tokenizer_config.json", "train.yaml",
    }  # fmt: skip
    results = json.loads((out / "results.json").read_text())
    loss, said = plain_loss(out, TEXT, results["check"]["window"])
    assert loss == pytest.approx(results["check"]["loss"], abs=1e-5)
    assert results["check"]["targets"] > 5000 and "quantization" not in said.lower()
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    kept = json.loads((out / "config.train.json").read_text())
    recipe = DeltaMatchConfig.from_dict(kept["quantization_config"])
    assert recipe.attention.name == "delta_matching" and recipe.linear.name == "blockwise"
    GenerationConfig.from_pretrained(out)
    ids = AutoTokenizer.from_pretrained(out)("a b", add_special_tokens=False).input_ids
    assert len(ids) == 3
    read = json.loads((out / "tokenizer_config.json").read_text())
    assert not {"is_local", "local_files_only"} & read.keys()  # of here, not of the tokenizer
    theirs = load_file(out / "model.safetensors")
    ours = load_file(run / "checkpoint-00000003" / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(bitwise(theirs[n], ours[n].to(torch.bfloat16)) for n in ours)
    # The run's file again: what is local is cut to its name.
    options = yaml.safe_load((out / "train.yaml").read_text())
    assert options["data"] == "texts.jsonl" and options["arm"] == "dm"
    assert str(tmp_path) not in "".join(
        p.read_text() for p in out.glob("*.[jm]*") if p.suffix != ".safetensors"
    )


def test_float32_is_bitwise_and_a_step_can_be_chosen(run, tmp_path, capsys) -> None:
    for step in (1, 3):
        out = tmp_path / str(step)
        assert export(run, "--checkpoint", step, "--dtype", "float32", "--output", out) == 0
        theirs = load_file(out / "model.safetensors")
        ours = load_file(run / f"checkpoint-0000000{step}" / "model.safetensors")
        assert all(bitwise(theirs[n], ours[n]) for n in ours)
        assert json.loads((out / "results.json").read_text())["training"]["step"] == step
    # One of them by its own folder.
    assert export(run / "checkpoint-00000001", "--output", tmp_path / "one") == 0
    assert load_file(tmp_path / "one" / "model.safetensors").keys() == ours.keys()
    capsys.readouterr()
    line = failed(capsys, run, "--checkpoint", 2000, "--output", tmp_path / "none")
    assert "no checkpoint of step 2000" in line and "1, 2, 3" in line


def test_final_alone_is_enough(copy, tmp_path) -> None:
    for folder in copy.glob("checkpoint-*"):
        shutil.rmtree(folder)
    assert export(copy, "--output", tmp_path / "out") == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["training"]["options"]["arm"] == "dm" and results["training"]["step"] == 3
    assert results["training"]["numbers"]["eval_loss"] > 0


def test_saved_model_with_a_recipe(tmp_path) -> None:
    """Layers and all come from its config.json, which the plain folder does not have."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
    DeltaMatchConfig(layers={"model.layers.0": "bf16"}).apply_to(model).save_pretrained(
        tmp_path / "m"
    )
    assert export(tmp_path / "m", "--output", tmp_path / "out") == 0
    kept = json.loads((tmp_path / "out" / "config.train.json").read_text())
    assert "model.layers.0" in kept["quantization_config"]["layers"]
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not (tmp_path / "out" / "train.yaml").exists()


def test_keep_recipe(run, tmp_path) -> None:
    out = tmp_path / "out"
    assert export(run, "--keep-recipe", "--output", out, "--text", TEXT) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    found = check_model(model)
    assert len(found.attention) == 2 and len(found.linears) == 14
    results = json.loads((out / "results.json").read_text())
    loss, said = plain_loss(out, TEXT, 64)
    assert loss == pytest.approx(results["check"]["loss"], abs=1e-5)
    assert "delta_matching" in said  # Transformers warns of what it does not know


def test_nothing_is_left_of_an_export_that_stops(run, tmp_path, monkeypatch) -> None:
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(export_folder, "_verify", stop)
    with pytest.raises(KeyboardInterrupt):
        export(run, "--output", tmp_path / "out" / "x")
    assert not list((tmp_path / "out").iterdir())


def test_weights_that_read_back_otherwise_are_refused(run, tmp_path, monkeypatch, capsys) -> None:
    write = export_folder.w.write_weights

    def wrong(source, master, folder, dtype):
        write(source, master, folder, dtype)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][0] += 1
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(export_folder.w, "write_weights", wrong)
    assert "'model.norm.weight'" in failed(capsys, run, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def truncate(run: Path) -> None:
    path = run / "checkpoint-00000003" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def change(run: Path) -> None:
    path = run / "checkpoint-00000003" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def foreign(run: Path) -> None:
    (run / "checkpoint-00000003" / "manifest.json").unlink()


def other_format(run: Path) -> None:
    (run / "checkpoint-00000003" / "manifest.json").write_text('{"format": "another"}')


def only_final(run: Path) -> None:
    for folder in run.glob("checkpoint-*"):
        shutil.rmtree(folder)


def truncated_final(run: Path) -> None:
    only_final(run)
    path = run / "final" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickled_final(run: Path) -> None:
    only_final(run)
    (run / "final" / "model.safetensors").unlink()
    torch.save({}, run / "final" / "pytorch_model.bin")


def quantised_final(run: Path) -> None:
    only_final(run)
    path = run / "final" / "config.json"
    config = {**json.loads(path.read_text()), "quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps(config))


def lacking_final(run: Path) -> None:
    only_final(run)
    path = run / "final" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def not_finite_final(run: Path) -> None:
    only_final(run)
    path = run / "final" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})


def empty(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, ["checkpoint-00000003/model.safetensors", "truncated"]),
        (change, ["checkpoint-00000003/model.safetensors", "SHA-256"]),
        (foreign, ["checkpoint-00000003/manifest.json", "not a checkpoint of this program"]),
        (other_format, ["checkpoint-00000003/manifest.json", "`format`"]),
        (truncated_final, ["final/model.safetensors", "truncated"]),
        (pickled_final, ["final", "no safetensors", "pytorch_model.bin is a pickle"]),
        (quantised_final, ["final/config.json", "quantised already (fp8)"]),
        (lacking_final, ["final", "missing keys", "model.layers.0.mlp.up_proj.weight"]),
        (not_finite_final, ["final/model.safetensors", "'model.norm.weight' has NaN"]),
        (empty, ["neither checkpoints", "examples/pretrain.py"]),
    ],
    ids=lambda v: v.__name__ if callable(v) else "",
)
def test_damaged_and_foreign_runs_are_refused_by_file(
    copy, damage, words, tmp_path, capsys
) -> None:
    damage(copy)
    line = failed(capsys, copy, "--output", tmp_path / "out")
    assert all(word in line for word in words), line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("has_checkpoints", [True, False])
@pytest.mark.parametrize(
    ("text", "words"), [('{"a":', "truncated or no JSON"), ("[1]", "holds a list; it must be")]
)
def test_damaged_json_beside_weights(copy, has_checkpoints, text, words, tmp_path, capsys) -> None:
    """Of ``final/``, where a checkpoint's tokenizer is read from, too."""
    if not has_checkpoints:
        only_final(copy)
    found = sorted((copy / "final").glob("*.json"))
    assert {"config.json", "generation_config.json", "tokenizer.json", FILE} <= {
        path.name for path in found
    }
    for path in found:
        before = path.read_text()
        path.write_text(text)
        line = failed(capsys, copy, "--output", tmp_path / "out")
        assert f"{path}: {words}" in line
        path.write_text(before)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["RUN", "--output", "RUN"], ["there is something already"]),
        (["RUN", "--output", "RUN/results.json"], ["there is something already"]),
        (["/nowhere/run", "--output", "NEW"], ["/nowhere/run", "no such folder"]),
        (
            ["RUN", "--output", "NEW", "--dtype", "float8"],
            ["'float8'", "bfloat16, float16, float32"],
        ),
        (["RUN", "--output", "NEW", "--fp8", "--keep-recipe"], ["one quantization_config"]),
        (["RUN", "--output", "NEW", "--text", "/nowhere.txt"], ["/nowhere.txt", "no such file"]),
        (["RUN", "--output", "NEW", "--seeds", "RUN"], ["seeds are [0, 0]"]),
        (
            ["RUN", "--output", "NEW", "--lm-eval", "RUN/results.json"],
            ["not a results file of lm-eval"],
        ),
    ],
)
def test_bad_arguments(run, argv, words, tmp_path, capsys) -> None:
    argv = [a.replace("RUN", str(run)).replace("NEW", str(tmp_path / "new")) for a in argv]
    line = failed(capsys, *argv)
    assert all(word in line for word in words), line
    assert not (tmp_path / "new").exists() and (run / "results.json").exists()


def test_checkpoint_of_another_model_names_its_file(tmp_path, capsys) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
    run = checkpoint_of(model, tmp_path / "run")
    model.config.num_hidden_layers = 3
    checkpoint_of(model, run)  # the weights of two layers
    line = failed(capsys, run, "--output", tmp_path / "out")
    assert "checkpoint-00000001/model.safetensors" in line and "another model" in line


def test_lora_is_exported_merged(tmp_path, capsys) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
    run = checkpoint_of(model, tmp_path / "run", lora_rank=4, linear=None)
    line = failed(capsys, run, "--output", tmp_path / "out")
    assert "of a LoRA run" in line and "merged" in line
    model.save_pretrained(run / "merged")
    (run / "results.json").write_text('{"steps": 1}')
    assert export(run, "--output", tmp_path / "out") == 0
    assert "finetune.py" in (tmp_path / "out" / "README.md").read_text()
    capsys.readouterr()
    assert "adapter was merged" in failed(capsys, run, "--fp8", "--output", tmp_path / "fp8")
