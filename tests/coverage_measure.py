"""What one causal-LM family does with our attention and our linears, as a row of JSON."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from coverage_models import LENGTH, VOCAB, tiny_model
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel

from hf_deltamatch import check_model, set_attention_recipe, swap_linears
from hf_deltamatch.diagnostics import count_calls
from hf_deltamatch.hf.attention import fp8_delta_matching_attention
from hf_deltamatch.hf.modules import attention_modules
from hf_deltamatch.testing import rel_rms

OURS = "fp8_delta_matching"
EXACT = 3e-6
"""Relative difference of logits and of gradients without quantisation: FP32 rounding. Measured: below
1e-6."""
FP8_OVER_EXACT = 2.0**20
"""How many times more it may be with quantisation: the roundings of E4M3 and of FP32, 2^-4 and 2^-24,
pass through the same model. The largest is half of that, where one sends a token to another expert."""


class Sees(TorchFunctionMode):
    """Counts attention that is computed outside our function: SDPA, and softmax over square rows."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign, self.inside = 0, False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not self.inside:
            if func is F.scaled_dot_product_attention:
                self.foreign += 1
            elif func in (F.softmax, torch.softmax, Tensor.softmax):
                shape = (args[0] if args else kwargs["input"]).shape
                self.foreign += len(shape) >= 3 and tuple(shape[-2:]) == (LENGTH, LENGTH)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watched() -> Iterator[tuple[Sees, set[int]]]:
    """Attention outside our function, and the modules that called it."""
    called: set[int] = set()
    with Sees() as sees:

        def recording(module, *args, **kwargs):
            called.add(id(module))
            sees.inside = True
            try:
                return fp8_delta_matching_attention(module, *args, **kwargs)
            finally:
                sees.inside = False

        AttentionInterface.register(OURS, recording)
        try:
            yield sees, called
        finally:
            AttentionInterface.register(OURS, fp8_delta_matching_attention)


def batch() -> tuple[Tensor, Tensor]:
    """A full row and one padded on the left: token ids and mask ``[2, LENGTH]``."""
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    return ids * mask, mask


def drafter_inputs(model: PreTrainedModel, mask: Tensor) -> dict[str, Any]:
    """What the model that a drafter of Gemma 4 drafts for would hand it."""
    g = torch.Generator().manual_seed(2)
    text = model.config.get_text_config()
    normal = lambda *shape: torch.randn(*shape, generator=g)
    kv = (2, text.num_key_value_heads, LENGTH, text.head_dim)
    return {
        "inputs_embeds": normal(2, LENGTH, 2 * model.backbone_hidden_size),
        "attention_mask": mask,
        "position_ids": torch.arange(LENGTH)[None],
        "shared_kv_states": {kind: (normal(*kv), normal(*kv)) for kind in set(text.layer_types)},
    }


def run(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of real tokens, and every gradient of their cross entropy."""
    ids, mask = batch()
    model.zero_grad()
    torch.manual_seed(0)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if hasattr(model, "backbone_hidden_size"):
        inputs = drafter_inputs(model, mask)
    logits = model(**inputs).logits
    logits = logits[:, -LENGTH:]
    shown = (mask[:, 1:] * mask[:, :-1]).bool()
    F.cross_entropy(logits[:, :-1][shown].float(), ids[:, 1:][shown]).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits[mask.bool()].detach(), grads


def difference(actual: tuple, expected: tuple) -> dict[str, float]:
    names = sorted(actual[1].keys() | expected[1].keys())
    zero = torch.zeros(())
    sides = []
    for grads, others in ((actual[1], expected[1]), (expected[1], actual[1])):
        parts = [grads[n] if n in grads else torch.zeros_like(others.get(n, zero)) for n in names]
        sides.append(torch.cat([p.double().flatten() for p in parts]))
    found = {"forward": rel_rms(actual[0], expected[0]), "gradient": rel_rms(*sides)}
    return {k: float(f"{v:.3g}") for k, v in found.items()}


def first_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    text = re.sub(r"\s+", " ", text.split("\n\n")[0])
    text = re.sub(r"(/[\w.+-]+){3,}", "(a file)", text)
    return text[:600]


def measure(family: str) -> dict[str, Any]:
    """The row of ``family``; see :func:`judge` for its ``status``."""
    warnings.simplefilter("ignore")
    row: dict[str, Any] = {"family": family}
    try:
        model = tiny_model(family, OURS)
        row["class"] = type(model).__name__
    except Exception as error:
        # Is it we who refuse?
        try:
            tiny_model(family, "eager")
        except Exception as plain:
            return {**row, "status": "cannot be built", "error": first_line(plain)}
        return {**row, "status": "refused", "error": first_line(error)}
    try:
        check = check_model(model)
        row["modules"], row["other"] = len(check.attention), len(check.other_attention)
        names = list(check.attention)
        if check.other_attention:
            row["why_other"] = sorted(set(check.other_attention.values()))
    except ValueError as error:
        row["error"], names = first_line(error), []
    expected = {}
    for plain in ("eager", "sdpa"):
        # Built anew: some models cannot change their attention.
        try:
            other = tiny_model(family, plain)
        except ValueError:  # it has no SDPA
            continue
        try:
            found = run(other)
            # Eager attention of Qwen 4 has NaN gradients in padding.
            if all(g.isfinite().all() for g in found[1].values()):
                expected[plain] = found
        except Exception as error:
            row.setdefault("plain_error", first_line(error))
    if not expected and not names:  # the user was told; there is nothing of ours to compare
        row["not_run"] = row.pop("plain_error", "its gradients are not finite")
        return {**row, "status": untouched(row["error"])}
    if not expected:
        row.setdefault("plain_error", "its gradients are not finite")
        return {**row, "status": "cannot be run", "error": row.pop("plain_error")}
    try:
        if names:
            set_attention_recipe(model, "bf16")
        with watched() as (sees, called), count_calls() as calls:
            exact = run(model)
        row["calls"], row["foreign"] = calls["attention_fwd"], sees.foreign
        row["backward_calls"] = calls["attention_bwd"]
        by_id = {id(m): n for n, m in attention_modules(model).items()}
        row["called"] = len([i for i in called if i in by_id])
        row["not_called"] = sorted(n for i, n in by_id.items() if i not in called)
        found = {p: difference(exact, e) for p, e in expected.items()}
        row["against"] = min(found, key=lambda p: max(found[p].values()))
        row["exact"] = found[row["against"]]
        if names:
            set_attention_recipe(model, "delta_matching")
            row["fp8"] = difference(run(model), expected[row["against"]])
    except Exception as error:
        return {**row, "status": "refused", "error": first_line(error)}
    row["linears"] = linears(model, expected[row["against"]])
    row["status"] = judge(row)
    return row


def linears(model: PreTrainedModel, expected: tuple) -> dict[str, Any]:
    """The same with FP8 linears."""
    try:
        report = swap_linears(model)
        with count_calls() as calls:
            found = run(model)
        return {
            "swapped": len(report.swapped),
            "calls": calls["linear_fwd"],
            **difference(found, expected),
        }
    except Exception as error:
        return {"error": first_line(error)}


def untouched(error: str) -> str:
    return "attention-free" if "no attention modules" in error else "own attention"


def judge(row: dict[str, Any]) -> str:
    """``works``: every attention of the forward runs on our op and is right; ``partly``: some of it
    is the model's own, which ``check_model`` lists; ``own attention``, ``attention-free``:
    ``check_model`` raises; and the two defects, ``silent`` and ``wrong``."""
    if not all(v < EXACT for v in row["exact"].values()):  # NaN is not
        return "wrong"
    for what, value in row.get("fp8", {}).items():
        if not row["exact"][what] < value < FP8_OVER_EXACT * row["exact"][what]:
            return "wrong"
    if "error" in row:
        if row["calls"]:
            return "silent"  # ours runs, but check_model says that it does not
        return "own attention" if row["foreign"] else untouched(row["error"])
    if row["calls"] == 0 or (row["foreign"] and not row["other"]):
        return "silent"
    return "partly" if row["other"] else "works"
