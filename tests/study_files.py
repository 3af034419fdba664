"""The study files of the examples, made so small that a CPU runs each of them in seconds; and what
tells whether a step waits for its device."""

from __future__ import annotations

from pathlib import Path

import yaml
from torch.utils._python_dispatch import TorchDispatchMode

CONFIGS = Path(__file__).parent.parent / "examples" / "configs"
LAYERS = 4
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "head_dim": 16,
    "attn_layer_indices": [LAYERS - 1],
    "first_k_dense_replace": LAYERS,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
TRAIN = {"steps": 3, "batch_size": 2, "seq_len": 32, "warmup": 1, "last": 2, "residual_every": 2}


def small(name: str, text: str, **top) -> dict:
    """What ``examples/configs/NAME`` holds, with the same arms, settings and model classes at sizes of
    tens, a few steps, one seed, and ``text`` as the corpus."""
    data = yaml.safe_load((CONFIGS / name).read_text())
    for part in (data, *data["settings"]):
        part["model"] = {key: _small(key, value) for key, value in part.get("model", {}).items()}
        if "then" in part:
            part["then"] |= {"steps": 3, "batch_size": 1, "seq_len": 128, "warmup": 1, "last": 1}
            part["then"]["residual_every"] = 2
    data["train"] |= {**TRAIN, "held_out_sequences": 2, "precision": "auto"}
    for setting in data["settings"]:
        setting["train"] = {k: v for k, v in setting.get("train", {}).items() if k not in TRAIN}
    return {**data, "seeds": [0], "corpus": {"source": text, "held_out_every": 5}, **top}


def _small(key: str, value):
    if key in SIZES:
        return SIZES[key]
    if key == "num_key_value_heads":
        return min(value, 2)
    if isinstance(value, list) and value and key.endswith(("layer_types", "layers")):
        return value[:LAYERS]
    return value


class NoWaiting(TorchDispatchMode):
    """Fails where the host would read a value from the device, or a shape that depends on one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "equal"), name
        return func(*args, **(kwargs or {}))
