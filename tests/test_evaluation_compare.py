"""``hf-deltamatch compare``: scores, differences, their standard errors, and what is refused."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import pytest

from hf_deltamatch import cli
from hf_deltamatch.evaluation.comparison import compare
from hf_deltamatch.evaluation.results import load

DATE = "2026-01-02T03-04-05.678901"
TASKS = Path(__file__).parent / "lm_eval_tasks"

# Per document: accuracy of "easy" and "hard", log-likelihood of "words".
MP = {"easy": [1, 0, 1, 1], "hard": [0, 0, 1, 0, 1, 0], "words": [-2.0, -3.5, -1.0]}
DM = {"easy": [1, 1, 1, 0], "hard": [0, 1, 1, 0, 1, 0], "words": [-2.5, -3.0, -1.1]}


def se(values) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def write(folder: Path, values: dict, *, samples: bool = True, **changes) -> Path:
    """A results file as lm-eval writes one, with its samples beside it."""
    results, configs = {}, {}
    for task, v in values.items():
        results[task] = {"alias": task, "sample_len": len(v)}
        if task == "words":
            score = math.exp(-statistics.fmean(v))
            results[task] |= {"perplexity,none": score, "perplexity_stderr,none": 0.5}
        else:
            results[task] |= {"acc,none": statistics.fmean(v), "acc_stderr,none": se(v)}
        configs[task] = {"task": task, "doc_to_text": "{{text}}", "metadata": {"pretrained": "x"}}
    parts = [results[t] for t in ("easy", "hard")]
    results["both"] = {
        "acc,none": statistics.fmean(p["acc,none"] for p in parts),
        "acc_stderr,none": math.hypot(*(p["acc_stderr,none"] for p in parts)) / 2,
        "sample_len": 10,
    }
    data = {
        "results": results,
        "groups": {"both": results["both"]},
        "group_subtasks": {"both": ["easy", "hard"]},
        "configs": configs,
        "versions": dict.fromkeys(results, 1.0),
        "n-shot": dict.fromkeys(results, 0),
        "higher_is_better": {
            **{t: {"acc": True} for t in ("easy", "hard", "both")},
            "words": {"perplexity": False},
        },
        "config": {
            "limit": None,
            "fewshot_seed": 1234,
            "deltamatch": {"attention": {"bf16": 2}, "linear": {}},
        },
        "model_name": f"models/{folder.name}",
    }
    for path, value in changes.items():
        *where, last = path.split("__")
        inner = data
        for key in where:
            inner = inner[key.replace("_", "-") if key == "n_shot" else key]
        inner[last] = value
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"results_{DATE}.json"
    file.write_text(json.dumps(data))
    for task, v in values.items() if samples else ():
        metric = "perplexity" if task == "words" else "acc"
        lines = [
            {"doc_id": i, "filter": "none", metric: x, "doc_hash": f"{task}{i}", "prompt_hash": "p"}
            for i, x in enumerate(v)
        ]
        # As processes hand them in: not in order.
        text = "".join(json.dumps(s) + "\n" for s in lines[::2] + lines[1::2])
        (folder / f"samples_{task}_{DATE}.jsonl").write_text(text)
    return file


def rows(folder: Path, *, b=DM, samples=(True, True), tasks=None, **changes) -> dict:
    write(folder / "mp", MP, samples=samples[0])
    write(folder / "dm", b, samples=samples[1], **changes)
    runs = [load(folder / name, name) for name in ("mp", "dm")]
    return {(r["task"], r["metric"]): r for r in compare(runs, tasks)["rows"]}


def test_paired_differences(tmp_path) -> None:
    found = rows(tmp_path)
    assert list(found) == [
        ("easy", "acc"), ("hard", "acc"), ("words", "perplexity"), ("both", "acc"),
    ]  # fmt: skip
    for task in ("easy", "hard"):
        row, change = found[task, "acc"], [b - a for a, b in zip(MP[task], DM[task], strict=True)]
        assert row["scores"]["mp"]["value"] == statistics.fmean(MP[task])
        assert row["scores"]["dm"]["stderr"] == pytest.approx(se(DM[task]))
        assert row["differences"]["dm"]["value"] == pytest.approx(statistics.fmean(change))
        assert row["differences"]["dm"]["stderr"] == pytest.approx(se(change))
        assert row["differences"]["dm"]["how"] == "paired" and row["documents"] == len(MP[task])
    group = found["both", "acc"]["differences"]["dm"]
    parts = [found[t, "acc"]["differences"]["dm"] for t in ("easy", "hard")]
    assert group["value"] == pytest.approx(statistics.fmean(p["value"] for p in parts))
    assert group["stderr"] == pytest.approx(math.hypot(*(p["stderr"] for p in parts)) / 2)
    assert group["how"] == "paired"


def test_perplexity_is_differentiated(tmp_path) -> None:
    """exp(-mean): leave-one-out estimates of the error agree with the linear one."""
    n = 400
    a = [-2 + math.sin(i) for i in range(n)]
    b = [x - 0.1 + 0.2 * math.cos(7 * i) for i, x in enumerate(a)]
    write(tmp_path / "mp", {**MP, "words": a})
    found = rows_of(tmp_path, {**MP, "words": b})["words", "perplexity"]["differences"]["dm"]
    left_out = lambda v, i: math.exp(-(sum(v) - v[i]) / (n - 1))
    jack = [left_out(b, i) - left_out(a, i) for i in range(n)]
    mean = statistics.fmean(jack)
    expected = math.sqrt((n - 1) / n * sum((j - mean) ** 2 for j in jack))
    assert found["stderr"] == pytest.approx(expected, rel=0.01) and found["how"] == "paired"


def rows_of(folder: Path, b: dict) -> dict:
    write(folder / "dm", b)
    runs = [load(folder / name, name) for name in ("mp", "dm")]
    return {(r["task"], r["metric"]): r for r in compare(runs)["rows"]}


@pytest.mark.parametrize("samples", [(True, False), (False, True), (False, False)])
def test_unpaired_without_samples(tmp_path, samples) -> None:
    found = rows(tmp_path, samples=samples)
    for (task, metric), row in found.items():
        errors = [row["scores"][name]["stderr"] for name in ("mp", "dm")]
        assert row["differences"]["dm"]["stderr"] == pytest.approx(math.hypot(*errors)), task
        assert row["differences"]["dm"]["how"] == "unpaired", metric


def test_a_score_that_samples_do_not_explain_is_unpaired(tmp_path) -> None:
    found = rows(tmp_path, **{"results__easy__acc,none": 0.6})["easy", "acc"]
    assert found["differences"]["dm"]["how"] == "unpaired"


def test_a_group_by_size_has_its_weights(tmp_path) -> None:
    for name, values in (("mp", MP), ("dm", DM)):
        mean = statistics.fmean([*values["easy"], *values["hard"]])
        write(tmp_path / name, values, **{"results__both__acc,none": mean})
    runs = [load(tmp_path / name, name) for name in ("mp", "dm")]
    found = {(r["task"], r["metric"]): r for r in compare(runs)["rows"]}
    parts = [found[t, "acc"]["differences"]["dm"]["stderr"] for t in ("easy", "hard")]
    group = found["both", "acc"]["differences"]["dm"]
    assert group["stderr"] == pytest.approx(math.hypot(0.4 * parts[0], 0.6 * parts[1]))


def test_ruler_has_a_standard_error_and_no_row_of_lengths_not_run(tmp_path) -> None:
    """lm-eval gives RULER none, and writes -1 for a length that a document or a run is not of."""
    scores = {"mp": [0.5, -1, 1.0, 0.0], "dm": [1.0, -1, 1.0, 0.5]}
    for name, values in scores.items():
        file = write(tmp_path / name, {"easy": [1, 0], "hard": [1, 0]})
        data = json.loads(file.read_text())
        data["configs"]["niah"] = {}
        ran = [v for v in values if v != -1]
        data["results"]["niah"] = {
            "4096,none": -1,
            "4096_stderr,none": "N/A",
            "8192,none": statistics.fmean(ran),
            "8192_stderr,none": "N/A",
            "sample_len": 4,
        }
        file.write_text(json.dumps(data))
        lines = [{"doc_id": i, "filter": "none", "8192": v} for i, v in enumerate(values)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (file.parent / f"samples_niah_{DATE}.jsonl").write_text(text)
    runs = [load(tmp_path / name, name) for name in scores]
    niah = [r for r in compare(runs)["rows"] if r["task"] == "niah"]
    assert [r["metric"] for r in niah] == ["8192"]
    assert niah[0]["scores"]["mp"]["stderr"] == pytest.approx(se([0.5, 1.0, 0.0]))
    assert niah[0]["differences"]["dm"]["stderr"] == pytest.approx(se([0.5, 0.0, 0.5]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions__easy": 2.0}, "easy: versions 1.0 and 2.0"),
        ({"n_shot__hard": 5}, "hard: n-shot 0 and 5"),
        ({"config__limit": 10}, "limit None and 10"),
        ({"config__gen_kwargs": "do_sample=True"}, "gen_kwargs None and 'do_sample=True'"),
        ({"chat_template_sha": "a1"}, "chat_template_sha None and 'a1'"),
        ({"results__easy__sample_len": 3}, "easy: 4 and 3 documents"),
        ({"configs__easy__doc_to_text": "Q: {{text}}"}, "easy: different doc_to_text"),
        ({"results__easy__acc_norm,none": 0.5}, "only one has the metric acc_norm,none"),
    ],
)  # fmt: skip
def test_mismatches_are_refused(tmp_path, changes, words) -> None:
    with pytest.raises(ValueError, match="mp and dm cannot be compared") as error:
        rows(tmp_path, **changes)
    assert words in str(error.value) and "--tasks" in str(error.value)


def test_functions_in_a_config_are_the_same_wherever_they_lie(tmp_path) -> None:
    for name, address in (("mp", "0x7f01"), ("dm", "0x7f02")):
        write(tmp_path / name, MP, configs__easy__doc_to_text=f"<function text at {address}>")
    assert compare([load(tmp_path / n, n) for n in ("mp", "dm")])["rows"]


def test_other_tasks_are_refused_and_chosen(tmp_path) -> None:
    fewer = {k: v for k, v in DM.items() if k != "words"}
    with pytest.raises(ValueError, match="only mp has words"):
        rows(tmp_path, b=fewer)
    assert {t for t, _ in rows(tmp_path, b=fewer, tasks=["both", "easy"])} == {"both", "easy"}
    with pytest.raises(ValueError, match="dm has no words, only easy, hard, both"):
        rows(tmp_path, b=fewer, tasks=["words"])


def test_other_documents_are_refused(tmp_path) -> None:
    write(tmp_path / "mp", MP)
    write(tmp_path / "dm", DM)
    file = tmp_path / "dm" / f"samples_hard_{DATE}.jsonl"
    file.write_text(file.read_text().replace("hard3", "other"))
    with pytest.raises(ValueError, match="hard: other documents or prompts .* number 3"):
        compare([load(tmp_path / n, n) for n in ("mp", "dm")])


def test_command(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name, values in (("mp", MP), ("dm", DM), ("sd", MP)):
        write(tmp_path / "runs" / name, values, samples=name != "sd")
    assert cli.main(["compare", "runs/mp", "runs/dm", "SD=runs/sd", "--json", "c.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ("| task | metric | n | mp | dm | SD | dm − mp | SD − mp | standard error |")
    hard = [b - a for a, b in zip(MP["hard"], DM["hard"], strict=True)]
    row = next(line for line in lines if line.startswith("| hard |"))
    assert row.split(" | ")[1:3] == ["acc ↑", "6"] and row.endswith("| paired, unpaired |")
    assert f"| +{statistics.fmean(hard):.4f} ± {se(hard):.4f} |" in row
    assert any(line.startswith("| **both** |") for line in lines)
    assert "* dm: models/dm, attention bf16 × 2, linear not in FP8" in lines
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["baseline"] == "mp" and list(found["runs"]) == ["mp", "dm", "SD"]
    assert found["environment"]["packages"]["torch"]


def test_newest_of_a_folder_is_read(tmp_path) -> None:
    old = write(tmp_path / "mp", MP)
    new = old.with_name("results_2026-02-01T00-00-00.000001.json")
    new.write_text(old.read_text())
    assert load(tmp_path / "mp", "mp").path == new and load(old, "mp").path == old


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["a"], "a comparison needs two"),
        (["a", "b"], "a does not exist"),
        (["empty", "mp"], "empty has no results file of lm-eval"),
        (["mp", "x=other.json"], "no 'results'"),
        (["mp", "x=text.json"], "not JSON"),
        (["mp", "x=mp"], "both are mp"),
        (["mp", "mp"], "two results are called 'mp'"),
        (["mp", "dm", "--json", "no/where.json"], "a folder that exists"),
        (["mp", "dm=org/model", "--", "--tasks", "x"], "--output is missing"),
        (["mp", "dm=m", "--output", "o", "--", "-o", "x"], "choose --output"),
        (["mp", "dm=m,attention", "--output", "o", "--", "--tasks", "x"], "not key=value"),
    ],
)
def test_bad_arguments(argv, words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mp", "dm"):
        write(tmp_path / name, MP)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "text.json").write_text("{")
    assert cli.main(["compare", *argv]) == 2
    err = capsys.readouterr().err
    assert words in err and err.startswith("hf-deltamatch compare: ") and len(err.splitlines()) == 1


def test_damaged_samples_are_named(tmp_path) -> None:
    write(tmp_path / "mp", MP)
    (tmp_path / "mp" / f"samples_easy_{DATE}.jsonl").write_text('{"doc_id": 0\n')
    write(tmp_path / "dm", DM)
    with pytest.raises(ValueError, match="samples_easy_.*is damaged"):
        compare([load(tmp_path / n, n) for n in ("mp", "dm")])


def test_models_are_evaluated_first(tmp_path, monkeypatch, capsys) -> None:
    """One command: a checkpoint in BF16 and in FP8, samples logged, so that they pair."""
    tasks = pytest.importorskip("lm_eval.tasks")
    import torch
    from tiny_models import build
    from transformers import ByT5Tokenizer

    class OnlyGiven(tasks.TaskManager):  # lm-eval's own take long to read
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **{**kwargs, "include_defaults": False})

    monkeypatch.setattr(tasks, "TaskManager", OnlyGiven)
    torch.manual_seed(0)
    build("llama", vocab_size=259, max_position_embeddings=512).save_pretrained(tmp_path / "model")
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    argv = ["compare", "mp=model,attention=none,linear=none", "dm=model", "--output", "out"]
    argv += ["--json", "c.json", "--", "--tasks", "tiny", "--include_path", str(TASKS)]
    argv += ["--model_args", "dtype=float32,add_bos_token=False", "--device", "cpu", "--limit", "6"]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    found = json.loads(Path("c.json").read_text())
    assert found["runs"]["dm"]["attention"] == {"delta_matching": 2}
    assert found["runs"]["mp"]["attention"] == {} and found["runs"]["dm"]["limit"] == 6
    assert {r["task"] for r in found["rows"]} == {"tiny", "tiny_ll", "tiny_mc"}
    assert all(r["differences"]["dm"]["how"] == "paired" for r in found["rows"])
    perplexity = next(r for r in found["rows"] if r["metric"] == "perplexity")
    assert perplexity["differences"]["dm"]["value"] != 0
    assert re.search(r"limited to 6 documents a task: not a benchmark result", out)
    # Read back, without models: the same table.
    assert cli.main(["compare", "mp=out/mp", "dm=out/dm"]) == 0
    assert capsys.readouterr().out.strip() in out
