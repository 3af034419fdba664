"""Train a causal language model from scratch in FP8, one Accelerate loop.

    python examples/pretrain.py --config examples/configs/pretrain_tiny.yaml          # CPU, minutes
    python examples/pretrain.py --config examples/configs/pretrain_125m.yaml          # one GPU
    accelerate launch --multi_gpu --num_processes 2 examples/pretrain.py --config …   # DDP
    accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 --mixed_precision bf16 \\
        --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP examples/pretrain.py --config …  # FSDP2
    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 examples/pretrain.py --config … \\
        --micro-batch 4                                                               # two CPU processes

Every key of the file is a flag as well (``--arm mp``, ``--lr 1e-3``, ``--micro-batch 4``); ``--help``
lists them. ``--data`` is ``stdlib``, a local file or folder, or a hub name; with ``--streaming true`` it
is never whole in memory (every process reads the whole stream and takes its share of the rows).

The same command again goes on from the newest checkpoint of ``--output``, with bitwise the same
result as a run that was never interrupted (same device and number of processes). ``metrics.jsonl`` has
every logged number, TensorBoard too; ``hf-deltamatch plot RUN`` draws them; ``final/`` is the model.
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm.auto import tqdm
from train_data import load_text, load_tokenizer
from train_setup import build_model, make_accelerator, set_arm, special_tokens
from transformers import PreTrainedModel

from hf_deltamatch import training as tr
from hf_deltamatch.diagnostics import Monitor
from hf_deltamatch.environment import environment
from hf_deltamatch.hf.train_config import write_train_config
from hf_deltamatch.training import state as st
from hf_deltamatch.training.lock import alone_in
from hf_deltamatch.training.metrics import MetricsFile, read_metrics
from hf_deltamatch.training.options import Options, parse_options
from hf_deltamatch.training.samplers import Sampler, padded_share, share

CHECKPOINT_FILES = ("model.safetensors", "config.json", "optimizer.pt", "progress.pt", "random.pt")


class Training:
    """Everything that a checkpoint holds, and the step."""

    def __init__(
        self,
        o: Options,
        accelerator: Accelerator,
        model: PreTrainedModel,
        sampler: Sampler,
        held_out,
    ) -> None:
        self.o, self.accelerator, self.sampler, self.held_out = o, accelerator, sampler, held_out
        flops = tr.flops_per_token(model, o.seq_len)
        if o.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if o.compile:  # by block: the masks are made outside, where values can be read
            for module in model.modules():
                if type(module).__name__ in (model._no_split_modules or ()):
                    module.compile()
        model.to(accelerator.device)  # before the optimisers: fused ones want it there
        betas = tuple(o.betas)
        make = tr.build_optimizers
        made = make(model, o.optimizer, lr=o.lr, weight_decay=o.weight_decay, betas=betas)
        self.model_config = model.config
        self.model, *prepared = accelerator.prepare(model.train(), *made)
        self.optimizers = [p.optimizer for p in prepared]
        self.guard = tr.StepGuard(o.max_skipped)
        self.meter = tr.Meter(flops, self._peak())
        self.monitor = Monitor(o.monitor_every if accelerator.is_main_process else 0)
        # Our attention takes packed rows as one; Transformers' own finds boundaries in positions.
        self.flat = tr.ARMS[o.arm] is not None
        self.step = self.tokens = 0
        self.run = {
            **o.identity(),
            "precision": accelerator.mixed_precision,
            "data_identity": sampler.identity(),
        }

    def _peak(self) -> float | None:
        peak = self.o.peak_flops or tr.peak_flops(self.accelerator.device)
        return peak and peak * self.accelerator.num_processes

    def inputs(self, rows: tr.Rows, targets: int) -> dict:
        """With ``num_items_in_batch`` the loss is a sum over these rows divided by ``targets``."""
        separate = self.o.documents == "separate"
        found = tr.model_inputs(rows, flat=self.flat, separate=separate)
        found["num_items_in_batch"] = torch.tensor(max(targets, 1))
        put = lambda v: v.to(self.accelerator.device) if isinstance(v, torch.Tensor) else v
        return {name: put(v) for name, v in found.items()} | {"use_cache": False}

    def train_step(self) -> dict:
        """One update from ``batch_size`` rows; returns its numbers."""
        o, acc = self.o, self.accelerator
        rows = self.sampler.next(o.batch_size)
        mine = share(rows, acc.process_index, acc.num_processes, o.micro_batch)
        factor = tr.lr_factor(
            self.step, steps=o.steps, warmup=o.warmup, kind=o.schedule, floor=o.floor, decay=o.decay
        )
        tr.set_lr(self.optimizers, factor)
        total = torch.zeros((), device=acc.device)
        for i, micro in enumerate(mine):
            last = i == len(mine) - 1
            with (
                nullcontext() if last else acc.no_sync(self.model),
                self.monitor.step(self.step) if last else nullcontext(),
            ):
                loss = self.loss(micro, rows.targets)
                acc.backward(loss * acc.num_processes)  # gradients are averaged over processes
            total += loss.detach()
        norm = acc.clip_grad_norm_(self.model.parameters(), o.clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        numbers = {"loss": float(acc.reduce(total)), "grad_norm": float(norm), "lr": o.lr * factor}
        if self.guard.ok(self.step, numbers["loss"], numbers["grad_norm"]):
            for optimizer in self.optimizers:
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.step += 1
        self.tokens += rows.ids.numel()
        self.meter.add(rows.ids.numel())
        return {**numbers, "tokens": self.tokens, "skipped": self.guard.skipped}

    def loss(self, micro, targets: int) -> torch.Tensor:
        """Accelerate puts the forward of a model under autocast, but not that of FSDP2."""
        with self.accelerator.autocast():
            return self.model(**self.inputs(micro, targets)).loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss of a token of the held-out rows."""
        acc, total = self.accelerator, torch.zeros((), device=self.accelerator.device)
        self.model.eval()
        rows = padded_share(self.held_out, acc.process_index, acc.num_processes, self.o.micro_batch)
        for micro in rows:
            total += self.loss(micro, 1)
        self.model.train()
        return float(acc.reduce(total)) / max(self.held_out.targets, 1)

    def save(self, output: Path) -> None:
        """A checkpoint; all processes take part, the first one writes."""
        model = st.model_state(self.model)
        optimizers = st.optimizer_state(self.model, self.optimizers)
        random = gather_object([st.rng_state()])
        progress = {
            "step": self.step,
            "tokens": self.tokens,
            "guard": self.guard.state_dict(),
            "sampler": self.sampler.state_dict(),
        }
        if self.accelerator.is_main_process:
            writers = (
                lambda path: st.save_model(model, path),
                lambda path: path.write_text(self.model_config.to_json_string()),
                *(lambda path, x=x: torch.save(x, path) for x in (optimizers, progress, random)),
            )
            files = dict(zip(CHECKPOINT_FILES, writers, strict=True))
            more = {"aside": self.o.aside(), "keep": self.o.keep}
            tr.write_checkpoint(output, self.step, files, run=self.run, **more)
        self.accelerator.wait_for_everyone()

    def resume(self, folder: Path) -> None:
        """Raises CheckpointError, with the file's name, for what is damaged or not of this run."""
        tr.read_manifest(folder, self.run, CHECKPOINT_FILES)
        st.load_model(self.model, folder / "model.safetensors")
        st.load_optimizers(self.model, self.optimizers, folder / "optimizer.pt")
        load = lambda name: torch.load(folder / name, map_location="cpu", weights_only=True)
        progress, random = load("progress.pt"), load("random.pt")
        self.step, self.tokens = progress["step"], progress["tokens"]
        self.guard.load_state_dict(progress["guard"])
        self.sampler.load_state_dict(progress["sampler"])
        if len(random) == self.accelerator.num_processes:
            st.set_rng_state(random[self.accelerator.process_index])
        else:
            self.accelerator.print("another number of processes: random numbers start anew")


def newest(o: Options) -> Path | None:
    """The checkpoint to go on from."""
    found = tr.checkpoints(Path(o.output))
    if o.resume == "never" and found:
        # Later ones of another run would be the newest the next time.
        raise tr.CheckpointError(
            f"{found[-1]}: is there already, and `resume` is 'never'. Remove it, or choose another "
            "output folder."
        )
    if o.resume not in ("auto", "never"):
        return Path(o.resume)
    return found[-1] if found else None


def train(o: Options, accelerator: Accelerator, model, tokenizer, sampler, held_out=None) -> dict:
    """The loop. Returns the last numbers, which ``final/`` was saved with."""
    output, log = Path(o.output), accelerator.print
    start = newest(o)
    t = Training(o, accelerator, model, sampler, held_out)
    if start is not None:
        t.resume(start)
        log(f"going on after step {t.step} from {start}")
    if o.tracker != "none":
        accelerator.init_trackers(output.name)
    file = output / "metrics.jsonl"
    metrics = MetricsFile(file, t.step) if accelerator.is_main_process else None
    shown = accelerator.is_main_process
    bar = tqdm(total=o.steps, initial=t.step, unit="step", dynamic_ncols=True, disable=not shown)
    # A run that had all its steps keeps its last numbers.
    numbers = next((r for r in read_metrics(file)[::-1] if r.pop("step") == t.step), {})
    while t.step < o.steps:
        numbers = t.train_step()
        now, end = t.step, t.step == o.steps
        more = t.monitor.pop()
        if now % o.log_every == 0 or end or more:
            more |= t.meter.read()
        if held_out is not None and (now % o.eval_every == 0 or end):
            with t.meter.paused():
                more["eval_loss"] = t.evaluate()
        bar.update()
        if more:
            numbers |= more
            bar.set_postfix(postfix(numbers))
            accelerator.log({k: v for k, v in numbers.items() if math.isfinite(v)}, step=now)
            if metrics is not None:
                metrics.add(now, numbers)
        if now % o.save_every == 0 or end:
            with t.meter.paused():
                t.save(output)
    bar.close()
    finish(t, tokenizer, numbers)
    return numbers


def postfix(numbers: dict) -> dict[str, str]:
    """Beside the bar, which has the remaining time itself."""
    shown = {"loss": f"{numbers['loss']:.3f}"}
    if "tokens_per_second" in numbers:
        shown["tok/s"] = f"{numbers['tokens_per_second']:,.0f}"
    if "mfu" in numbers:
        shown["MFU"] = f"{numbers['mfu']:.1%}"
    return shown


def finish(t: Training, tokenizer, numbers: dict) -> None:
    """The model in ``final/``, as ``from_pretrained`` takes it, and ``results.json``."""
    state = st.model_state(t.model)
    output = Path(t.o.output)
    if t.accelerator.is_main_process:
        model = t.accelerator.unwrap_model(t.model)
        model.save_pretrained(output / "final", state_dict=state)
        tokenizer.save_pretrained(output / "final")
        if not hasattr(model, "peft_config"):
            recipe = tr.train_config(t.o.arm, t.o.linear, t.o.block)
            write_train_config(output / "final", recipe, step=t.step)
        where = {"processes": t.accelerator.num_processes, "environment": environment()}
        facts = {"options": t.run, "aside": t.o.aside(), "steps": t.step, **where, **numbers}
        (output / "results.json").write_text(json.dumps(facts, indent=2) + "\n")
        losses = (f"{k} {numbers[k]:.3f}" for k in ("loss", "eval_loss") if numbers.get(k))
        print(", ".join((f"step {t.step}", *losses)))
        print(f"Written: {output / 'final'}, {output / 'results.json'}, {output / 'metrics.jsonl'}")
    t.accelerator.end_training()


def main(argv: list[str] | None = None) -> dict:
    o = parse_options(Options, argv, __doc__)
    accelerator = make_accelerator(o)
    tokenizer = load_tokenizer(o.tokenizer or (None if isinstance(o.model, dict) else o.model))
    sampler, held_out = load_text(o, tokenizer)
    model = build_model(o, **special_tokens(o, tokenizer))
    if model.config.vocab_size < len(tokenizer):
        raise SystemExit(
            f"the model has {model.config.vocab_size} tokens and the tokenizer {len(tokenizer)}; "
            "raise vocab_size."
        )
    set_arm(o, accelerator, model)
    return run(o, accelerator, model, tokenizer, sampler, held_out)


def run(*args) -> dict:
    """:func:`train`, with a line instead of a traceback for what a user can mend."""
    o, accelerator = args[:2]
    first = accelerator.is_main_process  # the one that writes
    try:
        with alone_in(Path(o.output)) if first else nullcontext():
            return train(*args)
    except (tr.CheckpointError, tr.NotFinite, OSError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
