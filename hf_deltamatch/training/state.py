"""State of model, optimisers and random numbers as whole tensors, however they are distributed.

The same files come from one process, DDP and FSDP2, so that checkpoints move between them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def _options() -> StateDictOptions:
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    return StateDictOptions(full_state_dict=True, cpu_offload=several)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Whole tensors by name, tied ones once. Collective: every rank calls it, and rank 0 has them."""
    state = get_model_state_dict(model, options=_options())
    extra = _tied_names(model)
    return {n: t for n, t in state.items() if n not in extra}


def save_model(state: dict[str, Tensor], path: Path) -> None:
    """As safetensors with the metadata that Transformers asks for."""
    whole = {n: t.detach().cpu().contiguous() for n, t in state.items()}
    save_file(whole, path, metadata={"format": "pt"})


def load_model(model: nn.Module, path: Path) -> None:
    """Collective; every rank reads the file.

    Raises:
        ValueError: names or shapes that are not the model's.
    """
    state = load_file(path)
    names = {n for n, _ in _named(model)}
    extra = _tied_names(model)
    if missing := sorted(names - extra - set(state)) or sorted(set(state) - names):
        raise ValueError(
            f"{path}: its tensors are not those of this model, {missing[0]!r} for one. Is it the "
            "checkpoint of another model?"
        )
    first = {n: c for c, names in _tied_groups(model).items() for n in names}
    state.update({n: state[first[n]] for n in extra})
    set_model_state_dict(model, state, options=_options())


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers by the names that state dicts give them, with aliases."""
    inner = getattr(model, "module", model)  # DDP
    persistent = set(inner.state_dict(keep_vars=True))
    named = [*inner.named_parameters(remove_duplicate=False)]
    named += inner.named_buffers(remove_duplicate=False)
    clean = lambda n: n.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
    return [(clean(n), t) for n, t in named if n in persistent]


def _tied_groups(model: nn.Module) -> dict[str, list[str]]:
    """First name of every tensor to its other names."""
    groups: dict[int, list[str]] = {}
    for name, tensor in _named(model):
        groups.setdefault(id(tensor), []).append(name)
    return {names[0]: names[1:] for names in groups.values()}


def _tied_names(model: nn.Module) -> set[str]:
    return {n for names in _tied_groups(model).values() for n in names}


def optimizer_state(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[dict]:
    """One state per optimiser, keyed by parameter name. Collective, as :func:`model_state`."""
    return [get_optimizer_state_dict(model, o, options=_options()) for o in optimizers]


def load_optimizers(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], path: Path
) -> None:
    """The inverse, from a file that ``torch.save`` wrote. Collective; every rank reads the file."""
    states = torch.load(path, map_location="cpu", weights_only=True)
    for optimizer, state in zip(optimizers, states, strict=True):
        set_optimizer_state_dict(model, optimizer, state, options=_options())


def rng_state() -> dict:
    """Random generators of this process: torch on CPU and device, and Python's."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate()}


def set_rng_state(state: dict) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
