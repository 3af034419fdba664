"""Versions and device, for results files and ``hf-deltamatch env``."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

PACKAGES = (
    "hf-deltamatch",
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "peft",
    "lm-eval",
    "datasets",
    "safetensors",
    "numpy",
)


def version_of(package: str) -> str | None:
    """Installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment() -> dict:
    """JSON types: Python, platform, package versions, device, threads, and variables of ours that are set.
    No host or user names."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {p: v for p in PACKAGES if (v := version_of(p)) is not None},
        "device": device_name(),
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **{k: v for k, v in sorted(os.environ.items()) if k.startswith("HF_DELTAMATCH_")},
    }


def device_name() -> str:
    """Name and compute capability of the GPU, or ``cpu``."""
    if not torch.cuda.is_available():
        return "cpu"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (sm_{major}{minor})"
