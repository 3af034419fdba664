"""Models that choose their attention from a table of classes instead of the attention interface.

``FALCON_ATTENTION_CLASSES[config._attn_implementation]`` and its like know the names "eager" and "sdpa";
any other, registered or not, is a bare ``KeyError`` while the model is built. An entry of ours says what
to do instead.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from torch import nn

from hf_deltamatch.hf.modules import ATTN_IMPLEMENTATION

# Language models, and parts of them, that have had a table in a supported Transformers.
_MODELS = (
    "diffllama",
    "falcon",
    "git",
    "gpt_neo",
    "gptj",
    "kyutai_speech_to_text",
    "moshi",
    "nemotron",
    "deepseek_ocr2",
    "unlimited_ocr",
)
_SUFFIX = "ATTENTION_CLASSES"


def tables() -> dict[str, dict[str, type[nn.Module]]]:
    """Every such table by ``model.NAME``. Models without one are not imported."""
    found = {}
    for model in _MODELS:
        name = f"transformers.models.{model}.modeling_{model}"
        try:
            source = importlib.util.find_spec(name).origin
            if f"{_SUFFIX}[" not in Path(source).read_text(encoding="utf-8"):
                continue
            module = importlib.import_module(name)
        except (ImportError, AttributeError, OSError):  # another version, or an extra is missing
            continue
        for key, table in vars(module).items():
            if key.endswith(_SUFFIX) and isinstance(table, dict):
                found[f"{model}.{key}"] = table
    return found


def register() -> None:
    """Give every table an entry that refuses; harmless when done again."""
    for name, table in tables().items():
        table.setdefault(ATTN_IMPLEMENTATION, _refuser(name, tuple(table)))


def _refuser(name: str, allowed: tuple[str, ...]) -> type[nn.Module]:
    model = name.split(".")[0]

    class NoAttentionInterface(nn.Module):
        """Stands where the class of an attention implementation would be."""

        def __init__(self, *args, **kwargs) -> None:
            raise ValueError(
                f"attn_implementation={ATTN_IMPLEMENTATION!r}: {model} chooses its attention from a "
                "table of its own classes and not through the attention interface of Transformers, "
                f"so FP8 attention cannot run in it. It takes {', '.join(map(repr, allowed))}. Load "
                "the model without attn_implementation (for a part of a larger model: "
                f'attn_implementation={{"": {ATTN_IMPLEMENTATION!r}, "vision_config": "sdpa"}}); for '
                "FP8 linears alone see swap_linears(model)."
            )

    return NoAttentionInterface
