"""Which implementation an op runs, and why. Nothing falls back by itself."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_deltamatch import kernels

OPS = ("attention", "linear")
BACKENDS = ("reference", "triton")


class Choice(NamedTuple):
    """``backend`` is None where the op would raise; ``reason`` is a sentence."""

    backend: str | None
    reason: str


def explain(op: str, device: torch.device | str, backend: str | None = None) -> Choice:
    """What ``op`` would run on ``device`` if asked for ``backend``.

    Raises:
        ValueError: an environment variable of ours has a value that it must not have.
    """
    kernels.wants_hopper()
    return _explain(op, torch.device(device), backend)


def _explain(op: str, device: torch.device, backend: str | None) -> Choice:
    if backend is not None and backend not in BACKENDS:
        return Choice(None, f"there is no backend {backend!r}; known: {', '.join(BACKENDS)}")
    if backend == "reference":
        return Choice(backend, "asked for by name")
    if device.type == "meta":
        return Choice(backend or "reference", "shapes of the specification only")
    if backend is None and device.type == "cpu":
        return Choice("reference", "pure torch, the specification; the only one on a CPU")
    missing = _missing(op, device)
    if backend == "triton":
        return Choice(None, missing) if missing else Choice(backend, "asked for by name")
    return Choice(None, missing) if missing else Choice("triton", "FP8 kernels for this device")


@torch.compiler.assume_constant_result
def _missing(op: str, device: torch.device) -> str | None:
    """A fact of the machine: not for torch.compile to trace."""
    return kernels.missing(op, device)


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
    choice = _explain(op, device, backend)
    if choice.backend is None:
        raise NotImplementedError(f"{op}: {choice.reason}. {SLOW_PATH}")
    return choice.backend


def runs_plain(quantize: bool, device: torch.device, backend: str | None) -> bool:
    """Does an unquantised recipe run torch's own attention? On a device yes: there is nothing to
    emulate, and the kernels are FP8. By name, and on a CPU, the reference is the specification."""
    return not quantize and backend is None and device.type not in ("cpu", "meta")


SLOW_PATH = (
    'Ask for the slow pure-torch path by name: backend="reference" in the function, in '
    "set_attention_recipe(model, …), swap_linears(model, …) or DeltaMatchConfig(…)."
)


def refuse_unsupported(op: str, unsupported: str | None) -> None:
    """Raises NotImplementedError if the chosen kernel does not do what is asked."""
    if unsupported is not None:
        raise NotImplementedError(f"{op}: {unsupported}. {SLOW_PATH}")
