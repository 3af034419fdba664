"""The weights of a run as Transformers itself would have saved them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_deltamatch.export.source import Source
from hf_deltamatch.hf.byte_tokenizer import byte_tokenizer, is_byte_tokenizer
from hf_deltamatch.training import CheckpointError
from hf_deltamatch.training.state import load_model

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def read_config(source: Source) -> tuple[PreTrainedConfig, dict | None]:
    """The model's config without a quantisation config, and that.

    Raises:
        CheckpointError: no config that Transformers knows, or weights of another quantisation.
    """
    path = source.weights / "config.json"
    try:
        config = AutoConfig.from_pretrained(source.weights)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: no config of a model of Transformers ({error}).") from error
    saved = vars(config).pop("quantization_config", None)
    saved = saved if saved is None or isinstance(saved, dict) else saved.to_dict()
    if saved is not None and saved.get("quant_method") != "delta_matching":
        raise CheckpointError(
            f"{path}: its weights are quantised already ({saved.get('quant_method')}); export what they "
            "were made from."
        )
    return config, saved


def load_master(source: Source, config: PreTrainedConfig) -> PreTrainedModel:
    """The model with the run's own weights in FP32, on the CPU, plain.

    Raises:
        CheckpointError: tensors that are not those of the config's model, or not finite.
    """
    path = source.weights / "model.safetensors"
    if source.as_trained:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        try:
            load_model(model, path)
        except (ValueError, RuntimeError) as error:
            text = str(error)
            raise CheckpointError(text if str(path) in text else f"{path}: {text}") from error
    else:
        model = load_saved(source.weights, torch.float32, config=config)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{path}: {name!r} has NaN or Inf; export an earlier checkpoint.")
    return model.eval()


def load_saved(folder: Path, dtype: torch.dtype, **how) -> PreTrainedModel:
    """``from_pretrained``, strictly: nothing may be missing, left over or of another shape."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **how
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: cannot be loaded: {error}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            name = sorted(map(str, info[what]))[0]
            raise CheckpointError(
                f"{folder}: its tensors are not those of its config.json: "
                f"{what.replace('_', ' ')}, {name} for one."
            )
    return model


def write_weights(
    source: Source, master: PreTrainedModel, folder: Path, dtype: torch.dtype
) -> None:
    """Config, generation config and safetensors in ``dtype`` (but for what a model keeps in FP32)."""
    master.save_pretrained(folder)
    if dtype != torch.float32:
        # By way of the files, so that it is Transformers that chooses what stays in FP32.
        load_saved(folder, dtype).save_pretrained(folder)
    own = source.companion and source.companion / "generation_config.json"
    if own is not None and own.is_file():
        shutil.copyfile(own, folder / own.name)


def write_tokenizer(source: Source, folder: Path) -> str:
    """Tokenizer files into ``folder``; where they are from, or why there are none."""
    options = source.options or {}
    if source.companion is not None and (source.companion / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(source.companion)
        if isinstance(tokenizer, ByT5Tokenizer) and len(tokenizer) == len(byte_tokenizer()):
            # The same ids; ByT5's ends a prompt as if it were a document.
            tokenizer = byte_tokenizer()
        _save(tokenizer, folder)
        return "UTF-8 bytes" if is_byte_tokenizer(tokenizer) else "of the run"
    if isinstance(options.get("model"), dict) and options.get("tokenizer") is None:
        byte_tokenizer().save_pretrained(folder)  # what the scripts take
        return "UTF-8 bytes"
    name = options.get("tokenizer") or options.get("model")
    if name is None:
        return "none: there is none beside the weights"
    try:
        _save(AutoTokenizer.from_pretrained(name), folder)
    except (OSError, ValueError):
        return f"none: that of {Path(name).name} cannot be loaded"
    return f"of {Path(name).name}"


def _save(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Without what Transformers keeps of how it was loaded here: "from files at hand only"."""
    for key in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(folder)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Name of every tensor in a saved model to its file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {n: folder / f for n, f in json.loads(index.read_text())["weight_map"].items()}
    from safetensors import safe_open

    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path)
