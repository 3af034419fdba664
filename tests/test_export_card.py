"""Cards and results of exports: every number from the JSON, metadata that the hub's own code reads."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("datasets")

import yaml  # noqa: E402
from export_runs import MODEL, checkpoint_of, train, untraced  # noqa: E402
from huggingface_hub import ModelCard  # noqa: E402
from tiny_models import one_thread  # noqa: E402, F401
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from hf_deltamatch import AttentionRecipe, LinearRecipe, cli  # noqa: E402
from hf_deltamatch.export import evaluations, facts  # noqa: E402

LICENSE = Path(__file__).parent.parent / "LICENSE"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [train(folder, f"dm-{seed}", seed=seed) for seed in (0, 1, 2)]


def lm_eval_file(path: Path, **changes) -> Path:
    """As lm-eval writes it: a benchmark of the hub, a local task, a group."""
    found = {
        "results": {
            "arc_easy": {
                "alias": "arc_easy",
                "acc,none": 0.4123456,
                "acc_stderr,none": 0.0101234,
                "acc_norm,none": 0.398,
                "acc_norm_stderr,none": "N/A",
            },
            "toy": {"alias": "toy", "acc,none": 0.75, "acc_stderr,none": float("nan")},
            "group": {"alias": "group", "acc,none": 0.5},
        },
        "configs": {
            "arc_easy": {"dataset_path": "allenai/ai2_arc", "dataset_name": "ARC-Easy"},
            "toy": {"dataset_path": "json"},
        },
        "n-shot": {"arc_easy": 0, "toy": 0},
        "n-samples": {
            "arc_easy": {"original": 2376, "effective": 2376},
            "toy": {"original": 8, "effective": 8},
        },
        "config": {"limit": None},
        "date": 1764547200.0,
        "lm_eval_version": "0.4.13",
        **changes,
    }
    path.write_text(json.dumps(found))
    return path


def export(*argv: object) -> int:
    return cli.main(["export", *map(str, argv)])


@pytest.fixture(scope="module")
def exported(runs, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    out = folder / "tiny-dm"
    argv = [runs[0], "--output", out, "--seeds", *runs[1:], "--text", LICENSE]
    argv += ["--license", "apache-2.0", "--about", "A test.", "--limit", "For tests only."]
    assert export(*argv, "--lm-eval", lm_eval_file(folder / "results_a.json")) == 0
    return out


def test_every_number_comes_from_the_results(exported) -> None:
    card = (exported / "README.md").read_text()
    results = json.loads((exported / "results.json").read_text())
    assert untraced(card, results) == set()
    # The search finds what does not belong.
    assert untraced(card + "\n0.4321 and 17,017", results) == {"0.4321", "17017"}
    assert "{" not in card.split("## Recipe")[0] and "None" not in card


def test_card_quotes_the_run(exported, runs) -> None:
    card = (exported / "README.md").read_text()
    logged = [json.loads((r / "results.json").read_text()) for r in runs]
    for key, text in (("loss", "training loss, last step"), ("eval_loss", "held-out loss")):
        values = [r[key] for r in logged]
        mean, std = statistics.mean(values), statistics.stdev(values)
        assert f"| {text} | {values[0]:.3f} | {mean:.3f} ± {std:.3f} |" in card
    assert "3 seeds, mean ± deviation" in card and "One seed" not in card
    assert "`texts.jsonl`" in card and "Name your own copy of: data" in card
    assert "python examples/pretrain.py --config train.yaml" in card
    assert "* For tests only." in card and "A test." in card
    # The recipe, as the command prints it.
    assert f"```text\n{AttentionRecipe()}\n{LinearRecipe()}\n{LinearRecipe().legend}\n```" in card


def test_the_hub_reads_the_front_matter(exported) -> None:
    card = ModelCard.load(exported / "README.md")
    data = card.data.to_dict()
    assert data["library_name"] == "transformers" and data["license"] == "apache-2.0"
    assert data["pipeline_tag"] == "text-generation"
    assert {"fp8", "delta-matching", "arm-dm"} <= set(data["tags"])
    assert "base_model" not in data and "datasets" not in data  # local files
    (result, other) = card.data.eval_results
    assert (result.dataset_type, result.metric_type) == ("allenai/ai2_arc", "acc")
    assert result.metric_value == 0.4123456 and other.metric_type == "acc_norm"
    assert "toy" not in str(data)


def test_eval_results_are_the_hubs_format(exported) -> None:
    """Its own parser; benchmarks of the hub only."""
    parse = pytest.importorskip("huggingface_hub._eval_results").parse_eval_result_entries
    (path,) = (exported / ".eval_results").iterdir()
    assert path.name == "arc_easy.yaml"
    (entry,) = parse(yaml.safe_load(path.read_text()))
    assert (entry.dataset_id, entry.task_id) == ("allenai/ai2_arc", "arc_easy")
    assert entry.value == 0.4123456 and entry.date == "2025-12-01"
    assert entry.notes == "acc, 0-shot, standard error 0.0101, lm-eval 0.4.13"
    assert entry.verify_token is None


def test_a_limited_evaluation_is_no_benchmark_result(runs, tmp_path) -> None:
    file = lm_eval_file(tmp_path / "l.json", config={"limit": 16.0})
    assert export(runs[0], "--output", tmp_path / "o", "--lm-eval", file) == 0
    assert not (tmp_path / "o" / ".eval_results").exists()
    card = (tmp_path / "o" / "README.md").read_text()
    assert "the first 16 documents of each task only: no benchmark result" in card
    assert ModelCard(card).data.eval_results is None
    assert untraced(card, json.loads((tmp_path / "o" / "results.json").read_text())) == set()


def test_evaluations_of_other_weights_are_refused(runs, tmp_path, capsys) -> None:
    ours = {"attention": {"delta_matching": 2}, "linear": {}, "weights_sha256": "ab" * 32}
    file = lm_eval_file(tmp_path / "o.json", config={"limit": None, "deltamatch": ours})
    assert export(runs[0], "--output", tmp_path / "o", "--lm-eval", file) == 2
    assert "of other weights" in capsys.readouterr().err and not (tmp_path / "o").exists()
    # Export, evaluate that, export again: the same weights.
    assert export(runs[0], "--output", tmp_path / "first") == 0
    from hf_deltamatch.hf.lm_eval import _weights_sha256

    ours["weights_sha256"] = _weights_sha256(tmp_path / "first")
    lm_eval_file(file, config={"limit": None, "deltamatch": ours})
    assert export(runs[0], "--output", tmp_path / "o", "--lm-eval", file) == 0
    card = (tmp_path / "o" / "README.md").read_text()
    assert "lm-eval 0.4.13, attention in `delta_matching`, linears in high precision:" in card


def test_results_files_must_agree(tmp_path) -> None:
    a = lm_eval_file(tmp_path / "a.json")
    b = lm_eval_file(tmp_path / "b.json", lm_eval_version="0.5")
    with pytest.raises(ValueError, match=r"b\.json: lm_eval_version is '0.5' and '0.4.13'"):
        evaluations.merge_lm_eval([a, b])
    found = evaluations.merge_lm_eval([a, a])
    assert set(found["tasks"]) == {"arc_easy", "toy"}
    assert found["tasks"]["toy"]["metrics"]["acc"]["stderr"] is None


@pytest.mark.parametrize("change", ["options", "step"])
def test_a_spread_is_over_seeds_alone(runs, change, tmp_path, capsys) -> None:
    other = Path(shutil.copytree(runs[1], tmp_path / "other"))
    if change == "options":
        path = other / "checkpoint-00000003" / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["run"]["lr"] = 1.0
        path.write_text(json.dumps(manifest))
        word = "more than its seed: lr"
    else:
        shutil.rmtree(other / "checkpoint-00000003")
        word = "no checkpoint of step 3"
    assert export(runs[0], "--seeds", other, "--output", tmp_path / "o") == 2
    assert word in capsys.readouterr().err


def test_names_of_the_hub(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "model").touch()
    names = ["org/model", "my/model", "data/chats.jsonl", "./a/b", "runs/a/final", "stdlib", None]
    assert [facts.is_hub_name(n) for n in names] == [True] + [False] * 6


def test_a_local_file_has_no_configuration_of_a_data_set() -> None:
    """A file in place of the data set that the run's YAML names, with a configuration of it."""
    options = {"data": "/home/me/chats.jsonl", "data_config": "sample-10BT", "model": "org/base"}
    found = facts.without_paths(options)
    assert found == {"data": "chats.jsonl", "data_config": None, "model": "org/base"}
    options["data"] = "org/texts"
    assert facts.without_paths(options)["data_config"] == "sample-10BT"


def test_base_model_and_data_of_the_hub(tmp_path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
    more = {"model": "org/base", "rope": "base", "data": "org/texts", "data_config": None}
    more |= {"split": "train", "text_column": "text", "tokenizer": str(tmp_path / "gone")}
    run = checkpoint_of(model, tmp_path / "run", **more)
    assert export(run, "--output", tmp_path / "out") == 0
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert data.base_model == "org/base" and data.datasets == ["org/texts"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "extend_context.py" in card and "AutoTokenizer" not in card
    assert "none: that of gone cannot be loaded" in card and str(tmp_path) not in card


def test_nothing_recorded_is_said(tmp_path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL)).save_pretrained(tmp_path / "m")
    assert export(tmp_path / "m", "--output", tmp_path / "out") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    for words in ("is not recorded beside them", "None recorded.", "In what arithmetic"):
        assert words in card
    assert untraced(card, json.loads((tmp_path / "out" / "results.json").read_text())) == set()
