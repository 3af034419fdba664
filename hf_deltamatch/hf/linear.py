"""FP8 linear modules and the swapper that turns a model's linears into them, in place.

A swapped module is the same object with another class: the same ``Parameter`` objects under the
same names, no buffers, no state. Optimisers, hooks, state dicts and sharding do not notice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_deltamatch.hf.experts import (
    experts_hard_reason,
    experts_recipe,
    experts_shape,
    is_experts,
    is_fp8_experts,
    swap_experts,
    unswap_experts,
)
from hf_deltamatch.hf.gated import check_fuse, choose_gated, unfuse_module
from hf_deltamatch.hf.layer_words import HIGH_PRECISION, linear_or_bf16, named_layers
from hf_deltamatch.hf.linear_cost import AutoFilter, auto_filter
from hf_deltamatch.hf.linear_modules import FP8Conv1D, FP8Linear, FP8Module
from hf_deltamatch.hf.linear_rules import (
    default_reason,
    in_features,
    out_features,
    tied_parameters,
)
from hf_deltamatch.hf.modules import (
    Patterns,
    check_backend,
    check_patterns,
    pattern_list,
    require_module,
    update_saved_config,
)
from hf_deltamatch.ops.attention_args import HIGH_PRECISION as QUANTISED_DTYPES
from hf_deltamatch.recipes import LinearRecipe

DEFAULT_RECIPE = "blockwise"


_SWAP = {nn.Linear: FP8Linear, Conv1D: FP8Conv1D}
_UNSWAP = {fp8: plain for plain, fp8 in _SWAP.items()}


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""Of a layer, in the name of a module."""


@dataclass
class SwapReport:
    """What :func:`swap_linears` did: every linear-like module is in one of the two."""

    swapped: dict[str, str] = field(default_factory=dict)
    """Module name to ``in -> out, recipe``, or to ``experts count x in -> inside, recipe``."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Module (or parameter) name to the reason."""
    notes: list[str] = field(default_factory=list)
    """What to know before training."""

    def __str__(self) -> str:
        mixtures = sum(what.startswith("experts ") for what in self.swapped.values())
        linears = f"{len(self.swapped) - mixtures} linears"
        if mixtures:
            linears += f" and the experts of {mixtures} mixtures"
        lines = [f"{linears} in FP8, {len(self.skipped)} left as they are"]
        for what, count in Counter(self.swapped.values()).most_common():
            lines.append(f"  {count:>4} x {what}")
        alike: dict[tuple[str, str], list[str]] = {}
        for name, reason in self.skipped.items():
            alike.setdefault((_NUMBER.sub("*", name), reason), []).append(name)
        for (names, reason), found in alike.items():
            name = found[0] if len(found) == 1 else f"{len(found)} x {names}"
            lines.append(f"  left {name or 'the module itself'}: {reason}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def swap_linears(
    model: nn.Module,
    recipe: str | LinearRecipe | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | AutoFilter | str | None = None,
    *,
    tokens: int | None = None,
    include: Iterable[str] = (),
    modules_to_not_convert: Iterable[str] | None = None,
    layers: dict[str, str | LinearRecipe] | str | None = None,
    fuse_gated: bool | str | None = None,
    backend: str | None = None,
) -> SwapReport:
    """Turn the linears of ``model`` into FP8 linears, in place.

    Swaps modules that are exactly ``nn.Linear`` or Transformers' ``Conv1D``, and the fused experts of
    mixtures, one module for all of a layer, where Transformers' experts interface runs them. By
    default leaves the output embedding, tied weights, routers of mixtures, outputs narrower than 16,
    PEFT adapters and weights that the code around the module reads itself, and reports fused experts
    that run code of their own.

    A model loaded with a ``DeltaMatchConfig`` saves the new choice. One without saves none and
    reloads with plain linears: see ``DeltaMatchConfig.apply_to``.

    Args:
        recipe: name or :class:`LinearRecipe`. None: a model that already has FP8 linears keeps
            them, with the recipe of each, and gets no others (so that ``swap_linears(model,
            backend=…)`` changes nothing else); any other model gets ``"blockwise"``.
        filter_fn: ``filter_fn(module, name)``; False leaves a module (a linear, or fused experts). It
            narrows the default choice; see ``include`` to widen it. ``"auto"`` leaves those that a
            model of the device's rates (:mod:`hf_deltamatch.hf.linear_cost`) predicts to be as fast
            in BF16, but for those of ``include``.
        tokens: for ``"auto"``, the tokens of one forward (batch times sequence); default 8192.
        include: module patterns to swap although the default leaves them.
        modules_to_not_convert: module patterns to leave.
        layers: module pattern to recipe, the most specific one wins; ``"bf16"`` leaves a module.
            ``"first_last_bf16"`` instead of a dict leaves the first and the last layer.
        fuse_gated: True runs ``down_proj(silu(gate) * up)`` of feed-forward modules with Transformers'
            usual forward as one op, which keeps nothing of the product for the backward
            (:func:`hf_deltamatch.ops.fp8_gated_linear`), ``"whole"`` gate_proj and up_proj in it as well
            (:func:`hf_deltamatch.ops.fp8_swiglu`); False undoes it, None leaves it
            as it is. Not saved with the model. A linear with hooks or a wrapper runs as before.
        backend: ``"reference"``, ``"triton"`` …; ``None`` keeps what a module has (by device where
            none was ever named).

    Returns:
        a :class:`SwapReport`; print it.

    Raises:
        ValueError: nothing would be swapped, a pattern matches nothing, or there is no such
            backend or filter; the model is then as it was.
        TypeError: a string instead of a list of patterns, or a list instead of a dict.

    >>> report = swap_linears(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)))
    >>> print(report)
    1 linears in FP8, 1 left as they are
         1 x 64 -> 64, blockwise
      left 1: out_features 2 < 16
    """
    require_module("swap_linears", model)
    check_backend("swap_linears", backend)
    check_fuse(fuse_gated)
    filter_fn = auto_filter(filter_fn, tokens)
    plan = plan_linears(
        model,
        recipe,
        filter_fn,
        include=pattern_list("swap_linears: `include`", include),
        leave=pattern_list("swap_linears: `modules_to_not_convert`", modules_to_not_convert),
        layers=named_layers("swap_linears: `layers`", layers, model, linear_modules(model)),
    )
    report = swap_by_plan(model, plan, backend)
    report.notes += choose_gated(model, fuse_gated)
    if isinstance(filter_fn, AutoFilter) and filter_fn.note is not None:
        report.notes.append(filter_fn.note)
    update_saved_config(model)
    return report


def plan_linears(
    model: nn.Module,
    recipe: str | LinearRecipe | None,
    filter_fn: Callable[[nn.Module, str], bool] | AutoFilter | None = None,
    *,
    include: list[str],
    leave: list[str],
    layers: dict[str, str | LinearRecipe],
    as_loaded: bool = False,
) -> dict[str, LinearRecipe | str]:
    """The recipe of every linear-like module, or the reason why it is left; changes nothing.

    ``as_loaded`` leaves out what happened to modules since (hooks), and checks no patterns.
    """
    linears = linear_modules(model)
    recipes = {p: linear_or_bf16("swap_linears", p, r) for p, r in layers.items()}
    per_layer = {p: None if r == HIGH_PRECISION else r for p, r in recipes.items()}
    if not as_loaded:
        check_patterns("swap_linears: `include`", include, linears)
        check_patterns("swap_linears: `modules_to_not_convert`", leave, linears)
        check_patterns("swap_linears: `layers`", layers, linears)
    keep = recipe is None and any(is_fp8(m) for m in linears.values())
    base = LinearRecipe.resolve(DEFAULT_RECIPE if recipe is None else recipe)
    tied = tied_parameters(model)
    asked, left, exceptions = Patterns(include), Patterns(leave), Patterns(per_layer)

    def decide(name: str, module: nn.Module) -> LinearRecipe | str:
        reason = _hard_reason(module, hooks=not as_loaded)
        if reason is not None:
            return reason
        kept, included = keep and is_fp8(module), bool(asked.matching(name))
        if not kept and not included:
            reason = default_reason(model, name, module, tied)
        if reason is None and left.matching(name):
            reason = "in modules_to_not_convert"
        pattern = exceptions.most_specific(name)
        if reason is None and pattern is not None and per_layer[pattern] is None:
            reason = f"layers[{pattern!r}] is 'bf16'"
        if reason is None and keep and not (kept or included or pattern is not None):
            reason = "was not in FP8 before; name a recipe to swap it"
        if reason is not None:
            return reason
        if pattern is not None:
            return per_layer[pattern]
        return recipe_of(module) if kept else base

    plan = {name: decide(name, module) for name, module in linears.items()}
    if filter_fn is None:
        return plan
    chosen = {name: r for name, r in plan.items() if not isinstance(r, str)}
    if isinstance(filter_fn, AutoFilter):
        filter_fn.look_at((linears[name], recipe) for name, recipe in chosen.items())
        for name, recipe in chosen.items():
            if not asked.matching(name):
                plan[name] = filter_fn.reason(linears[name], recipe) or recipe
        return plan
    left_out = [name for name in chosen if not filter_fn(linears[name], name)]
    return plan | dict.fromkeys(left_out, "filter_fn returned False")


def swap_by_plan(
    model: nn.Module, plan: dict[str, LinearRecipe | str], backend: str | None
) -> SwapReport:
    """Carries a plan out.

    Raises:
        ValueError: it would swap nothing.
    """
    report = SwapReport()
    for name, module in model.named_modules():
        if name not in plan:
            _report_fused(name, module, report)
        elif isinstance(plan[name], str):
            report.skipped[name] = plan[name]
        else:
            report.swapped[name] = f"{_shape(module)}, {plan[name].name}"
    if not report.swapped:
        automatic = ""
        if any("predicted" in reason for reason in report.skipped.values()):
            automatic = (
                ' "auto" predicts by rates measured on an H200 and leaves what is no faster there; '
                "without filter_fn everything that can be is swapped."
            )
        raise ValueError(
            f"swap_linears: no module of {type(model).__name__} can be swapped.{automatic} "
            f"Left:\n{report}"
        )
    for name, chosen in plan.items():
        if isinstance(chosen, str) and (why := _extended(model.get_submodule(name))):
            raise ValueError(f"swap_linears: {name} cannot be left ({chosen}): {why}.")
    for name, chosen in plan.items():
        module = model.get_submodule(name)
        if isinstance(chosen, str):
            _unswap(module)  # swapped by an earlier call
            continue
        if is_experts(module):
            swap_experts(module, chosen, backend)
            continue
        module.__class__ = _SWAP.get(type(module), type(module))
        module.fp8_recipe = chosen
        module.fp8_backend = backend or getattr(module, "fp8_backend", None)
    report.notes = low_precision_note([model.get_submodule(n) for n in report.swapped])
    return report


def low_precision_note(modules: Iterable[nn.Module]) -> list[str]:
    """Master weights in BF16 lose small updates; FP8 arithmetic asks for none of it."""
    weights = (m.down_proj if is_experts(m) else m.weight for m in modules)
    low = Counter(
        w.dtype for w in weights if w.requires_grad and w.dtype in (torch.bfloat16, torch.float16)
    )
    return [
        f"{count} FP8 linears train {str(dtype).removeprefix('torch.')} weights, which lose small "
        'updates; for training load with dtype=torch.float32 and use mixed_precision="bf16"'
        for dtype, count in low.items()
    ]


def unswap_linears(model: nn.Module) -> int:
    """Turn FP8 linears and experts back into the plain modules they were; returns how many.

    What a model that was loaded with a ``DeltaMatchConfig`` saves about itself follows.

    Raises:
        ValueError: an FP8 linear whose class something else has extended since it was swapped (a
            parametrization, ``fully_shard``); nothing is turned back then.
        TypeError: not a model.
    """
    require_module("unswap_linears", model)
    for name, module in fp8_linears(model).items():
        if _extended(module):
            raise ValueError(f"unswap_linears: {name or 'the module'}: {_extended(module)}.")
    count = sum(_unswap(module) for module in model.modules())
    update_saved_config(model)
    return count


def _extended(module: nn.Module) -> str | None:
    """Why an FP8 linear cannot become a plain one: its class is no longer ours alone."""
    if not isinstance(module, FP8Module) or type(module) in _UNSWAP:
        return None
    return (
        f"its class is {type(module).__name__} since something extended it in FP8 (a parametrization, "
        "fully_shard); undo that first, or choose before it"
    )


def _unswap(module: nn.Module) -> bool:
    unfuse_module(module)
    if is_experts(module):
        return unswap_experts(module)
    if type(module) not in _UNSWAP:
        return False
    module.__class__ = _UNSWAP[type(module)]
    del module.fp8_recipe, module.fp8_backend
    return True


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Linears and fused experts, in FP8 or not, by name."""
    found = lambda m: isinstance(m, (nn.Linear, Conv1D)) or is_experts(m)
    return {n: m for n, m in model.named_modules() if found(m)}


def fp8_linears(model: nn.Module) -> dict[str, nn.Module]:
    """FP8 linears and experts by name."""
    return {name: m for name, m in model.named_modules() if is_fp8(m)}


def is_fp8(module: nn.Module) -> bool:
    return isinstance(module, FP8Module) or is_fp8_experts(module)


def recipe_of(module: nn.Module) -> LinearRecipe:
    """Of a module that :func:`is_fp8`."""
    return experts_recipe(module) if is_experts(module) else module.fp8_recipe


def _shape(module: nn.Module) -> str:
    if is_experts(module):
        return experts_shape(module)
    return f"{in_features(module)} -> {out_features(module)}"


def _hard_reason(module: nn.Module, *, hooks: bool) -> str | None:
    """Why a module cannot be swapped, whatever is asked for."""
    if is_experts(module):
        return experts_hard_reason(module)
    if type(module) not in _SWAP and not isinstance(module, FP8Module):
        kind = type(module)
        return f"{kind.__module__}.{kind.__name__} is not exactly nn.Linear"
    if hooks and "forward" in vars(module) and not isinstance(module, FP8Module):
        return "its forward is replaced on the instance (an Accelerate hook, for example)"
    if not isinstance(module.weight, Tensor):
        return "it has no weight"
    if module.weight.dtype not in QUANTISED_DTYPES:
        return f"the weight is stored as {module.weight.dtype}"
    if 0 in (in_features(module), out_features(module)):
        return f"it is empty, {_shape(module)}"
    return None


def _report_fused(name: str, module: nn.Module, report: SwapReport) -> None:
    """Experts held as one 3-D parameter are matrix products that no linear module sees."""
    if not any("expert" in n.lower() for n in (type(module).__name__, name.rsplit(".", 1)[-1])):
        return
    for key, param in module.named_parameters(recurse=False):
        if param.dim() == 3:
            shape = " x ".join(str(n) for n in param.shape)
            report.skipped[f"{name}.{key}"] = f"fused experts, one {shape} parameter: not swapped"
