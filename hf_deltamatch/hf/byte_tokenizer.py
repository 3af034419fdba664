"""Tokenizers of models that read UTF-8 bytes, as ``AutoTokenizer`` loads them again."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIALS = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte ``b`` is token ``b + 3``, after ``<pad>``, ``</s>``, ``<unk>``: the ids of
    ``ByT5Tokenizer(extra_ids=0)``, which ends every text with ``</s>``. This one adds nothing, so that
    a model goes on with the text it is given."""
    vocabulary = {token: i for i, token in enumerate(SPECIALS.values())}
    letters = {letter: byte + len(SPECIALS) for byte, letter in bytes_to_unicode().items()}
    return byte_level(vocabulary | letters, **SPECIALS)


def byte_level(vocabulary: dict[str, int], **specials: str) -> PreTrainedTokenizerFast:
    """``vocabulary``: ids of the letters of ``bytes_to_unicode`` and of ``specials``."""
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, clean_up_tokenization_spaces=False, **specials
    )


def is_byte_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Are its tokens the bytes and its special tokens, nothing else?"""
    if isinstance(tokenizer, ByT5Tokenizer):
        return True
    words = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    return words <= set(bytes_to_unicode().values()) and len(words) >= 255
