"""What is looked at before the first run: what would end runs late, or one after the other."""

from __future__ import annotations

import torch

from hf_deltamatch.hf.model_config import config_of_fields
from hf_deltamatch.study.corpus import Corpus, load_corpus
from hf_deltamatch.study.evaluate import Evaluate, check_tasks, require_lm_eval
from hf_deltamatch.study.model import check_leave
from hf_deltamatch.study.spec import Run, Study


def check(study: Study, missing: list[Run], devices: list[str]) -> None:
    """
    Raises:
        ValueError: a device, the corpus, lm-eval, one of its tasks, or an arm's `leave`.
    """
    for name in devices:
        check_device(name)
    evaluation = missing[0].config.get("evaluate")
    if evaluation is not None:
        require_lm_eval()
    corpus = load_corpus(**study.corpus)
    if evaluation is not None:
        check_tasks(Evaluate(**evaluation), corpus)
    check_lengths(missing, corpus)
    for run in {(r.setting, r.arm): r for r in missing if "leave" in r.config}.values():
        try:
            check_leave(run.config)
        except ValueError as error:
            raise ValueError(f"study: arm {run.arm!r} in {run.setting!r}: {error}") from error


def check_lengths(runs: list[Run], corpus: Corpus) -> None:
    """
    Raises:
        ValueError: a text is shorter than a row and its next token.
    """
    parts = {"training": len(corpus.train), "held-out": len(corpus.held_out)}
    for run in runs:
        for stage in filter(None, (run.config, run.config.get("then"))):
            seq_len = stage["train"]["seq_len"]
            for part, there in parts.items():
                if there <= seq_len:
                    raise ValueError(
                        f"study: {run.setting!r} has rows of {seq_len:,} tokens, and the {part} text has {there:,} "
                        "bytes, a token each; it must have more. Give more text (corpus.source, "
                        "corpus.limit_bytes), another corpus.held_out_every, or a smaller train.seq_len."
                    )


def check_device(name: str) -> None:
    """
    Raises:
        ValueError: nothing can be trained on this device here. No context is made on a GPU.
    """
    device = torch.device(name)
    if device.type == "cuda":
        there = torch.cuda.device_count()
        if (device.index or 0) < there:
            return
        allowed = ", ".join(["cpu", *(f"cuda:{i}" for i in range(there))])
        why = f"PyTorch finds {there or 'no'} CUDA device{'s' if there > 1 else ''} here"
    else:
        try:
            torch.ones(1, device=device).item()  # `meta` has no numbers
            return
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            allowed, why = "cpu and cuda:0 …", str(error).strip().partition("\n")[0]
    raise ValueError(
        f"--devices has {name!r}, on which nothing can be trained ({why}); allowed here: {allowed}. "
        "`hf-deltamatch env` shows the device that is found."
    )


def check_known(chosen: list[Run]) -> None:
    """
    Raises:
        ValueError: the installed Transformers has no model type of these runs.
    """
    try:
        config_of_fields(chosen[0].config["model"])
    except ValueError as error:
        raise ValueError(f"study: nothing can be run: {error}") from error
