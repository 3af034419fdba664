"""A look at the attention's numerics now and then while a model trains."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from hf_deltamatch.monitor.capture import Capture, Slice
from hf_deltamatch.monitor.measure import measure

__all__ = ["Monitor", "Slice", "measure"]


class Monitor:
    """Every ``interval`` steps, numbers of one head in some layers, from the tensors that the ops
    worked on. Needs no model; gradients are untouched.

    A step that is looked at runs without ``torch.compile``: its ops have to be seen one by one. So
    numbers come at the price of one eager step in ``interval``.

    Args:
        interval: steps between looks, at step 0, ``interval``, …; 0 for none.
        layers: attention layers of each look; the layers, heads and sequences take turns.
        max_tokens: of the sequence that is looked at, a multiple of 128.

    >>> monitor = Monitor(interval=200)
    >>> for step, batch in enumerate(loader):
    ...     with monitor.step(step):
    ...         model(**batch, use_cache=False).loss.backward()
    ...     numbers = monitor.pop()  # {} but at sampled steps
    """

    def __init__(self, interval: int = 200, *, layers: int = 2, max_tokens: int = 1024) -> None:
        whole = all(type(n) is int for n in (interval, layers, max_tokens))
        if not whole or interval < 0 or layers < 1 or max_tokens < 1 or max_tokens % 128:
            raise ValueError(
                f"Monitor: interval {interval!r}, layers {layers!r}, max_tokens {max_tokens!r}; all are "
                "integers, interval not negative, layers at least 1, max_tokens a multiple of 128."
            )
        self.interval, self.layers, self.max_tokens = interval, layers, max_tokens
        self._turn = 0
        self._found: dict[str, float] = {}

    def due(self, step: int) -> bool:
        return self.interval > 0 and step % self.interval == 0

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one forward and backward.

        Raises:
            TypeError: ``step`` is no integer.
        """
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"Monitor.step: `step` is {step!r}; it must be an integer.")
        if not self.due(step):
            yield
            return
        # The state of turns is a function of the step, so that a resumed run looks at the same.
        self._turn = step // self.interval
        capture = Capture(self.max_tokens, self._turn)
        with _eager(), capture:
            yield
        self._found = self._measure(capture.done)

    def pop(self) -> dict[str, float]:
        """Numbers of the step just looked at, once: ``attention/NAME/layer_07`` of each layer and
        ``attention/NAME``, the largest of them. Names: :func:`hf_deltamatch.monitor.measure`."""
        found, self._found = self._found, {}
        return found

    def _measure(self, done: list[Slice | None]) -> dict[str, float]:
        n = len(done)
        chosen = {(self._turn + i * n // self.layers) % n for i in range(self.layers)} if n else ()
        out: dict[str, float] = {}
        for layer in sorted(chosen):
            found = done[n - 1 - layer]  # backwards run from the last layer to the first
            if found is None:
                continue
            for name, value in measure(found).items():
                out[f"attention/{name}/layer_{layer:02d}"] = value
                worst = f"attention/{name}"
                so_far = out.get(worst, value)
                out[worst] = value if math.isnan(value) or value > so_far else so_far
        return out


def _eager():
    """Compiled code runs uncompiled inside; nothing to do where nothing was compiled."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
