"""CASES.md: complete, and every test that it names is one that pytest collects."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPORTS, URLS = 46, 71
OPTIONAL = {"test_hf_trl.py", "test_hf_gpu.py"} | {
    p.name for pattern in ("test_kernels_*.py", "test_benchmarks*.py") for p in HERE.glob(pattern)
}
"""What a machine without TRL or Triton cannot import."""

COLLECT = """
import json, sys, pytest
class Seen:
    ids, skipped = [], []
    def pytest_collection_modifyitems(self, items):
        self.ids += [item.nodeid for item in items]
    def pytest_collectreport(self, report):
        if report.skipped:
            self.skipped.append(report.nodeid)
code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[2:]], plugins=[Seen()])
json.dump({"code": int(code), "ids": Seen.ids, "skipped": Seen.skipped}, open(sys.argv[1], "w"))
"""


def rows(heading: str) -> list[list[str]]:
    text = (HERE / "CASES.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def named_in(row: list[str]) -> list[str]:
    return re.findall(r"`([^`]+)`", row[-1])


NAMED = sorted(
    {t for heading in ("Reports", "Modes") for row in rows(heading) for t in named_in(row)}
)


@pytest.fixture(scope="module")
def collected(tmp_path_factory) -> dict:
    """One collection of all files that the tables name."""
    files = sorted({str(HERE / name.split("::")[0]) for name in NAMED})
    out = tmp_path_factory.mktemp("cases") / "ids.json"
    run = subprocess.run(
        [sys.executable, "-c", COLLECT, str(out), *files],
        cwd=HERE.parent, capture_output=True, text=True,
    )  # fmt: skip
    found = json.loads(out.read_text())
    assert found["code"] == 0, run.stdout[-3000:]
    found["ids"] = [_local(i) for i in found["ids"]]
    found["skipped"] = {Path(i.split("::")[0]).name for i in found["skipped"]}
    return found


def _local(node: str) -> str:
    """A node id without its folder; parameters may hold slashes."""
    path, rest = node.split("::", 1)
    return f"{Path(path).name}::{rest}"


@pytest.mark.parametrize("name", NAMED)
def test_named_test_exists(name: str, collected: dict) -> None:
    file = name.split("::")[0]
    if file in collected["skipped"]:
        assert file in OPTIONAL, f"{file} could not be imported"
        tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
        functions = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
        assert name.split("::")[1].split("[")[0] in functions
    else:
        assert any(i == name or i.startswith(f"{name}[") for i in collected["ids"]), name


def test_reports_are_complete() -> None:
    """Every report once, each with what it was and a test."""
    found = rows("Reports")
    urls = [url for row in found for url in row[0].split()]
    assert all(re.fullmatch(r"https://github\.com/[\w./-]+", url) for url in urls)
    assert len(urls) == len(set(urls)) == URLS and len(found) == REPORTS
    assert all(len(row) == 3 and row[1] and named_in(row) for row in found)


def test_modes_are_listed_once() -> None:
    found = rows("Modes")
    assert len({row[0] for row in found}) == len(found) >= 26
    assert all(len(row) == 2 and named_in(row) for row in found)


def test_names_are_looked_for(collected: dict) -> None:
    """The check can fail."""
    with pytest.raises(AssertionError):
        test_named_test_exists("test_hf_check.py::test_that_is_not_there", collected)
    with pytest.raises(AssertionError):
        test_named_test_exists("test_hf_distributed.py::test_two_processes[none]", collected)
