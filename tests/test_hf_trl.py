"""TRL's SFTTrainer: padded, padding-free and packed batches give the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import (
    NEWEST,
    VOCAB,
    batch,
    build,
    one_thread,  # noqa: F401
    use,
)

trl = pytest.importorskip("trl", reason="needs the extra `trl`")
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from hf_deltamatch import check_model, swap_linears  # noqa: E402
from hf_deltamatch.diagnostics import count_calls  # noqa: E402

LENGTHS = (17, 24, 9, 30)
BATCHES = {
    "padded": {},
    "padding_free": {"padding_free": True, "max_length": None},
    "packed": {"packing": True, "max_length": sum(LENGTHS), "padding_free": True},
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(3, VOCAB)} | {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def losses(model, kind: str, path: Path, *, peft_config=None, **args) -> list[float]:
    """Three steps, every one over all rows."""
    rows = [batch(1, n, seed=n)[0].tolist() for n in LENGTHS]
    plain = dict(
        max_steps=3, per_device_train_batch_size=len(LENGTHS), report_to=[], learning_rate=3e-3,
        save_strategy="no", disable_tqdm=True, logging_steps=1, use_cpu=True, bf16=False,
        gradient_checkpointing=False, dataloader_pin_memory=False, shuffle_dataset=False,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(path, **{**plain, **BATCHES[kind], **args}),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


BY_TARGETS = pytest.mark.skipif(
    not NEWEST, reason="padded, Trainer of Transformers 5.4 divides by a label more in each row"
)


@pytest.mark.parametrize(
    "kind", ["padded", *(pytest.param(k, marks=BY_TARGETS) for k in BATCHES if k != "padded")]
)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_sft_batches_agree(family: str, kind: str, tmp_path: Path) -> None:
    """Without quantisation the losses of padded SDPA, whichever way the rows are laid out; were they
    to see each other, the first loss alone would move by 1e-3 and more."""
    sizes = {} if family == "llama" else {"sliding_window": 8}
    expected = losses(use(build(family, **sizes), "sdpa"), "padded", tmp_path)
    with count_calls() as calls:
        actual = losses(use(build(family, **sizes), recipe="bf16"), kind, tmp_path)
    layers = 3 if family == "gemma3_text" else 2
    assert calls["attention_fwd"] == calls["attention_bwd"] == 3 * layers
    assert actual == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("kind", BATCHES)
def test_sft_trains_in_fp8(kind: str, checkpointing: bool, tmp_path: Path) -> None:
    model = use(build("llama"))
    swap_linears(model)
    with count_calls() as calls:
        found = losses(model, kind, tmp_path, gradient_checkpointing=checkpointing)
    assert calls["attention_bwd"] == 3 * 2 and calls["linear_bwd_weight"] == 3 * 14
    assert calls["attention_fwd"] == 3 * 2 * (2 if checkpointing else 1)
    assert len(check_model(model).linears) == 14
    assert found[0] - found[1] > 0.05 and found[1] - found[2] > 0.05, found


def test_sft_adapters_on_fp8(tmp_path: Path) -> None:
    """LoRA on frozen FP8 linears, packed."""
    model = use(build("llama"))
    swap_linears(model)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    found = losses(model, "packed", tmp_path, peft_config=config, learning_rate=3e-2)
    assert found[2] < found[0], found
    after = {n.replace(".base_layer", ""): p for n, p in model.named_parameters()}
    assert all(torch.equal(after[n], p) for n, p in frozen.items())
