"""Registration of our ops with ``torch.library``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "hf_deltamatch"


def define_op(fn: Callable[..., Any]) -> torch._ops.OpOverload:
    """Register ``fn`` as ``hf_deltamatch::<its name>`` for every device, schema from its annotations
    (which must be evaluated); returns the op. It runs without autocast, with the device of its
    tensors as the current one.

    The same as ``torch.library.custom_op`` for ``torch.compile`` and ``opcheck``, without its layers
    of Python around each call (measured with 13 arguments: 62 µs there, 9 here). Not checked in each
    call: that outputs alias no input.

    Raises (the op):
        RuntimeError: an input wants a gradient; the op has no autograd formula of its own.
    """

    def body(*args):
        if torch.is_grad_enabled():
            for x in args:
                if isinstance(x, Tensor) and x.requires_grad:
                    raise RuntimeError(
                        f"{NAMESPACE}::{fn.__name__} has no autograd formula, and an input requires "
                        f"grad. Call the public function of hf_deltamatch, or under torch.no_grad()."
                    )
        # Contexts that change nothing would take the host longer than to see that they do not.
        kind = _autocast_of(args)
        if kind is not None:
            with torch.autocast(kind, enabled=False):
                return body(*args)
        device = _other_device(args)
        if device is None:
            return fn(*args)
        with torch.cuda.device(device):
            return fn(*args)

    name = f"{NAMESPACE}::{fn.__name__}"
    schema = torch.library.infer_schema(fn, mutates_args=())
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    # Dynamo must not look into a body that a frame it gave up on calls.
    torch.library.impl(name, "default", torch.compiler.disable(body))
    return getattr(getattr(torch.ops, NAMESPACE), fn.__name__).default


def _other_device(args: tuple[Any, ...]) -> torch.device | None:
    """The CUDA device of the tensors where it is not the current one, as for the later layers of a
    model that is spread over devices. Triton launches on the current device, whatever it is given."""
    for x in args:
        if isinstance(x, Tensor):
            if not x.is_cuda:
                return None
            device = x.device
            return None if device.index == torch.cuda.current_device() else device
    return None


def _autocast_of(args: tuple[Any, ...]) -> str | None:
    """The type of device of the tensors, where autocast is on for it."""
    for x in args:
        if isinstance(x, Tensor):
            kind = "cuda" if x.is_cuda else x.device.type
            return kind if torch.is_autocast_enabled(kind) else None
    return None
