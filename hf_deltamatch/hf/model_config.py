"""The config of a new model from a mapping, as files of options hold it."""

from __future__ import annotations

import difflib
import inspect
import re
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

# Former names, which Transformers still moves to where they belong now.
_FORMER = {"rope_theta", "rope_scaling", "torch_dtype", "partial_rotary_factor"}


def config_of_fields(fields: dict[str, Any]) -> PreTrainedConfig:
    """``{"model_type": "llama", "hidden_size": 512, …}``; what is not named has Transformers' default.

    Raises:
        ValueError: no such model type, a field that its config does not have (Transformers would keep
            it and build the model of the default in its place), or a value that it refuses.
    """
    given = dict(fields)
    kind = given.pop("model_type", None)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(kind), CONFIG_MAPPING, 3)
        hint = f"; near are {', '.join(near)}" if near else ""
        raise ValueError(
            f"model_type is {kind!r}, which is no model type of the installed Transformers{hint}."
        )
    cls = CONFIG_MAPPING[kind]
    known = _FORMER | set(cls.attribute_map) | {n for n in dir(cls) if not n.startswith("_")}
    # Llama's too: a file may share them over model types, of which some have no use for one.
    for base in (*cls.__mro__, *CONFIG_MAPPING["llama"].__mro__):
        known |= set(inspect.get_annotations(base)) | set(
            inspect.signature(base.__init__).parameters
        )
    for name in given:
        if name not in known and not _read_by_code(cls, str(name)):
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"the config of {kind} has no {name!r}; {hint}it would be ignored.")
    try:
        return AutoConfig.for_model(kind, **given)
    except Exception as error:  # Transformers and its validation raise many kinds
        said = " ".join(str(error).split())
        raise ValueError(f"the config of {kind}: {type(error).__name__}: {said}") from error


def positions_of(fields: dict[str, Any]) -> tuple[str, int] | None:
    """The field of the config that says for how many positions a model is, and its value; None of
    models without positions, and of fields that :func:`config_of_fields` refuses."""
    try:
        return positions_in(config_of_fields(fields))
    except ValueError:
        return None


def positions_in(config: PreTrainedConfig) -> tuple[str, int] | None:
    """As :func:`positions_of`, of a config."""
    config = config.get_text_config()
    # Of the class itself: a file may name fields that it has no use for.
    own, given = type(config)().to_dict(), config.to_dict()
    for name in ("max_position_embeddings", "n_positions"):
        value = given.get(name)
        if name in own and isinstance(value, int) and value > 0:
            return name, value
    return None


def _read_by_code(cls: type, name: str) -> bool:
    """Do the models of a config ask for a field that it does not declare (Qwen2's for head_dim)?"""
    word = re.compile(rf"\b{re.escape(name)}\b")
    files = Path(inspect.getfile(cls)).parent.glob("modeling_*.py")
    return any(word.search(file.read_text(encoding="utf-8")) for file in files)
