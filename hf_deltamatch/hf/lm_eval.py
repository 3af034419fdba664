"""lm-eval model ``hf-deltamatch``: stock ``HFLM`` with FP8 attention and linears, and provenance.

``hf-deltamatch eval --model_args pretrained=PATH --tasks …`` takes lm-eval's own options. Extra
``model_args``:

* ``attention``: recipe name, ``auto`` (what the checkpoint says in its ``config.json``, or the
  ``config.train.json`` beside it; else ``delta_matching``, with a warning) or ``none``;
* ``linear``: recipe name, ``auto`` (the same, else ``blockwise``) or ``none``;
* ``fp8_backend``: ``reference`` for the slow path on a GPU without a kernel. It changes no recipe.

A recipe name replaces the recipe of every module that a checkpoint's own config runs in FP8; what
that config leaves in high precision stays so.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from hf_deltamatch.environment import environment
from hf_deltamatch.hf.attention import ATTN_IMPLEMENTATION
from hf_deltamatch.hf.check import check_model
from hf_deltamatch.hf.config import DeltaMatchConfig
from hf_deltamatch.hf.linear import (
    HIGH_PRECISION,
    fp8_linears,
    linear_modules,
    swap_linears,
    unswap_linears,
)
from hf_deltamatch.hf.modules import (
    Patterns,
    attention_modules,
    check_backend,
    choice_of,
    is_ours,
    plain_implementation,
    set_attention_recipe,
)
from hf_deltamatch.hf.train_config import read_train_config
from hf_deltamatch.ops.observe import CALLS

_LOG = logging.getLogger(__name__)
_DEFAULTS = {"attention": "delta_matching", "linear": "blockwise"}


@register_model("hf-deltamatch")
class DeltaMatchLM(HFLM):
    """``HFLM`` that loads a model with FP8 attention and linears and reports what really ran.

    A model object may be passed as ``pretrained``; it is then evaluated as it is.
    """

    def __init__(
        self,
        pretrained,
        *,
        attention: str | None = "auto",
        linear: str | None = "auto",
        fp8_backend: str | None = None,
        **kwargs,
    ) -> None:
        self._wanted = {"attention": attention, "linear": linear}
        self._fp8_backend = fp8_backend
        self._stored: str | None = None
        self._calls_before = Counter(CALLS)
        check_backend("hf-deltamatch: fp8_backend", fp8_backend)
        choices = (attention, linear, fp8_backend)
        if not isinstance(pretrained, str) and choices != ("auto", "auto", None):
            raise ValueError(
                "hf-deltamatch: `attention`, `linear` and `fp8_backend` choose how a checkpoint is "
                "loaded; a model object is evaluated as it is. Use set_attention_recipe(model, "
                "recipe, backend=…) and swap_linears(model, recipe, backend=…) on it."
            )
        if isinstance(pretrained, str):
            _refuse_folders_of_runs(Path(pretrained), kwargs.get("tokenizer"))
        try:
            super().__init__(pretrained, **kwargs)
        except OSError as error:
            if not isinstance(pretrained, str) or Path(pretrained).exists():
                raise
            raise OSError(
                f"pretrained={pretrained!r} is no folder here; as a name of the hub: {error}"
            ) from error
        if isinstance(pretrained, str) and kwargs.get("tp_plan") is None:
            self._share_documents()

    def _share_documents(self) -> None:
        """Data parallelism with any device; lm-eval's own needs several GPUs in one process's sight.

        Elsewhere (CPU, one visible GPU a process) each process would do all documents, and on
        several machines those of its place on its own machine.
        """
        accelerator = getattr(self, "accelerator", None)
        if accelerator is not None:
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            _LOG.warning(
                "%s processes were launched but Accelerate sees one: each evaluates all documents. "
                "On CPUs launch with ACCELERATE_USE_CPU=true torchrun --nproc_per_node N.",
                os.environ["WORLD_SIZE"],
            )

    def _create_model(self, *args, quantization_config=None, **kwargs) -> None:
        saved = isinstance(quantization_config, DeltaMatchConfig)
        if quantization_config is not None and not saved:
            kind = type(quantization_config).__name__
            method = getattr(quantization_config, "quant_method", kind)
            self._stored = str(getattr(method, "value", method))
        plain = all(name in (None, "none") for name in self._wanted.values())
        if quantization_config is not None and not (saved or plain):
            raise ValueError(
                f"hf-deltamatch: the checkpoint is quantised with {kind}; FP8 arithmetic needs high-precision "
                "weights. Evaluate it as it is with attention=none,linear=none, or dequantise it "
                "first."
            )
        defaults = _DEFAULTS
        if quantization_config is None and "auto" in self._wanted.values():
            trained = read_train_config(**kwargs)
            if trained is not None and trained["quantization_config"] is not None:
                quantization_config = DeltaMatchConfig.from_dict(trained["quantization_config"])
                quantization_config.backend = self._fp8_backend
                saved = True
            elif trained is not None:
                defaults = dict.fromkeys(_DEFAULTS)
            else:
                self._say_defaults(kwargs.get("pretrained"))
        wanted = {
            what: None if name in (None, "none") else (defaults[what] if name == "auto" else name)
            for what, name in self._wanted.items()
        }
        if quantization_config is None and any(wanted.values()):
            quantization_config = DeltaMatchConfig(**wanted, backend=self._fp8_backend)
        super()._create_model(*args, quantization_config=quantization_config, **kwargs)
        if saved:
            self._override_saved(quantization_config)

    def _say_defaults(self, pretrained: str) -> None:
        chosen = [
            f"{what}={_DEFAULTS[what] if name == 'auto' else name or 'none'}"
            for what, name in self._wanted.items()
        ]
        _LOG.warning(
            "%s does not say in what arithmetic it was trained; evaluated with %s. Choose with "
            "--model_args attention=…,linear=… (recipe names, or none for high precision).",
            pretrained,
            ",".join(chosen),
        )

    def _override_saved(self, saved: DeltaMatchConfig) -> None:
        """The checkpoint's own config wins in Transformers; apply what was asked for on top."""
        model, backend = self.model, self._fp8_backend
        attention, linear = self._wanted["attention"], self._wanted["linear"]
        if attention in (None, "none"):
            model.set_attn_implementation(plain_implementation(model))
        elif attention != "auto":
            kept = {
                n: HIGH_PRECISION
                for n, m in attention_modules(model).items()
                if is_ours(m) and not choice_of(m).recipe.quantize and saved.attention.quantize
            }
            model.set_attn_implementation(ATTN_IMPLEMENTATION)
            set_attention_recipe(model, attention, kept, backend)
        elif saved.attention is not None:
            set_attention_recipe(model, backend=backend)
        if linear in (None, "none"):
            unswap_linears(model)
        elif linear != "auto" and saved.linear is not None:
            running = list(fp8_linears(model))
            swap_linears(
                model, linear, lambda _, name: name in running, include=running, backend=backend
            )
        elif linear != "auto":
            left = [p for p, d in (saved.layers or {}).items() if d.get("linear") == HIGH_PRECISION]
            left = Patterns(left).used(linear_modules(model))
            swap_linears(model, linear, modules_to_not_convert=left, backend=backend)
        elif saved.linear is not None:
            swap_linears(model, backend=backend)

    def get_model_info(self) -> dict[str, Any]:
        """lm-eval's own facts, and under ``deltamatch`` what really ran."""
        return {**super().get_model_info(), "deltamatch": self.provenance()}

    def provenance(self) -> dict[str, Any]:
        """Recipes by number of modules, executed op calls, versions, device, hash of the weights."""
        attention: dict[str, int] = {}
        linears = 0
        if _is_ours(self.model):
            found = check_model(self.model)
            attention = dict(Counter(r.name for r in found.attention.values()))
            linears = len(found.linears)
        linear_recipes = Counter(
            m.fp8_recipe.name for m in self.model.modules() if hasattr(m, "fp8_recipe")
        )
        return {
            "attention": attention,
            "attention_modules": len(attention_modules(self.model)),
            "linear": dict(linear_recipes),
            "fp8_linears": linears,
            "processes": self.world_size,  # the calls are those of the first
            "calls": dict(CALLS - self._calls_before),
            "stored_as": self._stored,  # of Transformers' own quantisations
            "weights_sha256": _weights_sha256(self.pretrained),
            "environment": environment(),
        }


def _is_ours(model) -> bool:
    return getattr(model.config, "_attn_implementation", None) == ATTN_IMPLEMENTATION or any(
        hasattr(m, "fp8_recipe") for m in model.modules()
    )


def _weights_sha256(pretrained) -> str | None:
    """SHA-256 over the safetensors files of a local checkpoint, in the order of their names."""
    if not isinstance(pretrained, (str, Path)) or not Path(pretrained).is_dir():
        return None
    digest = hashlib.sha256()
    files = sorted(Path(pretrained).glob("*.safetensors"))
    for file in files:
        with file.open("rb") as f:
            while chunk := f.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest() if files else None


def _refuse_folders_of_runs(folder: Path, tokenizer: object) -> None:
    """
    Raises:
        ValueError: a training script's folder, or a checkpoint in it, which has no tokenizer of its own.
    """
    if (folder / "config.json").is_file():
        has_tokenizer = tokenizer is not None or any(folder.glob("tokenizer*"))
        if (folder / "manifest.json").is_file() and not has_tokenizer:
            raise ValueError(
                f"{folder} is a checkpoint of a run, and has no tokenizer. Evaluate the run's final/, or what "
                f"`hf-deltamatch export {folder} --output …` makes of it, or add tokenizer=PATH to --model_args."
            )
    elif (folder / "final" / "config.json").is_file():
        raise ValueError(
            f"{folder} is the folder of a run and holds no model itself; evaluate {folder / 'final'}."
        )
