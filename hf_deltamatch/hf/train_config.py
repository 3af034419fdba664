"""``config.train.json``: the arithmetic that weights were trained in, beside weights whose ``config.json``
names none, so that they load as a plain model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from hf_deltamatch.hf.config import DeltaMatchConfig
from hf_deltamatch.recipes import AttentionRecipe, LinearRecipe

FILE = "config.train.json"
FORMAT = "hf_deltamatch.train_config"


def config_of(
    attention: AttentionRecipe | None, linear: LinearRecipe | None, leave: list[str] | None = None
) -> DeltaMatchConfig | None:
    """Of what a model was trained in; None: all in high precision."""
    if attention is None and linear is None:
        return None
    return DeltaMatchConfig(attention=attention, linear=linear, modules_to_not_convert=leave)


def write_train_config(folder: Path, recipe: DeltaMatchConfig | None, **more: Any) -> None:
    """``recipe`` None: all in high precision. ``more``: JSON types, for whoever reads the file."""
    found = {
        "format": FORMAT,
        "quantization_config": None if recipe is None else recipe.to_dict(),
        **more,
    }
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    (folder / FILE).write_text(text, encoding="utf-8")


def read_train_config(
    pretrained: str, revision: str | None = None, subfolder: str | None = None, **_: Any
) -> dict | None:
    """Of a folder or a repository of the hub; None without such a file of this program.

    Raises:
        ValueError: the file is no JSON.
    """
    missing = ("missing_entries", "connection_errors", "gated_repo")
    file = cached_file(
        pretrained,
        FILE,
        revision=revision,
        subfolder=subfolder or "",
        **{f"_raise_exceptions_for_{what}": False for what in missing},
    )
    if file is None:
        return None
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: truncated or no JSON ({error}).") from error
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None
