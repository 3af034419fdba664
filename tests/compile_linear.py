"""Compile the kernels of a linear layer for a capability that need not be present, as
:mod:`compile_kernels` does those of attention.

    python tests/compile_linear.py 90

Prints a JSON object a line: the kernel and its shared memory.
"""

from __future__ import annotations

import itertools
import json
import sys

import torch
from compile_kernels import Target
from triton.runtime import driver
from triton.runtime.jit import JITFunction


def main(capability: int) -> None:
    driver.set_active(Target(capability))
    plain = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = plain(self, *args, grid=grid, warmup=True, **kwargs)
        print(json.dumps({"kernel": self.__name__, "shared": kernel.metadata.shared}))

    JITFunction.run = compile_only
    from hf_deltamatch import LinearRecipe
    from hf_deltamatch.kernels import gated, launch, linear_gated
    from hf_deltamatch.kernels.linear import quantize

    linear_gated.capability_of = lambda device: divmod(capability, 10)
    launch._watched = lambda: True  # every launch goes through Triton, which is cut off
    recipes = (
        LinearRecipe(), LinearRecipe("rowwise"), LinearRecipe("mx", "pow2"),
        LinearRecipe(grad_format="e5m2"),
    )  # fmt: skip
    sides = ({"rows": True, "columns": True}, {"rows": True}, {"columns": True})
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.zeros(256, 256, dtype=dtype)
        for recipe, what, side in itertools.product(recipes, ("x", "dy", "weight"), sides):
            quantize(x, recipe, what, **side)
        gated.gated(x, x)
        for with_h in (False, True):
            gated.gated_bwd(x, x, x, with_h=with_h)
        for recipe, side in itertools.product(recipes, sides):
            if linear_gated.fits(x, x, recipe):
                side = {"rows": False, "columns": False, **side}
                linear_gated.gated_bwd_quantize(x, x, x, recipe, product=side["columns"], **side)
                linear_gated.gated_quantize(x, x, recipe)
    # Tails, rows of a wider matrix, one side and the product alone.
    x = torch.zeros(130, 512, dtype=torch.bfloat16)[:, :330]
    for product in (False, True):
        linear_gated.gated_bwd_quantize(
            x, x, x, LinearRecipe("blockwise", "pow2"), rows=True, columns=False, product=product
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))
