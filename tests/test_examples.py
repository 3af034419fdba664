"""The demo runs from its real entry point, in small."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("lm_eval")
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import demo  # noqa: E402
import demo_data  # noqa: E402

SMALL = ["--steps", "3", "--batch-size", "2", "--seq-len", "64", "--eval-docs", "4"]
SMALL += ["--residual-every", "2", "--warmup", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("demo")
    return demo.main([*SMALL, "--output", str(folder)]), folder


def test_demo_writes_its_results(run) -> None:
    _, folder = run
    results = json.loads((folder / "results.json").read_text())
    assert set(results["arms"]) == {"mp", "sd", "dm"}
    for arm in results["arms"].values():
        fields = ("loss_first", "loss_last", "bits_per_byte", "row_sum_residual", "seconds")
        assert all(math.isfinite(arm[f]) for f in fields)
        assert len(arm["loss"]) == 3 and arm["loss_last"] < arm["loss_first"]
    assert results["environment"]["packages"]["torch"]
    assert (folder / "loss.png").stat().st_size > 10_000


def test_demo_shows_the_invariant(run) -> None:
    arms = run[0]["arms"]
    assert arms["dm"]["row_sum_residual"] < 1e-6
    assert arms["mp"]["row_sum_residual"] < 1e-5
    assert arms["sd"]["row_sum_residual"] > 1e-3


def test_demo_counts_the_calls_of_every_layer(run) -> None:
    arms = run[0]["arms"]
    assert arms["mp"]["calls"] == {}
    for arm in ("sd", "dm"):
        calls = arms[arm]["calls"]
        assert calls["attention_fwd"] == calls["attention_bwd"] == 3 * 4
        # 7 linears in each of 4 layers; every one has a gradient for its input and its weight.
        for op in ("linear_fwd", "linear_bwd_input", "linear_bwd_weight"):
            assert calls[op] == 3 * 4 * 7
        assert arms[arm]["provenance"]["calls"]["attention_fwd"] > 0


def test_demo_arms_start_from_the_same_weights_and_data(run) -> None:
    first = {name: arm["loss"][0] for name, arm in run[0]["arms"].items()}
    # FP8 changes the first loss by its rounding alone; SD and DM share one forward.
    assert first["sd"] == first["dm"]
    assert abs(first["dm"] - first["mp"]) < 0.02


def test_demo_is_repeatable(run, tmp_path) -> None:
    again = demo.main([*SMALL, "--arms", "dm", "--output", str(tmp_path)])
    assert again["arms"]["dm"]["loss"] == run[0]["arms"]["dm"]["loss"]


def test_demo_takes_a_local_model_dataset_and_tokenizer(tmp_path) -> None:
    from tiny_models import build

    build("qwen2", vocab_size=259).save_pretrained(tmp_path / "model")
    demo_data.load_tokenizer(None).save_pretrained(tmp_path / "tokenizer")
    rows = [{"body": f"Line {i}: the quick brown fox jumps. " * 40} for i in range(30)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    results = demo.main(
        [*SMALL, "--arms", "dm", "--model", str(tmp_path / "model")]
        + ["--tokenizer", str(tmp_path / "tokenizer"), "--dataset", str(tmp_path / "text.jsonl")]
        + ["--text-column", "body", "--output", str(tmp_path / "out")]
    )
    assert results["arms"]["dm"]["calls"]["attention_fwd"] == 3 * 2


def write_text(path: Path, rows: int = 200) -> Path:
    """``rows`` short texts, as JSON lines, CSV or plain lines by the suffix of ``path``."""
    texts = [f"Line {i}: the quick brown fox jumps over {i * i} lazy dogs." for i in range(rows)]
    if path.suffix == ".jsonl":
        texts = [json.dumps({"text": t, "n": i}) for i, t in enumerate(texts)]
    elif path.suffix == ".csv":
        texts = ["n,text", *(f'{i},"{t}"' for i, t in enumerate(texts))]
    path.write_text("".join(t + "\n" for t in texts))
    return path


@pytest.mark.parametrize("file", ["a.jsonl", "a.csv", "a.txt", "a.py", "folder/a.txt"])
def test_load_corpus_of_the_default_column(tmp_path, file: str) -> None:
    """Rows shorter than an evaluation snippet are joined; the column is called `text` already."""
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    write_text(path)
    name = str(path.parent if "folder" in file else path)
    train, held = demo_data.load_corpus(name, "text", limit_chars=10**6)
    assert len(held) == 1 and len(train) >= 9
    assert all(len(t) >= demo_data.MIN_CHARS and "quick brown fox" in t for t in train + held)
    assert train[0].startswith("Line 0:") and "Line 1:" in train[0]


def test_load_corpus_stops_at_its_limit(tmp_path) -> None:
    path = write_text(tmp_path / "a.jsonl", rows=2000)
    train, held = demo_data.load_corpus(str(path), "text", limit_chars=20_000)
    assert 20_000 <= sum(map(len, train)) < 21_000 and held


@pytest.mark.parametrize(
    ("name", "column", "words"),
    [
        ("{tmp}/a.jsonl", "n", ["--dataset", "'n' holds int", "--text-column"]),
        ("{tmp}/none.jsonl", "text", ["--dataset", "none.jsonl"]),
        ("{tmp}/empty.txt", "text", ["0 documents", "10"]),
    ],
)
def test_load_corpus_refuses(tmp_path, monkeypatch, name, column, words) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    write_text(tmp_path / "a.jsonl")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(SystemExit) as error:
        demo_data.load_corpus(name.format(tmp=tmp_path), column, 10**6)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (30, ["--text-column", "text"], ["no column 'text'", "body"]),
        (3, ["--text-column", "body"], ["3 documents", "10"]),
    ],
)
def test_demo_bad_dataset(tmp_path, rows, options, words) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"body": "some text " * 200}) + "\n" for _ in range(rows)))
    with pytest.raises(SystemExit) as error:
        demo.main([*SMALL, "--dataset", str(path), *options, "--output", str(tmp_path / "out")])
    assert all(word in str(error.value) for word in words), error.value


def test_demo_bad_arguments(capsys) -> None:
    with pytest.raises(SystemExit):
        demo.parse_args(["--steps", "0"])
    assert "--steps is 0" in capsys.readouterr().err
