"""Train the three arms of FP8 attention on real text, evaluate them, and print one table.

    make demo                                              # this and a small study, on a fresh machine
    python examples/demo.py                                # this, in the present environment
    python examples/demo.py --steps 400 --seq-len 512      # longer
    python examples/demo.py --model HuggingFaceTB/SmolLM2-135M --tokenizer HuggingFaceTB/SmolLM2-135M \\
        --dataset my_text.jsonl --lr 5e-5                  # fine-tune a pretrained model

Arms (same seed, same data, FP32 weights): ``mp`` mixed precision with SDPA (BF16 on a GPU, FP32 on a
CPU); ``sd`` FP8 attention with the stale δ of FlashAttention; ``dm`` FP8 attention with matched δ. FP8
linears in ``sd`` and ``dm``.

Writes ``results.json`` and ``loss.png`` to ``--output``. A run this small shows the invariant (the
row-sum residual), not the divergence, which takes scale, time or a learning rate near the edge.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed
from demo_data import load_corpus, load_tokenizer, pack, write_eval_tasks
from demo_report import format_table, plot
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import hf_deltamatch
from hf_deltamatch import kernels
from hf_deltamatch.diagnostics import count_calls, record_row_sum
from hf_deltamatch.environment import device_name, environment
from hf_deltamatch.formats import ATTENTION_BLOCKS
from hf_deltamatch.ops.backend import BACKENDS, OPS, explain
from hf_deltamatch.recipes import AttentionRecipe

ARMS = {"mp": None, "sd": "stale_delta", "dm": "delta_matching"}  # attention recipes
HEAD_DIM = 32  # of the model from scratch
# SDPA's backward in our own code: unquantised operands, δ = rowsum(dO ∘ O).
SDPA_LIKE = AttentionRecipe(quantize=False, delta="stale")


@dataclass
class Arm:
    """What one arm leaves behind; the fields of ``results.json``."""

    loss: list[float] = field(default_factory=list)
    residual_steps: list[int] = field(default_factory=list)
    residuals: list[float] = field(default_factory=list)
    loss_first: float = math.nan
    loss_last: float = math.nan
    bits_per_byte: float = math.nan
    lm_eval: dict[str, float] = field(default_factory=dict)
    row_sum_residual: float = math.nan
    seconds: float = math.nan
    dtype: dict[str, str] = field(default_factory=dict)
    fp8_backend: dict[str, str] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    provenance: dict = field(default_factory=dict)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="hub name or local path; default: a small Llama from scratch")
    add("--dataset", help="hub name or local path; default: the standard library's source")
    add("--text-column", default="text", help="default: %(default)s")
    add("--tokenizer", help="hub name or local path; default: UTF-8 bytes")
    add("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    add("--steps", type=int, default=120)
    add("--batch-size", type=int, default=8, help="sequences per step")
    add("--seq-len", type=int, default=256, help="tokens per sequence")
    add("--lr", type=float, default=1e-3, help="peak of the cosine schedule")
    add("--warmup", type=int, default=20, help="steps")
    add("--seed", type=int, default=0)
    add("--eval-docs", type=int, default=48, help="documents per lm-eval task")
    add("--residual-every", type=int, default=15, help="steps between residual measurements")
    add("--block", default="128xD", choices=list(ATTENTION_BLOCKS), help="attention block")
    add(
        "--backend",
        choices=BACKENDS,
        help="FP8 backend; default: by device, and the reference where no kernel exists",
    )
    add("--output", type=Path, default=Path("runs/demo"))
    args = parser.parse_args(argv)
    for name in ("steps", "batch_size", "seq_len", "eval_docs", "residual_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; at least 1.")
    # Before MP has trained: a backend asked for by name has to run here, and do what is asked.
    device = PartialState().device
    choice = explain("attention", device, args.backend)
    if args.backend is not None and choice.backend is None:
        parser.error(f"--backend {args.backend}: {choice.reason}.")
    if choice.backend == "triton":
        recipe = AttentionRecipe(block=args.block)
        refused = kernels.unsupported_attention(recipe, (HEAD_DIM,) * 2, 1.0, device)
        if refused:
            parser.error(f"--block {args.block}: {refused}, or --backend reference.")
    return args


def build_model(args: argparse.Namespace, arm: str, vocab_size: int) -> PreTrainedModel:
    """The same weights for every arm: pretrained, or drawn from ``--seed``."""
    set_seed(args.seed)
    attn = "sdpa" if ARMS[arm] is None else hf_deltamatch.hf.ATTN_IMPLEMENTATION
    if args.model:
        # Not the checkpoint's dtype: AdamW's steps are lost in the rounding of BF16 weights.
        return AutoModelForCausalLM.from_pretrained(
            args.model, attn_implementation=attn, dtype=torch.float32
        )
    config = LlamaConfig(
        vocab_size=-(-vocab_size // 64) * 64,
        hidden_size=4 * HEAD_DIM,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max(args.seq_len, 1024),
        attention_bias=True,  # a common key component, which a stale δ leaks along
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn)


def choose_backends(wanted: str | None, device: torch.device) -> dict[str, str]:
    """Backend of each op: ``wanted``, or the reference by name where this device has no kernel (said
    aloud)."""
    chosen = {}
    for op in OPS:
        choice = explain(op, device, wanted)
        if choice.backend is None:
            print(f"FP8 {op}: {choice.reason}; running the pure-torch reference on {device}.")
        chosen[op] = choice.backend or "reference"
    return chosen


def measure_mp_residual(model: PreTrainedModel, batch: torch.Tensor) -> float:
    """Row-sum residual of MP: one extra backward through our own unquantised code, no step."""
    model.set_attn_implementation(hf_deltamatch.hf.ATTN_IMPLEMENTATION)
    hf_deltamatch.set_attention_recipe(model, SDPA_LIKE, backend="reference")
    with record_row_sum() as residual:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad][:1])
    model.set_attn_implementation("sdpa")
    return residual.value


def train(args: argparse.Namespace, arm: str, tokens: torch.Tensor, vocab: int) -> tuple:
    """One arm: a plain Accelerate loop. Returns the result and the trained model."""
    on_gpu = PartialState().device.type == "cuda"
    accelerator = Accelerator(mixed_precision="bf16" if on_gpu else "no")
    model = build_model(args, arm, vocab)
    result = Arm(dtype=dtypes(model, accelerator))
    print(f"{arm}: weights in {result.dtype['weights']}, computing in {result.dtype['compute']}")
    recipe = ARMS[arm]
    if recipe is not None:
        backend = result.fp8_backend = choose_backends(args.backend, accelerator.device)
        attention = AttentionRecipe.from_name(recipe, block=args.block)
        hf_deltamatch.set_attention_recipe(model, attention, backend=backend["attention"])
        report = hf_deltamatch.swap_linears(model, backend=backend["linear"])
        found = str(hf_deltamatch.check_model(model)).replace("\n", ", ")
        print(f"{arm}: {found}; {len(report.skipped)} linears left; backends: {backend}")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, args))
    order = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(
        tokens, batch_size=args.batch_size, shuffle=True, drop_last=True, generator=order
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    bar = tqdm(total=args.steps, desc=arm, unit="step", dynamic_ncols=True)
    start, step, nothing = time.perf_counter(), 0, contextlib.nullcontext()
    with count_calls() as calls:
        while step < args.steps:
            for batch in loader:
                measure = step % args.residual_every == 0 or step == args.steps - 1
                if measure and recipe is None:
                    inner = accelerator.unwrap_model(model)
                    result.residuals.append(measure_mp_residual(inner, batch))
                with record_row_sum() if measure and recipe else nothing as residual:
                    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
                    accelerator.backward(loss)
                if measure and recipe:
                    result.residuals.append(residual.value)
                if measure:
                    result.residual_steps.append(step)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                result.loss.append(loss.item())
                step += 1
                bar.update()
                bar.set_postfix(loss=f"{result.loss[-1]:.3f}")
                if step == args.steps:
                    break
    bar.close()
    result.seconds = time.perf_counter() - start
    result.calls = dict(calls) if recipe else {}
    result.loss_first = result.loss[0]
    tail = result.loss[-max(1, args.steps // 10) :]
    result.loss_last = sum(tail) / len(tail)
    result.row_sum_residual = max(result.residuals)
    return result, accelerator.unwrap_model(model)


def dtypes(model: PreTrainedModel, accelerator: Accelerator) -> dict[str, str]:
    """Dtype of the weights, and that of the activations (autocast's where it is on)."""
    weights = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))
    autocast = {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision)
    return {"weights": weights, "compute": autocast or weights}


def lr_factor(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then cosine to a tenth."""
    if step < args.warmup:
        return (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def evaluate(args, model: PreTrainedModel, tokenizer, tasks: list[dict], result: Arm) -> None:
    """Both lm-eval tasks, with the arithmetic the arm was trained in."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from hf_deltamatch.hf.lm_eval import DeltaMatchLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # Bars of lm-eval and datasets; errors are raised, not printed.
    with contextlib.redirect_stderr(io.StringIO()):
        lm = DeltaMatchLM(
            pretrained=model.eval(),
            tokenizer=tokenizer,
            batch_size=16,
            max_length=args.seq_len,
            device=str(model.device),
        )
        out = lm_eval.simple_evaluate(
            model=lm,
            tasks=[dict(task) for task in tasks],
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
            random_seed=args.seed,
            verbosity="ERROR",
        )
    result.bits_per_byte = out["results"]["held_out"]["bits_per_byte,none"]
    result.lm_eval = {
        "continuation_acc": out["results"]["continuation"]["acc,none"],
        "documents": args.eval_docs,
    }
    result.provenance = without_nulls(lm.provenance())
    result.provenance["environment"] = real_environment(model.device)


def real_environment(device: torch.device) -> dict:
    """The environment with the device that was used, which need not be the GPU that exists."""
    used = device_name() if device.type == "cuda" else device.type
    return without_nulls({**environment(), "device": used})


def without_nulls(facts: dict) -> dict:
    return {k: v for k, v in facts.items() if v is not None}


def main(argv: list[str] | None = None) -> dict:
    args = parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    need = args.steps * args.batch_size * args.seq_len
    train_docs, held_out = load_corpus(args.dataset, args.text_column, limit_chars=4 * need)
    tokens = pack(train_docs, tokenizer, args.seq_len)
    if len(tokens) < args.batch_size:
        raise SystemExit(
            f"--batch-size is {args.batch_size} and the training text has {len(tokens)} sequences of "
            f"{args.seq_len} tokens; give more text, or a smaller --batch-size or --seq-len."
        )
    tasks = write_eval_tasks(
        held_out,
        tokenizer,
        args.output / "eval",
        documents=args.eval_docs,
        seed=args.seed,
        seq_len=args.seq_len,
    )
    print(f"{tokens.numel():,} training tokens, {len(held_out)} held-out documents")
    arms = {}
    for arm in args.arms:
        arms[arm], model = train(args, arm, tokens, len(tokenizer))
        print(f"{arm}: evaluating on {args.eval_docs} documents with lm-eval")
        evaluate(args, model, tokenizer, tasks, arms[arm])
    results = {
        "arms": {name: asdict(arm) for name, arm in arms.items()},
        "config": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "environment": real_environment(PartialState().device),
    }
    (args.output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    plot(arms, args.output / "loss.png")
    print("\n" + format_table(arms))
    print(f"Written: {args.output / 'results.json'}, {args.output / 'loss.png'}")
    return results


if __name__ == "__main__":
    main()
