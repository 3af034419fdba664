"""A model that is built with our attention, and runs its own, says so at once.

Transformers accepts any registered name of an attention for every model, and asks nobody where a
model's code does not use the attention interface. The last that every model does while it is built is
``PreTrainedModel.post_init``.
"""

from __future__ import annotations

import functools
import warnings

from transformers import GenerationMixin, PreTrainedModel

from hf_deltamatch.hf.check import ignored_choice


def register() -> None:
    """Look at every generating model when it is built; harmless when done again."""
    original = PreTrainedModel.post_init
    if hasattr(original, "looks_at_attention"):
        return

    @functools.wraps(original)
    def post_init(self: PreTrainedModel) -> None:
        original(self)
        # Not the parts of one: a vision tower may well have attention of its own.
        ignored = ignored_choice(self) if isinstance(self, GenerationMixin) else None
        if ignored is not None:
            warnings.warn(f"fp8_delta_matching: {ignored}", stacklevel=2)

    post_init.looks_at_attention = True
    PreTrainedModel.post_init = post_init
