"""Which implementation an op runs, and why. Nothing falls back by itself."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_deltamatch import kernels

OPS = ("attention", "linear")
BACKENDS = ("reference",)


class Choice(NamedTuple):
    """``backend`` is None where the op would raise; ``reason`` is a sentence."""

    backend: str | None
    reason: str


def explain(op: str, device: torch.device | str, backend: str | None = None) -> Choice:
    """What ``op`` would run on ``device`` if asked for ``backend``."""
    device = torch.device(device)
    if backend is not None and backend not in BACKENDS:
        return Choice(None, f"there is no backend {backend!r}; known: {', '.join(BACKENDS)}")
    if backend is not None:
        return Choice(backend, "asked for by name")
    if device.type in ("cpu", "meta"):
        return Choice("reference", "pure torch, the specification; the only one on a CPU")
    return Choice(
        None,
        f"this version has no {op} kernel for `{device.type}` devices"
        + (f" (kernels exist for {kernels.AVAILABLE[op]})" if op in kernels.AVAILABLE else ""),
    )


def choose(op: str, device: torch.device, backend: str | None) -> str:
    """The backend to run.

    Raises:
        ValueError: unknown ``backend``.
        NotImplementedError: no kernel for this device; says how to ask for the slow path.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"{op}: `backend` is {backend!r}; allowed are None (choose by device), "
            f"{', '.join(repr(b) for b in BACKENDS)}."
        )
    choice = explain(op, device, backend)
    if choice.backend is None:
        raise NotImplementedError(
            f"{op}: {choice.reason}. Ask for the slow pure-torch path by name: "
            'backend="reference" in the function, in set_attention_recipe(model, …), '
            "swap_linears(model, …) or DeltaMatchConfig(…)."
        )
    return choice.backend
