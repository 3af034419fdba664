"""The tokenizer of models that read bytes, for lm-eval and for saved weights."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_deltamatch.study.corpus import END


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token is a byte and its id the byte's value; 0 is ``<|end|>``, which the corpus has between
    documents."""
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items() if byte != END[0]}
    inner = Tokenizer(models.BPE(vocab={"<|end|>": END[0], **vocabulary}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    end = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|end|>")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, clean_up_tokenization_spaces=False, **end
    )
