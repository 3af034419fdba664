"""Many runs at once, in processes over all devices; every result is on disk as soon as it exists.

Processes, not threads: launching kernels takes the interpreter's lock, and a run that breaks its
device context takes only itself down.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from hf_deltamatch.environment import environment
from hf_deltamatch.study.corpus import load_corpus
from hf_deltamatch.study.run import GraphError, identity, train
from hf_deltamatch.study.spec import Run
from hf_deltamatch.training.lock import Claims
from hf_deltamatch.training.study_rows import append_row


def devices_of(names: list[str] | None) -> list[str]:
    """The named devices, or all CUDA devices, or the CPU."""
    if names:
        try:
            return [str(torch.device(n)) for n in names]
        except RuntimeError as error:
            raise ValueError(
                f"--devices is {' '.join(names)}; names are cpu, cuda, cuda:0 … ({error})."
            ) from error
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]


@dataclass
class _Worker:
    process: Any
    link: Connection
    device: str
    run: Run | None = None


def run_all(
    runs: list[Run],
    corpus: dict,
    folder: Path,
    *,
    devices: list[str],
    workers: int,
    cuda_graph: bool,
    backend: str | None = None,
    time_limit: float | None = None,
    save: bool = False,
    is_done: Callable[[Run], bool] = lambda run: False,
    say: Callable[[str], None] = print,
    show: Callable[[str], None] = lambda text: None,
) -> list[dict]:
    """Train ``runs``, ``workers`` at a time on each device; returns the rows that came.

    ``save``: final weights go to ``folder/models/KEY``.
    ``is_done``: asked before a run begins, as another process may work in ``folder``; what that is at is left to
    it.
    ``say`` gets a line for each result, ``show`` those on the way.
    ``time_limit`` (seconds): runs that are not done by then are ended and leave nothing.
    ``cuda_graph``: if a step cannot be recorded, that run and all later ones of its setting go
    without.
    """
    todo, rows, active = deque(runs), [], []
    without_graph: set[str] = set()
    context = multiprocessing.get_context("spawn")
    deadline = None if time_limit is None else time.monotonic() + time_limit
    slots = [d for _ in range(workers) for d in devices][: len(todo)]
    claims = Claims(folder)

    def keep(row: dict) -> None:
        append_row(folder, row)
        rows.append(row)
        claims.give(row["key"])

    def next_run() -> Run | None:
        while todo:
            run = todo.popleft()
            if not claims.take(run.key):
                say(f"{run.name}: another process is at it, and it is left to that")
            elif is_done(run):
                claims.give(run.key)
                say(f"{run.name}: done by another process meanwhile")
            else:
                return run
        return None

    def start(device: str) -> None:
        here, there = context.Pipe()
        models = folder / "models" if save else None
        options = (corpus, device, backend, max(1, (os.cpu_count() or 1) // len(slots)), models)
        process = context.Process(target=_work, args=(there, *options), daemon=True)
        process.start()
        there.close()
        active.append(_Worker(process, here, device))

    def end(worker: _Worker) -> None:
        active.remove(worker)
        worker.link.close()
        worker.process.terminate()
        worker.process.join()

    try:
        for device in slots:
            start(device)
        while active:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                unfinished = len(todo) + sum(w.run is not None for w in active)
                say(f"time limit: {unfinished} runs were not done; the same command does them")
                break
            ready = wait([w.link for w in active], timeout=left)
            for worker in [w for w in active if w.link in ready]:
                kind, value = _receive(worker)
                if kind == "progress":
                    show(f"  {worker.run.name}: {value}")
                    continue
                run, worker.run = worker.run, None
                if kind == "done":
                    keep(value)
                    say(f"{_line(value)}; {len(todo) + len(active) - 1} left")
                elif kind == "graph":
                    say(f"{run.name}: no CUDA graph, going on without ({value})")
                    without_graph.add(run.setting)
                    todo.appendleft(run)
                elif kind != "ready":
                    say(f"{'a worker' if run is None else run.name} failed: {value}")
                    if run is not None:
                        keep(_failed_row(run, value))
                whole = (
                    ("ready", "done") if "cuda" in worker.device else ("ready", "done", "failed")
                )
                if kind in whole:
                    worker.run = next_run()
                if worker.run is not None:
                    graph = cuda_graph and worker.run.setting not in without_graph
                    worker.link.send((worker.run, graph))
                    continue
                # Nothing to do, or a process whose device context may be broken.
                end(worker)
                if todo and run is not None:
                    start(worker.device)
    finally:
        for worker in list(active):
            end(worker)
        claims.close()
    return rows


def _receive(worker: _Worker) -> tuple[str, Any]:
    try:
        return worker.link.recv()
    except (EOFError, OSError):
        worker.process.join(10.0)
        return "lost", f"its process ended without a word ({_ending(worker.process.exitcode)})"


def _ending(code: int | None) -> str:
    if code is None:
        return "it hangs"
    if code >= 0:
        return f"exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{name}: out of memory, or killed" if name == "SIGKILL" else name


def _line(row: dict) -> str:
    loss = "not finite" if row["final_loss"] is None else f"{row['final_loss']:.4f}"
    if row.get("then"):
        then = row["then"]["final_loss"]
        loss += f", then {'not finite' if then is None else f'{then:.4f}'}"
    return (
        f"{row['name']}: {row['status']}, loss {loss}, {row['seconds']:.0f} s, "
        f"{row['tokens_per_second']:,} tokens/s{', CUDA graph' if row['cuda_graph'] else ''}"
    )


def _failed_row(run: Run, error: str) -> dict:
    return {**identity(run), "status": "failed", "error": error}


def _work(
    link: Connection,
    corpus: dict,
    device: str,
    backend: str | None,
    threads: int,
    models: Path | None,
) -> None:
    """The worker's process: says it is ready, then trains what it is sent."""
    faulthandler.enable()  # a crash in native code leaves its Python stack on stderr
    torch.set_num_threads(threads)
    target = torch.device(device)
    if target.type == "cuda":
        torch.cuda.set_device(target)
    text = load_corpus(**corpus).to(target)
    facts = environment()
    link.send(("ready", None))
    while True:
        try:
            run, cuda_graph = link.recv()
        except (EOFError, OSError):
            return
        try:
            row = train(
                run,
                text,
                target,
                backend=backend,
                cuda_graph=cuda_graph,
                save=models and models / run.key,
                progress=lambda progress: link.send(("progress", str(progress))),
            )
            link.send(("done", {**row, "device": device, "environment": facts}))
        except GraphError as error:
            link.send(("graph", str(error)))
        except Exception as error:
            traceback.print_exc()
            link.send(("failed", f"{type(error).__name__}: {error}"))
