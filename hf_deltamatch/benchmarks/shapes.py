"""What is timed: shapes, inputs, recipes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_deltamatch.recipes import AttentionRecipe


class Shape(NamedTuple):
    """One benchmark shape; ``BHTD``, BF16. A ``window`` is causal: the newest keys, own included."""

    B: int
    Hq: int
    Hkv: int
    T: int
    D: int
    causal: bool
    window: int | None = None

    @property
    def mask(self) -> str:
        """The last field of ``--shape``."""
        if self.window is not None:
            return f"window{self.window}"
        return "causal" if self.causal else "full"

    def __str__(self) -> str:
        heads = f"H{self.Hq}" if self.Hq == self.Hkv else f"H{self.Hq}/{self.Hkv}"
        return f"B{self.B} {heads} T{self.T} D{self.D} {self.mask}"

    @property
    def flops(self) -> float:
        """Of the forward: 4·D for every pair of a query and a key that it sees. Causal counts half
        of T², as everybody does; a window counts its pairs, which is what skipping tiles could
        save."""
        if self.window is not None:
            w = min(self.window, self.T)
            pairs = w * self.T - w * (w - 1) / 2
        else:
            pairs = self.T**2 * (0.5 if self.causal else 1.0)
        return 4.0 * self.B * self.Hq * self.D * pairs


SHAPES = (
    Shape(4, 16, 16, 8192, 128, True),
    Shape(16, 16, 16, 2048, 128, True),
    Shape(1, 16, 16, 32768, 128, True),
    Shape(1, 16, 16, 32768, 128, True, 128),
    Shape(4, 16, 16, 8192, 128, False),
    Shape(4, 32, 32, 8192, 64, True),
    Shape(2, 8, 8, 8192, 256, True),
    Shape(4, 64, 8, 8192, 128, True),
)
RECIPES = ("delta_matching", "delta_matching 1xD", "stale_delta")
"""By default all of them for the first shape, the first one for the rest."""


def parse_shape(text: str) -> Shape:
    """``B,Hq,Hkv,T,D,causal``, ``…,full`` or ``…,windowN``.

    Raises:
        ValueError: anything else.
    """
    *numbers, mask = text.split(",")
    if len(numbers) != 5 or not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise ValueError(
            f"--shape is {text!r}; it must be B,Hq,Hkv,T,D,MASK, five positive numbers and "
            "`causal`, `full` or `windowN` as in 1,16,16,32768,128,window128."
        )
    width = mask.removeprefix("window")
    windowed = mask.startswith("window") and width.isdecimal() and int(width) > 0
    if mask not in ("causal", "full") and not windowed:
        raise ValueError(
            f"--shape is {text!r}; it must end in `causal`, `full` or `windowN`, N the number of "
            "keys that a query sees."
        )
    window = int(width) if windowed else None
    shape = Shape(*(int(n) for n in numbers), mask != "full", window)
    if shape.Hq % shape.Hkv:
        raise ValueError(f"--shape is {text!r}; Hq must be a multiple of Hkv.")
    return shape


def parse_recipe(text: str) -> AttentionRecipe:
    """``NAME`` or ``NAME BLOCK``.

    Raises:
        ValueError: an unknown name or block, or more words.
    """
    name, *block = text.split() or [""]
    if len(block) > 1:
        raise ValueError(f"--recipe is {text!r}; it must be a name, or a name and a block.")
    return AttentionRecipe.from_name(name, **({"block": block[0]} if block else {}))


def make_inputs(s: Shape, device: torch.device | str = "cuda") -> tuple[Tensor, ...]:
    """``q, k, v`` (leaves) and ``do``: N(0, 1), BF16, ``BHTD`` views of ``BTHD`` storage, as models
    send them."""
    g = torch.Generator(device=device).manual_seed(0)

    def normal(H: int) -> Tensor:
        x = torch.randn(s.B, s.T, H, s.D, device=device, dtype=torch.bfloat16, generator=g)
        return x.transpose(1, 2)

    q, k, v, do = (normal(H) for H in (s.Hq, s.Hkv, s.Hkv, s.Hq))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do
