"""The ``hf-deltamatch`` command: what it prints and how it fails."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

from hf_deltamatch import cli, numerics


def test_env_names_versions_device_and_backends(capsys) -> None:
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    for package in ("torch", "transformers", "hf-deltamatch"):
        assert metadata.version(package) in out
    for op in ("attention", "linear"):
        assert f"{op} " in out
    assert "reference" in out


def test_env_json(capsys) -> None:
    assert cli.main(["env", "--json"]) == 0
    env = json.loads(capsys.readouterr().out)
    assert env["packages"]["torch"] == metadata.version("torch")
    assert set(env["ops"]) == {"attention", "linear"}
    assert all(op["reason"] for op in env["ops"].values())


def test_recipe_prints_the_seven_products(capsys) -> None:
    assert cli.main(["recipe", "delta_matching"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line.split()[0].isdigit()] == list(
        "1234567"
    )


def test_recipe_unknown_lists_the_known(capsys) -> None:
    assert cli.main(["recipe", "fp9"]) == 2
    err = capsys.readouterr().err
    assert "'fp9'" in err and "delta_matching" in err and "blockwise" in err


def test_numerics_writes_its_table(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(numerics, "SHAPE", {"B": 1, "H": 1, "T": 192, "D": 64})
    path = tmp_path / "numerics.json"
    assert cli.main(["numerics", "--seeds", "1", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    table = json.loads(path.read_text())
    assert table["shape"]["T"] == 192 and table["environment"]["packages"]["torch"]
    for rule, by_offset in table["rules"].items():
        assert rule in out
        assert f"{by_offset['2']['dq']['mean']:.3f}" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["numerics", "--seeds", "0"], ["--seeds", "0", "at least 1"]),
        (["numerics", "--seeds", "1", "--block", "64xD"], ["64xD", "128xD", "1xD", "mx"]),
    ],
)
def test_bad_arguments(argv, words, capsys) -> None:
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words), err


def test_entry_points_are_declared() -> None:
    points = metadata.entry_points()
    (command,) = points.select(group="console_scripts", name="hf-deltamatch")
    assert command.load() is cli.main
    (model,) = points.select(group="lm_eval.models", name="hf-deltamatch")
    assert model.value == "hf_deltamatch.hf.lm_eval:DeltaMatchLM"
