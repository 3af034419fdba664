"""Compile the attention kernels for a capability that need not be present; a script, because Triton
takes its target once per process and must not be told to interpret.

    python tests/compile_kernels.py 90 '[{"D": 128}, {"D": 64, "mask": "packed", "attention": false}]'

A case takes shapes, options and fields of the recipe; without ``attention`` only the small kernels
around it are compiled, which is quick; ``hopper`` asks for the Gluon kernels, ``output: false`` for a
matched δ in two passes. Prints one JSON object per line: the kernel, its shared and tensor memory, how often its PTX multiplies, multiplies FP8, and multiplies
FP8 with block scales, its barriers and how many of those share their memory (see `ptx`), and for 9.0 how
many products in loops lose an operand and how many conversions come early (see `sass`).
"""

from __future__ import annotations

import json
import os
import re
import sys

import ptx as ptx_text
import sass
import sass_flow
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

FP8_PRODUCT = re.compile(r"(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\S*(e4m3|f8f6f4)")
SCALED_PRODUCT = re.compile(r"(mma\.sync|tcgen05\.mma)\S*kind::mxf8f6f4\S*block_scale")
ANY_PRODUCT = re.compile(r"^\s*(?:@\S+ )?(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\S*", re.M)


class Target:
    """A driver that knows what to compile for, and nothing that could launch."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main(capability: int, cases: list[dict]) -> None:
    driver.set_active(Target(capability))
    compiled = []
    plain = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        if self.__name__.startswith("_attention") and not case.get("attention", True):
            return None
        kernel = plain(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.__name__, kwargs.get("MX", False), kernel))
        return kernel

    JITFunction.run = compile_only
    from hf_deltamatch import AttentionRecipe
    from hf_deltamatch.kernels import HOPPER_VARIABLE, attention, attention_config
    from hf_deltamatch.ops import attention_kernels

    # Nothing runs, so what this asserts was never written.
    torch._assert_async = lambda *args: None
    attention_config.capability_of = lambda device: divmod(capability, 10)
    for case in cases:
        case = {"Hq": 2, "Hkv": 1, "T": 256, "dtype": "bfloat16", **case}
        os.environ[HOPPER_VARIABLE] = str(int(case.get("hopper", False)))
        D, Dv, T = case["D"], case.get("Dv", case["D"]), case["T"]
        dtype = getattr(torch, case["dtype"])

        def zeros(H: int, D: int, T: int = T, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(1, T, H, D, dtype=dtype).transpose(1, 2)

        q, k, v = zeros(case["Hq"], D), zeros(case["Hkv"], D), zeros(case["Hkv"], Dv)
        mask = case.get("mask")
        cu = torch.tensor([0, T // 3, T], dtype=torch.int32) if mask == "packed" else None
        masks = {
            "bool": torch.ones(1, 1, T, T, dtype=torch.bool),
            "compact": torch.zeros(1, 3, 1, T, dtype=torch.int32),
        }
        options = dict(
            mask=masks.get(mask), sinks=None, cu_seqlens_q=cu, cu_seqlens_k=cu,
            is_causal=case.get("is_causal", mask != "compact"), window=case.get("window"),
            softmax_scale=D**-0.5, softcap=case.get("softcap"),
            recipe=AttentionRecipe.from_name("delta_matching", **case.get("fields", {})),
        )  # fmt: skip
        fwd = attention_kernels.attention_fwd(q, k, v, **options)
        x = attention_kernels.problem(q.shape, k.shape, Dv, q.device, **options)
        dlse = torch.zeros(1, case["Hq"], T) if case.get("dlse") else None
        if not case.get("output", True):
            fwd = fwd._replace(o=None)
        attention.attention_bwd(zeros(case["Hq"], Dv), dlse, fwd, x)
    for name, mx, kernel in compiled:
        ptx = kernel.asm["ptx"]
        facts = {
            "kernel": name,
            "mx": mx,
            "shared": kernel.metadata.shared,
            "tensor_memory": getattr(kernel.metadata, "tmem_size", 0) or 0,
            "products": len(ANY_PRODUCT.findall(ptx)),
            "fp8_products": len(FP8_PRODUCT.findall(ptx)),
            "scaled_products": len(SCALED_PRODUCT.findall(ptx)),
        }
        facts["barriers"], facts["reused_barriers"] = ptx_text.reused_barriers(ptx)
        if capability == 90:
            found, lost = sass.lost_operands(kernel.asm["cubin"])
            facts |= {"products_in_loops": found, "lost_operands": lost}
            facts["early_conversions"] = sass.early_conversions(kernel.asm["cubin"])
            facts["foreign_conversions"] = sass.foreign_conversions(kernel.asm["cubin"])
            facts["unwritten_uniforms"] = sass_flow.unwritten_uniforms(kernel.asm["cubin"])
        print(json.dumps(facts))


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
