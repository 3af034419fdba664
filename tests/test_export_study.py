"""`hf-deltamatch export` of what `study --save` kept: the weights, the card, and the run again from it."""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
from pathlib import Path

import pytest
import torch
import yaml
from export_runs import MODEL, bitwise, plain_loss, results_of, untraced
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from study_files import CONFIGS
from tiny_models import one_thread  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_deltamatch import AttentionRecipe, DeltaMatchConfig, LinearRecipe, check_model, cli
from hf_deltamatch.export.card import write_card
from hf_deltamatch.export.facts import without_paths as options_without_paths
from hf_deltamatch.export.study import find_study
from hf_deltamatch.export.study_facts import study_file, training, without_paths
from hf_deltamatch.formats import BLOCKWISE_128X128, E4M3
from hf_deltamatch.hf.train_config import read_train_config
from hf_deltamatch.reference import dequantize, quantize
from hf_deltamatch.study.spec import load_study, parse_study
from hf_deltamatch.training.study_rows import read_rows

ROOT = Path(__file__).parent.parent
LICENSE, STUDIES = ROOT / "LICENSE", ROOT / "examples" / "studies"
PLAIN, LONGER = "short | plain", "longer, by 2"
STUDY = {
    "name": "tiny",
    "baseline": "MP",
    "arms": {
        "MP": None,
        "DM + FFN": {
            "attention": "delta_matching",
            "linear": "blockwise",
            "leave": ["*.self_attn"],
        },
    },
    "seeds": [0, 1],
    "corpus": {"source": "words.txt", "held_out_every": 5},
    "model": {**MODEL, "vocab_size": 256, "tie_word_embeddings": False},
    "train": {
        "steps": 3,
        "batch_size": 2,
        "seq_len": 32,
        "lr": 1e-3,
        "warmup": 1,
        "last": 2,
        "residual_every": 1,
        "held_out_sequences": 2,
    },
    "settings": [
        {"name": PLAIN},
        {
            "name": LONGER,
            "then": {
                "steps": 2,
                "seq_len": 64,
                "last": 1,
                "model": {"max_position_embeddings": 96},
            },
        },
    ],
}


@pytest.fixture(scope="module")
def output(text, tmp_path_factory) -> Path:
    """A study's folder, all runs of it saved, made by the command; the text is in ``words.txt``."""
    folder = tmp_path_factory.mktemp("study")
    shutil.copy(text, folder / "words.txt")
    (folder / "a.yaml").write_text(yaml.safe_dump(STUDY, sort_keys=False))
    with contextlib.chdir(folder):
        assert cli.main(["study", "a.yaml", "--output", "out", "--save"]) == 0
    return folder / "out"


def rows_of(output: Path, setting: str, arm: str) -> dict[int, dict]:
    found = read_rows(output).values()
    return {r["seed"]: r for r in found if (r["setting"], r["arm"]) == (setting, arm)}


def folder_of(output: Path, setting: str = PLAIN, arm: str = "DM + FFN", seed: int = 0) -> Path:
    return output / "models" / rows_of(output, setting, arm)[seed]["key"]


def export(*argv: object) -> int:
    return cli.main(["export", *map(str, argv)])


def exported(output: Path, to: Path, *argv: object, **which) -> tuple[dict, str]:
    """``results.json`` and the card."""
    assert export(folder_of(output, **which), "--output", to, *argv) == 0
    return json.loads((to / "results.json").read_text()), (to / "README.md").read_text()


@pytest.mark.parametrize("arm", STUDY["arms"])
def test_weights_and_files(arm, output, tmp_path) -> None:
    """Stock Transformers reads the very weights that the study kept, and the loss is that of the card."""
    out = tmp_path / "tiny"
    results, _ = exported(output, out, "--text", LICENSE, arm=arm)
    assert {p.name for p in out.iterdir()} == {
        "README.md", "config.json", "config.train.json", "generation_config.json", "model.safetensors",
        "results.json", "study.yaml", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    loss, said = plain_loss(out, LICENSE, 32)
    assert loss == pytest.approx(results["check"]["loss"], abs=1e-5)
    assert results["check"]["window"] == 32 and "quantization" not in said.lower()
    ours = load_file(folder_of(output, arm=arm) / "model.safetensors")
    theirs = load_file(out / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(bitwise(theirs[n], ours[n].to(torch.bfloat16)) for n in ours)
    assert not results["weights"]["exact"]
    results, card = exported(output, tmp_path / "whole", "--dtype", "float32", arm=arm)
    theirs = load_file(tmp_path / "whole" / "model.safetensors")
    assert all(bitwise(theirs[n], ours[n]) for n in ours)
    assert results["weights"]["exact"] and "with the weights that are stored here" in card
    # A token is a byte, and a text ends where the corpus' files did.
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("a\n").input_ids == [97, 10]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((out / name).read_text())["eos_token_id"] == tokenizer.eos_token_id == 0


def test_the_recipe_runs_as_it_was_trained(output, tmp_path) -> None:
    """Restored from config.train.json: the same modules as in the study's own model."""
    from hf_deltamatch.hf.linear import fp8_linears
    from hf_deltamatch.study.model import build_model

    exported(output, tmp_path / "o")
    kept = json.loads((tmp_path / "o" / "config.train.json").read_text())
    row = rows_of(output, PLAIN, "DM + FFN")[0]
    assert kept["options"] == row["config"] and kept["step"] == 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "o")
    DeltaMatchConfig.from_dict(kept["quantization_config"]).apply_to(model)
    found = check_model(model)
    own = build_model(row["config"], torch.device("cpu"), None)
    assert list(fp8_linears(model)) == list(fp8_linears(own)) and len(found.linears) == 6
    assert found.attention == check_model(own).attention and len(found.attention) == 2
    exported(output, tmp_path / "mp", arm="MP")
    kept = json.loads((tmp_path / "mp" / "config.train.json").read_text())
    assert kept["quantization_config"] is None and kept["options"]["attention"] == "sdpa"


@pytest.mark.parametrize("arm", STUDY["arms"])
def test_eval_runs_it_as_trained(arm, output, tmp_path) -> None:
    pytest.importorskip("lm_eval")
    from hf_deltamatch.hf.lm_eval import DeltaMatchLM

    exported(output, tmp_path / "o", arm=arm)
    ran = DeltaMatchLM(str(tmp_path / "o"), device="cpu").provenance()
    expected = ({}, {}) if arm == "MP" else ({"delta_matching": 2}, {"blockwise": 6})
    assert (ran["attention"], ran["linear"]) == expected


@pytest.mark.parametrize("setting", [PLAIN, LONGER])
def test_numbers_are_those_of_the_results_file(setting, output, tmp_path) -> None:
    """Of the last stage; the gap is that of the study's own report."""
    results, card = exported(output, tmp_path / "o", "--text", LICENSE, setting=setting)
    assert untraced(card, results) == set() and card == write_card(results)
    last = lambda row: row["then"] if setting == LONGER else row
    rows = {s: last(r) for s, r in rows_of(output, setting, "DM + FFN").items()}
    base = {s: last(r) for s, r in rows_of(output, setting, "MP").items()}
    words = {
        "final_loss": f"training loss, mean of the last {'1 step' if setting == LONGER else '2 steps'}",
        "held_out_loss": "held-out loss",
    }
    for name, text in words.items():
        values = [rows[s][name] for s in (0, 1)]
        gaps = [rows[s][name] - base[s][name] for s in (0, 1)]
        mean, std = statistics.fmean(values), statistics.stdev(values)
        gap = f"{statistics.fmean(gaps):+.4f} ± {statistics.stdev(gaps):.4f}"
        line = f"| {text} | {values[0]:.3f} | {mean:.3f} ± {std:.3f} | {gap} |"
        assert line in card
    assert "2 seeds, mean ± deviation | gap to MP, 2 paired seeds |" in card
    assert "Diverged: 0 of 2 seeds (by seed: 0 done, 1 done)." in card and "One seed" not in card
    residual = [statistics.median(rows[s]["residual"]["values"]) for s in (0, 1)]
    assert f"{residual[0]:.1e}; over seeds {statistics.fmean(residual):.1e} ± " in card
    found = json.loads((output / "report.json").read_text())["settings"]
    name = f"{LONGER}, then 64 tokens" if setting == LONGER else PLAIN
    facts, theirs = results["training"], found[name]["DM + FFN"]
    assert {k: facts["gap"]["final_loss"][k] for k in theirs["gap"]} == theirs["gap"]
    for key in ("final_loss", "held_out_loss"):
        assert facts["spread"][key] == theirs[key]
    assert ("All of the second stage" in card) == ("before the second stage" in card)
    assert ("before the second stage" in card) == (setting == LONGER)
    tokens = 3 * 2 * 32 + (2 * 2 * 64 if setting == LONGER else 0)
    assert facts["tokens"] == tokens and f"| tokens | {tokens} |" in card
    window = results["check"]["window"]
    assert window == (64 if setting == LONGER else 32)
    config = json.loads((tmp_path / "o" / "config.json").read_text())
    assert config["max_position_embeddings"] == (96 if setting == LONGER else 64)


def test_what_the_card_says(output, tmp_path) -> None:
    _, card = exported(output, tmp_path / "o", "--license", "mit", "--limit", "For tests only.")
    row = rows_of(output, PLAIN, "DM + FFN")[0]
    recipes = f"```text\n{AttentionRecipe()}\n{LinearRecipe()}\n{LinearRecipe().legend}\n```"
    assert recipes in card
    assert "FP8, `delta_matching` (arm DM + FFN) |" in card
    assert "FP8, `blockwise`; in high precision those of `*.self_attn` |" in card
    assert "| setting, seed | short \\| plain, 0 |" in card  # a cell stays one
    assert row["corpus"]["train_sha256"] in card and row["corpus"]["held_out_sha256"] in card
    assert "`words.txt`: one file, the last 1/5 of it held out." in card
    assert "```bash\nhf-deltamatch study study.yaml --save\n```" in card
    assert (tmp_path / "o" / "study.yaml").read_text() in card
    assert f"runs/o/models/{row['key']}" in card and "Name your own copy of: corpus.source" in card
    assert "* For tests only." in card and "No downstream evaluation." in card
    assert str(output.parent) not in card and "None" not in card and "not recorded" not in card
    data = ModelCard.load(tmp_path / "o" / "README.md").data
    assert data.license == "mit" and "arm-dm-ffn" in data.tags
    _, card = exported(output, tmp_path / "mp", arm="MP")
    assert "attention in high precision: softmax(Q Kᵀ) V by torch's SDPA" in card
    assert "gap to" not in card and "Row-sum residual" not in card
    assert "In the arithmetic of training" not in card  # Transformers' own


@pytest.mark.parametrize(("setting", "arm"), [(PLAIN, "MP"), (LONGER, "DM + FFN")])
def test_the_command_of_the_card_is_the_run(setting, arm, output, tmp_path) -> None:
    """Run again: the same key, the same numbers, the same weights."""
    exported(output, tmp_path / "o", "--name", "again", setting=setting, arm=arm)
    shutil.copy(output.parent / "words.txt", tmp_path / "o")
    with contextlib.chdir(tmp_path / "o"):
        assert cli.main(["study", "study.yaml", "--save"]) == 0
    row = rows_of(output, setting, arm)[0]
    (new,) = read_rows(tmp_path / "o" / "runs" / "again").values()
    same = ("key", "setting", "arm", "seed", "config", "loss", "held_out_loss")
    assert {k: new[k] for k in same} == {k: row[k] for k in same}
    assert new.get("then", {}).get("loss") == row.get("then", {}).get("loss")
    theirs = tmp_path / "o" / "runs" / "again" / "models" / new["key"] / "model.safetensors"
    ours = load_file(folder_of(output, setting, arm) / "model.safetensors")
    assert all(bitwise(t, ours[n]) for n, t in load_file(theirs).items())


@pytest.mark.parametrize("file", sorted(p.name for p in CONFIGS.glob("study_*.yaml")))
def test_every_run_of_the_examples_has_a_study_of_its_own(file) -> None:
    """Whatever arms, stages and evaluations there are: the same key."""
    for run in load_study(CONFIGS / file).runs:
        fields = {"setting": run.setting, "arm": run.arm, "seed": run.seed}
        # As the row has it.
        alone = study_file({**fields, "config": json.loads(json.dumps(run.config))}, "x")
        (again,) = parse_study(yaml.safe_load(yaml.safe_dump(alone))).runs
        assert again == run and again.key == run.key


@pytest.mark.parametrize("name", sorted(p.parent.name for p in STUDIES.glob("*/runs.jsonl")))
def test_runs_of_the_published_studies(name, tmp_path) -> None:
    """As if their weights had been kept: cards whose numbers are those of their reports, files with the
    keys of the runs; of those that diverged, a refusal."""
    folder = Path(shutil.copytree(STUDIES / name, tmp_path / name))
    report = json.loads((folder / "report.json").read_text())
    cards = 0
    for key, row in read_rows(folder).items():
        (folder / "models" / key).mkdir(parents=True)
        (folder / "models" / key / "config.json").touch()
        if "diverged" in (row["status"], (row.get("then") or row)["status"]):
            with pytest.raises(ValueError, match="diverged"):
                find_study(folder / "models" / key)
            continue
        results = results_of(json.loads(json.dumps(training(find_study(folder / "models" / key)))))
        facts = results["training"]
        assert untraced(write_card(results), results) == set()
        (run,) = parse_study(study_file(facts["study"], "x")).runs
        assert run.key == key
        found = report["settings"][run.stage or run.setting][row["arm"]]
        if facts["spread"] is None:
            assert found["final_loss"]["values"] == [facts["numbers"]["final_loss"]]
        else:
            assert facts["spread"]["final_loss"] == found["final_loss"]
            assert facts["spread"]["diverged"] == found["diverged"]
        if row["arm"] != report["baseline"]:
            assert {k: facts["gap"]["final_loss"][k] for k in found["gap"]} == found["gap"]
        cards += 1
    assert cards > 10


def test_a_path_is_cut_and_said_to_be(text, output, tmp_path) -> None:
    """Of another machine's text there is the name; with its path put back the key is the run's."""
    config = {**rows_of(output, PLAIN, "MP")[0]["config"]}
    config["corpus"] = {**config["corpus"], "source": text}
    run = parse_study({**STUDY, "corpus": config["corpus"]}).runs[0]
    copy = copied(output, tmp_path, {"MP": {"config": config, "key": run.key}})
    (copy / "models" / folder_of(output, arm="MP").name).rename(copy / "models" / run.key)
    assert export(copy / "models" / run.key, "--output", tmp_path / "o") == 0
    published = "".join(
        p.read_text() for p in (tmp_path / "o").glob("*.[jmy]*") if p.suffix != ".safetensors"
    )
    assert str(Path(text).parent) not in published
    data = yaml.safe_load((tmp_path / "o" / "study.yaml").read_text())
    assert data["corpus"]["source"] == "words.txt"
    data["corpus"]["source"] = text
    (again,) = parse_study(data).runs
    assert again.key == run.key


def copied(output: Path, to: Path, changes: dict[str, dict]) -> Path:
    """The study's folder with fields of the rows of seed 0, by arm, changed."""
    copy = Path(shutil.copytree(output, to / "copy"))
    lines = []
    for row in read_rows(output).values():
        if row["seed"] == 0 and row["setting"] == PLAIN:
            row = {**row, **changes.get(row["arm"], {})}
        lines.append(json.dumps(row) + "\n")
    (copy / "runs.jsonl").write_text("".join(lines))
    return copy


def test_fp8_weights(output, tmp_path, capsys) -> None:
    """The linears that ran in FP8 and no others, as training multiplied with them."""
    results, _ = exported(output, tmp_path / "o", "--fp8")
    names = {f"model.layers.{i}.mlp.{p}_proj" for i in (0, 1) for p in ("gate", "up", "down")}
    assert set(results["weights"]["fp8"]["stored"]) == names
    ours = load_file(folder_of(output) / "model.safetensors")
    stored = load_file(tmp_path / "o" / "model.safetensors")
    for name in names:
        scale = stored[f"{name}.weight_scale_inv"]
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        pair = quantize(ours[f"{name}.weight"], E4M3, BLOCKWISE_128X128, "fp32")
        expected = dequantize(*pair, BLOCKWISE_128X128)
        assert bitwise(stored[f"{name}.weight"].float() * wide, expected)
    capsys.readouterr()
    assert export(folder_of(output, arm="MP"), "--fp8", "--output", tmp_path / "mp") == 2
    assert "nothing says that these weights were trained in FP8" in capsys.readouterr().err


def test_keep_recipe(output, tmp_path) -> None:
    exported(output, tmp_path / "o", "--keep-recipe")
    assert len(check_model(AutoModelForCausalLM.from_pretrained(tmp_path / "o")).linears) == 6
    assert AutoConfig.from_pretrained(tmp_path / "o").quantization_config


def test_lm_eval_of_the_exported_folder(output, tmp_path, capsys) -> None:
    """As for other runs: results of these weights, on the same card."""
    pytest.importorskip("accelerate")
    pytest.importorskip("datasets")
    from test_export_card import lm_eval_file

    results, _ = exported(output, tmp_path / "first")
    ours = {"attention": {"delta_matching": 2}, "linear": {"blockwise": 6}}
    ours["weights_sha256"] = results["weights"]["sha256"]
    config = {"limit": None, "deltamatch": ours}
    file = lm_eval_file(tmp_path / "results.json", config=config)
    results, card = exported(output, tmp_path / "o", "--lm-eval", file)
    assert "lm-eval 0.4.13, attention in `delta_matching`, linears in `blockwise`:" in card
    assert (tmp_path / "o" / ".eval_results" / "arc_easy.yaml").exists()
    assert untraced(card, results) == set() and "No downstream" not in card
    other = folder_of(output, seed=1)
    assert export(other, "--output", tmp_path / "x", "--lm-eval", file) == 2
    assert "of other weights" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["here", "link", "linked disk"])
def test_however_the_folder_is_named(how, output, tmp_path) -> None:
    folder = folder_of(output)
    where, name = Path.cwd(), folder
    if how == "here":
        where, name = folder, "."
    elif how == "link":
        name = tmp_path / "link"
        name.symlink_to(folder)
    else:
        copy = Path(shutil.copytree(output, tmp_path / "copy"))
        (copy / "models").rename(tmp_path / "disk")
        (copy / "models").symlink_to(tmp_path / "disk")
        name = copy / "models" / folder.name
    with contextlib.chdir(where):
        assert export(name, "--output", tmp_path / "o") == 0
    assert (tmp_path / "o" / "study.yaml").exists()


def test_a_copy_elsewhere_is_a_plain_saved_model(output, tmp_path) -> None:
    shutil.copytree(folder_of(output), tmp_path / "models" / folder_of(output).name)
    assert export(tmp_path / "models" / folder_of(output).name, "--output", tmp_path / "o") == 0
    card = (tmp_path / "o" / "README.md").read_text()
    assert "delta_matching" in card and "None recorded." in card
    assert not (tmp_path / "o" / "study.yaml").exists()
    recipes = [
        read_train_config(str(f))["quantization_config"]
        for f in (folder_of(output), tmp_path / "o")
    ]
    assert recipes[0] == recipes[1]


def test_of_weights_that_say_nothing_nothing_is_said(output, tmp_path) -> None:
    """Null would mean high precision."""
    folder = shutil.copytree(folder_of(output), tmp_path / "saved")
    (folder / "config.train.json").unlink()
    assert export(folder, "--output", tmp_path / "o") == 0
    assert "In what arithmetic" in (tmp_path / "o" / "README.md").read_text()
    assert not (tmp_path / "o" / "config.train.json").exists()


def test_values_beyond_a_dtype(output, tmp_path, capsys) -> None:
    folder = shutil.copytree(folder_of(output), tmp_path / "saved")
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"][0, 0] = 1e5
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert export(folder, "--output", tmp_path / "o", "--dtype", "float16") == 2
    assert "'lm_head.weight' has values that float16 cannot hold" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("short", ["", "a"])
def test_a_text_without_a_next_token(short, output, tmp_path, capsys) -> None:
    (tmp_path / "t.txt").write_text(short)
    said = ("--text", tmp_path / "t.txt")
    assert export(folder_of(output), "--output", tmp_path / "o", *said) == 2
    assert f"has {len(short)} tokens; a loss needs two at least" in capsys.readouterr().err


def test_a_folder_called_like_the_keyword() -> None:
    """Is not published as Python's own library."""
    config, local = without_paths({"corpus": {"source": "mine/stdlib"}})
    assert config["corpus"]["source"] == "stdlib/" and local == ["corpus.source"]
    assert without_paths({"corpus": {"source": "stdlib"}}) == ({"corpus": {"source": "stdlib"}}, [])
    assert options_without_paths({"data": "./mine/stdlib"})["data"] == "stdlib/"


@pytest.mark.parametrize("arm", STUDY["arms"])
def test_eval_runs_what_the_study_kept_as_trained(arm, output, tmp_path) -> None:
    """Before it is exported, too."""
    found = read_train_config(str(folder_of(output, arm=arm)))
    kept = export(folder_of(output, arm=arm), "--output", tmp_path / "o")
    assert kept == 0
    exported_config = json.loads((tmp_path / "o" / "config.train.json").read_text())
    assert found["quantization_config"] == exported_config["quantization_config"]


def test_a_key_that_is_not_there(output, tmp_path, capsys) -> None:
    assert export(output / "models" / "0123456789abcdef", "--output", tmp_path / "o") == 2
    said = capsys.readouterr().err
    assert "no such folder" in said and "name one of its runs: models/" in said
