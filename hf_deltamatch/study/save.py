"""The weights that ``hf-deltamatch study --save`` keeps of a run."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from transformers import PreTrainedModel

from hf_deltamatch.hf.train_config import config_of, write_train_config
from hf_deltamatch.study.corpus import END
from hf_deltamatch.study.tokenizer import byte_tokenizer
from hf_deltamatch.training.study_rows import recipes_of_config


def save_whole(model: PreTrainedModel, folder: Path, config: dict) -> None:
    """The folder is there when it is whole, whenever this process is killed. What killed ones left of it goes."""
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    _save(model, partial, config)
    while True:
        if folder.exists():  # of a run whose row was lost, or of the same command at the same time
            shutil.rmtree(folder, ignore_errors=True)
        try:
            partial.rename(folder)
            break
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    for left in folder.parent.glob(f"{folder.name}.*.partial"):
        if not _is_alive(int(left.name.split(".")[1])):
            shutil.rmtree(left, ignore_errors=True)


def _is_alive(process: int) -> bool:
    if os.name == "nt":  # os.kill would end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _save(model: PreTrainedModel, folder: Path, config: dict) -> None:
    """Weights and the bytes' tokenizer, for ``from_pretrained``, ``hf-deltamatch eval`` and ``export``: a
    plain model, and beside it the arithmetic of the run's ``config``."""
    configs = [c for c in (model.config, model.generation_config) if c is not None]
    before = [(c.bos_token_id, c.eos_token_id) for c in configs]
    try:
        for c in configs:  # not those of the class's own tokenizer
            c.bos_token_id = c.eos_token_id = END[0]
        model.save_pretrained(folder)
    finally:  # scores must not depend on whether weights were saved
        for c, ids in zip(configs, before, strict=True):
            c.bos_token_id, c.eos_token_id = ids
    byte_tokenizer().save_pretrained(folder)
    write_train_config(folder, config_of(*recipes_of_config(config), config.get("leave")))
