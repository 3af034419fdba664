"""The trained models in `model_cards/`: they load with Transformers alone and are what their cards say."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

import torch  # noqa: E402
from export_runs import plain_loss, untraced  # noqa: E402
from huggingface_hub import ModelCard  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_models import one_thread  # noqa: E402, F401
from transformers import AutoModelForCausalLM  # noqa: E402

from hf_deltamatch import DeltaMatchConfig, check_model  # noqa: E402
from hf_deltamatch.export.card import write_card  # noqa: E402
from hf_deltamatch.study.spec import load_study  # noqa: E402
from hf_deltamatch.training.options import Options, checked, read_yaml  # noqa: E402

CARDS = Path(__file__).parent.parent / "model_cards"
TEXT = CARDS / "check.txt"
FOLDERS = sorted(p.parent for p in CARDS.glob("*/config.json"))
MB = 2**20


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def test_there_is_one_per_arm() -> None:
    assert [p.name for p in FOLDERS] == ["tiny-dm", "tiny-mp", "tiny-sd"]
    files = [p for p in CARDS.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 10 * MB
    assert all(p.stat().st_size < 3 * MB for p in files)
    kinds = {".md", ".json", ".yaml", ".safetensors", ".txt"}
    assert {p.suffix for p in files} <= kinds  # no pickle


def test_only_the_arm_differs() -> None:
    rest = [
        {k: v for k, v in results_of(f)["training"]["options"].items() if k != "arm"}
        for f in FOLDERS
    ]
    assert rest[0] == rest[1] == rest[2]
    arms = [results_of(f)["training"]["options"]["arm"] for f in FOLDERS]
    assert arms == ["dm", "mp", "sd"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_loss_of_the_card_by_transformers_alone(folder) -> None:
    results = results_of(folder)
    check = results["check"]
    assert hashlib.sha256(TEXT.read_bytes()).hexdigest() == check["sha256"]
    loss, _ = plain_loss(folder, TEXT, check["window"])
    # FP32 sums in another order, on another machine.
    assert loss == pytest.approx(check["loss"], abs=1e-3)
    quoted = re.search(r"plain Transformers \| ([\d.]+) \|", (folder / "README.md").read_text())[1]
    assert loss == pytest.approx(float(quoted), abs=2e-3)
    # Trained: a new model knows nothing of its 320 tokens, ln 320 = 5.77.
    assert loss < 2.5 and results["training"]["numbers"]["eval_loss"] < 2.5


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_card_is_its_results(folder) -> None:
    results, card = results_of(folder), (folder / "README.md").read_text()
    assert card == write_card(results)
    assert untraced(card, results) == set()
    data = ModelCard(card).data
    assert data.license == "apache-2.0" and f"arm-{folder.name[-2:]}" in data.tags
    for name, fact in results["weights"]["files"].items():
        content = (folder / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (
            fact["bytes"],
            fact["sha256"],
        )
    state = load_file(folder / "model.safetensors")
    assert sum(t.numel() for t in state.values()) == results["weights"]["parameters"]
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
    assert not re.search(r"/(home|tmp|root|work)/", card + json.dumps(results))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_the_recipe_can_be_restored(folder) -> None:
    """As the card says to; the loss in FP8 is that of high precision but for rounding."""
    from transformers import AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(TEXT.read_text(), return_tensors="pt").input_ids
    ids = ids[:, :256]
    with torch.no_grad():
        plain = float(model(input_ids=ids, labels=ids).loss)
        recipe = json.loads((folder / "config.train.json").read_text())["quantization_config"]
        DeltaMatchConfig.from_dict(recipe).apply_to(model)
        fp8 = float(model(input_ids=ids, labels=ids).loss)
    found = check_model(model)
    assert len(found.linears) == 28
    assert len(found.attention) == (0 if folder.name.endswith("mp") else 4)
    assert 0 < abs(fp8 - plain) < 0.03


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_the_command_of_the_card_is_the_run(folder) -> None:
    """Its file, with the defaults of what it leaves out, is the run's identity."""
    options = Options(**checked(Options, read_yaml(folder / "train.yaml")))
    assert json.loads(json.dumps(options.identity())) == results_of(folder)["training"]["options"]


def test_table_of_the_readme() -> None:
    rows = {}
    for line in (CARDS / "README.md").read_text().splitlines():
        if line.startswith("| [tiny-"):
            name, *cells = (c.strip() for c in line.strip("|").split("|"))
            rows[name.split("]")[0].strip("[ ")] = cells
    assert sorted(rows) == [p.name for p in FOLDERS]
    for folder in FOLDERS:
        r = results_of(folder)
        spread = r["training"]["spread"]
        over = lambda k, s=spread: f"{s[k]['mean']:.3f} ± {s[k]['std']:.3f}"
        printed = rows[folder.name][1:]
        assert printed == [over("loss"), over("eval_loss"), f"{r['check']['loss']:.3f}"]
    # What the text says of them.
    held_out = {f.name: results_of(f)["training"]["spread"]["eval_loss"]["values"] for f in FOLDERS}
    others = zip(held_out["tiny-dm"], held_out["tiny-mp"], strict=True)
    lowest = [sd < min(o) for sd, o in zip(held_out["tiny-sd"], others, strict=True)]
    said = f"SD has the lowest held-out loss in {sum(lowest)} of the {len(lowest)} seeds"
    assert said in (CARDS / "README.md").read_text()


OF_A_STUDY = sorted(p.parent for p in CARDS.glob("study-*/results.json"))


@pytest.mark.parametrize("folder", OF_A_STUDY, ids=lambda p: p.name)
def test_card_of_a_study_is_its_results_and_the_study_s(folder) -> None:
    results, card = results_of(folder), (folder / "README.md").read_text()
    assert card == write_card(results)
    assert untraced(card, results) == set()
    study = CARDS.parent / "examples" / "studies" / "scores_h200"
    rows = [json.loads(line) for line in (study / "runs.jsonl").read_text().splitlines()]
    training = results["training"]
    (row,) = (r for r in rows if r["key"] == training["study"]["key"])
    peers = [r for r in rows if r["arm"] == row["arm"]]
    for name in ("final_loss", "held_out_loss"):
        assert training["numbers"][name] == row[name]
        assert sorted(training["spread"][name]["values"]) == sorted(r[name] for r in peers)
    assert (
        training["scores"]["tasks"]["continuation"]["acc"]["value"]
        == (row["scores"]["continuation"]["acc"][0])
    )
    (run,) = load_study(folder / "study.yaml").runs
    assert run.key == row["key"]


def test_table_of_the_studys_models() -> None:
    rows = {}
    for line in (CARDS / "README.md").read_text().splitlines():
        if line.startswith("| [study-"):
            name, *cells = (c.strip() for c in line.strip("|").split("|"))
            rows[name.split("]")[0].strip("[ ")] = cells[1:]
    expected = {}
    for folder in OF_A_STUDY:
        r = results_of(folder)
        spread, tasks = r["training"]["spread"], r["training"]["scores"]["tasks"]
        found = [
            spread["final_loss"],
            spread["held_out_loss"],
            tasks["continuation"]["acc"]["over_seeds"],
        ]
        expected[folder.name] = [f"{s['mean']:.3f} ± {s['std']:.3f}" for s in found]
        expected[folder.name].append(f"{r['check']['loss']:.3f}")
    assert rows == expected and len(rows) == 4
