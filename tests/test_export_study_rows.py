"""Exports of a study whose results file, or what lies beside it, is not as it should be: a sentence, or
a card that says so. Runs here are trained in this process."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from export_runs import MODEL, bitwise, results_of, train, untraced
from safetensors.torch import load_file
from test_evaluation_damaged import WRONG, changed
from test_study_spec import places
from tiny_models import one_thread  # noqa: F401

from hf_deltamatch import cli
from hf_deltamatch.environment import environment
from hf_deltamatch.export.card import write_card
from hf_deltamatch.export.source import find_source
from hf_deltamatch.export.study_facts import training
from hf_deltamatch.formats import BLOCKWISE_128X128, E4M3
from hf_deltamatch.reference import quantize
from hf_deltamatch.study import report
from hf_deltamatch.study import run as study_run
from hf_deltamatch.study.corpus import load_corpus
from hf_deltamatch.study.spec import Study, parse_study
from hf_deltamatch.training.study_rows import append_row, read_rows

CPU = torch.device("cpu")
TRAIN = {"steps": 3, "batch_size": 2, "seq_len": 160, "lr": 1e-3, "warmup": 1, "last": 2}
TRAIN |= {"residual_every": 1, "held_out_sequences": 2, "precision": "bfloat16"}
FACTS = environment()


def study_of(text: str, **changes) -> Study:
    data = {
        "name": "s",
        "arms": ["MP", "DM"],
        "seeds": [0, 1, 2],
        "corpus": {"source": text, "held_out_every": 5},
        "model": {**MODEL, "vocab_size": 256, "max_position_embeddings": 160},
        "train": TRAIN,
        "settings": [{"name": "only"}],
    }
    return parse_study({**data, **changes})


def run_study(study: Study, output: Path) -> Path:
    """As the command does it, without processes."""
    corpus = load_corpus(**study.corpus)
    output.mkdir()
    rows = {}
    for run in study.runs:
        row = study_run.train(run, corpus, CPU, save=output / "models" / run.key)
        rows[run.key] = {**row, "device": "cpu", "environment": FACTS}
        append_row(output, rows[run.key])
    report.write_report(study, rows, output, png=False)
    return output


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> Path:
    """A study of BF16 weights, two arms of three seeds."""
    return run_study(study_of(text), tmp_path_factory.mktemp("s") / "out")


@pytest.fixture
def output(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "out"))


def lines_of(output: Path) -> list[dict]:
    return list(read_rows(output).values())


def write_lines(output: Path, rows: list[dict]) -> None:
    (output / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def key_of(output: Path, arm: str = "DM", seed: int = 0) -> str:
    (key,) = [r["key"] for r in lines_of(output) if (r["arm"], r["seed"]) == (arm, seed)]
    return key


def change(output: Path, arm: str, seed: int, **fields) -> None:
    rows = lines_of(output)
    for row in rows:
        if (row["arm"], row["seed"]) == (arm, seed):
            row |= fields
    write_lines(output, rows)


def export(*argv: object) -> int:
    return cli.main(["export", *map(str, argv)])


def exported(output: Path, *argv: object) -> tuple[dict, str]:
    to = output.parent / "exported"
    assert export(output / "models" / key_of(output), "--output", to, *argv) == 0
    return json.loads((to / "results.json").read_text()), (to / "README.md").read_text()


def failed(capsys, *argv: object) -> str:
    """The one line of an export that must fail."""
    capsys.readouterr()
    assert export(*argv) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("hf-deltamatch export: ") and "Traceback" not in line
    return line


def test_bfloat16_is_what_the_run_computed_with(output) -> None:
    results, card = exported(output)
    ours = load_file(output / "models" / key_of(output) / "model.safetensors")
    theirs = load_file(output.parent / "exported" / "model.safetensors")
    assert {t.dtype for t in ours.values()} == {torch.bfloat16} and theirs.keys() == ours.keys()
    assert all(bitwise(theirs[n], ours[n]) for n in ours) and results["weights"]["exact"]
    assert "with the weights that are stored here" in card and "rounded once more" not in card
    assert "| precision in training | bfloat16, master weights and AdamW in FP32 |" in card
    assert untraced(card, results) == set()


def test_fp8_of_bfloat16_is_what_the_linears_multiplied_with(text, tmp_path) -> None:
    """The weight that a linear gets is BF16; and linears alone are a recipe."""
    arms = {"L": {"attention": "sdpa", "linear": {"recipe": "blockwise", "descale": "pow2"}}}
    output = run_study(study_of(text, arms=arms, seeds=[0]), tmp_path / "out")
    key, out = key_of(output, "L"), tmp_path / "o"
    assert export(output / "models" / key, "--output", out, "--fp8") == 0
    ours, stored = (load_file(f / "model.safetensors") for f in (output / "models" / key, out))
    names = [n for n in stored if f"{n}_scale_inv" in stored]
    assert len(names) == 14
    for name in names:
        payload, scale = quantize(ours[name], E4M3, BLOCKWISE_128X128, "pow2")
        assert bitwise(stored[name], payload) and bitwise(stored[f"{name}_scale_inv"], scale)
    card = (out / "README.md").read_text()
    assert "SDPA in high precision (arm L)" in card and "FP8, `blockwise(descale='pow2')` |" in card
    recipe = json.loads((out / "config.train.json").read_text())["quantization_config"]
    assert recipe["attention"] is None and recipe["linear"]["descale"] == "pow2"


def test_scores_of_the_study(text, tmp_path) -> None:
    pytest.importorskip("lm_eval")
    evaluate = {"tasks": ["continuation"], "limit": 8}
    output = run_study(study_of(text, seeds=[0, 1], evaluate=evaluate), tmp_path / "out")
    results, card = exported(output)
    found = json.loads((output / "report.json").read_text())["settings"]["only"]["DM"]["scores"]
    score = found["continuation acc"]
    row = next(r for r in lines_of(output) if r["key"] == key_of(output))
    value, error = row["scores"]["continuation"]["acc"]
    ours = results["training"]["scores"]["tasks"]["continuation"]["acc"]
    assert ours["over_seeds"] == {k: score[k] for k in ours["over_seeds"]}
    assert ours["gap"] == score["gap"]
    line = f"| continuation | acc | {value:.4f} | {error:.4f} | {score['mean']:.4f} ± {score['std']:.4f} | "
    assert line + f"{score['gap']['mean']:+.4f} ± {score['gap']['std']:.4f} |" in card
    assert "the first 8 documents of each task only: no benchmark result" in card
    assert "No downstream evaluation" not in card and untraced(card, results) == set()
    data = yaml.safe_load((tmp_path / "exported" / "study.yaml").read_text())
    data["corpus"]["source"] = text
    assert parse_study(data).runs[0].key == row["key"]
    assert 'pip install "hf-deltamatch[eval]"' in card
    assert not (tmp_path / "exported" / ".eval_results").exists()


def test_the_standard_library_is_everyones(text, tmp_path) -> None:
    """No path in it: the file beside the card has the key of the run."""
    corpus = {"source": "stdlib", "limit_bytes": 300_000}
    output = run_study(study_of(text, corpus=corpus, arms=["DM"], seeds=[3]), tmp_path / "out")
    to = tmp_path / "exported"
    key = key_of(output, seed=3)
    assert export(output / "models" / key, "--output", to) == 0
    results, card = json.loads((to / "results.json").read_text()), (to / "README.md").read_text()
    (run,) = parse_study(yaml.safe_load((to / "study.yaml").read_text())).runs
    assert run.key == key and results["training"]["local"] == []
    python, files = FACTS["python"], results["training"]["study"]["corpus"]["documents"]
    assert f"standard library, without its tests (Python {python}): {files:,} files" in card
    assert "cut at 300,000 bytes, one in 50 of them held out" in card
    assert f"`runs/exported/models/{key}`: the key" in card and "your own copy" not in card
    assert untraced(card, results) == set() and "One seed" in card


def test_seeds_that_diverged_or_failed_are_counted(output) -> None:
    losses = {"final_loss": None, "held_out_loss": None}
    change(output, "DM", 1, status="diverged", **losses)
    change(output, "MP", 0, status="diverged")
    rows = [r for r in lines_of(output) if (r["arm"], r["seed"]) != ("DM", 2)]
    gone = next(r for r in lines_of(output) if (r["arm"], r["seed"]) == ("DM", 2))
    identity = ("key", "name", "setting", "arm", "seed", "config")
    rows.append({**{k: gone[k] for k in identity}, "status": "failed", "error": "no memory"})
    write_lines(output, rows)
    results, card = exported(output)
    assert "Diverged: 1 of 2 seeds, failed: 1 (by seed: 0 done, 1 diverged, 2 failed)." in card
    assert results["training"]["spread"]["final_loss"]["n"] == 1
    assert "(of 1) |" in card and "(1 not finite) |" in card and "Of these, 1 diverged." in card
    assert untraced(card, results) == set()


def test_one_seed_is_said_to_be_one(output) -> None:
    write_lines(output, [r for r in lines_of(output) if r["seed"] == 0])
    results, card = exported(output)
    assert results["training"]["spread"] is None
    assert "One seed: differences" in card and "| over seeds | gap to MP, same seed |" in card
    assert "Diverged" not in card and untraced(card, results) == set()


def test_without_a_report_there_is_no_gap(output) -> None:
    (output / "report.json").unlink()
    results, card = exported(output)
    assert results["training"]["gap"] is None and "gap to" not in card
    assert results["training"]["spread"]["count"] == 3


def test_rows_of_other_runs_and_other_text_do_not_count(output, text) -> None:
    """Another version of the file; another text; a line of the file cut by a kill."""
    corpus = {**lines_of(output)[0]["corpus"], "train_sha256": "ab" * 32}
    change(output, "DM", 2, corpus=corpus)
    other = study_of(text, train={**TRAIN, "lr": 2e-3}, seeds=[5]).runs[1]
    row = next(r for r in lines_of(output) if r["key"] == key_of(output))
    append_row(output, {**row, **study_run.identity(other)})
    with (output / "runs.jsonl").open("a") as file:
        file.write('{"key": "ab')
    results, card = exported(output)
    training = results["training"]
    assert training["spread"]["seeds"] == [0, 1] and training["study"]["not_counted"] == [2]
    assert "Not counted, of other text or precision: seeds 2." in card
    assert "Not counted, damaged: 1 line of the study's results file." in card


def test_a_changed_baseline_is_the_last_one(output, text) -> None:
    """An arm of that name with another recipe, later in the file."""
    arms = {"MP": {"attention": "stale_delta"}, "DM": None}
    for run in study_of(text, arms=arms, seeds=[0, 1]).runs:
        if run.arm == "MP":
            row = next(r for r in lines_of(output) if r["key"] == key_of(output))
            append_row(output, {**row, **study_run.identity(run), "final_loss": 1.0})
    results, _ = exported(output)
    by_seed = {r["seed"]: r["final_loss"] for r in lines_of(output) if r["arm"] == "DM"}
    found = results["training"]["gap"]["final_loss"]["by_seed"]
    assert found == {str(s): by_seed[s] - 1.0 for s in (0, 1)}


def diverged(output: Path) -> None:
    change(output, "DM", 0, status="diverged", final_loss=6.5, best_loss=4.25)


def in_error(output: Path) -> None:
    change(output, "DM", 0, status="failed", error="out of memory")


def unrecorded(output: Path) -> None:
    write_lines(output, [r for r in lines_of(output) if r["key"] != key_of(output)])


def cut_short(output: Path) -> None:
    rows, key = lines_of(output), key_of(output)
    lines = [json.dumps(r) for r in rows]
    lines = [
        line[:200] if row["key"] == key else line for line, row in zip(lines, rows, strict=True)
    ]
    (output / "runs.jsonl").write_text("\n".join(lines) + "\n")


def edited(output: Path) -> None:
    row = next(r for r in lines_of(output) if r["key"] == key_of(output))
    change(output, "DM", 0, config=changed(row["config"], ("train", "lr"), 5.0))


def no_config(output: Path) -> None:
    (output / "models" / key_of(output) / "config.json").unlink()


def truncated(output: Path) -> None:
    path = output / "models" / key_of(output) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def of_another_model(output: Path) -> None:
    change(output, "DM", 0, parameters=17)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            diverged,
            ["'only / DM / seed 0' diverged", "6.500", "4.250", "(only / MP / seed 0)", "copy"],
        ),
        (in_error, ["'only / DM / seed 0' failed (out of memory)", "--save` does what is missing"]),
        (
            unrecorded,
            ["runs.jsonl: no line of run KEY", "did not end", "--save`", "(only / DM / seed 1)"],
        ),
        (cut_short, ["runs.jsonl: line 2, of run KEY, is no whole result", "cut short", "--save`"]),
        (edited, ["runs.jsonl: the configuration in the line of run KEY", "changed"]),
        (no_config, ["models/KEY: no config.json in it", "Remove the folder"]),
        (truncated, ["models/KEY/model.safetensors: truncated"]),
        (of_another_model, ["parameters, and the run", "has 17", "weights of another model"]),
    ],
    ids=lambda v: v.__name__ if callable(v) else "",
)
def test_runs_that_are_not_done_and_damaged_files(damage, words, output, tmp_path, capsys) -> None:
    key = key_of(output)
    damage(output)
    line = failed(capsys, output / "models" / key, "--output", tmp_path / "o")
    assert all(word.replace("KEY", key) in line for word in words), line
    assert not (tmp_path / "o").exists()


def test_what_a_kill_left_is_refused(output, tmp_path, capsys) -> None:
    partial = output / "models" / f"{key_of(output)}.4711.partial"
    shutil.copytree(output / "models" / key_of(output), partial)
    line = failed(capsys, partial, "--output", tmp_path / "o")
    assert "killed while it saved" in line and "--save` does what is missing" in line


@pytest.mark.parametrize("name", ["", "models"])
def test_the_study_itself_is_no_checkpoint(name, output, tmp_path, capsys) -> None:
    line = failed(capsys, output / name, "--output", tmp_path / "o")
    assert "output folder of a study" in line and f"models/{key_of(output)} (only / DM" in line
    assert "and 2 more" in line
    shutil.rmtree(output / "models")
    line = failed(capsys, output, "--output", tmp_path / "o")
    assert "none that is done and was saved (`--save`)" in line


def test_flags_that_make_no_sense_here(output, tmp_path, capsys) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("datasets")
    one, other = (output / "models" / key_of(output, seed=s) for s in (0, 1))
    to = ["--output", tmp_path / "o"]
    line = failed(capsys, one, "--seeds", other, *to)
    assert f"--seeds {other}" in line and "counted from its runs.jsonl" in line
    line = failed(capsys, one, "--checkpoint", 3, *to)
    assert "--checkpoint is 3" in line and "last step alone" in line
    script = train(tmp_path, "dm")
    line = failed(capsys, script, "--seeds", one, *to)
    assert f"--seeds {one}: a run of a study, and RUN {script} is none" in line
    assert not (tmp_path / "o").exists()


def test_rows_with_any_value_anywhere(output) -> None:
    """The run's own row, a seed's and a baseline's: a sentence, or a card."""
    rows = lines_of(output)
    for row in rows:  # as if there had been a second stage
        own = ("key", "name", "setting", "arm", "seed", "config", "corpus", "environment")
        stage = {k: copy.deepcopy(v) for k, v in row.items() if k not in own}
        row["config"]["then"] = {k: copy.deepcopy(row["config"][k]) for k in ("train", "model")}
        row["then"] = {**stage, "held_out_before": 5.0, "scores": {"t": {"acc": [0.5, 0.1]}}}
        renamed(output, row)
    write_lines(output, rows)
    folder = output / "models" / key_of(output)
    fine = refused = 0
    for arm, seed in (("DM", 0), ("DM", 1), ("MP", 0)):
        at = next(i for i, r in enumerate(rows) if (r["arm"], r["seed"]) == (arm, seed))
        for place in places(rows[at]):
            if any(isinstance(k, int) and k > 0 for k in place) or place[-1] in (
                "loss",
                "grad_norm",
            ):
                continue
            # Any change of the configuration is one of its key.
            for value in WRONG[:1] if place[0] == "config" else WRONG:
                write_lines(output, [*rows[:at], changed(rows[at], place, value), *rows[at + 1 :]])
                try:
                    source = find_source(folder)
                    facts = training(source.study)
                except ValueError as error:
                    assert (arm, seed) == ("DM", 0), (place, value)
                    assert str(error).endswith(".") and len(str(error)) > 60
                    refused += 1
                    continue
                json.dumps(facts, allow_nan=False)
                assert write_card(results_of(facts))
                fine += 1
    assert fine > 1000 and refused > 100


def renamed(output: Path, row: dict) -> None:
    from hf_deltamatch.training.study_rows import key_of as of_config

    key = of_config(row["config"])
    (output / "models" / row["key"]).rename(output / "models" / key)
    row["key"] = key
