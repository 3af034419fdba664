"""PYTHONPATH of the processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path


def python_path(*first: Path | str) -> str:
    """``first``, then what this process was started with."""
    return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])])
