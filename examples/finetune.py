"""Fine-tune on conversations in FP8: all weights or LoRA, with a loss on the answers only.

    python examples/finetune.py --config examples/configs/finetune_chat.yaml --data my_chats.jsonl
    python examples/finetune.py --config examples/configs/finetune_lora.yaml --data my_chats.jsonl
    accelerate launch --multi_gpu --num_processes 2 examples/finetune.py --config … --data …

A row of the data has ``messages``, a list of ``{"role": …, "content": …}``; the tokenizer's chat template
turns them into text (ChatML if it has none). Conversations are packed into rows without seeing each
other, never cut between rows. The loop, its checkpoints and its options are those of ``pretrain.py``.

``final/`` is the model; with ``--lora-rank 16`` it is the adapter, and ``merged/`` the model with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from jinja2 import TemplateError
from pretrain import run
from train_data import load_examples, load_tokenizer, need_column
from train_setup import build_model, make_accelerator, set_arm
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_deltamatch.hf.train_config import write_train_config
from hf_deltamatch.training import IGNORED, Packer, Rows, join, train_config
from hf_deltamatch.training.options import Options, aside, parse_options
from hf_deltamatch.training.samplers import RowSampler

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class FinetuneOptions(Options):
    messages_column: str = "messages"
    lora_rank: int = 0
    """Of LoRA's adapter; 0 trains all weights."""
    lora_alpha: float = 32.0
    lora_targets: str = "all-linear"
    """``all-linear``, or names of modules separated by commas."""
    merge: bool = aside(True)
    """Also save the model with the adapter merged into it."""
    lr: float = 2e-5
    warmup: int = 20
    output: str = aside("runs/finetune")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.lora_rank < 2**31:
            raise ValueError(f"`lora_rank` is {self.lora_rank}; it must be 0 or more.")
        if not 0 < self.lora_alpha < 1e300:
            raise ValueError(f"`lora_alpha` is {self.lora_alpha}; it must be a positive number.")


def encode(messages: list[dict], tokenizer: PreTrainedTokenizerBase) -> tuple[list, list]:
    """Tokens of a conversation and their labels: those of the assistant's messages, what ends them
    included, and :data:`IGNORED` elsewhere. What follows the last answer is left out.

    Raises:
        ValueError: a template that changes earlier text when a message is added.
    """
    ids: list[int] = []
    labels: list[int] = []
    done = ""
    whole = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and m.get("content") is not None
        for m in messages
    )
    if not whole:
        raise ValueError(
            f"finetune: a conversation is {str(messages)[:80]!r}; it must be a list of "
            '{"role": …, "content": …}.'
        )
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        render = lambda n, prompt: tokenizer.apply_chat_template(
            messages[:n], tokenize=False, add_generation_prompt=prompt
        )
        question, answered = render(i, True), render(i + 1, False)
        if not (question.startswith(done) and answered.startswith(question)):
            raise ValueError(
                f"finetune: message {i}: the chat template rewrites earlier text when a message is "
                "added, so answers cannot be told from the rest. Use a template that only appends, "
                "or conversations of one answer."
            )
        for text, learned in ((question[len(done) :], False), (answered[len(question) :], True)):
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += tokens
            labels += tokens if learned else [IGNORED] * len(tokens)
        done = answered
    return ids, labels


def load_chats(o: FinetuneOptions, tokenizer) -> tuple[RowSampler, Rows | None]:
    """Training rows and held-out rows."""
    if o.data == "stdlib" or o.streaming:
        raise SystemExit("finetune: name conversations with --data, without --streaming.")
    examples = load_examples(o)
    need_column(examples, o.messages_column, o)
    try:
        chats = [encode(messages, tokenizer) for messages in examples[o.messages_column]]
    except (ValueError, TemplateError) as error:
        raise SystemExit(f"data {o.data!r}: {error}") from error
    chats = [chat for chat in chats if chat[0]]
    n = min(o.held_out, len(chats) - 1)
    chosen = {i * len(chats) // n for i in range(n)} if n > 0 else set()
    parts = {held: [c for i, c in enumerate(chats) if (i in chosen) == held] for held in (0, 1)}
    train, cut = pack(parts[0], o, tokenizer)
    if cut:
        print(f"{cut} of {len(chats)} conversations are longer than {o.seq_len} tokens: cut off")
    held_out = pack(parts[1], o, tokenizer)[0] if n > 0 else None
    return RowSampler(train, o.seed), None if held_out is None else held_out[: o.eval_rows]


def pack(chats: list[tuple[list, list]], o: FinetuneOptions, tokenizer) -> tuple[Rows, int]:
    """Rows, and how many conversations were cut off."""
    packer = Packer(o.seq_len, split=False, pad=tokenizer.pad_token_id or 0)
    rows = [row for ids, labels in chats for row in packer.feed(ids, labels)]
    rows += packer.flush()
    if not rows:
        raise SystemExit(f"data {o.data!r}: no conversation has an answer by the assistant.")
    return join(rows), packer.cut


def add_lora(model: PreTrainedModel, o: FinetuneOptions):
    from peft import LoraConfig, get_peft_model

    targets = o.lora_targets if o.lora_targets == "all-linear" else o.lora_targets.split(",")
    config = LoraConfig(
        r=o.lora_rank, lora_alpha=o.lora_alpha, target_modules=targets, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def save_merged(o: FinetuneOptions, tokenizer) -> None:
    """The base model with the saved adapter, in FP32 on the CPU, however training was spread."""
    from peft import PeftModel

    folder = Path(o.output)
    base = AutoModelForCausalLM.from_pretrained(o.model, dtype=torch.float32)
    PeftModel.from_pretrained(base, folder / "final").merge_and_unload().save_pretrained(
        folder / "merged"
    )
    tokenizer.save_pretrained(folder / "merged")
    write_train_config(folder / "merged", train_config(o.arm, o.linear, o.block))


def prepare(o: FinetuneOptions, accelerator: Accelerator):
    """Model and tokenizer."""
    if not isinstance(o.model, str):
        raise SystemExit("finetune: `model` must be a local path or a hub name.")
    tokenizer = load_tokenizer(o.tokenizer or o.model)
    if tokenizer.chat_template is None:
        accelerator.print("the tokenizer has no chat template: ChatML")
        tokenizer.chat_template = CHATML
    model = build_model(o)
    set_arm(o, accelerator, model)
    return (add_lora(model, o) if o.lora_rank else model), tokenizer


def main(argv: list[str] | None = None) -> dict:
    o = parse_options(FinetuneOptions, argv, __doc__)
    accelerator = make_accelerator(o)
    model, tokenizer = prepare(o, accelerator)
    sampler, held_out = load_chats(o, tokenizer)
    numbers = run(o, accelerator, model, tokenizer, sampler, held_out)
    if o.lora_rank and o.merge and accelerator.is_main_process:
        save_merged(o, tokenizer)
        print(f"Written: {Path(o.output) / 'merged'}")
    return numbers


if __name__ == "__main__":
    main()
