"""lm-eval in a study: the bytes' tokenizer, the scores, and how the report pairs them."""

from __future__ import annotations

import json
import re

import pytest
import torch
import yaml
from study_files import small
from tiny_models import one_thread  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_deltamatch import cli
from hf_deltamatch.study import evaluate as study_evaluate
from hf_deltamatch.study import pool, report
from hf_deltamatch.study import run as study_run
from hf_deltamatch.study.evaluate import CHOICES, Evaluate, ScoringError, questions
from hf_deltamatch.study.run import Trainer, train
from hf_deltamatch.study.spec import parse_study
from hf_deltamatch.study.tokenizer import byte_tokenizer

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.tasks import TaskManager  # noqa: E402

from hf_deltamatch.hf import lm_eval_scores  # noqa: E402
from hf_deltamatch.hf.lm_eval import DeltaMatchLM  # noqa: E402

CPU = torch.device("cpu")
LINEARS = "study_linears.yaml"
FOXES = {
    "task": "foxes",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{t}}",
    "metric_list": [{"metric": "bits_per_byte"}],
    "metadata": {"version": 1.0},
}


def study_of(text: str, arms: list[str], **evaluate):
    data = small(LINEARS, text, arms=arms, claims=[], evaluate={"limit": 8, **evaluate})
    data["train"]["seq_len"] = 160
    return parse_study(data)


def test_a_token_is_a_byte(tmp_path) -> None:
    tokenizer = byte_tokenizer()
    text = "def f(x):\n\treturn 'é😀' # Ā, \r\n \x7f "
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text and len(tokenizer) == 256
    assert (
        tokenizer.eos_token_id
        == tokenizer.bos_token_id
        == 0
        == tokenizer("<|end|>")["input_ids"][0]
    )
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ids


def test_questions_are_the_held_out_text(corpus) -> None:
    held = corpus.held_out.numpy().tobytes().decode()
    asked = questions(corpus, 20)
    assert asked == questions(corpus, 20) and len({q["answer"] for q in asked}) > 1
    for q in asked:
        assert len(q["choices"]) == CHOICES and q["question"] + q["choices"][q["answer"]] in held
    with pytest.raises(ValueError, match="10 held-out bytes are fewer"):
        questions(corpus._replace(held_out=corpus.held_out[:10]), 1)


def test_scores_are_the_model_s(text, corpus) -> None:
    """The accuracy against log-likelihoods by hand."""
    run = study_of(text, ["MP"]).runs[0]
    row = train(run, corpus, CPU)
    trainer = Trainer(run.config, corpus, CPU)
    for _ in range(3):
        trainer.step()
    trainer.model.eval()
    right = 0
    for q in questions(corpus, 8):
        totals = []
        for choice in q["choices"]:
            ids = torch.tensor([list((q["question"] + choice).encode())])
            logs = trainer.model(input_ids=ids[:, :-1], use_cache=False).logits.log_softmax(-1)
            own = logs.gather(2, ids[:, 1:, None])[0, -len(choice.encode()) :, 0]
            totals.append(own.sum().item())
        right += max(range(CHOICES), key=totals.__getitem__) == q["answer"]
    value, error = row["scores"]["continuation"]["acc"]
    assert value == pytest.approx(right / 8)
    assert error == pytest.approx((value * (1 - value) / 7) ** 0.5, rel=1e-4)


def test_scores_of_local_tasks_and_their_gaps(text, corpus, tmp_path) -> None:
    """Tasks from a folder; every arm in its own arithmetic, and the report pairs them."""
    (tmp_path / "docs.jsonl").write_text(
        "".join(json.dumps({"t": f"fox {i}."}) + "\n" for i in range(9))
    )
    task = {**FOXES, "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.jsonl")}}}
    (tmp_path / "foxes.yaml").write_text(yaml.safe_dump(task))
    tasks = ["foxes", "continuation"]
    study = study_of(text, ["MP", "DM"], tasks=tasks, include=str(tmp_path))
    rows = {run.key: train(run, corpus, CPU) for run in study.runs}
    by_arm = {row["arm"]: row["scores"] for row in rows.values()}
    assert set(by_arm["DM"]) == set(tasks)
    bits = {arm: scores["foxes"]["bits_per_byte"][0] for arm, scores in by_arm.items()}
    assert 1 < bits["MP"] < 20 and 0 < abs(bits["DM"] - bits["MP"]) < 0.5
    found = report.build_report(study, rows)
    score = found["settings"]["Llama, no-QK-norm"]["DM"]["scores"]["foxes bits_per_byte"]
    assert score["gap"]["mean"] == pytest.approx(bits["DM"] - bits["MP"], abs=1e-6)
    page = report.to_markdown(found)
    assert f"| DM | foxes bits_per_byte | {bits['DM']:.3f}" in page
    assert "| MP | continuation acc | " in page


@pytest.mark.parametrize("arm", ["MP", "DM + FP8 linears"])
def test_saved_weights_load_and_score_the_same(arm, text, corpus, tmp_path) -> None:
    """By our model of lm-eval, from the folder alone; plain Transformers gets the weights, too."""
    data = small(LINEARS, text, claims=[], evaluate={"limit": 8})
    data["train"]["seq_len"] = 160
    run = next(r for r in parse_study(data).runs if r.arm == arm)
    row = train(run, corpus, CPU, save=tmp_path)
    fp8 = arm != "MP"
    lm = DeltaMatchLM(
        str(tmp_path),
        attention="delta_matching" if fp8 else "none",
        linear="blockwise" if fp8 else "none",
        device="cpu",
        dtype="float32",
        batch_size=32,
        max_length=160,
    )
    task = study_evaluate._continuation(corpus, 8, tmp_path)
    out = lm_eval.simple_evaluate(
        lm, tasks=[task], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0
    )
    assert out["results"]["continuation"]["acc,none"] == row["scores"]["continuation"]["acc"][0]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    trained = dict(lm.model.named_parameters())
    assert all(torch.equal(p, trained[n]) for n, p in plain.named_parameters())


def test_scores_are_of_the_last_stage(text, corpus) -> None:
    data = small("study_context.yaml", text, arms=["MP"], evaluate={"limit": 2})
    row = train(parse_study(data).runs[0], corpus, CPU)
    assert "scores" not in row and set(row["then"]["scores"]) == {"continuation"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": "continuation"}, "evaluate.tasks is 'continuation'.*list of names"),
        ({"tasks": []}, "evaluate.tasks is"),
        ({"limit": 0}, "evaluate.limit is 0.*1 or more"),
        ({"batch_size": None}, "evaluate.batch_size is None"),
        ({"num_fewshot": -1}, "evaluate.num_fewshot is -1.*0 or more"),
        ({"task": ["x"]}, "unknown 'task'"),
    ],
)
def test_refused(options, words) -> None:
    with pytest.raises(ValueError, match=words):
        parse_study({"model": {"model_type": "llama"}, "evaluate": options})
    assert Evaluate().tasks == ("continuation",)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": ["continuation", "foxs"]}, "'foxs' is no task, group or tag.*near are foxes"),
        ({"include": "none"}, "'none' is no folder with files of tasks"),
        ({"source": "short.txt"}, "50 held-out bytes are fewer than a question"),
    ],
)
def test_tasks_are_known_before_anything_is_trained(
    options, words, text, tmp_path, capsys, monkeypatch
) -> None:
    """By the command: no worker has started and nothing is written."""
    (tmp_path / "foxes.yaml").write_text(yaml.safe_dump(FOXES))
    (tmp_path / "short.txt").write_text("x" * 250)
    data = small(LINEARS, text, evaluate={"include": str(tmp_path), **options})
    if "source" in options:
        data["corpus"]["source"] = str(tmp_path / data["evaluate"].pop("source"))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(data))
    monkeypatch.setattr(pool, "run_all", lambda *_, **__: pytest.fail("trained"))
    folder = tmp_path / "out"
    assert cli.main(["study", str(tmp_path / "a.yaml"), "--output", str(folder)]) == 2
    assert re.search(f"^hf-deltamatch study: study: .*{words}", capsys.readouterr().err)
    assert not folder.exists()


def test_names_of_tasks(tmp_path, monkeypatch) -> None:
    """lm-eval's own, those of a folder, and files."""
    (tmp_path / "foxes.yaml").write_text(yaml.safe_dump(FOXES))
    lm_eval_scores.check_tasks(["foxes", str(tmp_path / "foxes.yaml")], str(tmp_path))
    lm_eval_scores.check_tasks(["foxes", "lambada_openai"], str(tmp_path))
    with pytest.raises(ValueError, match="'lambada_opena' is no task.*near are lambada_openai"):
        lm_eval_scores.check_tasks(["lambada_opena"])


@pytest.mark.parametrize("save", [True, False])
def test_weights_are_kept_when_scoring_fails(save, text, corpus, tmp_path, monkeypatch) -> None:
    def fail(*_) -> dict:
        raise KeyError("foxs")

    run = study_of(text, ["MP"]).runs[0]
    monkeypatch.setattr(study_run, "evaluate", fail)
    folder = tmp_path / "models" / run.key
    folder.parent.mkdir()
    said = f"are in models/{run.key}" if save else r"are lost \(--save keeps them\)"
    with pytest.raises(ScoringError, match=f"scoring failed; .* {said}. KeyError: 'foxs'"):
        train(run, corpus, CPU, save=folder if save else None)
    assert folder.exists() is save
    if save:
        assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0


def test_scores_do_not_depend_on_saving(text, corpus, tmp_path, monkeypatch) -> None:
    """What is saved has the ends of its own tokenizer, the model that is scored those of its class."""
    seen = []
    ends = lambda model, *_: seen.append(model.generation_config.eos_token_id) or {}
    monkeypatch.setattr(study_run, "evaluate", ends)
    run = study_of(text, ["MP"]).runs[0]
    train(run, corpus, CPU)
    train(run, corpus, CPU, save=tmp_path / "saved")
    assert seen[0] == seen[1]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config.eos_token_id == 0


def test_lm_eval_is_asked_for_before_training(monkeypatch) -> None:
    study_evaluate.require_lm_eval()
    monkeypatch.setattr(study_evaluate.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="`evaluate` needs lm-eval: pip install"):
        study_evaluate.require_lm_eval()
