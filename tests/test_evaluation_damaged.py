"""``compare`` of results that are damaged, or odd: a sentence that names the file, or right numbers."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
from test_evaluation_compare import DATE, DM, MP, write
from test_study_spec import places

from hf_deltamatch import cli
from hf_deltamatch.evaluation.compare_command import to_markdown
from hf_deltamatch.evaluation.comparison import compare
from hf_deltamatch.evaluation.results import load

GONE = object()
WRONG = [
    None, 0, -1, True, 1.5, math.nan, math.inf, "", "x", [], [1], [[]], [{}], {}, {"x": 1}, 10**400, GONE,
]  # fmt: skip


def changed(whole, place: tuple, value):
    whole = copy.deepcopy(whole)
    part = whole
    for key in place[:-1]:
        part = part[key]
    if value is GONE:
        del part[place[-1]]
    else:
        part[place[-1]] = copy.deepcopy(value)
    return whole


def compared(folder: Path) -> dict | None:
    """The comparison, None where it is refused in a sentence."""
    try:
        found = compare([load(folder / name, name) for name in ("mp", "dm")])
        assert to_markdown(found)
        return found
    except ValueError as error:
        text = str(error)
        assert text.startswith(("mp and dm cannot be compared: ", f"{folder / 'dm'}")), text
        assert text.endswith((".", "--tasks.")), text
        return None


def test_results_with_any_value_anywhere(tmp_path) -> None:
    """Scores that were not touched stay what they are, whatever else is in the file."""
    write(tmp_path / "mp", MP)
    file = write(tmp_path / "dm", DM)
    whole = json.loads(file.read_text())
    good = compared(tmp_path)
    answers = 0
    for place in places(whole):
        for value in WRONG:
            file.write_text(json.dumps(changed(whole, place, value)))
            found = compared(tmp_path)
            if found is None or place[0] in ("results", "groups"):
                continue
            answers += 1
            for row, right in zip(found["rows"], good["rows"], strict=False):
                assert row["scores"] == right["scores"], (place, value)
                assert row["differences"] == right["differences"], (place, value)
    assert answers > 100


def test_samples_with_any_value_anywhere(tmp_path) -> None:
    """Sample files only tell how sure a difference is: the scores are those of the results."""
    write(tmp_path / "mp", MP)
    write(tmp_path / "dm", DM)
    good = compared(tmp_path)
    file = tmp_path / "dm" / f"samples_easy_{DATE}.jsonl"
    text = file.read_text()
    samples = [json.loads(line) for line in text.splitlines()]
    for place in places(samples):
        for value in WRONG:
            lines = changed(samples, place, value)
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
            found = compared(tmp_path)
            for row, right in zip(found["rows"] if found else (), good["rows"], strict=False):
                assert row["differences"]["dm"]["value"] == right["differences"]["dm"]["value"]
    for end in range(0, len(text), 7):
        file.write_text(text[:end])
        compared(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 5000, b"[1]", b"{}"], ids=str)
def test_files_of_other_kinds(content: bytes, tmp_path, capsys) -> None:
    write(tmp_path / "mp", MP)
    file = write(tmp_path / "dm", DM)
    file.write_bytes(content)
    assert cli.main(["compare", str(tmp_path / "mp"), str(tmp_path / "dm")]) == 2
    assert f"{file} is not a results file" in capsys.readouterr().err


def test_a_group_within_itself(tmp_path) -> None:
    write(tmp_path / "mp", MP)
    write(tmp_path / "dm", DM, group_subtasks__both=["easy", "both"])
    with pytest.raises(ValueError, match="damaged: the group 'both' is within itself"):
        compare([load(tmp_path / n, n) for n in ("mp", "dm")])


def test_nothing_to_compare(tmp_path) -> None:
    for name in ("mp", "dm"):
        write(tmp_path / name, MP, results={}, configs={}, groups={})
    with pytest.raises(ValueError, match="mp has no scores to compare; it has no tasks"):
        compare([load(tmp_path / n, n) for n in ("mp", "dm")])


def test_json_without_nan(tmp_path) -> None:
    """A score that is not finite is shown, and null in a file that any reader takes."""
    write(tmp_path / "mp", MP)
    write(tmp_path / "dm", DM, results__hard={"acc,none": math.nan, "sample_len": 6})
    out = tmp_path / "out.json"
    assert (
        cli.main(["compare", f"{tmp_path / 'mp'}", f"{tmp_path / 'dm'}", "--json", str(out)]) == 0
    )
    strict = lambda word: pytest.fail(word)
    found = json.loads(out.read_text(), parse_constant=strict)
    row = next(r for r in found["rows"] if r["task"] == "hard")
    assert row["scores"]["dm"]["value"] is None and row["scores"]["mp"]["value"] is not None


def test_a_model_folder_that_is_not_there(tmp_path, capsys) -> None:
    """Not the hub's words about names of repositories."""
    for command in (["eval", str(tmp_path / "none"), "--tasks", "arc_easy"],):
        assert cli.main(command) == 2
        assert f"{tmp_path / 'none'} is no folder; PATH is" in capsys.readouterr().err
