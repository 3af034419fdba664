"""The study's file: what it may say, and the runs that follow from it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from hf_deltamatch.recipes import AttentionRecipe
from hf_deltamatch.study.spec import Claim, load_study, parse_study, select

TABLE = Path(__file__).parent.parent / "examples" / "configs" / "study_table.yaml"
SMALL = {
    "seeds": [0, 1],
    "model": {"model_type": "llama"},
    "settings": [{"name": "a"}, {"name": "b", "train": {"lr": 0.1}}],
}


def test_the_table_of_the_examples() -> None:
    study = load_study(TABLE)
    assert len(study.runs) == 3 * 3 * 6 == len({run.key for run in study.runs})
    # Seeds go round before settings of less worth begin.
    assert all(
        "6e-3" in r.name or "3e-3" in r.name or "4.5e-3, no-QK" in r.name for r in study.runs[:36]
    )
    assert [r.name for r in study.runs[:3]] == [
        f"lr 6e-3, no-QK-norm / {arm} / seed 0" for arm in ("MP", "SD", "DM")
    ]
    for run in study.runs:
        assert run.config["model"]["model_type"] == ("llama" if "no-QK" in run.name else "qwen3")
    rates = {run.setting: run.config["train"]["lr"] for run in study.runs}
    assert rates["lr 4.5e-3, QK-norm"] == 4.5e-3 and rates["lr 6e-3, no-QK-norm"] == 6e-3


def test_arms_are_recipes() -> None:
    arms = {
        "MP": None,
        "MP-L": {"attention": "sdpa", "linear": "blockwise"},
        "DMP": {"attention": {"recipe": "delta_matching", "project_row_sum": True}},
    }
    study = parse_study({**SMALL, "arms": arms})
    assert study.arms["MP"] == {"attention": "sdpa", "linear": None}
    assert study.arms["MP-L"]["linear"]["scaling"] == "blockwise"
    recipe = AttentionRecipe.from_name("delta_matching", project_row_sum=True)
    assert study.arms["DMP"]["attention"] == recipe.to_dict()


def test_keys_follow_what_changes_results_and_nothing_else() -> None:
    before = {r.name: r.key for r in parse_study(SMALL).runs}
    same = {**copy.deepcopy(SMALL), "name": "other", "runtime": {"workers": 9}, "seeds": [1, 0]}
    assert {r.name: r.key for r in parse_study(same).runs} == before
    for change in ({"train": {"clip": 2.0}}, {"model": {"model_type": "qwen3"}}):
        after = {r.name: r.key for r in parse_study({**SMALL, **change}).runs}
        assert not set(after.values()) & set(before.values())


def test_second_stages() -> None:
    then = {"lr": 1e-4, "model": {"max_position_embeddings": 99}}
    settings = [{"name": "a", "then": {"seq_len": 99}}, {"name": "b", "then": {"steps": 3}}]
    train = {"steps": 7, "clip": 2.0}
    runs = parse_study({**SMALL, "train": train, "then": then, "settings": settings}).runs
    by_setting = {r.setting: r for r in runs}
    one = by_setting["a"].config["then"]
    assert one["model"] == {"model_type": "llama", "max_position_embeddings": 99}
    assert (one["train"]["lr"], one["train"]["steps"], one["train"]["clip"]) == (1e-4, 7, 2.0)
    assert by_setting["b"].config["then"]["train"]["steps"] == 3
    assert [by_setting[n].stage for n in "ab"] == ["a, then 99 tokens", "b, then 512 tokens"]
    assert by_setting["a"].config["train"]["lr"] == 3e-3
    plain = parse_study({**SMALL, "train": train}).runs
    assert plain[0].stage is None and plain[0].key not in {r.key for r in runs}


def test_claims_are_of_arms_and_change_no_key() -> None:
    claims = [{"arm": "DM", "within": 0.02}, {"arm": "DM", "to": "SD"}]
    study = parse_study({**SMALL, "claims": claims})
    assert study.claims == [Claim("DM", "MP", 0.02), Claim("DM", "SD", None)]
    assert [r.key for r in study.runs] == [r.key for r in parse_study(SMALL).runs]


def test_select() -> None:
    study = load_study(TABLE)
    chosen = select(study, ["6e-3 no-qk-norm DM", "4.5e-3 no-QK-norm dm"], None)
    assert {(r.arm, r.setting) for r in chosen} == {
        ("DM", "lr 6e-3, no-QK-norm"),
        ("DM", "lr 4.5e-3, no-QK-norm"),
    }
    halves = [select(study, None, f"{i}/2") for i in (1, 2)]
    assert sorted(r.key for h in halves for r in h) == sorted(r.key for r in study.runs)
    with pytest.raises(ValueError, match="--only 'zzz' matches no run"):
        select(study, ["zzz"], None)
    with pytest.raises(ValueError, match="--shard is '3/2'"):
        select(study, None, "3/2")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sedes": [1]}, "unknown 'sedes'"),
        ({"train": {"lr": "3e-3"}}, "train.lr is '3e-3'.*need a dot: 3.0e-3"),
        ({"train": {"stepz": 3}}, "unknown 'stepz'"),
        ({"train": {"steps": 0}}, "train.steps is 0.*at least 1"),
        ({"train": {"schedule": "linear"}}, "schedule is 'linear'.*cosine"),
        ({"arms": ["MP", "XX"]}, "arm 'XX' is not one of MP, SD, DM"),
        ({"arms": {"A": {"attention": "nope"}}}, "Unknown attention recipe 'nope'"),
        ({"baseline": "BF16"}, "baseline is 'BF16'; arms are MP, SD, DM"),
        ({"seeds": "all"}, "seeds is 'all'"),
        ({"settings": [{"name": "a"}, {"name": "a"}]}, "two settings are called 'a'"),
        ({"settings": [{"lr": 1}]}, r"settings\[0\] must be a mapping with a name"),
        ({"model": {}}, "no model_type"),
        ({"model": [1]}, "model in study is .*must be a mapping"),
    ],
)
def test_refused(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_study({**SMALL, **change})


def test_not_yaml(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match="a.yaml is not YAML"):
        load_study(tmp_path / "a.yaml")
