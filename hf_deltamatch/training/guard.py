"""What to do with a step that is not finite: leave it out, count it, and give up after some in a row."""

from __future__ import annotations

import math


class NotFinite(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


class StepGuard:
    """Decides of every step whether its update is applied.

    Args:
        stop_after: so many skipped steps in a row raise :class:`NotFinite`.
    """

    def __init__(self, stop_after: int = 10) -> None:
        if stop_after < 1:
            raise ValueError(f"StepGuard: `stop_after` is {stop_after}; it must be at least 1.")
        self.stop_after = stop_after
        self.skipped = self.in_a_row = 0

    def ok(self, step: int, loss: float, grad_norm: float) -> bool:
        """True to apply the step, False to skip it.

        Raises:
            NotFinite: the last of ``stop_after`` in a row.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= self.stop_after:
            raise NotFinite(
                f"step {step}: {self.in_a_row} steps in a row were not finite (loss {loss}, gradient "
                f"norm {grad_norm}), {self.skipped} in all. Go on from the last checkpoint with a "
                "lower learning rate, or allow more with max_skipped."
            )
        return False

    def state_dict(self) -> dict:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict) -> None:
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]
