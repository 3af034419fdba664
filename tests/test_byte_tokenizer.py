"""Tokenizers of bytes: ids, nothing added, what AutoTokenizer makes of the saved files."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

from hf_deltamatch.hf.byte_tokenizer import byte_tokenizer, is_byte_tokenizer
from hf_deltamatch.study.tokenizer import byte_tokenizer as study_tokenizer

TEXTS = ["", "def f(x):\n\treturn x", "  a  b ", "é — 漢字 😀", "\x00\x7f\x80", "x</s>y"]


@pytest.fixture(params=["made", "loaded"])
def tokenizer(request, tmp_path) -> PreTrainedTokenizerBase:
    made = byte_tokenizer()
    if request.param == "made":
        return made
    made.save_pretrained(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def test_ids_are_those_of_byt5_and_nothing_is_added(tokenizer) -> None:
    theirs = ByT5Tokenizer(extra_ids=0)
    assert len(tokenizer) == len(theirs) == 259
    for name in ("pad_token_id", "eos_token_id", "unk_token_id"):
        assert getattr(tokenizer, name) == getattr(theirs, name)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert tokenizer("é")["input_ids"] == [0xC3 + 3, 0xA9 + 3]


def test_what_reads_bytes(tokenizer) -> None:
    assert is_byte_tokenizer(tokenizer) and is_byte_tokenizer(study_tokenizer())
    assert is_byte_tokenizer(ByT5Tokenizer(extra_ids=0))
    tokenizer.add_tokens(["word"])
    assert not is_byte_tokenizer(tokenizer)
