"""One arm of a benchmark in a process of its own: its compile caches and its memory peak are its own.

``python -m hf_deltamatch.benchmarks.process FUNCTION FILE`` reads a JSON request from its input,
calls ``hf_deltamatch.benchmarks.FUNCTION`` (as in ``step.run_arm``) with it and writes what it
returns to FILE.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "hf_deltamatch.benchmarks"
ROOT = Path(__file__).parents[2]


class ArmFailed(RuntimeError):
    """The process ended without a result; the message is its last line, or how long it ran."""


def in_own_process(function: str, request: dict[str, Any], timeout_s: float) -> Any:
    """What ``hf_deltamatch.benchmarks.FUNCTION(**request)`` returns; both are JSON.

    Raises:
        ArmFailed: it raised, crashed, or took longer than ``timeout_s``.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        with log.open("w") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", f"{PACKAGE}.process", function, str(answer)],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                env=env,
                text=True,
                start_new_session=True,  # with the compilers that it starts
            )
            try:
                child.communicate(json.dumps(request), timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise ArmFailed(f"not done after {timeout_s:.0f} s") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if child.returncode != 0 or not answer.exists():
            lines = log.read_text(errors="replace").strip().splitlines()
            raise ArmFailed(lines[-1] if lines else f"exit status {child.returncode}")
        return json.loads(answer.read_text())


def _main(function: str, answer: str) -> None:
    module, _, name = function.partition(".")
    call = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
    Path(answer).write_text(json.dumps(call(**json.load(sys.stdin))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
