"""The study's file: what it may say, and the runs that follow from it."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import json
import math
from pathlib import Path

import pytest

from hf_deltamatch.recipes import AttentionRecipe
from hf_deltamatch.study.spec import Claim, Train, load_study, parse_study, select

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


def test_the_delta_rules_of_the_examples() -> None:
    """Its runs of MP and DM are runs of the table, by their keys: done once, they count for both."""
    study, table = (load_study(TABLE.with_name(f"study_{n}.yaml")) for n in ("delta", "table"))
    assert len(study.runs) == 4 * 3 * 2 == len({run.key for run in study.runs})
    known = {run.key for run in table.runs}
    assert {run.arm for run in study.runs if run.key in known} == {"MP", "DM"}
    assert sum(run.key in known for run in study.runs) == 2 * 3 * 2
    rules = {name: arm["attention"] for name, arm in study.arms.items() if name != "MP"}
    assert {name: rule["delta"] for name, rule in rules.items()} == {
        "DM": "matched",
        "dequantized": "dequantized",
        "forward": "forward",
    }


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
    then = {"lr": 1e-4, "model": {"max_position_embeddings": 512}}
    settings = [{"name": "a", "then": {"seq_len": 99}}, {"name": "b", "then": {"steps": 3}}]
    train = {"steps": 7, "clip": 2.0}
    runs = parse_study({**SMALL, "train": train, "then": then, "settings": settings}).runs
    by_setting = {r.setting: r for r in runs}
    one = by_setting["a"].config["then"]
    assert one["model"] == {"model_type": "llama", "max_position_embeddings": 512}
    assert (one["train"]["lr"], one["train"]["steps"], one["train"]["clip"]) == (1e-4, 7, 2.0)
    assert by_setting["b"].config["then"]["train"]["steps"] == 3
    assert [by_setting[n].stage for n in "ab"] == ["a, then 99 tokens", "b, then 512 tokens"]
    assert by_setting["a"].config["train"]["lr"] == 3e-3
    plain = parse_study({**SMALL, "train": train}).runs
    assert plain[0].stage is None and plain[0].key not in {r.key for r in runs}


def test_arms_that_are_the_same() -> None:
    """Their runs would share a key, and one row would count for both."""
    arms = {"A": {"attention": "delta_matching"}, "B": {"attention": "delta_matching"}}
    with pytest.raises(ValueError, match="arms 'A' and 'B' are the same"):
        parse_study({**SMALL, "arms": arms, "baseline": "A"})


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
        ({"train": {"steps": 0}}, "train.steps is 0.*whole number, 1 or more"),
        ({"train": {"schedule": "linear"}}, "schedule is 'linear'.*cosine"),
        ({"arms": ["MP", "XX"]}, "arm 'XX' is not one of MP, SD, DM"),
        ({"arms": {"": {}}}, "the name of an arm is ''.*printable"),
        ({"arms": {"a\nb": {}}}, r"the name of an arm is 'a\\nb'.*printable"),
        ({"arms": ["MP", "\ud800"]}, r"arms is '\\ud800'.*printable"),
        ({"settings": [{"name": " "}]}, r"name in settings\[0\] is ' '.*printable"),
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


LONG = {"train": {"seq_len": 4096}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (LONG, r"train.seq_len is 4096 \(settings\[0\]\).*2,048 tokens \(max_position_emb"),
        ({**LONG, "model": {"model_type": "gpt2"}}, r"1,024 tokens \(n_positions\)"),
        ({"model": {"model_type": "gpt2", "max_position_embeddings": 64}}, r"64 tokens \(n_pos"),
        (
            {"then": {"seq_len": 4096}},
            r"then.seq_len is 4096 \(then in settings\[0\]\).*Set then.model.max_position",
        ),
        ({"settings": [{"name": "a"}, {"name": "b", **LONG}]}, r"4096 \(settings\[1\]\)"),
    ],
)
def test_more_tokens_than_positions(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_study({**SMALL, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"seq_len": 2048}},
        {**LONG, "model": {"model_type": "llama", "max_position_embeddings": 4096}},
        # None, also where the file names what they have no use for.
        *(
            {**LONG, "model": {"model_type": name, **more}}
            for name in ("mamba", "bloom", "rwkv", "xlnet")
            for more in ({}, {"max_position_embeddings": 512})
        ),
        # Said when they are run: another version of Transformers may have them.
        {**LONG, "model": {"model_type": "nothing_yet"}},
        {**LONG, "model": {"model_type": "llama", "no_field": 1}},
        {"then": {"seq_len": 4096, "model": {"max_position_embeddings": 4096}}},
    ],
)
def test_as_many_tokens_as_positions(change: dict) -> None:
    assert parse_study({**SMALL, **change}).runs


@pytest.mark.parametrize("file", sorted(TABLE.parent.glob("study_*.yaml")), ids=lambda f: f.stem)
def test_files_of_the_examples(file: Path) -> None:
    assert load_study(file).runs


@pytest.mark.parametrize(
    "content", [b"a: [1", b"\xff\xfe\x00", b"[" * 5000], ids=["cut", "bin", "deep"]
)
def test_not_yaml(content: bytes, tmp_path) -> None:
    (tmp_path / "a.yaml").write_bytes(content)
    with pytest.raises(ValueError, match="a.yaml is not YAML"):
        load_study(tmp_path / "a.yaml")


WRONG = [
    None, 0, -1, True, 1.5, math.nan, math.inf, "", "x", "3e-3", [], [1], [[]], [{}], {}, {"x": 1}, {1: 2},
    datetime.date(2020, 1, 1), b"x", 10**30,
]  # fmt: skip


def places(part, at=()) -> list[tuple]:
    """Paths to everything in a file's content."""
    items = part.items() if isinstance(part, dict) else enumerate(part)
    out = []
    for key, value in items:
        out.append((*at, key))
        if isinstance(value, dict | list):
            out += places(value, (*at, key))
    return out


WHOLE = {
    "name": "all", "baseline": "DM", "seeds": [0, 1], "arms": {
        "MP": {"attention": "sdpa"},
        "DM": {"attention": {"recipe": "delta_matching", "block": "1xD"}, "linear": "blockwise",
               "leave": ["*.q_proj"]},
    },
    "corpus": {"source": "stdlib", "held_out_every": 9, "limit_bytes": 1000},
    "runtime": {"workers": 2, "cuda_graph": "auto", "backend": None},
    "evaluate": {"tasks": ["continuation"], "include": "x", "limit": 3, "num_fewshot": 0,
                 "batch_size": 4},
    "model": {"model_type": "llama"}, "train": {**dataclasses.asdict(Train()), "betas": [0.9, 0.95]},
    "then": {"seq_len": 1024, "model": {"rope_theta": 1.0}},
    "settings": [{"name": "a", "priority": 1, "train": {"lr": 1.0}}, {"name": "b", "model": {}}],
    "claims": [{"arm": "MP", "to": "DM", "within": 0.02}],
}  # fmt: skip


@pytest.mark.parametrize("place", places(WHOLE), ids=lambda p: ".".join(map(str, p)))
def test_any_value_anywhere(place: tuple) -> None:
    """What is read is a study whose values have the types of their fields; all else is one sentence
    that begins with what is wrong, however odd the value."""
    parse_study(copy.deepcopy(WHOLE))
    for value in WRONG:
        data = copy.deepcopy(WHOLE)
        part = data
        for key in place[:-1]:
            part = part[key]
        part[place[-1]] = copy.deepcopy(value)
        try:
            study = parse_study(data)
        except ValueError as error:
            assert str(error).startswith("study: "), (value, error)
            continue
        assert json.loads(json.dumps(study.source, allow_nan=False)) == study.source
        for run in study.runs:
            for name in ("steps", "batch_size", "seq_len", "warmup"):
                assert type(run.config["train"][name]) is int
            for name in ("lr", "clip", "weight_decay", "floor"):
                assert type(run.config["train"][name]) in (int, float)
            assert [type(b) in (int, float) for b in run.config["train"]["betas"]] == [True, True]
            assert type(run.config["corpus"]["source"]) is str
            assert type(run.config["corpus"]["held_out_every"]) is int
        assert study.runtime["workers"] >= 1 and study.runtime["cuda_graph"] in (
            True,
            False,
            "auto",
        )
