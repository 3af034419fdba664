"""What ``bench linear`` times: shapes, inputs, recipes; and the comparison before any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_deltamatch import reference
from hf_deltamatch.benchmarks.verify import WrongNumbers
from hf_deltamatch.recipes import LinearRecipe
from hf_deltamatch.testing import rel_rms

Linear = Callable[[Tensor, Tensor], Tensor]
"""``x [tokens, in]``, ``weight [out, in]`` to ``[tokens, out]``."""

PARTS = ("output", "grad_input", "grad_weight")
MAX_DIFFERENCE = 4e-3
"""Kernels against the reference in BF16: the rounding of the result (1.7e-3) and the 14 bits that FP8
tensor cores keep of a block's partial sum."""
MAX_ERROR = {"fp8": 0.1, "bf16": 0.01}
"""Against FP32 products of the unquantised operands. E4M3 costs 0.037 of N(0, 1), E5M2 gradients
0.06, BF16 0.002."""


class LinearShape(NamedTuple):
    """One benchmark shape, BF16."""

    tokens: int
    n_in: int
    n_out: int

    def __str__(self) -> str:
        return f"{self.tokens} x {self.n_in} x {self.n_out}"

    @property
    def flops(self) -> float:
        """Of one of the three products."""
        return 2.0 * self.tokens * self.n_in * self.n_out


LINEAR_SHAPES = (
    LinearShape(16384, 4096, 14336),
    LinearShape(16384, 14336, 4096),
    LinearShape(16384, 4096, 4096),
)
LINEAR_RECIPES = ("blockwise", "blockwise compiled", "rowwise", "mx")


def parse_linear_shape(text: str) -> LinearShape:
    """``tokens,in,out``.

    Raises:
        ValueError: anything else.
    """
    numbers = text.split(",")
    if len(numbers) != 3 or not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise ValueError(
            f"--shape is {text!r}; it must be tokens,in,out, three positive numbers as in "
            "16384,4096,14336."
        )
    return LinearShape(*map(int, numbers))


def parse_linear_recipe(text: str) -> tuple[LinearRecipe, bool]:
    """``NAME`` or ``NAME compiled``: the recipe, and whether ``torch.compile`` wraps it.

    Raises:
        ValueError: an unknown name, or other words.
    """
    name, *rest = text.split() or [""]
    if rest not in ([], ["compiled"]):
        raise ValueError(
            f"--recipe is {text!r}; it must be a name, or a name and the word `compiled`."
        )
    return LinearRecipe.from_name(name), bool(rest)


def make_linear_inputs(
    s: LinearShape, device: torch.device | str = "cuda"
) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` and ``weight`` (leaves) and ``dy``: N(0, 1), the weight 0.02 N(0, 1), BF16."""
    g = torch.Generator(device=device).manual_seed(0)
    draw = lambda *size: torch.randn(*size, device=device, dtype=torch.bfloat16, generator=g)
    x, weight, dy = draw(s.tokens, s.n_in), 0.02 * draw(s.n_out, s.n_in), draw(s.tokens, s.n_out)
    return x.requires_grad_(), nn.Parameter(weight), dy


def both(linear: Linear, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """``output, grad_input, grad_weight``."""
    x, weight, dy = inputs
    output = linear(x, weight)
    return output, *torch.autograd.grad(output, (x, weight), dy)


@torch.no_grad()
def exact(inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The three products in FP32, not quantised."""
    x, weight, dy = (t.float() for t in inputs)
    return x @ weight.T, dy @ weight, dy.T @ x


@torch.no_grad()
def emulated(inputs: tuple[Tensor, Tensor, Tensor], recipe: LinearRecipe) -> tuple[Tensor, ...]:
    """The three products of the specification, FP32."""
    x, weight, dy = inputs
    if recipe.grad_weight_hp:
        dw = reference.linear_bwd_weight_hp(dy, x)
    else:
        dw = reference.linear_bwd_weight(dy, reference.linear_save_input(x, recipe), recipe)
    output = reference.linear_fwd(x, weight, None, recipe)
    return output, reference.linear_bwd_input(dy, weight, recipe), dw


def compare(
    got: tuple[Tensor, ...], expected: tuple[Tensor, ...], allowed: float, to: str
) -> float:
    """Largest relative difference of the three results.

    Raises:
        WrongNumbers: above ``allowed``, or NaN.
    """
    errors = {name: rel_rms(a.detach(), e) for name, a, e in zip(PARTS, got, expected, strict=True)}
    if not all(e < allowed for e in errors.values()):
        text = ", ".join(f"{name} {e:.3g}" for name, e in errors.items())
        raise WrongNumbers(f"{to}: results differ by {text}; allowed is {allowed}")
    return max(errors.values())
