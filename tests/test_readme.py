"""Every number of the README's tables comes from a committed results file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hf_deltamatch.study import report
from hf_deltamatch.study.spec import load_study
from hf_deltamatch.training.study_rows import read_rows

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
    rows = table("δ rule")
    assert list(rows) == list(result["rules"])
    for name, printed in rows.items():
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


ATTENTION = RESULTS / "attention_h200.json"


def test_attention_table() -> None:
    """shape | best BF16 | delta_matching | speed-up | forward: best BF16 → delta_matching"""
    result = json.loads(ATTENTION.read_text())
    assert result["hopper_kernels"]
    expected = {}
    for shape in result["shapes"]:
        rows = [r for r in shape["rows"].values() if "failed" not in r]
        ours = shape["rows"]["delta_matching"]
        best = lambda part, rows=rows: min(r[part] for r in rows if r["bf16"])
        expected[shape["name"]] = [
            f"{best('fwd_bwd_ms'):.2f}",
            f"{ours['fwd_bwd_ms']:.2f}",
            f"{ours['fwd_bwd_speedup']:.2f}",
            f"{best('fwd_ms'):.2f} → {ours['fwd_ms']:.2f}",
        ]
    assert table("attention, ms") == expected


def words() -> str:
    return " ".join((ROOT / "README.md").read_text().split())


def test_plain_attention() -> None:
    """ "8.69 ms at the first shape" without the Hopper kernels; where the default is faster than BF16."""
    result = json.loads((RESULTS / "attention_plain_h200.json").read_text())
    assert not result["hopper_kernels"]
    first = result["shapes"][0]
    assert first["name"] == next(iter(table("attention, ms")))
    assert f"{first['rows']['delta_matching']['fwd_bwd_ms']:.2f} ms at the first shape" in words()
    (alone,) = json.loads((RESULTS / "attention_plain_alone_h200.json").read_text())["shapes"]
    assert alone["name"] == first["name"]
    assert f"{alone['rows']['delta_matching']['fwd_bwd_ms']:.2f} ms where only that" in words()
    for shape in json.loads(ATTENTION.read_text())["shapes"]:
        of, speed = shape["shape"], shape["rows"]["delta_matching"]["fwd_bwd_speedup"]
        long = of["D"] == 128 and of["T"] >= 8192 and of["window"] is None
        assert (speed > 1) is long, shape["name"]


def test_monitor() -> None:
    """What a sampled step costs, in TRAINING.md."""
    rows = json.loads((RESULTS / "monitor_h200.json").read_text())["rows"]
    said = " ".join((ROOT / "docs/TRAINING.md").read_text().split())
    span = lambda name, scale=1: sorted(scale * row[name] for row in rows)[:: len(rows) - 1]
    extra, step, share = span("extra_ms"), span("step_ms"), span("share", 100)
    assert (
        f"{extra[0]:.0f} to {extra[1]:.0f} ms longer than the {step[0]:.0f} to {step[1]:.0f}"
        in said
    )
    assert f"{share[0]:.2f} to {share[1]:.2f} % at the default of every 200 steps" in said
    assert share[1] < 2 and {row["interval"] for row in rows} == {200}


def test_step() -> None:
    """Milliseconds of both, tokens/s and memory of a whole step."""
    (shape,) = json.loads((RESULTS / "step_h200.json").read_text())["shapes"]
    bf16, fp8 = shape["rows"]["bf16"], shape["rows"]["fp8"]
    assert shape["shape"]["batch"] == 4 and shape["shape"]["tokens"] == 8192
    assert bf16["sdpa"] == "cuDNN" and 1.35e9 < bf16["parameters"] < 1.45e9
    said = f"{bf16['step_ms']:.0f} ms in BF16 with cuDNN, {fp8['step_ms']:.0f} ms with FP8"
    rates = f"{fp8['speedup']:.2f} times the tokens/s in {fp8['memory']:.2f} of the memory"
    assert said in words() and rates in words()


def test_linear_table() -> None:
    """tokens × in × out | best BF16 | blockwise | speed-up | torchao rowwise, tensorwise"""
    expected = {}
    for shape in json.loads((RESULTS / "linear_h200.json").read_text())["shapes"]:
        ms = {n: r["fwd_bwd_ms"] for n, r in shape["rows"].items() if "failed" not in r}
        best = min(ms[n] for n, r in shape["rows"].items() if r["bf16"] and n in ms)
        ours, theirs = ms["blockwise"], (ms[f"torchao {n}"] for n in ("rowwise", "tensorwise"))
        expected[shape["name"]] = [
            *(f"{x:.2f}" for x in (best, ours, best / ours)),
            ", ".join(f"{x:.2f}" for x in theirs),
        ]
        late = shape["rows"]["torchao blockwise"]["failed"]
        assert (
            late == "not done after 150 s"
            and "in the run of the table it was not done after 150 s" in words()
        )
    assert table("linear, tokens × in × out, ms") == expected


def test_linear_beside_torchao_blockwise() -> None:
    (shape,) = json.loads((RESULTS / "linear_torchao_h200.json").read_text())["shapes"]
    assert shape["name"] == next(iter(table("linear, tokens × in × out, ms")))
    ours, theirs = (
        f"{shape['rows'][name]['fwd_bwd_ms']:.2f}"
        for name in ("blockwise compiled", "torchao blockwise")
    )
    assert (
        f"took {theirs} ms at the first shape in another run, where ours took {ours} (" in words()
    )


def test_two_gpus() -> None:
    """Tokens/s of the last steps, and losses before the gradients grow."""
    rows = json.loads((RESULTS / "two_gpus_large_h200.json").read_text())["rows"]
    rate = lambda name: rows[name][-1]["tokens_per_second"]
    ratio = rate("two GPUs, FSDP2, lr 6e-4") / rate("one GPU, lr 6e-4")
    assert f"with FSDP2 at {ratio:.2f} times the tokens/s of one" in words() and ratio > 1.85
    for one, two in zip(rows["one GPU"][:3], rows["two GPUs, FSDP2"][:3], strict=True):
        assert abs(one["loss"] - two["loss"]) < 0.0015, one["step"]


STUDIES = ROOT / "examples" / "studies"


def test_study_table() -> None:
    """setting | MP | SD | DM | gap of DM to MP"""

    def loss(arm: dict) -> str:
        seeds, text = len(arm["seeds"]), "{mean:.3f} ± {std:.3f}".format(**arm["final_loss"])
        if arm["diverged"]:
            return f"{text}, {arm['diverged']} of {seeds} diverged"
        return text if seeds == 3 else f"{text} ({seeds} seeds)"

    found = json.loads((STUDIES / "table_h200" / "report.json").read_text())
    expected = {
        name: [
            *(loss(arms[arm]) for arm in ("MP", "SD", "DM")),
            "{mean:+.3f} ± {std:.3f}".format(**arms["DM"]["gap"]),
        ]
        for name, arms in found["settings"].items()
    }
    assert table("setting") == expected
    assert found["runs"] == {"planned": 54, "present": 54}
    # "diverges in every seed and the matched one trains", "within 0.01 of it"
    high, unsteady = "lr 6e-3, no-QK-norm", "lr 4.5e-3, no-QK-norm"
    assert found["settings"][high]["SD"]["diverged"] == 3
    assert not any(arms["DM"]["diverged"] for arms in found["settings"].values())
    for name, arms in found["settings"].items():
        assert name in (high, unsteady) or abs(arms["DM"]["gap"]["mean"]) < 0.01


def test_other_studies() -> None:
    """Every gap of the sentences below the table, in the order in which they stand there."""
    text = words()
    sentences = text[text.index("Other studies") : text.index("## Speed")]
    settings = lambda name: json.loads((STUDIES / f"{name}_h200" / "report.json").read_text())[
        "settings"
    ]
    gap = lambda arm: "{mean:+.3f} ± {std:.3f}".format(**arm["gap"])
    linears, context = settings("linears"), settings("context")
    (arms,) = linears.values()
    eight, four = (context[n] for n in context if "then" in n)
    expected = [gap(arms[n]) for n in ("FP8 linears", "FP8 FFN", "DM + FP8 linears")]
    (arms,) = settings("scores").values()
    acc = lambda arm: arms[arm]["scores"]["continuation acc"]
    assert "BF16 {mean:.3f} ± {std:.3f}, DM".format(**acc("MP")) in sentences
    for number in (lambda arm: acc(arm), lambda arm: arms[arm]):
        expected += [gap(number(arm)) for arm in ("DM", "DM + FP8 linears", "SD")]
    expected += [gap(eight["DM"]), gap(four["DM"]), gap(eight["SD"]), gap(four["SD"])]
    assert re.findall(r"[+-]0\.\d{3} ± 0\.\d{3}", sentences) == expected
    architectures = settings("architectures")
    alone = [
        "{mean:+.3f}".format(**arms["DM"]["gap"]) for arms in architectures.values() if "DM" in arms
    ]
    assert re.findall(r"[+-]0\.\d{3}(?! ±)", sentences) == alone
    first = [context[n]["MP"]["final_loss"]["values"] for n in context if "then" not in n]
    again = [f"{abs(a - b):.3f}" for a, b in zip(*first, strict=True)]
    assert f"differs from the other by {again[0]} and {again[1]}, before" in sentences
    assert not re.search(r"\b[A-Z]{6,}\b", sentences)  # no placeholder


@pytest.mark.parametrize("folder", sorted(STUDIES.iterdir()), ids=lambda f: f.name)
def test_reports_of_studies_are_those_of_their_runs(folder: Path) -> None:
    study = load_study(ROOT / "examples" / "configs" / f"study_{folder.name.split('_')[0]}.yaml")
    found = report.build_report(study, read_rows(folder))
    assert json.loads(json.dumps(found)) == json.loads((folder / "report.json").read_text())
    assert (folder / "report.md").read_text().startswith(report.to_markdown(found).strip())


def test_results_hold_no_path_of_a_machine() -> None:
    for path in (*RESULTS.glob("*.json"), *STUDIES.rglob("*.json*")):
        assert not any(s in path.read_text() for s in ('"/', "home/", "tmp/", "\\\\")), path.name


def test_links_and_folders_exist() -> None:
    text = (ROOT / "README.md").read_text()
    links = [part.split(")")[0] for part in text.split("](")[1:]]
    links += [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    files = [link for link in links if "://" not in link and not link.startswith("hf-deltamatch")]
    assert len(files) >= 6
    for link in files:
        assert any((ROOT / f"{link}{end}").exists() for end in ("", ".md")), link


def test_results_say_where_they_were_measured() -> None:
    for path in RESULTS.glob("*.json"):
        assert json.loads(path.read_text())["environment"]["packages"]["torch"], path.name


def python_blocks() -> list[str]:
    text = (ROOT / "README.md").read_text()
    return [part.split("```")[0] for part in text.split("```python\n")[1:]]


def test_code_runs_and_config_keeps_what_is_said(tmp_path) -> None:
    """The blocks in order, on a small model; what config.json keeps, and a reload from it."""
    from tiny_models import build
    from transformers import AutoModelForCausalLM

    from hf_deltamatch import DeltaMatchConfig, check_model

    build("llama").save_pretrained(tmp_path / "model")
    loaded = {}
    for i, block in enumerate(python_blocks()):
        block = block.replace('"HuggingFaceTB/SmolLM2-135M"', repr(str(tmp_path / "model")))
        exec(block, loaded)
        check = check_model(loaded["model"])
        assert len(check.attention) == 2 and len(check.linears) == 14
        loaded["model"].save_pretrained(tmp_path / str(i))
        kept = json.loads((tmp_path / str(i) / "config.json").read_text())
        assert ("quantization_config" in kept) == ("DeltaMatchConfig" in block)
        assert "fp8_delta_matching" not in json.dumps(kept)
    assert i == 1
    DeltaMatchConfig().apply_to(loaded["model"])
    loaded["model"].save_pretrained(tmp_path / "applied")
    for folder in ("0", "applied"):
        check = check_model(AutoModelForCausalLM.from_pretrained(tmp_path / folder))
        assert len(check.attention) == 2 and len(check.linears) == 14


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", "ARGS=--steps 20"], "examples/demo.py --steps 20"),
        (["demo", "VENV=/tmp/no-such-venv"], "into /tmp/no-such-venv"),
        (["test-gpu", "PYTHON=/some/python"], "/some/python -m pytest -m gpu"),
    ],
)
def test_makefile(arguments: list[str], says: str) -> None:
    done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert says in done.stdout, done.stdout + done.stderr


def test_ci_has_both_ends() -> None:
    """The oldest Transformers of the matrix is the oldest that pyproject.toml admits."""
    lowest = re.search(r'"transformers>=([\d.]+),(<\d+)"', (ROOT / "pyproject.toml").read_text())
    matrix = re.search(
        r'transformers: \["==([\d.]+)", "(<\d+)"\]',
        (ROOT / ".github" / "workflows" / "ci.yml").read_text(),
    )
    assert matrix[1].startswith(f"{lowest[1]}.") and matrix[2] == lowest[2]
