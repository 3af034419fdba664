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
import demo_report  # noqa: E402
import torch  # noqa: E402

from hf_deltamatch.ops.backend import Choice  # noqa: E402

SMALL = ["--steps", "3", "--batch-size", "2", "--seq-len", "208", "--eval-docs", "4"]
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


def test_demo_records_what_ran(run) -> None:
    results, _ = run
    for name, arm in results["arms"].items():
        assert arm["dtype"] == {"weights": "float32", "compute": "float32"}
        backends = {} if name == "mp" else {"attention": "reference", "linear": "reference"}
        assert arm["fp8_backend"] == backends
        assert arm["provenance"]["environment"]["device"] == "cpu"
        facts = [*arm["provenance"].values(), *arm["provenance"]["environment"].values()]
        assert None not in facts
    assert None not in results["environment"].values()


def test_demo_output(tmp_path, capfd) -> None:
    """One arm: what is printed is about that arm, and lm-eval is silent."""
    demo.main([*SMALL, "--arms", "dm", "--output", str(tmp_path)])
    out, err = capfd.readouterr()
    assert "dm: weights in float32, computing in float32" in out
    assert "backends: {'attention': 'reference', 'linear': 'reference'}" in out
    assert "largest of the 2 steps" in out and "chance is 0.25 ± 0.22" in out
    assert "MP's" not in out and "MP, " not in out.split("MP, SD, DM:")[0]
    for word in ("Truncating", "Tokenizing", "loglikelihood", "Generating", "aggregation"):
        assert word not in out + err


def arm(**fields) -> demo.Arm:
    steps = {"loss": [2.0, 1.0], "residual_steps": [0, 1], "residuals": [1e-7, 1e-7]}
    numbers = {"loss_first": 2.0, "loss_last": 1.0, "bits_per_byte": 3.0, "seconds": 1.0}
    dtype = {"weights": "float32", "compute": "float32"}
    lm_eval = {"continuation_acc": 0.5, "documents": 48}
    return demo.Arm(
        **{
            **steps,
            **numbers,
            "row_sum_residual": 1e-7,
            "dtype": dtype,
            "lm_eval": lm_eval,
            **fields,
        }
    )


def test_table_names_the_dtype_that_ran() -> None:
    table = demo_report.format_table({"mp": arm()})
    assert "MP, FP32 with SDPA" in table and "BF16" not in table
    assert "chance is 0.25 ± 0.06" in table and "MP's residual" in table
    bf16 = arm(dtype={"weights": "float32", "compute": "bfloat16"})
    assert "MP, BF16 with SDPA" in demo_report.format_table({"mp": bf16})


@pytest.mark.parametrize(
    ("names", "panels"),
    [(["mp", "sd", "dm"], 3), (["mp", "dm"], 3), (["sd", "dm"], 2), (["mp"], 2)],
)
def test_plot_follows_the_arms(names, panels, tmp_path, monkeypatch) -> None:
    from matplotlib import figure

    seen = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: seen.append(self))
    demo_report.plot({n: arm(loss=[3.0, 2.0 + i]) for i, n in enumerate(names)}, tmp_path / "a.png")
    (drawn,) = seen
    assert len(drawn.axes) == panels and all(axis.get_legend() for axis in drawn.axes)
    title = drawn.get_suptitle()
    assert title.startswith(", ".join(n.upper() for n in names) + ": one seed")
    assert ("matched δ" in title) == ("dm" in names)
    if panels == 3:
        legend = [text.get_text() for text in drawn.axes[1].get_legend().get_texts()]
        assert legend == [f"{n.upper()} − MP" for n in names[1:]]
        lines = {line.get_label(): list(line.get_ydata()) for line in drawn.axes[1].lines}
        assert all(lines[f"{n.upper()} − MP"] == [0.0, i] for i, n in enumerate(names) if i)


def test_pretrained_weights_are_loaded_in_fp32(tmp_path) -> None:
    from tiny_models import build

    build("llama", vocab_size=259).bfloat16().save_pretrained(tmp_path)
    args = demo.parse_args(["--model", str(tmp_path)])
    for name in demo.ARMS:
        assert {p.dtype for p in demo.build_model(args, name, 259).parameters()} == {torch.float32}


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seq-len", "64"], ["--seq-len is 64", "at least 200"]),
        (["--batch-size", "500", "--seq-len", "10000"], ["--batch-size is 500", "more text"]),
    ],
)
def test_demo_refuses_before_training(options, words, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(demo, "train", lambda *_: pytest.fail("trained first"))
    with pytest.raises(SystemExit) as error:
        demo.main([*SMALL, *options, "--output", str(tmp_path)])
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--steps", "0"], ["--steps is 0"]),
        (["--block", "foo"], ["--block", "'foo'", "128xD", "1xD", "mx"]),
        (["--backend", "zz"], ["--backend", "'zz'", "reference"]),
        (["--arms", "bf16"], ["--arms", "'bf16'", "mp"]),
    ],
)
def test_demo_bad_arguments(argv, words, capsys) -> None:
    with pytest.raises(SystemExit) as done:
        demo.parse_args(argv)
    assert done.value.code == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words), err


def test_demo_backend_that_cannot_run_here(monkeypatch, capsys) -> None:
    monkeypatch.setattr(demo, "explain", lambda *_: Choice(None, "no such device"))
    with pytest.raises(SystemExit):
        demo.parse_args(["--backend", "reference"])
    assert "--backend reference: no such device" in capsys.readouterr().err


def test_demo_block_without_a_kernel(monkeypatch, capsys) -> None:
    monkeypatch.setattr(demo, "explain", lambda *_: Choice("triton", "kernel"))
    refuse = lambda recipe, *_: "no kernel here" if recipe.block == "mx" else None
    monkeypatch.setattr(demo.kernels, "unsupported_attention", refuse)
    demo.parse_args(["--block", "1xD"])
    with pytest.raises(SystemExit):
        demo.parse_args(["--block", "mx"])
    assert "--block mx: " in (err := capsys.readouterr().err) and "--backend reference" in err


def test_demo_takes_the_reference_where_an_op_has_no_kernel(monkeypatch, capsys) -> None:
    """Ops differ: the kernel of one does not make the other's exist."""
    found = {"attention": Choice("triton", "kernel"), "linear": Choice(None, "no linear kernel")}
    monkeypatch.setattr(demo, "explain", lambda op, *_: found[op])
    chosen = demo.choose_backends(None, torch.device("cuda"))
    assert chosen == {"attention": "triton", "linear": "reference"}
    assert (
        "FP8 linear: no linear kernel; running the pure-torch reference" in capsys.readouterr().out
    )
