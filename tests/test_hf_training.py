"""Training loops: checkpointing, accumulation, Trainer, torch.compile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tiny_models import (
    FAMILIES,
    batch,
    build,
    grads_of,
    one_thread,  # noqa: F401
    padded,
    rel_grads,
    run,
    use,
)
from torch import Tensor
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from hf_deltamatch import swap_linears
from hf_deltamatch.diagnostics import count_calls
from hf_deltamatch.testing import assert_bitwise_equal, rel_rms


def fp8_model(family: str = "llama", *, linears: bool = True, **kwargs):
    model = use(build(family, **kwargs)).train()
    if linears:
        swap_linears(model)
    return model


def assert_same_grads(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        assert_bitwise_equal(actual[name], grad, name)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "gpt_oss", "mixtral"])
def test_gradient_checkpointing(family: str, use_reentrant: bool) -> None:
    """The recomputed forward quantises as the first one did: the same gradients, bit for bit."""
    inputs = padded("left")._asdict() | {"use_cache": False}
    model = fp8_model(family)
    logits, expected = run(model, **inputs)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with count_calls() as calls:
        again, grads = run(model, **inputs)
    layers = FAMILIES[family][1]
    assert calls["attention_fwd"] == 2 * layers and calls["attention_bwd"] == layers
    assert_bitwise_equal(again, logits)
    assert_same_grads(grads, expected)


@pytest.mark.parametrize("linears", [False, True], ids=["attention", "all"])
def test_gradient_accumulation(linears: bool) -> None:
    """Four parts of a batch, one after the other, give the gradient of the whole."""
    model, ids = fp8_model(linears=linears), batch(4, 40)
    _, expected = run(model, input_ids=ids, labels=ids)
    model.zero_grad()
    for part in ids.split(1):
        (model(part, labels=part).loss / 4).backward()
    # Measured: 2.1e-7 (more where the last bit of a sum tips an FP8 rounding). grad_weight of an FP8
    # linear has descales over the tokens of a call: 0.0187.
    assert rel_grads(grads_of(model), expected) < (0.022 if linears else 1e-3)


def test_gradient_accumulation_is_not_stale() -> None:
    """Weights are quantised in every call: after a step the next forward sees the new ones."""
    model, ids = fp8_model(), batch()
    fresh = fp8_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    fresh.load_state_dict(model.state_dict())
    assert_bitwise_equal(model(ids).logits, fresh(ids).logits)


def test_training_is_repeatable() -> None:
    runs = []
    for _ in range(2):
        model, ids = fp8_model("gpt_oss"), batch()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
        runs.append(dict(model.state_dict()))
    assert_same_grads(*runs)


def collate_padded(rows: list[dict]) -> dict[str, Tensor]:
    inputs = padded("right", length=24)
    return {k: v[: len(rows)] for k, v in inputs._asdict().items()}


COLLATORS = {
    "padded": collate_padded,
    "flattened": DataCollatorWithFlattening(return_tensors="pt"),
    "flattened-flash": DataCollatorWithFlattening(
        return_tensors="pt", return_flash_attn_kwargs=True, return_seq_idx=True
    ),
    "flattened-index": DataCollatorWithFlattening(return_tensors="pt", return_seq_idx=True),
}


def trainer_steps(model, collator: str, path: Path, **args) -> list[float]:
    """Losses of three steps of the Trainer, two rows of unequal length a step."""
    rows = [{"input_ids": batch(1, n, seed=n)[0].tolist()} for n in (17, 24) * 3]
    plain = dict(
        max_steps=3, per_device_train_batch_size=2, report_to=[], learning_rate=3e-3,
        save_strategy="no", disable_tqdm=True, logging_steps=1, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=TrainingArguments(path, **plain, **args),
        train_dataset=rows,
        data_collator=COLLATORS[collator],
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("collator", COLLATORS)
def test_trainer(collator: str, checkpointing: bool, tmp_path: Path) -> None:
    """Three steps, every forward and backward through our ops, the loss falling."""
    with count_calls() as calls:
        losses = trainer_steps(
            fp8_model(), collator, tmp_path, use_cpu=True, gradient_checkpointing=checkpointing
        )
    assert calls["attention_bwd"] == 3 * 2 and calls["linear_bwd_weight"] == 3 * 14
    assert calls["attention_fwd"] == 3 * 2 * (2 if checkpointing else 1)
    assert len(losses) == 3 and losses[2] < losses[0]


@pytest.mark.parametrize("collator", [c for c in COLLATORS if c != "padded"])
def test_trainer_flattened_batches_do_not_mix(collator: str) -> None:
    """What the flattening collator makes gives each row the logits it has alone."""
    model = fp8_model(linears=False).eval()
    rows = [{"input_ids": batch(1, n, seed=n)[0].tolist()} for n in (17, 24)]
    inputs = {k: v for k, v in COLLATORS[collator](rows).items() if k != "labels"}
    packed = model(**inputs, use_cache=False).logits[0].split([17, 24])
    for logits, row in zip(packed, rows, strict=True):
        alone = model(torch.tensor(row["input_ids"])[None]).logits[0]
        assert rel_rms(logits, alone) < 1e-3  # measured: 1e-7


def test_accelerate_bf16() -> None:
    """mixed_precision="bf16": autocast over FP32 master weights, everything still through our ops."""
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = fp8_model()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    losses, ids = [], batch()
    for _ in range(3):
        with count_calls() as calls:
            loss = wrapped(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
        assert calls["attention_bwd"] == 2 and calls["linear_bwd_weight"] == 14
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] - losses[2] > 0.3, losses
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize(
    "family,backend",
    [
        ("llama", "aot_eager"),
        pytest.param("gpt2", "aot_eager", marks=pytest.mark.slow),
        pytest.param("gemma2", "aot_eager", marks=pytest.mark.slow),
        pytest.param("llama", "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_training_step(family: str, backend: str) -> None:
    """Attention and linears of a swapped model in one graph."""
    torch._dynamo.reset()
    model = fp8_model(family)
    ids, mask, labels = padded("left", length=20)
    forward = lambda: model(ids, attention_mask=mask, use_cache=False).logits
    results = []
    for call in (forward, torch.compile(forward, fullgraph=True, backend=backend)):
        model.zero_grad()
        with count_calls() as calls:
            logits = call()
            F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        assert calls["attention_fwd"] == calls["attention_bwd"] == 2
        assert calls["linear_fwd"] == calls["linear_bwd_weight"] > 0
        results.append((logits.detach(), grads_of(model)))
    (expected, expected_grads), (logits, grads) = results
    if backend == "aot_eager":
        assert_bitwise_equal(logits, expected)
        assert_same_grads(grads, expected_grads)
    else:  # generated code rounds otherwise, and that can tip an FP8 rounding
        assert rel_rms(logits, expected) < 1e-3  # measured: 1.1e-7
        assert rel_grads(grads, expected_grads) < 1e-3  # measured: 8.7e-8
