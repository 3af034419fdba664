"""Which linears are left in high precision, and why."""

from __future__ import annotations

import ast
import functools
import textwrap

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_deltamatch.hf.experts import experts_default_reason, is_experts
from hf_deltamatch.hf.modules import source_of

MIN_OUT_FEATURES = 16

# What code may ask of a weight without multiplying by it.
_FACTS = {
    "dtype", "device", "shape", "size", "dim", "ndim", "numel", "requires_grad", "is_cuda",
    "is_meta", "is_quantized", "element_size",
}  # fmt: skip
# Methods that set weights up, rather than use them.
_SETTING_UP = {"init", "initialize", "reset", "tie", "load", "save", "resize"}


def out_features(module: nn.Module) -> int:
    return module.nf if isinstance(module, Conv1D) else module.out_features


def in_features(module: nn.Module) -> int:
    return module.weight.shape[0] if isinstance(module, Conv1D) else module.in_features


def default_reason(
    model: nn.Module, name: str, module: nn.Module, tied: dict[int, list[str]]
) -> str | None:
    """Why a module is left by default; ``include`` overrides it."""
    if is_experts(module):
        return experts_default_reason(name, module, tied, MIN_OUT_FEATURES)
    if module is _output_embedding(model):
        return "output embedding"
    own = f"{name}.weight" if name else "weight"
    shared = [n for n in tied.get(id(module.weight), ()) if n != own]
    if shared:
        return f"weight tied with {shared[0]}"
    if _is_router(model, name):
        return "router of a mixture of experts"
    if _is_adapter(name):
        return "PEFT adapter"
    reader = _reader_of_weight(model, name)
    if reader is not None:
        return f"{reader} multiplies by this weight itself, past the module"
    if out_features(module) < MIN_OUT_FEATURES:
        return f"out_features {out_features(module)} < {MIN_OUT_FEATURES}"
    return None


def _output_embedding(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    return getter() if callable(getter) else None


def tied_parameters(model: nn.Module) -> dict[int, list[str]]:
    """Names of every parameter, by identity; before loading, also what Transformers will tie."""
    by_id: dict[int, list[str]] = {}
    params = dict(model.named_parameters(remove_duplicate=False))
    for name, param in params.items():
        by_id.setdefault(id(param), []).append(name)
    for a, b in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if a in params and b in params:
            names = by_id[id(params[a])] + by_id[id(params[b])]
            by_id[id(params[a])] = by_id[id(params[b])] = list(dict.fromkeys(names))
    return by_id


def _is_router(model: nn.Module, name: str) -> bool:
    parts = name.split(".")
    if any(p == "router" or p.endswith("_router") for p in parts):
        return True
    if parts[-1] != "gate":
        return False
    parent = model.get_submodule(".".join(parts[:-1]))
    return any("expert" in child for child, _ in parent.named_children())


def _is_adapter(name: str) -> bool:
    return any(p.startswith("lora_") or p == "modules_to_save" for p in name.split("."))


def _reader_of_weight(model: nn.Module, name: str) -> str | None:
    """Class of a module that holds this one and whose code reads ``self.<name>.weight``.

    Such code multiplies by the weight without calling the module, on some of its paths at least
    (the CUDA kernels of Mamba, the fast path of ``nn.TransformerEncoderLayer``): there a swapped
    module would not run in FP8, whatever a report says.
    """
    parts = [p for p in name.split(".") if p != "base_layer"]  # PEFT wraps what it adapts
    for depth in range(len(parts)):
        owner = model.get_submodule(".".join(parts[:depth])) if depth else model
        if ".".join(parts[depth:]) in weights_read_by(type(owner)):
            return type(owner).__name__
    return None


@functools.cache
def weights_read_by(cls: type) -> frozenset[str]:
    """Paths ``p`` for which a method of the class reads ``self.p.weight``, other than its dtype,
    device or shape, and not to set it up. Empty where there is no source."""
    found = set()
    for base in cls.__mro__:
        if base in (nn.Module, PreTrainedModel, object):
            continue
        try:
            tree = ast.parse(textwrap.dedent(source_of(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        for method in tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef) and not _sets_up(method.name):
                found |= _weights_read_in(method)
    return frozenset(found)


def _sets_up(method: str) -> bool:
    return bool(_SETTING_UP & set(method.split("_")))


def _weights_read_in(method: ast.FunctionDef) -> set[str]:
    harmless = set()
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and node.attr in _FACTS:
            harmless.add(node.value)
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in (
            "isinstance",
            "hasattr",
        ):
            harmless |= set(node.args)
    return {
        path
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and node.attr == "weight" and node not in harmless
        if isinstance(node.ctx, ast.Load) and (path := _path_from_self(node.value))
    }


def _path_from_self(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed(parts)) if getattr(node, "id", None) == "self" else ""
