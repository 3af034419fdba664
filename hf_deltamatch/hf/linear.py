"""FP8 linear modules and the swapper that turns a model's linears into them, in place.

A swapped module is the same object with another class: the same ``Parameter`` objects under the
same names, no buffers, no state. Optimisers, hooks, state dicts and sharding do not notice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_deltamatch.hf.modules import check_patterns, matches, most_specific
from hf_deltamatch.ops import fp8_linear
from hf_deltamatch.recipes import LinearRecipe

MIN_OUT_FEATURES = 16
HIGH_PRECISION = "bf16"


class _FP8:
    # Tensor parallelism of Transformers then hands the forward plain local tensors.
    _hf_quantized_needs_local_tp = True
    fp8_recipe: LinearRecipe
    fp8_backend: str | None

    def extra_repr(self) -> str:
        shape = super().extra_repr()
        return f"{shape}{', ' if shape else ''}fp8={self.fp8_recipe.name}"


class FP8Linear(_FP8, nn.Linear):
    """``nn.Linear`` whose three GEMMs take FP8 operands; the weight stays in high precision."""

    def forward(self, input: Tensor) -> Tensor:
        return fp8_linear(input, self.weight, self.bias, self.fp8_recipe, self.fp8_backend)


class FP8Conv1D(_FP8, Conv1D):
    """Transformers' ``Conv1D`` (a linear layer with weight ``[in, out]``, as in GPT-2) in FP8."""

    def __repr__(self) -> str:  # Conv1D's own does not call extra_repr
        return f"{type(self).__name__}(nf={self.nf}, nx={self.nx}, fp8={self.fp8_recipe.name})"

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.weight.t(), self.bias, self.fp8_recipe, self.fp8_backend)


_SWAP = {nn.Linear: FP8Linear, Conv1D: FP8Conv1D}
_UNSWAP = {fp8: plain for plain, fp8 in _SWAP.items()}


@dataclass
class SwapReport:
    """What :func:`swap_linears` did: every linear-like module is in one of the two."""

    swapped: dict[str, str] = field(default_factory=dict)
    """Module name to ``shape, recipe``."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Module (or parameter) name to the reason."""

    def __str__(self) -> str:
        lines = [f"{len(self.swapped)} linears in FP8, {len(self.skipped)} left as they are"]
        for what, count in Counter(self.swapped.values()).most_common():
            lines.append(f"  {count:>4} x {what}")
        lines += [f"  left {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


def swap_linears(
    model: nn.Module,
    recipe: str | LinearRecipe = "blockwise",
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    include: Iterable[str] = (),
    modules_to_not_convert: Iterable[str] | None = None,
    layers: dict[str, str | LinearRecipe] | None = None,
    backend: str | None = None,
) -> SwapReport:
    """Turn the linears of ``model`` into FP8 linears, in place.

    Swaps modules that are exactly ``nn.Linear`` or Transformers' ``Conv1D``. By default leaves the
    output embedding, tied weights, routers of mixtures, outputs narrower than 16, PEFT adapters,
    and reports fused 3-D experts, which are no linear modules.

    Args:
        recipe: name or :class:`LinearRecipe`.
        filter_fn: ``filter_fn(module, name)``; False leaves a module. It narrows the default
            choice; see ``include`` to widen it.
        include: module patterns to swap although the default leaves them.
        modules_to_not_convert: module patterns to leave.
        layers: module pattern to recipe, the most specific one wins; ``"bf16"`` leaves a module.
        backend: ``None`` (by device) or ``"reference"``.

    Returns:
        a :class:`SwapReport`; print it.

    Raises:
        ValueError: nothing was swapped, or a pattern matches nothing.

    >>> report = swap_linears(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)))
    >>> print(report)
    1 linears in FP8, 1 left as they are
         1 x 64 -> 64, blockwise
      left 1: out_features 2 < 16
    """
    base = LinearRecipe.resolve(recipe)
    include, leave = tuple(include), tuple(modules_to_not_convert or ())
    per_layer = {
        p: None if r == HIGH_PRECISION else LinearRecipe.resolve(r)
        for p, r in (layers or {}).items()
    }
    names = [name for name, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))]
    for what, patterns in (
        ("include", include),
        ("modules_to_not_convert", leave),
        ("layers", per_layer),
    ):
        check_patterns(f"swap_linears: `{what}`", patterns, names or ["(no linear modules)"])
    tied = _tied(model)
    report = SwapReport()
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, Conv1D)):
            _report_fused(name, module, report)
            continue
        reason = _hard_reason(module)
        if reason is None and not any(matches(name, p) for p in include):
            reason = _default_reason(model, name, module, tied)
        if reason is None and any(matches(name, p) for p in leave):
            reason = "in modules_to_not_convert"
        pattern = most_specific(name, per_layer)
        chosen = base if pattern is None else per_layer[pattern]
        if reason is None and chosen is None:
            reason = f"layers[{pattern!r}] is 'bf16'"
        if reason is None and filter_fn is not None and not filter_fn(module, name):
            reason = "filter_fn returned False"
        if reason is not None:
            _unswap(module)  # swapped by an earlier call
            report.skipped[name] = reason
            continue
        module.__class__ = _SWAP.get(type(module), type(module))
        module.fp8_recipe, module.fp8_backend = chosen, backend
        shape = f"{_in_features(module)} -> {_out_features(module)}"
        report.swapped[name] = f"{shape}, {chosen.name}"
    if not report.swapped:
        raise ValueError(
            f"swap_linears: no module of {type(model).__name__} was swapped. Left:\n{report}"
        )
    return report


def unswap_linears(model: nn.Module) -> int:
    """Turn FP8 linears back into the plain modules they were; returns how many."""
    return sum(_unswap(module) for module in model.modules())


def _unswap(module: nn.Module) -> bool:
    if type(module) not in _UNSWAP:
        return False
    module.__class__ = _UNSWAP[type(module)]
    del module.fp8_recipe, module.fp8_backend
    return True


def fp8_linears(model: nn.Module) -> dict[str, nn.Module]:
    """FP8 linear modules by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, _FP8)}


def _out_features(module: nn.Module) -> int:
    return module.nf if isinstance(module, Conv1D) else module.out_features


def _in_features(module: nn.Module) -> int:
    return module.weight.shape[0] if isinstance(module, Conv1D) else module.in_features


def _hard_reason(module: nn.Module) -> str | None:
    """Why a module cannot be swapped, whatever is asked for."""
    if type(module) not in _SWAP and not isinstance(module, _FP8):
        kind = type(module)
        return f"{kind.__module__}.{kind.__name__} is not exactly nn.Linear"
    if "forward" in vars(module) and not isinstance(module, _FP8):
        return "its forward is replaced on the instance (an Accelerate hook, for example)"
    if not module.weight.is_floating_point() or module.weight.element_size() < 2:
        return f"the weight is stored as {module.weight.dtype}"
    return None


def _default_reason(
    model: nn.Module, name: str, module: nn.Module, tied: dict[int, list[str]]
) -> str | None:
    """Why a module is left by default."""
    if module is _output_embedding(model):
        return "output embedding"
    shared = [n for n in tied.get(id(module.weight), ()) if n != f"{name}.weight"]
    if shared:
        return f"weight tied with {shared[0]}"
    if _is_router(model, name):
        return "router of a mixture of experts"
    if _is_adapter(name):
        return "PEFT adapter"
    if name.split(".")[-1] == "dt_proj":
        return "Mamba multiplies by this weight itself, past the module"
    if _out_features(module) < MIN_OUT_FEATURES:
        return f"out_features {_out_features(module)} < {MIN_OUT_FEATURES}"
    return None


def _output_embedding(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    return getter() if callable(getter) else None


def _tied(model: nn.Module) -> dict[int, list[str]]:
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


def _report_fused(name: str, module: nn.Module, report: SwapReport) -> None:
    """Experts held as one 3-D parameter are matrix products that no linear module sees."""
    if "expert" not in type(module).__name__.lower():
        return
    for key, param in module.named_parameters(recurse=False):
        if param.dim() == 3:
            shape = " x ".join(str(n) for n in param.shape)
            report.skipped[f"{name}.{key}"] = f"fused experts, one {shape} parameter: not swapped"
