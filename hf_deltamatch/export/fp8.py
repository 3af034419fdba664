"""Linears in Transformers' fine-grained FP8 format, with the very numbers that training multiplied with.

    weight            E4M3, [out, in]
    weight_scale_inv  FP32, [out / 128, in / 128]: multiplies to recover, as a descale here

``weight · weight_scale_inv`` is, bit for bit, what the recipe ``blockwise`` (of either descale) makes of
the high-precision weight in every forward and backward.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_deltamatch.export.weights import tensor_files
from hf_deltamatch.formats import BLOCKWISE_128X128, E4M3
from hf_deltamatch.hf import DeltaMatchConfig
from hf_deltamatch.hf.experts import experts_weights, is_experts
from hf_deltamatch.hf.linear import plan_linears
from hf_deltamatch.hf.running import linear_options, resolved
from hf_deltamatch.recipes import LinearRecipe
from hf_deltamatch.reference.quantize import Quantized, dequantize, quantize

BLOCK = 128
# An expert's matrices on disk, by what a fused weight holds of them.
_PARTS = {
    "gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")),
    "up_proj": (("up_proj", "w1"),),
    "down_proj": (("down_proj", "w2"),),
}


@dataclass
class Fp8Plan:
    """Which linears (and fused experts) are stored in FP8, by module name, and why others are not."""

    stored: dict[str, LinearRecipe] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def quantization_config(self) -> dict:
        """What config.json says of it."""
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": [self._pattern(name) for name in sorted(self.left)],
        }

    def refuse_nothing(self) -> None:
        """Raises ValueError where no linear is stored in FP8, with the reasons."""
        if not self.stored:
            reasons = "; ".join(sorted(set(self.left.values()))) or "the model has no linears"
            raise ValueError(
                f"--fp8: none of {len(self.left)} linears can be stored in Transformers' fine-grained "
                f"FP8 format: {reasons}. Export it without --fp8."
            )

    def _pattern(self, left: str) -> str:
        """Some versions read names as beginnings or ends of others: `gate` would be `gate_proj` too."""
        longer = any(name.startswith(left) or name.endswith(left) for name in self.stored)
        return f"{left}$" if longer else left


def plan_fp8(config: PreTrainedConfig, recipe: DeltaMatchConfig) -> Fp8Plan:
    """Of a model by its config, trained with ``recipe``; builds it without memory.

    Raises:
        ValueError: no linear was trained in a form that the format has, with the reasons.
    """
    if recipe.linear is None:
        raise ValueError(
            "--fp8: the run's linears were trained in high precision, so FP8 weights would be other "
            "numbers than it was trained with. Export it without --fp8, or train with `linear: "
            "blockwise`."
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    recipe = resolved(recipe, model)
    found = plan_linears(model, recipe.linear, **linear_options(recipe, model))
    plan = Fp8Plan()
    for name, chosen in found.items():
        reason = chosen
        if isinstance(chosen, LinearRecipe):
            reason = _cannot_be_stored(model.get_submodule(name), chosen)
        if reason is None:
            plan.stored[name] = chosen
        else:
            plan.left[name] = reason
    _leave_old_experts(model, plan)
    plan.refuse_nothing()
    return plan


def _leave_old_experts(model: nn.Module, plan: Fp8Plan) -> None:
    """Transformers takes every module called `experts` for fused ones."""
    for mixture, _ in model.named_modules():
        if mixture.endswith(".experts") and mixture not in plan.stored:
            plan.left.setdefault(mixture, "experts whose form is not that of the format")
            for name in [n for n in plan.stored if n.startswith(f"{mixture}.")]:
                plan.left[name] = plan.left[mixture]
                del plan.stored[name]


def _cannot_be_stored(module: nn.Module, recipe: LinearRecipe) -> str | None:
    if recipe.scaling != "blockwise":
        return f"trained with {recipe.name}, which the format cannot say"
    if not is_experts(module):
        if type(module) is not nn.Linear:
            return f"a {type(module).__name__}, of which the format has no form"
        n_out, n_in = module.weight.shape
        odd = n_out % BLOCK or n_in % BLOCK
        return f"{n_out} x {n_in} is not divisible into {BLOCK} x {BLOCK}" if odd else None
    if module.has_bias or module.is_transposed:
        return "experts with a bias or transposed weights, of which the format has no form"
    shapes = [tuple(getattr(module, n).shape[1:]) for n in experts_weights(module)]
    halves = [
        (n // 2, m) if i == 0 and module.has_gate else (n, m) for i, (n, m) in enumerate(shapes)
    ]
    if any(n % BLOCK or m % BLOCK for n, m in halves):
        return f"experts of {halves} are not divisible into {BLOCK} x {BLOCK}"
    return None


def quantize_weight(weight: Tensor, recipe: LinearRecipe) -> Quantized:
    """``[..., out, in]`` to payload and FP32 descales ``[..., out / 128, in / 128]``."""
    return quantize(weight, E4M3, BLOCKWISE_128X128, recipe.descale)


def trained_values(master: PreTrainedModel, plan: Fp8Plan) -> dict[str, Tensor]:
    """FP32 values of the weights that are stored in FP8, by the model's names."""
    out = {}
    for name, recipe in plan.stored.items():
        module = master.get_submodule(name)
        for key in experts_weights(module) if is_experts(module) else ["weight"]:
            pair = quantize_weight(getattr(module, key).detach(), recipe)
            out[f"{name}.{key}"] = dequantize(*pair, BLOCKWISE_128X128)
    return out


def write_fp8(folder: Path, exact: Path, master: PreTrainedModel, plan: Fp8Plan) -> None:
    """Replace in ``folder`` the weights of the plan by FP8 made from those of ``exact``, the same
    model in FP32. What is not found there under the names that the format wants moves to ``left``."""
    files, sources = tensor_files(folder), tensor_files(exact)
    chosen = {}
    for name in list(plan.stored):
        keys = _names_on_disk(name, master.get_submodule(name), files)
        if keys is None:
            plan.left[name] = "saved under names of which the format has no form"
            del plan.stored[name]
        else:
            chosen.update(dict.fromkeys(keys, plan.stored[name]))
    plan.refuse_nothing()
    for path in sorted(set(files.values())):
        tensors = {}
        with safe_open(path, framework="pt") as file:
            for key in file.keys():
                if key not in chosen:
                    tensors[key] = file.get_tensor(key)
                    continue
                with safe_open(sources[key], framework="pt") as master_file:
                    weight = master_file.get_tensor(key)
                payload, descale = quantize_weight(weight, chosen[key])
                tensors[key] = payload
                tensors[f"{key}_scale_inv"] = descale.contiguous()
        save_file(tensors, path, metadata={"format": "pt"})
    _extend_index(folder, files, chosen)


def _names_on_disk(name: str, module: nn.Module, files: dict[str, Path]) -> list[str] | None:
    if not is_experts(module):
        return [f"{name}.weight"] if f"{name}.weight" in files else None
    keys = []
    for fused in experts_weights(module):
        for names in _PARTS[fused]:
            found = [k for n in names for k in files if re.fullmatch(_of_expert(name, n), k)]
            if len(found) != module.num_experts:
                return None
            keys += found
    return keys


def _of_expert(name: str, part: str) -> str:
    # Mixtral's files have the mixture under another name than the model.
    parent = re.escape(name.removesuffix(".mlp.experts"))
    return rf"{parent}\.\w+\.experts\.\d+\.{part}\.weight"


def _extend_index(folder: Path, files: dict[str, Path], chosen: dict) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    facts = json.loads(index.read_text())
    facts["weight_map"] |= {f"{k}_scale_inv": files[k].name for k in chosen}
    facts["metadata"]["total_size"] = sum(p.stat().st_size for p in set(files.values()))
    index.write_text(json.dumps(facts, indent=2) + "\n")
