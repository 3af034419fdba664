"""Tokens per second and model FLOP utilisation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# Dense BF16 FLOP/s of a device, from its data sheet; the first name that is part of the device's.
PEAK_BF16 = {
    "B200": 2250e12,
    "GB200": 2500e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 5090": 209e12,
}


def peak_flops(device: torch.device) -> float | None:
    """BF16 peak of ``device``, None if unknown. Also the measure of FP8 runs, so that arms compare."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for word, peak in PEAK_BF16.items() if word in name), None)


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """FLOPs of forward and backward per token: 6 per parameter that is multiplied with (4 of a frozen
    one), and 6 · T · Hq · D for causal attention in every layer (recomputation not counted, experts
    all counted)."""
    config = getattr(model, "config", None)
    get = lambda *names: next((v for n in names if (v := getattr(config, n, None))), 0)
    layers, heads = get("num_hidden_layers"), get("num_attention_heads")
    width = (get("head_dim") or get("hidden_size") // max(heads, 1)) * heads
    looked_up = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            looked_up |= {id(p) for p in module.parameters(recurse=False)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:  # a tied embedding is multiplied with after all
        looked_up -= {id(p) for p in head.parameters()}
    used = [p for p in model.parameters() if id(p) not in looked_up]
    parameters = sum((6.0 if p.requires_grad else 4.0) * p.numel() for p in used)
    return parameters + 6.0 * layers * width * seq_len


class Meter:
    """Rates between two looks.

    >>> meter = Meter(flops_per_token=6e9, peak=989e12)
    >>> meter.add(4096)
    >>> meter.read()  # {"tokens_per_second": …, "mfu": …}
    """

    def __init__(self, flops_per_token: float, peak: float | None) -> None:
        self.flops_per_token, self.peak = flops_per_token, peak
        self.tokens, self._since = 0, time.perf_counter()

    def add(self, tokens: int) -> None:
        self.tokens += tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside, of an evaluation or a checkpoint, does not count."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def read(self) -> dict[str, float]:
        """Rates since the last look; ``mfu`` only where the peak is known."""
        now = time.perf_counter()
        rate = self.tokens / max(now - self._since, 1e-9)
        self.tokens, self._since = 0, now
        out = {"tokens_per_second": rate}
        if self.peak:
            out["mfu"] = rate * self.flops_per_token / self.peak
        return out
