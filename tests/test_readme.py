"""Every number of the README's tables comes from a committed results file."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "examples" / "benchmarks"


def table(heading: str) -> dict[str, list[str]]:
    """Rows of the README's table whose first column is headed ``heading``, by first cell."""
    lines = iter((ROOT / "README.md").read_text().splitlines())
    cells = lambda line: [c.strip() for c in line.strip("|").split("|")]
    rows = {}
    for line in lines:
        if line.startswith(f"| {heading} |"):
            next(lines)
            for row in lines:
                if not row.startswith("|"):
                    break
                name, *rest = cells(row)
                rows[name] = rest
    assert rows, f"no table headed {heading!r}"
    return rows


def test_numerics_table() -> None:
    result = json.loads((RESULTS / "numerics.json").read_text())
    assert result["shape"] == {"B": 4, "H": 1, "T": 1024, "D": 128} and result["seeds"] == 5
    assert result["mask"] == "causal" and result["block"] == "128xD"
    for name, printed in table("δ rule").items():
        rule = result["rules"][name]
        expected = [f"{rule[o]['dq']['mean']:.3f} ± {rule[o]['dq']['std']:.3f}" for o in "026"]
        residual = max(rule[o]["residual"]["mean"] for o in "026")
        assert printed == [*expected, f"{residual:.1e}"], name


def test_demo_table() -> None:
    result = json.loads((RESULTS / "demo_cpu.json").read_text())
    assert result["config"]["steps"] == 120 and result["environment"]["cpus"] == 2
    rows = table("arm")
    assert [name.split(":")[0].lower() for name in rows] == list(result["arms"])
    for printed, arm in zip(rows.values(), result["arms"].values(), strict=True):
        assert printed == [
            f"{arm['loss_first']:.3f} → {arm['loss_last']:.3f}",
            f"{arm['bits_per_byte']:.3f}",
            f"{arm['row_sum_residual']:.1e}",
            f"{arm['seconds']:.0f}",
        ]


def test_results_hold_no_path_of_a_machine() -> None:
    for path in RESULTS.glob("*.json"):
        assert not any(s in path.read_text() for s in ('"/', "home/", "tmp/", "\\\\")), path.name


def test_links_and_folders_exist() -> None:
    text = (ROOT / "README.md").read_text()
    links = [part.split(")")[0] for part in text.split("](")[1:]]
    links += [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    files = [link for link in links if "://" not in link and not link.startswith("hf-deltamatch")]
    assert len(files) >= 6
    for link in files:
        assert any((ROOT / f"{link}{end}").exists() for end in ("", ".md")), link
