"""The ``hf-deltamatch`` command: what it prints and how it fails."""

from __future__ import annotations

import dataclasses
import json
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import hf_deltamatch
from hf_deltamatch import AttentionRecipe, LinearRecipe, cli, numerics


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


@pytest.mark.parametrize(
    ("argv", "recipe"),
    [
        ("delta_matching --block 1xD --project-row-sum", AttentionRecipe("1xD", project_row_sum=True)),
        ("delta_matching --no-quantize", AttentionRecipe(quantize=False)),
        ("stale_delta --do-format e5m2", AttentionRecipe(delta="stale", do_format="e5m2")),
        ("rowwise --descale pow2 --grad-format e5m2", LinearRecipe("rowwise", "pow2", "e5m2")),
        ("mx", LinearRecipe("mx", "pow2")),
    ],
)  # fmt: skip
def test_recipe_variants(argv: str, recipe, capsys) -> None:
    assert cli.main(["recipe", *argv.split()]) == 0
    assert capsys.readouterr().out.startswith(f"{recipe}\n")


def test_recipe_prints_all(capsys) -> None:
    assert cli.main(["recipe"]) == 0
    texts = capsys.readouterr().out.split("\n\n")
    names = [*AttentionRecipe.NAMES, *LinearRecipe.NAMES]
    assert [text.split()[0].strip(":") for text in texts] == names


def test_recipe_flags_are_the_fields() -> None:
    fields = {f.name for c in (AttentionRecipe, LinearRecipe) for f in dataclasses.fields(c)}
    assert set(cli.RECIPE_FLAGS) == fields


def test_linear_recipe_says_what_stays_high_precision(capsys) -> None:
    assert cli.main(["recipe", "rowwise"]) == 0
    out = capsys.readouterr().out
    assert "Sums in FP32" in out and "dtype of x" in out and "high precision" in out
    blocks = [line.split(maxsplit=1) for line in out.splitlines()[-2:]]
    assert blocks == [["rowwise", "1 x all"], ["columnwise", "all x 1"]]
    assert "1 x 128" in LinearRecipe().legend and "128 x 128" in LinearRecipe().legend


@pytest.mark.parametrize("kind", [AttentionRecipe, LinearRecipe])
def test_recipe_name_with_fields_points_to_from_name(kind) -> None:
    with pytest.raises(ValueError, match=r"from_name\('delta_matching', block='1xD'\)"):
        kind.resolve("delta_matching(block='1xD')")


def test_version(capsys) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"hf-deltamatch {hf_deltamatch.__version__}\n"


def test_numerics_help(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["numerics", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "random inputs for each of three key offsets" in out
        and "(default: 5;" in out
        and "128xD)" in out
    )


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
    # One seed has no spread.
    assert "1 seed (" in out and "±" not in out and "seeds" not in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["numerics", "--seeds", "0"], ["--seeds", "0", "at least 1"]),
        (["numerics", "--seeds", "1", "--block", "64xD"], ["64xD", "128xD", "1xD", "mx"]),
        (["recipe", "fp9", "--block", "1xD"], ["'fp9'", "delta_matching", "blockwise"]),
        (["recipe", "delta_matching(block='1xD')"], ["--block 1xD", 'block="1xD"', "from_name"]),
        (["recipe", "--block", "1xD"], ["--block changes a recipe", "name it"]),
        (["recipe", "--no-quantize"], ["--quantize changes a recipe", "name it"]),
        (["recipe", "blockwise", "--block", "1xD"], ["no field block", "scaling"]),
        (["recipe", "delta_matching", "--block", "2xD"], ["'2xD'", "'128xD'", "'1xD'", "'mx'"]),
        (["recipe", "mx", "--descale", "fp32"], ["'fp32'", "powers of two"]),
        (["eval"], ["--tasks is missing", "eval ls tasks"]),
        (["eval", "run"], ["--tasks is missing"]),
        (["eval", "--tasks", "x"], ["pretrained=PATH is missing"]),
        (["eval", "--tasks", "x", "--model_args", "dtype=float32"], ["pretrained=PATH is missing"]),
        (["eval", "--model", "zz", "--tasks", "x"], ["Tasks not found: x"]),
        (["eval", "--tasks", "x", "--model_args", "pretrained=p"], ["Tasks not found: x"]),
        (["eval", "--config", "/nowhere/c.yaml"], ["not found", "/nowhere/c.yaml"]),
    ],
)
def test_bad_arguments(argv, words, capsys) -> None:
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words), err
    (line,) = [text for text in err.splitlines() if text.startswith("hf-deltamatch")]
    assert line.startswith(f"hf-deltamatch {argv[0]}: ") and "Traceback" not in err


@pytest.mark.parametrize("path", ["none/n.json", "."])
def test_numerics_checks_its_file_first(path, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(numerics, "table", lambda *_: pytest.fail("computed first"))
    assert cli.main(["numerics", "--json", path]) == 2
    assert f"--json is {path}" in capsys.readouterr().err


def test_numerics_cannot_write(tmp_path, monkeypatch, capsys) -> None:
    """The table is printed even so."""
    monkeypatch.setattr(numerics, "SHAPE", {"B": 1, "H": 1, "T": 130, "D": 32})

    def full(self, *_, **__) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "n.json"
    path.write_text("before")
    monkeypatch.setattr(Path, "write_text", full)
    assert cli.main(["numerics", "--seeds", "1", "--json", str(path)]) == 2
    out, err = capsys.readouterr()
    steps = [f"offset {offset:g}, seed 0" for offset in numerics.OFFSETS]
    *progress, error = err.splitlines()
    assert "matched" in out and "No space left" in error and progress == steps
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def fake_lm_eval(monkeypatch, error: Exception | None = None) -> list[list[str]]:
    """Records what lm-eval would be called with."""
    main = pytest.importorskip("lm_eval.__main__")
    seen = []

    def cli_evaluate() -> None:
        seen.append(sys.argv[1:])
        if error is not None:
            raise error

    monkeypatch.setattr(main, "cli_evaluate", cli_evaluate)
    return seen


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("ls tasks", "ls tasks"),
        ("validate --tasks a", "validate --tasks a"),
        ("--tasks a -a pretrained=p", "run --model hf-deltamatch --tasks a -a pretrained=p"),
        ("run -t a -a pretrained=p", "run --model hf-deltamatch -t a -a pretrained=p"),
        ("--model hf --tasks a", "run --model hf --tasks a"),
        ("-M hf --tasks a", "run -M hf --tasks a"),
        ("--model=hf --tasks=a", "run --model=hf --tasks=a"),
        ("-C c.yaml", "run --model hf-deltamatch -C c.yaml"),
    ],
)
def test_eval_passes_arguments_through(argv: str, expected: str, monkeypatch) -> None:
    seen, before = fake_lm_eval(monkeypatch), list(sys.argv)
    assert cli.main(["eval", *argv.split()]) == 0
    assert seen == [expected.split()] and sys.argv == before


@pytest.mark.parametrize(
    "error", [ValueError("a\nb"), KeyError("a b"), TypeError("a b"), OSError("a b")], ids=repr
)
def test_eval_errors_are_one_line(error: Exception, monkeypatch, capsys) -> None:
    fake_lm_eval(monkeypatch, error)
    argv = ["eval", "--tasks", "a", "--model_args", "pretrained=p"]
    assert cli.main(argv) == 2
    expected = "hf-deltamatch eval: a b (--verbosity DEBUG shows where)\n"
    assert capsys.readouterr().err == expected
    with pytest.raises(type(error)):
        cli.main([*argv, "--verbosity", "debug"])


def test_eval_help_begins_with_our_model(capsys) -> None:
    pytest.importorskip("lm_eval")
    with pytest.raises(SystemExit) as done:
        cli.main(["eval", "--help"])
    out = capsys.readouterr().out
    ours, theirs = out.split("usage: lm-eval run")
    assert done.value.code == 0 and "--tasks" in theirs
    for word in ("--model hf-deltamatch", "pretrained", "attention", "linear", "fp8_backend"):
        assert word in ours


def test_entry_points_are_declared() -> None:
    points = metadata.entry_points()
    (command,) = points.select(group="console_scripts", name="hf-deltamatch")
    assert command.load() is cli.main
    (model,) = points.select(group="lm_eval.models", name="hf-deltamatch")
    assert model.value == "hf_deltamatch.hf.lm_eval:DeltaMatchLM"


@pytest.mark.parametrize(
    "argv,words",
    [
        ("--shape 1,2,3", "'1,2,3'; it must be B,Hq,Hkv,T,D,MASK"),
        ("--shape 1,2,2,0,64,full", "five positive numbers"),
        ("--shape 1,2,2,64,64,mask", "end in `causal`, `full` or `windowN`"),
        ("--shape 1,2,2,64,64,window0", "end in `causal`, `full` or `windowN`"),
        ("--shape 1,3,2,64,64,full", "multiple of Hkv"),
        ("--recipe fast", "fast"),
        ("--recipe delta_matching=1xD", "delta_matching"),
        ("--json no/such/file", "a folder that exists"),
    ],
)
def test_bench_bad_arguments(argv: str, words: str, capsys) -> None:
    pytest.importorskip("triton")
    assert cli.main(["bench", "attention", *argv.split()]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a device to time on")
def test_bench_needs_a_device(capsys) -> None:
    pytest.importorskip("triton")
    assert cli.main(["bench", "attention"]) == 2
    assert "CUDA device" in capsys.readouterr().err
