"""One run on one device. Its state lives on the device, and no step waits for it: the host looks at
the numbers every hundred steps. So a step can be recorded once as a CUDA graph and replayed.

A second stage (``then`` in the file) goes on with the master weights of the first, at another context
and learning rate. Its AdamW starts afresh and its schedule at step 0: give it a warm-up. A run that
diverged in its first stage has no second.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_deltamatch.diagnostics import count_calls, record_row_sum
from hf_deltamatch.study.corpus import Corpus
from hf_deltamatch.study.evaluate import Evaluate, ScoringError, evaluate
from hf_deltamatch.study.model import (
    build_model,
    decays,
    is_direct,
    load_weights,
    logits_of,
    to_working_dtype,
)
from hf_deltamatch.study.save import save_whole
from hf_deltamatch.study.spec import Run, Train
from hf_deltamatch.training.order import order_positions
from hf_deltamatch.training.schedule import lr_factor

LOOK_EVERY = 100
SAY_EVERY = 15.0
"""Seconds without a look after which slow steps are looked at for the progress alone."""
WARM_STEPS = 4
"""Ordinary steps before a graph is recorded: kernels are compiled and state is allocated in them."""


class Progress(NamedTuple):
    """Where a run is; ``stage`` is empty in its first one."""

    stage: str
    step: int
    steps: int
    loss: float
    seconds_left: float | None

    def __str__(self) -> str:
        left = "" if self.seconds_left is None else f", {self.seconds_left:.0f} s left"
        return f"{self.stage}step {self.step} of {self.steps}, loss {self.loss:.3f}{left}"


class GraphError(RuntimeError):
    """A step could not be recorded as a CUDA graph; the process is not to be used any more."""


class Trainer:
    """The state of one run and its step.

    Master weights, gradients and AdamW in FP32; the model's own parameters are their copies in the
    working dtype. Skipping a step that is not finite is done on the device, too.
    """

    def __init__(
        self,
        config: dict,
        corpus: Corpus,
        device: torch.device,
        backend: str | None = None,
        weights: list[Tensor] | None = None,
    ) -> None:
        """``weights``: FP32, in the order of the parameters; None: drawn from the seed.

        Raises:
            ValueError: too little text for one sequence, or weights of another model.
        """
        self.options = t = Train(**config["train"])
        self.device = device
        self.corpus = corpus
        self.dtype = _working_dtype(t.precision, device)
        self.model = build_model(config, device, backend)
        if weights is not None:
            load_weights(self.model, weights)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.master = [p.detach().clone() for p in self.params]
        decayed = decays(self.model)
        to_working_dtype(self.model, self.dtype)
        # `to_working_dtype` may have given a parameter other memory, never another object.
        for m in self.master:
            m.grad = torch.zeros_like(m)
        self.grads = [m.grad for m in self.master]
        self.lr = torch.tensor(t.lr, device=device)
        groups = [
            {
                "params": [m for m, d in zip(self.master, decayed, strict=True) if d is matrix],
                "weight_decay": t.weight_decay if matrix else 0.0,
            }
            for matrix in (True, False)
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.lr, betas=t.betas, fused=True, capturable=device.type == "cuda"
        )
        factors = [
            lr_factor(s, steps=t.steps, warmup=t.warmup, kind=t.schedule, floor=t.floor)
            for s in range(t.steps)
        ]
        self.rates = (torch.tensor(factors) * t.lr).to(device)
        self.starts = self._starts(config["seed"]).to(device)
        self.span = torch.arange(t.seq_len + 1, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.losses = torch.full((t.steps,), math.nan, device=device)
        self.norms = torch.full((t.steps,), math.nan, device=device)
        self.skipped = torch.zeros(1, device=device)

    def _starts(self, seed: int) -> Tensor:
        """First byte of every sequence of every step, ``[steps, batch]``."""
        t = self.options
        windows = (len(self.corpus.train) - 1) // t.seq_len
        if windows < 1:
            raise ValueError(
                f"study: the corpus has {len(self.corpus.train)} bytes, fewer than one sequence of "
                f"{t.seq_len}; give more text or a smaller train.seq_len."
            )
        order = order_positions(windows, seed, 0, t.steps * t.batch_size)
        return order.view(t.steps, t.batch_size) * t.seq_len

    def loss_of(self, text: Tensor, starts: Tensor) -> Tensor:
        window = text[starts[:, None] + self.span].long()
        logits = logits_of(self.model, window[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())

    def step(self) -> None:
        """One training step; everything that varies is read from the device."""
        loss = self.loss_of(self.corpus.train, self.starts.index_select(0, self.at)[0])
        grads = torch.autograd.grad(loss, self.params)
        loss = loss.detach()
        with torch.no_grad():
            torch._foreach_copy_(self.grads, list(grads))
            norm = torch.nn.utils.get_total_norm(self.grads)
            bad = ~(norm.isfinite() & loss.isfinite())
            scale = (self.options.clip / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(self.grads, scale)
            self.lr.copy_(self.rates.index_select(0, self.at)[0])
            # The fused kernel leaves weights and state as they are where this is 1.
            self.optimizer.found_inf = bad.float()
            self.optimizer.step()
            torch._foreach_copy_(self.params, self.master)
            self.losses.index_copy_(0, self.at, loss.view(1))
            self.norms.index_copy_(0, self.at, norm.view(1))
            self.skipped.add_(bad)
            self.at.add_(1)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss of evenly spaced held-out sequences, NaN if the text is too short for one."""
        t, text = self.options, self.corpus.held_out
        windows = (len(text) - 1) // t.seq_len
        n = min(windows, t.held_out_sequences)
        if n < 1:
            return math.nan
        starts = torch.arange(n, device=self.device) * (windows // n) * t.seq_len
        total = sum(
            self.loss_of(text, part).double() * len(part) for part in starts.split(t.batch_size)
        )
        return float(total) / n


def _working_dtype(precision: str, device: torch.device) -> torch.dtype:
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, precision)


def train(
    run: Run,
    corpus: Corpus,
    device: torch.device,
    *,
    backend: str | None = None,
    cuda_graph: bool = False,
    save: Path | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> dict:
    """Train one run; returns its row of the results file, JSON types only.

    ``save``: a folder for the final weights, as ``from_pretrained`` takes them.

    Raises:
        GraphError: the step could not be recorded; start again in a new process without a graph.
        ScoringError: the weights could not be scored; they are in ``save``.
    """
    # torch's remark that a capturable optimiser also runs outside of a graph.
    warnings.filterwarnings("ignore", message=".*capturable=True.*")
    with _own_stream(device):
        row, trainer = _stages(run.config, corpus, device, backend, cuda_graph, progress)
        # Before scoring, which may fail after hours of training.
        if save is not None:
            save_whole(trainer.model, save, run.config)
        if "evaluate" in run.config:
            last = row.get("then") or row
            last["scores"] = _scores(run, corpus, trainer, save)
    return {**identity(run), **row, "corpus": corpus.facts}


def _scores(run: Run, corpus: Corpus, trainer: Trainer, save: Path | None) -> dict:
    options = Evaluate(**run.config["evaluate"])
    try:
        return evaluate(trainer.model, options, corpus, trainer.options.seq_len)
    except Exception as error:  # lm-eval and its tasks raise many kinds
        where = "are lost (--save keeps them)"
        if save is not None:
            where = f"are in {save.parent.name}/{save.name}"
        raise ScoringError(
            f"trained, but scoring failed; the final weights {where}. {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """What is recorded as a graph and what is not must share a stream, which is not the default."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def _stages(
    config: dict,
    corpus: Corpus,
    device: torch.device,
    backend: str | None,
    cuda_graph: bool,
    progress: Callable[[Progress], None],
) -> tuple[dict, Trainer]:
    """The row, and the last stage's trainer."""
    trainer = Trainer(config, corpus, device, backend)
    graph = cuda_graph and device.type == "cuda" and is_direct(trainer.model)
    row = _loop(trainer, graph, "", progress)
    then = config.get("then")
    if then is None:
        return row, trainer
    if row["status"] != "done":
        return {**row, "then": None}, trainer
    # Only the weights: two models and two optimisers need not fit.
    weights = trainer.master
    del trainer
    trainer = Trainer({**config, **then}, corpus, device, backend, weights)
    before = number(trainer.held_out_loss())
    second = _loop(trainer, graph, f"{trainer.options.seq_len} tokens, ", progress)
    return {**row, "then": {**second, "held_out_before": before}}, trainer


def identity(run: Run) -> dict:
    """What every row of ``runs.jsonl`` says of its run."""
    return {
        "key": run.key,
        "name": run.name,
        "setting": run.setting,
        "arm": run.arm,
        "seed": run.seed,
        "config": run.config,
    }


def _loop(trainer: Trainer, graph: bool, stage: str, progress: Callable[[Progress], None]) -> dict:
    t = trainer.options
    measured = _residual_steps(t, trainer)
    replay, residuals, calls = None, {}, {}
    began = started = looked = time.perf_counter()
    start_step, stopped = 0, None
    for step in range(t.steps):
        if step == min(WARM_STEPS, t.steps - 1):
            if graph:
                replay = _record(trainer)
            _wait(trainer.device)
            started, start_step = time.perf_counter(), step
        if step in measured:
            with record_row_sum() as residual:
                trainer.step()
            residuals[step] = residual.value
        elif step == 1:
            with count_calls() as calls:
                trainer.step()
        elif replay is not None:
            replay()
        else:
            trainer.step()
        look = (step + 1) % LOOK_EVERY == 0 or step + 1 == t.steps
        if look or time.perf_counter() - looked > SAY_EVERY:
            loss, looked = trainer.losses[step].item(), time.perf_counter()
            # What comes before `started` is compiling.
            timed = step + 1 - start_step
            left = None if start_step == 0 else (t.steps - step - 1) * (looked - started) / timed
            progress(Progress(stage, step + 1, t.steps, loss, left))
        # At set steps alone: where a run ends must not depend on how fast it was.
        if look and trainer.skipped.item() > t.max_skipped:
            stopped = step + 1
            break
    _wait(trainer.device)
    timed, timed_steps = time.perf_counter() - started, step + 1 - start_step
    losses, norms = trainer.losses.tolist(), trainer.norms.tolist()
    return {
        **summary(losses, norms, t, int(trainer.skipped.item()), stopped),
        "held_out_loss": number(trainer.held_out_loss()),
        "residual": {"steps": list(residuals), "values": [number(v) for v in residuals.values()]},
        "loss": [number(x) for x in losses],
        "grad_norm": [number(x, 4) for x in norms],
        "seconds": round(time.perf_counter() - began, 3),
        "tokens_per_second": round(t.batch_size * t.seq_len * timed_steps / max(timed, 1e-9)),
        "calls_per_step": dict(calls),
        "precision": str(trainer.dtype).removeprefix("torch."),
        "cuda_graph": replay is not None,
        "parameters": sum(m.numel() for m in trainer.master),
    }


def _residual_steps(t: Train, trainer: Trainer) -> set[int]:
    if t.residual_every == 0 or trainer.model.config._attn_implementation == "sdpa":
        return set()
    return {s for s in range(t.steps) if s and s % t.residual_every == 0} | {t.steps - 1}


def _record(trainer: Trainer) -> Callable[[], None]:
    """The step as a CUDA graph. Recording does not execute it."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    try:
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            trainer.step()
    except Exception as error:
        raise GraphError(f"{type(error).__name__}: {error}") from error
    return graph.replay


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(
    losses: list[float], norms: list[float], t: Train, skipped: int, stopped: int | None
) -> dict:
    """What the report reads of a run: the loss of the last steps, and whether it diverged."""
    done = losses[:stopped]
    window = min(t.last, len(done))
    finite = [x if math.isfinite(x) else math.inf for x in done]
    means = [sum(finite[i : i + window]) / window for i in range(len(done) - window + 1)]
    best = min(means)
    last = sum(finite[-window:]) / window
    tail = [n for n in norms[:stopped][-window:] if math.isfinite(n)]
    rose = not last <= best + t.diverged_above
    status = "diverged" if stopped is not None or rose else "done"
    return {
        "status": status,
        "steps": len(done),
        "final_loss": number(last),
        "best_loss": number(best),
        "skipped_steps": skipped,
        "grad_norm_last": number(sum(tail) / len(tail), 4) if tail else None,
    }


def number(x: float, digits: int = 5) -> float | None:
    """For JSON, which has no NaN; ``digits`` significant beyond what is printed."""
    return float(f"{x:.{digits + 1}g}") if math.isfinite(x) else None
