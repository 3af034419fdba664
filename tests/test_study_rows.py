"""``runs.jsonl``: what counts as a result, however the file was left; weights that are whole or not
there."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from python_path import python_path
from test_evaluation_damaged import GONE, WRONG, changed
from test_study import FILE
from test_study_spec import places
from tiny_models import one_thread  # noqa: F401

from hf_deltamatch import cli
from hf_deltamatch.study import pool, report
from hf_deltamatch.study.spec import load_study, parse_study
from hf_deltamatch.training.lock import Claims
from hf_deltamatch.training.study_rows import append_row, read_rows


@pytest.fixture(scope="module")
def study(text, tmp_path_factory):
    """A file, the folder of its results, and the rows."""
    folder = tmp_path_factory.mktemp("study")
    data = {**FILE, "arms": ["MP", "DM"], "corpus": {"source": text, "held_out_every": 10}}
    data["then"] = {"seq_len": 96, "steps": 2, "last": 1, "warmup": 0}
    (folder / "a.yaml").write_text(yaml.safe_dump(data))
    assert cli.main(["study", str(folder / "a.yaml"), "--output", str(folder / "out")]) == 0
    rows = [json.loads(line) for line in (folder / "out" / "runs.jsonl").read_text().splitlines()]
    return data, folder, rows


def test_rows_with_any_value_anywhere(study, tmp_path) -> None:
    """A row counts if a report can be made of it; the others do not stand in its way."""
    data, _, rows = study
    parsed = parse_study(data)
    counted = 0
    for place in places(rows[0]):
        if place[0] == "config" or any(isinstance(k, int) and k > 0 for k in place):
            continue
        for value in WRONG:
            lines = [changed(rows[0], place, value), rows[1]]
            (tmp_path / "runs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
            found = read_rows(tmp_path)
            assert rows[1]["key"] in found
            made = report.write_report(parsed, found, tmp_path, png=False)
            assert report.to_markdown(made)
            strict = lambda word: pytest.fail(word)
            json.loads((tmp_path / "report.json").read_text(), parse_constant=strict)
            counted += len(found) == 2
    assert counted > 50 and GONE in WRONG


@pytest.mark.parametrize(
    "line",
    [b"", b"3", b"null", b"[1]", b"{}", b'{"key": 3}', b"\xff\xfe", b"[" * 5000, b'{"key": "a"'],
)
def test_lines_that_are_no_rows(line: bytes, study, tmp_path) -> None:
    _, _, rows = study
    whole = b"".join(json.dumps(r).encode() + b"\n" for r in rows)
    (tmp_path / "runs.jsonl").write_bytes(whole + line)
    said: list[str] = []
    assert list(read_rows(tmp_path, said.append)) == [r["key"] for r in rows]
    assert len(said) == bool(line) and all("1 lines are no whole results" in s for s in said)
    append_row(tmp_path, {**copy.deepcopy(rows[0]), "key": "new"})
    assert list(read_rows(tmp_path))[-1] == "new"


TAKE = """
import sys
from pathlib import Path
from hf_deltamatch.training.lock import Claims
claims = Claims(Path(sys.argv[1]))
print([claims.take(key) for key in sys.argv[2:]], flush=True)
input()
"""


def test_two_processes_in_one_folder_share_the_runs(study, capsys) -> None:
    """What another one is at is left to it, however that ends; what it has done is not done again."""
    _, folder, rows = study
    output = folder / "shared"
    output.mkdir()
    call = ["study", str(folder / "a.yaml"), "--output", str(output), "--only", "DM"]
    key = next(r["key"] for r in rows if r["arm"] == "DM")
    env = {**os.environ, "PYTHONPATH": python_path(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", TAKE, str(output), key, "f" * 16]
    other = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
    )
    assert other.stdout.readline() == "[True, True]\n"
    assert cli.main(call) == 1
    assert "another process is at it" in capsys.readouterr().out
    assert not read_rows(output)
    other.kill()
    other.wait()
    append_row(output, next(r for r in rows if r["key"] == key))
    done: list[str] = []
    (run,) = [r for r in load_study(folder / "a.yaml").runs if r.key == key]
    shared = dict(devices=["cpu"], workers=1, cuda_graph=False, say=done.append)
    corpus = load_study(folder / "a.yaml").corpus
    is_done = lambda run: run.key in read_rows(output)
    assert pool.run_all([run], corpus, output, is_done=is_done, **shared) == []
    assert done == [f"{run.name}: done by another process meanwhile"]
    claims = Claims(output)
    assert claims.take(key)  # free again
    claims.close()


def test_weights_that_are_missing_are_made(study, capsys) -> None:
    """``--save`` after a run without it: its results are there and its weights are not."""
    _, folder, rows = study
    call = ["study", str(folder / "a.yaml"), "--output", str(folder / "out"), "--only", "DM"]
    assert cli.main(call) == 0 and "runs to do" not in capsys.readouterr().out
    assert cli.main([*call, "--save"]) == 0
    assert "1 of 1 runs to do" in capsys.readouterr().out
    key = next(r["key"] for r in rows if r["arm"] == "DM")
    models = folder / "out" / "models"
    assert [p.name for p in models.iterdir()] == [key]  # nothing partial
    # What is left by a process that was killed, and by one that is at work.
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, alive = (models / f"{key}.{n}.partial" for n in (ended.pid, os.getpid()))
    dead.mkdir(), alive.mkdir(), shutil.rmtree(models / key)
    assert cli.main([*call, "--save"]) == 0
    assert sorted(p.name for p in models.iterdir()) == [key, alive.name]
    alive.rmdir(), capsys.readouterr()
    assert cli.main([*call, "--save"]) == 0 and "runs to do" not in capsys.readouterr().out
    again = read_rows(folder / "out")[key]
    assert again["loss"] == next(r for r in rows if r["key"] == key)["loss"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--devices", "nope"], ["--backend", "nope"], ["--time-limit", "nan"], ["--time-limit", "-1"],
        ["--workers", "0"], ["--shard", "0/2"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_flags_that_are_refused(flags: list[str], study, capsys) -> None:
    _, folder, _ = study
    assert (
        cli.main(["study", str(folder / "a.yaml"), "--output", str(folder / "none"), *flags]) == 2
    )
    assert flags[0] in capsys.readouterr().err and not (folder / "none").exists()
