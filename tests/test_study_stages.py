"""Second stages, claims and arms of parts: what they compute and how the report shows them."""

from __future__ import annotations

import json
import math

import pytest
import torch
import yaml
from study_files import CONFIGS, small
from tiny_models import one_thread  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM

from hf_deltamatch import cli
from hf_deltamatch.hf.linear import fp8_linears
from hf_deltamatch.study import pool, report
from hf_deltamatch.study import run as study_run
from hf_deltamatch.study.claims import check
from hf_deltamatch.study.model import build_model
from hf_deltamatch.study.spec import Claim, load_study, parse_study

CPU = torch.device("cpu")
CONTEXT, LINEARS = "study_context.yaml", "study_linears.yaml"


def test_a_text_that_is_no_longer_than_a_row(text, tmp_path, capsys) -> None:
    """Of a second stage, whose rows are longer: said before the first is trained."""
    parts = ((4, 400, "held-out text has 100 bytes"), (2, 256, "training text has 128 bytes"))
    for held_out, length, words in parts:
        (tmp_path / "text.txt").write_text("x" * length)
        data = small(CONTEXT, str(tmp_path / "text.txt"))
        data["corpus"]["held_out_every"] = held_out
        (tmp_path / "a.yaml").write_text(yaml.safe_dump(data))
        assert cli.main(["study", str(tmp_path / "a.yaml"), "--output", str(tmp_path / "o")]) == 2
        said = capsys.readouterr().err
        assert words in said and "rows of 128 tokens" in said
        assert not (tmp_path / "o").exists()


def test_a_second_stage_goes_on_with_the_weights_of_the_first(text, corpus, monkeypatch) -> None:
    """Against two trainers by hand; and its context, positions and learning rate are its own."""
    run = parse_study(small(CONTEXT, text)).runs[0]
    assert run.arm == "MP" and run.setting == "RoPE base, 8 times"
    trainers = []
    real = study_run.Trainer.__init__
    monkeypatch.setattr(
        study_run.Trainer,
        "__init__",
        lambda self, *args: (trainers.append(self), real(self, *args))[1],
    )
    row = study_run.train(run, corpus, CPU)
    first, second = trainers
    assert len(row["loss"]) == 3 and len(row["then"]["loss"]) == 3
    assert second.span.shape == (129,) and second.starts.shape == (3, 1)
    assert second.rates.tolist() == pytest.approx([3e-4] * 3)
    inverse = [t.model.model.rotary_emb.inv_freq for t in trainers]
    assert (
        inverse[1][-1] == pytest.approx(85550.0 ** (-14 / 16)) and inverse[0][-1] > inverse[1][-1]
    )
    # By hand, from the first stage's result.
    own = study_run.Trainer({**run.config, **run.config["then"]}, corpus, CPU, None, first.master)
    before = own.held_out_loss()
    for _ in range(3):
        own.step()
    assert row["then"]["loss"] == pytest.approx(own.losses.tolist(), rel=1e-5)
    assert row["then"]["held_out_before"] == pytest.approx(before, rel=1e-5)
    assert row["then"]["held_out_loss"] == pytest.approx(second.held_out_loss(), rel=1e-5)
    json.dumps(row, allow_nan=False)


def test_a_second_stage_of_other_sizes_is_refused(text, corpus) -> None:
    data = small(CONTEXT, text)
    data["settings"][0]["then"]["model"] = {"hidden_size": 16}
    with pytest.raises(ValueError, match="`then.model` may change positions"):
        study_run.train(parse_study(data).runs[0], corpus, CPU)


def test_no_second_stage_after_one_that_diverged(text, corpus, monkeypatch) -> None:
    data = small(CONTEXT, text)
    data["train"]["max_skipped"] = 0
    study = parse_study(data)
    real = study_run.Trainer.loss_of
    monkeypatch.setattr(study_run.Trainer, "loss_of", lambda *a: real(*a) * math.nan)
    runs = [r for r in study.runs if r.setting == study.settings[0]]
    rows = {run.key: study_run.train(run, corpus, CPU) for run in runs}
    assert all(r["status"] == "diverged" and r["then"] is None for r in rows.values())
    found = report.build_report(study, rows)["settings"]["RoPE base, 8 times, then 128 tokens"]
    assert all(arm["diverged"] == 1 and arm["final_loss"]["mean"] is None for arm in found.values())
    report.to_markdown(report.build_report(study, rows))


def test_context_file_end_to_end(text, corpus, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    study = parse_study(small(CONTEXT, text))
    rows = {run.key: study_run.train(run, corpus, CPU) for run in study.runs}
    found = report.write_report(study, rows, tmp_path)
    assert list(found["settings"]) == [
        "RoPE base, 8 times",
        "RoPE base, 8 times, then 128 tokens",
        "YaRN, 4 times",
        "YaRN, 4 times, then 128 tokens",
    ]
    for name, arms in found["settings"].items():
        stage = "then" in name
        for arm, a in arms.items():
            assert a["diverged"] == a["failed"] == 0 and ("held_out_before" in a) is stage
            assert (arm == "MP") == ("gap" not in a)
        rows_of = [
            r["then"] if stage else r for r in rows.values() if name.startswith(r["setting"])
        ]
        mean = arms["DM"]["final_loss"]["mean"]
        assert mean in [r["final_loss"] for r in rows_of]
        assert arms["DM"]["residual"]["max"] < 1e-6
    page = (tmp_path / "report.md").read_text()
    assert "## YaRN, 4 times, then 128 tokens" in page
    assert page.count("Held-out loss before this stage, at its context: MP ") == 2
    first = rows[study.runs[0].key]
    assert first["then"]["calls_per_step"] == {}  # MP
    assert {r["then"]["calls_per_step"].get("attention_bwd") for r in rows.values()} == {None, 4}


def test_keys_of_files_without_second_stages_stay_as_they_were() -> None:
    """A results file of before is still one of this file."""
    table = load_study(CONFIGS / "study_table.yaml")
    assert [r.key for r in table.runs[:3]] == [
        "1f94190464f810e3",
        "14c9e41ef42551b4",
        "1e7c213700948b9d",
    ]
    assert all("then" not in r.config and "leave" not in r.config for r in table.runs)


def test_delta_file_end_to_end(text, corpus, tmp_path) -> None:
    study = parse_study(small("study_delta.yaml", text))
    rows = {run.key: study_run.train(run, corpus, CPU) for run in study.runs}
    found = report.write_report(study, rows, tmp_path, png=False)
    for arms in found["settings"].values():
        assert len({a["final_loss"]["mean"] for a in arms.values()}) == len(arms) == 4
        residual = {name: a["residual"]["max"] for name, a in arms.items() if name != "MP"}
        assert residual["DM"] < 1e-6 < residual["forward"] < residual["dequantized"]
    assert len(found["claims"]) == 2 * len(study.claims)


def test_linears_file_end_to_end(text, corpus, tmp_path) -> None:
    study = parse_study(small(LINEARS, text))
    rows = {run.key: study_run.train(run, corpus, CPU) for run in study.runs}
    calls = {row["arm"]: row["calls_per_step"] for row in rows.values()}
    attention = {"attention_fwd": 4, "attention_bwd": 4}
    assert calls["MP"] == {} and calls["DM"] == calls["dequantized"] == attention
    # Seven linears a layer, three of them in the feed-forward part.
    assert calls["FP8 linears"]["linear_fwd"] == 28 and calls["FP8 FFN"]["linear_fwd"] == 12
    for arm in ("DM + FP8 linears", "SD + FP8 linears"):
        assert calls[arm] == {**attention, **calls["FP8 linears"]}
    found = report.write_report(study, rows, tmp_path, png=False)
    by_pair = {(c["arm"], c["to"]): c for c in found["claims"]}
    loss = {row["arm"]: row["final_loss"] for row in rows.values()}
    assert len(by_pair) == len(study.claims) == 8
    for (arm, to), one in by_pair.items():
        assert one["gap"]["mean"] == pytest.approx(loss[arm] - loss[to], abs=1e-7)
        bound = one["within"]
        assert one["holds"] == (None if bound is None else abs(one["gap"]["mean"]) <= bound)
    assert loss["DM"] != loss["DM + projection"] != loss["dequantized"] != loss["DM"]
    page = (tmp_path / "report.md").read_text()
    assert "| Llama, no-QK-norm | FP8 linears | MP |" in page


def test_leave_names_modules_whose_linears_stay(text) -> None:
    runs = {r.arm: r for r in parse_study(small(LINEARS, text)).runs}
    names = list(fp8_linears(build_model(runs["FP8 FFN"].config, CPU, None)))
    assert len(names) == 12 and all(".mlp." in n for n in names)
    assert len(fp8_linears(build_model(runs["FP8 linears"].config, CPU, None))) == 28


def test_leave_that_matches_nothing_is_found_before_training(
    text, tmp_path, capsys, monkeypatch
) -> None:
    data = small(LINEARS, text)
    data["arms"]["FP8 FFN"]["leave"] = ["*.self_atn"]
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(data))
    monkeypatch.setattr(pool, "run_all", lambda *_, **__: pytest.fail("trained"))
    folder = tmp_path / "out"
    assert cli.main(["study", str(tmp_path / "a.yaml"), "--output", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "study: arm 'FP8 FFN' in 'Llama, no-QK-norm': " in said and "'*.self_atn'" in said
    assert not folder.exists()


def rows_of(*losses: float | None, status: str = "done") -> dict[int, dict]:
    return {
        seed: {"status": "diverged" if loss is None else status, "final_loss": loss}
        for seed, loss in enumerate(losses)
    }


@pytest.mark.parametrize(
    ("found", "to", "holds"),
    [
        (rows_of(1.005, 1.104, 1.2), rows_of(1.0, 1.1, 1.2), True),
        (rows_of(0.985, 1.085, 1.185), rows_of(1.0, 1.1, 1.2), False),  # better is not close either
        (rows_of(1.02, 0.98, 1.0), rows_of(1.0, 1.0, 1.0), True),  # of the mean
        (rows_of(1.0, None, 1.2), rows_of(1.0, 1.1, 1.2), False),
        (rows_of(1.0, 1.1), rows_of(1.0, None), None),
        (rows_of(1.0, status="failed"), rows_of(1.0), None),
        (rows_of(1.0, 1.1, status="diverged"), rows_of(1.0, 1.1), False),
    ],
)
def test_check(found, to, holds) -> None:
    one = check(Claim("A", "B", 0.01), found, to)
    assert one["holds"] is holds
    assert check(Claim("A", "B"), found, to)["holds"] is None


def test_gap_lines() -> None:
    one = check(Claim("A", "B", 0.01), rows_of(1.005, 1.104, 1.2), rows_of(1.0, 1.1, 1.2))
    line = report.claims.lines([{"setting": "s", **one}])[-2]
    assert line == (
        "| s | A | B | +0.0030 ± 0.0026 | +0.0050, +0.0040, +0.0000 | 0.01 | **holds** |"
    )
    lost = check(Claim("A", "B", 0.01), rows_of(1.0), rows_of(None))
    assert (
        "| – (1 not finite) |  | 0.01 | B diverged or is missing |"
        in report.claims.lines([{"setting": "s", **lost}])[-2]
    )


def test_progress_says_what_is_left() -> None:
    some = study_run.Progress("", 100, 300, 2.5, 12.4)
    assert str(some) == "step 100 of 300, loss 2.500, 12 s left"
    assert str(some._replace(stage="2048 tokens, ", seconds_left=None)) == (
        "2048 tokens, step 100 of 300, loss 2.500"
    )


def test_progress_of_slow_steps(text, corpus, monkeypatch) -> None:
    monkeypatch.setattr(study_run, "SAY_EVERY", 0.0)
    data = small(LINEARS, text, arms=["MP"], claims=[])
    data["train"]["steps"] = 7
    seen = []
    study_run.train(parse_study(data).runs[0], corpus, CPU, progress=seen.append)
    assert [p.step for p in seen] == list(range(1, 8)) and {p.steps for p in seen} == {7}
    assert [p.seconds_left is None for p in seen] == [True] * 4 + [False] * 3
    assert seen[4].seconds_left > 0 == seen[-1].seconds_left


def test_scale_file(text, corpus) -> None:
    """Its names are its sizes, at full size; and it runs."""
    study = load_study(CONFIGS / "study_scale.yaml")
    for run in study.runs:
        fields = dict(run.config["model"])
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        millions = sum(p.numel() for p in model.parameters()) // 10**6
        assert run.setting.startswith(f"{millions} M parameters")
    steps = {r.setting: r.config["train"]["steps"] for r in study.runs}
    assert steps["3 M parameters, 4 times the tokens"] == 4 * steps["3 M parameters"]
    runs = parse_study(small("study_scale.yaml", text)).runs
    for run in runs[:3]:
        assert study_run.train(run, corpus, CPU)["status"] == "done"
