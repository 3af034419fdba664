"""Go on training at 4 to 8 times the context: another RoPE base or scaling, a lower learning rate.

    python examples/extend_context.py --config examples/configs/extend_context.yaml \\
        --model runs/pretrain_125m/final
    accelerate launch --multi_gpu --num_processes 2 examples/extend_context.py --config … --model …

``--rope`` chooses how positions beyond the trained ones are encoded:

* ``base``: a larger base, so that the slowest rotation covers the new context as it covered the old
  one: base · factor^(d / (d − 2)) with d the rotated dimensions, or ``--rope-theta``;
* ``yarn``, ``linear``: the scaling of that name in Transformers, with ``factor``.

The loop, its data, checkpoints and options are those of ``pretrain.py``; ``--seq-len`` defaults to
the new context. ``final/`` loads with plain Transformers at the new length.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pretrain import run
from train_data import load_text, load_tokenizer
from train_setup import build_model, make_accelerator, set_arm
from transformers import AutoConfig, PreTrainedConfig

from hf_deltamatch.training.options import Options, aside, parse_options

ROPES = ("base", "yarn", "linear")


@dataclass
class ExtendOptions(Options):
    factor: float = 4.0
    """New context over old context."""
    rope: str = "base"
    """``base`` (a larger base), ``yarn`` or ``linear``."""
    rope_theta: float | None = None
    """The new base; default: by ``factor``."""
    seq_len: int = 0
    """0: the whole new context."""
    lr: float = 3e-5
    batch_size: int = 8
    micro_batch: int = 1
    output: str = aside("runs/extend_context")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope not in ROPES:
            raise ValueError(
                f"`rope` is {self.rope!r}; allowed values are {', '.join(map(repr, ROPES))}."
            )
        if not 1 <= self.factor <= 1e6:
            raise ValueError(f"`factor` is {self.factor}; it must be a number from 1 to 1e6.")
        if self.rope_theta is not None and not 0 < self.rope_theta < 1e300:
            raise ValueError(f"`rope_theta` is {self.rope_theta}; it must be a positive number.")
        if not isinstance(self.model, str):
            raise ValueError("`model` must be the local path or hub name of a trained model.")


def longer(config: PreTrainedConfig, o: ExtendOptions) -> dict:
    """Fields of the config that change.

    Raises:
        ValueError: a model without RoPE, or one that is scaled already.
    """
    old = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        raise ValueError(f"{o.model}: a {config.model_type} without RoPE has nothing to extend.")
    nested = {k: v for k, v in rope.items() if isinstance(v, dict)}
    if nested:  # by kind of layer: windows stay as long as they are
        kind = "full_attention"
        rope = {**rope, kind: _scaled(nested[kind], config, old, o)}
    else:
        rope = _scaled(rope, config, old, o)
    return {"rope_parameters": rope, "max_position_embeddings": round(old * o.factor)}


def _scaled(rope: dict, config: PreTrainedConfig, old: int, o: ExtendOptions) -> dict:
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"{o.model}: its RoPE is scaled already ({rope['rope_type']}); extend the model that it was "
            "made from."
        )
    if o.rope != "base":
        changed = {"rope_type": o.rope, "factor": o.factor}
        if o.rope == "yarn":
            changed["original_max_position_embeddings"] = old
        return {**rope, **changed, **({"rope_theta": o.rope_theta} if o.rope_theta else {})}
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    d = int(width * rope.get("partial_rotary_factor", 1.0))
    theta = o.rope_theta or rope["rope_theta"] * o.factor ** (d / (d - 2))
    return {**rope, "rope_theta": theta}


def main(argv: list[str] | None = None) -> dict:
    o = parse_options(ExtendOptions, argv, __doc__)
    accelerator = make_accelerator(o)
    try:
        changes = longer(AutoConfig.from_pretrained(o.model), o)
    except (ValueError, OSError) as error:
        here = Path(o.model).exists()
        what = "" if here else f"model {o.model!r} is no folder here; as a name of the hub: "
        raise SystemExit(f"extend_context: {what}{error}") from error
    context = changes["max_position_embeddings"]
    o.seq_len = o.seq_len or context
    if o.seq_len > context:
        raise SystemExit(
            f"extend_context: seq_len {o.seq_len} is beyond the new context, {context}."
        )
    accelerator.print(f"context {context}, RoPE {changes['rope_parameters']}")
    tokenizer = load_tokenizer(o.tokenizer or o.model)
    sampler, held_out = load_text(o, tokenizer)
    model = build_model(o, **changes)
    set_arm(o, accelerator, model)
    return run(o, accelerator, model, tokenizer, sampler, held_out)


if __name__ == "__main__":
    main()
