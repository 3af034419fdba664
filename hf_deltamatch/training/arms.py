"""The arms of a comparison: one model, its attention and linears in the arithmetic of each."""

from __future__ import annotations

import torch
from torch import nn

from hf_deltamatch.hf import (
    ATTN_IMPLEMENTATION,
    DeltaMatchConfig,
    check_model,
    set_attention_recipe,
    swap_linears,
)
from hf_deltamatch.hf.train_config import config_of
from hf_deltamatch.ops.backend import explain
from hf_deltamatch.recipes import AttentionRecipe, LinearRecipe

ARMS = {"mp": None, "sd": "stale_delta", "dm": "delta_matching"}
"""Attention recipe of each arm: mixed precision through SDPA; FP8 with a stale δ; FP8, matched δ."""


def recipes_of(
    arm: str, linear: str | None, block: str
) -> tuple[AttentionRecipe | None, LinearRecipe | None]:
    """Of attention (None: SDPA in high precision) and of linears (None: high precision)."""
    name = ARMS[arm]
    return (
        None if name is None else AttentionRecipe.from_name(name, block=block),
        None if linear is None else LinearRecipe.from_name(linear),
    )


def train_config(arm: str, linear: str | None, block: str) -> DeltaMatchConfig | None:
    """What ``config.train.json`` says of it; None: all in high precision."""
    return config_of(*recipes_of(arm, linear, block))


def apply_arm(
    model: nn.Module,
    arm: str,
    *,
    linear: str | None = None,
    block: str = "128xD",
    backend: str | None = None,
    device: torch.device,
) -> str:
    """Give ``model`` the attention of ``arm`` and, with ``linear``, FP8 linears of that recipe.

    Linears run the pure-torch reference where the device has no kernel for them (the same numbers,
    slowly); attention without a kernel raises.

    Returns:
        What was done, a line for the log.

    Raises:
        ValueError: unknown arm or recipe, or a model whose attention cannot be chosen.
        NotImplementedError: no attention kernel for ``device``.
    """
    if arm not in ARMS:
        raise ValueError(f"arm is {arm!r}; allowed values are {', '.join(map(repr, ARMS))}.")
    recipe = ARMS[arm]
    said = [f"arm {arm}"]
    if recipe is None:
        model.set_attn_implementation("sdpa")
    else:
        choice = explain("attention", device, backend)
        if choice.backend is None:
            raise NotImplementedError(
                f"arm {arm}: {choice.reason}. Use a device with kernels, or backend: reference "
                "(slow)."
            )
        model.set_attn_implementation(ATTN_IMPLEMENTATION)
        attention = AttentionRecipe.from_name(recipe, block=block)
        set_attention_recipe(model, attention, backend=backend)
        said.append(f"{recipe} {block} on {choice.backend}")
    if linear is not None:
        has_kernel = explain("linear", device, backend).backend is not None
        chosen = backend if has_kernel else "reference"
        report = swap_linears(model, LinearRecipe.from_name(linear), backend=chosen)
        said.append(f"{len(report.swapped)} linears in FP8 ({linear})")
        if not has_kernel:
            said.append("by the reference")
    if recipe is not None:
        said.append(str(check_model(model)).replace("\n", ", "))
    elif linear is not None:  # that attention is SDPA's is what the arm is about
        said.extend(check_model(model).notes)
    return "; ".join(said)
