"""Compile the attention kernels for a capability that need not be present; a script, because Triton
takes its target once per process and must not be told to interpret.

    python tests/compile_kernels.py 90 '[{"D": 128}]'

Prints one JSON object per line: the kernel, its shared and tensor memory, and how often its PTX
multiplies, multiplies FP8, and multiplies FP8 with block scales.
"""

from __future__ import annotations

import json
import re
import sys

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
        kernel = plain(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.__name__, kwargs.get("MX", False), kernel))
        return kernel

    JITFunction.run = compile_only
    from hf_deltamatch import AttentionRecipe
    from hf_deltamatch.kernels import attention, attention_config
    from hf_deltamatch.ops import attention_kernels

    attention_config.capability_of = lambda device: divmod(capability, 10)
    for case in cases:
        case = {"Hq": 2, "Hkv": 1, "T": 256, "block": "128xD", **case}
        D, Dv, T = case["D"], case.get("Dv", case["D"]), case["T"]

        def zeros(H: int, D: int, T: int = T) -> torch.Tensor:
            return torch.zeros(1, T, H, D, dtype=torch.bfloat16).transpose(1, 2)

        q, k, v = zeros(case["Hq"], D), zeros(case["Hkv"], D), zeros(case["Hkv"], Dv)
        options = dict(
            mask=None, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None,
            is_causal=case.get("is_causal", True), window=case.get("window"),
            softmax_scale=D**-0.5, softcap=case.get("softcap"),
            recipe=AttentionRecipe.from_name(
                "delta_matching", block=case["block"], do_format=case.get("do_format", "e4m3")
            ),
        )  # fmt: skip
        if case.get("bool_mask"):
            options["mask"] = torch.ones(1, 1, T, T, dtype=torch.bool)
        fwd = attention_kernels.attention_fwd(q, k, v, **options)
        x = attention_kernels.problem(q.shape, k.shape, Dv, q.device, **options)
        attention.attention_bwd(zeros(case["Hq"], Dv), None, fwd, x)
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
        print(json.dumps(facts))


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
