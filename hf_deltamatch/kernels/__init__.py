"""GPU kernels: the only place that imports Triton. Empty so far: on CUDA devices the ops raise and
name ``backend="reference"``."""

from __future__ import annotations

AVAILABLE: dict[str, str] = {}
"""Op name to the devices its kernel serves, for ``hf-deltamatch env`` and the choice of backend."""
