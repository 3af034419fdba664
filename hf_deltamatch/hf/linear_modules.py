"""FP8 linear modules: what :func:`hf_deltamatch.swap_linears` makes of plain ones, and back."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_deltamatch.ops import fp8_linear
from hf_deltamatch.recipes import LinearRecipe


class FP8Module:
    """What FP8 linears have in common."""

    # Tensor parallelism of Transformers then hands the forward plain local tensors.
    _hf_quantized_needs_local_tp = True
    fp8_recipe: LinearRecipe
    fp8_backend: str | None

    def extra_repr(self) -> str:
        shape = super().extra_repr()
        return f"{shape}{', ' if shape else ''}fp8={self.fp8_recipe.name}"


class FP8Linear(FP8Module, nn.Linear):
    """``nn.Linear`` whose three GEMMs take FP8 operands; the weight stays in high precision."""

    def forward(self, input: Tensor) -> Tensor:
        return fp8_linear(input, self.weight, self.bias, self.fp8_recipe, self.fp8_backend)


class FP8Conv1D(FP8Module, Conv1D):
    """Transformers' ``Conv1D`` (a linear layer with weight ``[in, out]``, as in GPT-2) in FP8."""

    def __repr__(self) -> str:  # Conv1D's own does not call extra_repr
        return f"{type(self).__name__}(nf={self.nf}, nx={self.nx}, fp8={self.fp8_recipe.name})"

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.weight.t(), self.bias, self.fp8_recipe, self.fp8_backend)
