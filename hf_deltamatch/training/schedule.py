"""Learning-rate schedules as pure functions of the step, so that resuming needs no state."""

from __future__ import annotations

import math

SCHEDULES = ("cosine", "wsd", "constant")


def lr_factor(
    step: int,
    *,
    steps: int,
    warmup: int = 0,
    kind: str = "cosine",
    floor: float = 0.1,
    decay: float = 0.2,
) -> float:
    """Factor of the peak learning rate at ``step`` (from 0) of ``steps``.

    Linear warm-up over ``warmup`` steps, then ``cosine`` to ``floor``; ``wsd``: constant, then linear
    to ``floor`` over the last ``decay`` of all steps; or ``constant``.

    Raises:
        ValueError: unknown ``kind``, or a fraction outside 0 to 1.

    >>> [round(lr_factor(s, steps=10, warmup=2), 2) for s in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    if kind not in SCHEDULES:
        raise ValueError(
            f"lr_factor: `kind` is {kind!r}; allowed values are {', '.join(map(repr, SCHEDULES))}."
        )
    for name, value in (("floor", floor), ("decay", decay)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"lr_factor: `{name}` is {value}; it is a fraction, from 0 to 1.")
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    if kind == "cosine":
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
    length = max(1, round(decay * steps))
    left = min(1.0, max(0.0, (steps - step) / length))
    return floor + (1 - floor) * left
