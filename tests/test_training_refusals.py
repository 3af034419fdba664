"""What the training scripts refuse before they train: options, models, data, folders."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import finetune  # noqa: E402
import train_data  # noqa: E402
from extend_context import ExtendOptions  # noqa: E402
from python_path import python_path  # noqa: E402
from transformers import ByT5Tokenizer  # noqa: E402

from hf_deltamatch.hf.model_config import config_of_fields  # noqa: E402
from hf_deltamatch.training.checkpoints import CheckpointError  # noqa: E402
from hf_deltamatch.training.lock import alone_in  # noqa: E402
from hf_deltamatch.training.options import Options, parse_options  # noqa: E402


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("lr", (-1.0, math.nan, math.inf)),
        ("clip", (0.0, -1.0, math.nan, math.inf)),
        ("weight_decay", (-0.1, math.nan, math.inf)),
        ("floor", (-1.0, 2.0, math.nan)),
        ("decay", (-1.0, 5.0, math.nan)),
        ("betas", ([], [0.9], [0.9, 1.0], [0.9, math.nan], [0.9, 0.95, 0.99])),
        ("peak_flops", (0.0, -1.0, math.nan)),
        ("seed", (-1, 2**32)),
        ("warmup", (-1,)),
        ("seq_len", (-1, 0, 1)),
        ("steps", (0, -1, 2**63)),
        ("held_out", (-1,)),
        ("eval_rows", (0,)),
        ("monitor_every", (-1,)),
        ("linear", ("nope", "bf16")),
        ("block", ("nope",)),
        ("backend", ("nope",)),
        ("model", (None, 3, [1])),
        ("output", ("",)),
    ],
)
def test_options_have_ranges(name: str, values: tuple) -> None:
    """Each of these trained to the end, or failed far below in words of its own."""
    for value in values:
        with pytest.raises(ValueError, match=f"^`{name}` is "):
            Options(**{"model": "x", name: value})


def test_options_of_the_other_scripts() -> None:
    assert ExtendOptions(model="x").seq_len == 0  # the whole new context
    for changes in (
        {"factor": math.nan},
        {"factor": math.inf},
        {"rope_theta": -1.0},
        {"seq_len": 1},
    ):
        with pytest.raises(ValueError, match=f"^`{next(iter(changes))}` is "):
            ExtendOptions(model="x", **changes)
    for changes in ({"lora_rank": -1}, {"lora_alpha": math.nan}):
        with pytest.raises(ValueError, match=f"^`{next(iter(changes))}` is "):
            finetune.FinetuneOptions(model="x", **changes)


@pytest.mark.parametrize("content", [b"a: [1", b"\xff\xfe", b"[1]", b"[" * 5000, b"1: 2"], ids=str)
def test_files_of_other_kinds(content: bytes, tmp_path, capsys) -> None:
    (tmp_path / "a.yaml").write_bytes(content)
    with pytest.raises(SystemExit) as error:
        parse_options(Options, ["--config", str(tmp_path / "a.yaml")], "")
    assert error.value.code == 2 and "a.yaml: " in capsys.readouterr().err


def test_fields_of_a_new_model() -> None:
    """Transformers keeps a field that a config does not have, and builds the default in its place: a
    misspelled hidden_size would train a model of 7B."""
    assert config_of_fields({"model_type": "llama", "hidden_size": 64}).hidden_size == 64
    assert config_of_fields({"model_type": "llama", "rope_theta": 5.0})
    assert config_of_fields({"model_type": "qwen2", "head_dim": 16}).head_dim == 16  # not declared
    for fields, words in (
        ({"model_type": "llama", "hiddensize": 64}, "no 'hiddensize'; did you mean 'hidden_size'"),
        ({"model_type": "llama", "hidden_size": "x"}, "config of llama: .*hidden_size"),
        ({"model_type": "lama"}, "'lama', which is no model type .*near are .*llama"),
        ({"model_type": ["llama"]}, "no model type"),
        ({}, "model_type is None"),
    ):
        with pytest.raises(ValueError, match=words):
            config_of_fields(fields)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "empty|no"),
        ('{"text": "a', "JSON|parse|Failed"),
        ('{"text": 3}\n', "column 'text' holds 3"),
    ],
    ids=["empty", "cut", "numbers"],
)
def test_data(content: str, words: str, tmp_path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    o = Options(model="x", data=str(path), seq_len=16, held_out=0)
    with pytest.raises(SystemExit, match=f"data '{path}'.*({words})"):
        train_data.load_text(o, ByT5Tokenizer(extra_ids=0))


def test_data_that_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither here nor a name of the hub (which is not asked)."""

    def nowhere(*args, **kwargs):
        raise FileNotFoundError("no such data set")

    monkeypatch.setattr(train_data, "load_dataset", nowhere)
    o = Options(model="x", data="none/such.jsonl", seq_len=16, held_out=0)
    with pytest.raises(
        SystemExit, match="no such file or folder here; as a name of the hub: no such data"
    ):
        train_data.load_text(o, ByT5Tokenizer(extra_ids=0))


@pytest.mark.parametrize(
    "messages",
    [3, "hi", [3], [{"role": "user"}], [{"content": "x"}], [{"role": 1, "content": "x"}]],
)
def test_conversations(messages, tmp_path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = finetune.CHATML
    o = finetune.FinetuneOptions(model="x", data=str(path))
    with pytest.raises(SystemExit, match="a conversation is .*it must be a list of"):
        finetune.load_chats(o, tokenizer)


def test_one_process_writes_a_folder(tmp_path) -> None:
    folder = tmp_path / "run"
    hold = (
        "import sys, pathlib; from hf_deltamatch.training.lock import alone_in\n"
        "with alone_in(pathlib.Path(sys.argv[1])): print('in', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": python_path(Path(__file__).parent.parent)},
    )  # fmt: skip
    try:
        assert other.stdout.readline() == b"in\n"
        with pytest.raises(CheckpointError, match="another process is training into this folder"):
            with alone_in(folder):
                pytest.fail("two at once")
    finally:
        other.kill()  # as a machine would: nothing is tidied up
        other.communicate()
    with alone_in(folder):
        assert list(folder.iterdir()) == []
    with alone_in(folder):
        pass


def test_folders_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside", Path("/proc/none")):
        with pytest.raises(
            CheckpointError, match="no folder that can be written to.*Choose another"
        ):
            with alone_in(folder):
                pass


def test_flags_are_whole_words(capsys) -> None:
    with pytest.raises(SystemExit):
        parse_options(Options, ["--out", "elsewhere"], "")
    assert "--out" in capsys.readouterr().err


def test_flags_are_the_keys_in_either_spelling() -> None:
    for argv in (["--eval_every", "6"], ["--eval-every", "6"], ["--eval_every=6"]):
        assert parse_options(Options, [*argv, "--model", "a_b"], "").eval_every == 6
