"""What the training scripts start from: a model, its arm, Accelerate."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env, set_seed
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_deltamatch import training as tr
from hf_deltamatch.hf.model_config import config_of_fields, positions_in
from hf_deltamatch.training.options import Options


def build_model(o: Options, **changes) -> PreTrainedModel:
    """A new model drawn from the seed, or a pretrained one; FP32 weights. ``changes`` go into its
    config."""
    set_seed(o.seed)
    try:
        model = _build(o, changes)
    # Transformers raises what it likes.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise SystemExit(f"model {o.model!r}: {type(error).__name__}: {error}") from error
    found = positions_in(model.config)
    if found is not None and o.seq_len > found[1]:
        raise SystemExit(
            f"seq_len is {o.seq_len}; the model has {found[1]} positions. Give a smaller --seq-len, a "
            "model with more positions, or extend its context with examples/extend_context.py."
        )
    return model


def _build(o: Options, changes: dict) -> PreTrainedModel:
    if isinstance(o.model, dict):
        config = config_of_fields({**o.model, **changes})
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Not the checkpoint's dtype: AdamW's steps are lost in the rounding of BF16 weights.
    config = AutoConfig.from_pretrained(o.model)
    stored = dict(getattr(config, "quantization_config", None) or {})
    if stored.get("quant_method") == "fp8":
        raise SystemExit(
            f"{o.model}: its weights are stored in FP8; training needs high-precision ones. Export the "
            "run without --fp8, or dequantise it (docs/PUBLISHING.md)."
        )
    for name, value in changes.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_pretrained(o.model, config=config, dtype=torch.float32)


def special_tokens(o: Options, tokenizer) -> dict:
    """Ends of the tokenizer in use, for the config of a new model: generation stops at them, and
    the config's class has those of another tokenizer. (Not ``pad``: an embedding does not learn it.)"""
    names = ("bos_token_id", "eos_token_id") if isinstance(o.model, dict) else ()
    return {name: getattr(tokenizer, name) for name in names if name not in o.model}


def make_accelerator(o: Options) -> Accelerator:
    # Accelerator would read the flag, but only after the state is made.
    on_gpu = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU")).device.type == "cuda"
    precision = {"auto": "bf16" if on_gpu else "no"}.get(o.precision, o.precision)
    tracker = None if o.tracker == "none" else o.tracker
    # TensorBoard adds the name of the run, which is the output folder's.
    where = Path(o.output).parent
    try:
        accelerator = Accelerator(mixed_precision=precision, log_with=tracker, project_dir=where)
    except ValueError as error:
        raise SystemExit(f"tracker {o.tracker!r}: {error}") from error
    each = o.micro_batch * accelerator.num_processes
    if o.batch_size % each:
        raise SystemExit(
            f"batch_size is {o.batch_size}; it must be a multiple of {each}: micro_batch "
            f"{o.micro_batch} on {accelerator.num_processes} processes. Give another --micro-batch, or a "
            "--batch-size that it divides."
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 2:
        # Autocast casts, as on one device. Accelerate's default also sums gradients and returns the
        # loss in BF16: measured 0.04 away in the loss after 20 steps.
        plugin.mixed_precision_policy = MixedPrecisionPolicy()
    return accelerator


def set_arm(o: Options, accelerator: Accelerator, model: PreTrainedModel) -> None:
    how = {"linear": o.linear, "block": o.block, "backend": o.backend}
    try:
        accelerator.print(tr.apply_arm(model, o.arm, device=accelerator.device, **how))
    except (ValueError, NotImplementedError) as error:
        said = str(error)
        raise SystemExit(said if said.startswith("arm ") else f"arm {o.arm!r}: {said}") from error
