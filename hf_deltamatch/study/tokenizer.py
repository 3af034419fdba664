"""The tokenizer of the study's models, for lm-eval and for saved weights."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_deltamatch.hf.byte_tokenizer import byte_level
from hf_deltamatch.study.corpus import END


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token is a byte and its id the byte's value; 0 is ``<|end|>``, which the corpus has between
    documents."""
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items() if byte != END[0]}
    end = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|end|>")
    return byte_level({"<|end|>": END[0], **vocabulary}, **end)
