"""Kernels in several processes that take turns on one GPU; a script, as what is wrong there may hang.

    python tests/share_gpu.py                        # every kind, three processes, short and long queues
    python tests/share_gpu.py plain-128 hopper-128 --queue 100 --seconds 5
    python tests/share_gpu.py dq-128+dkdv-128        # kinds joined by +: each process another of them

Every process repeats one computation and compares it bitwise with its first result, and waits for the
device after each queue of rounds: a queue longer than a time slice (about 2 ms) is interrupted within a
kernel. One line for each kind and queue; exits with 1 if anything differed, failed or hung, and ends
where the device no longer answers. ``--blocking`` waits for every launch, so that the place of a fault
is that of its kernel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import share_gpu_kinds
import torch

COMPILE_S = 90.0
GRACE_S = 12.0
HANGS_S = 6.0
"""Without a queue's end: it hangs."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(share_gpu_kinds.KINDS))
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each row")
    parser.add_argument(
        "--queue", type=int, nargs="+", default=[5, 100], help="rounds between waits"
    )
    parser.add_argument("--blocking", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="rows, as they come")
    parser.add_argument(
        "--worker", nargs=3, metavar=("QUEUE", "SECONDS", "START"), help=argparse.SUPPRESS
    )
    args = parser.parse_args(argv)
    unknown = [k for row in args.kinds for k in row.split("+") if k not in share_gpu_kinds.KINDS]
    if unknown:
        parser.error(f"no kind {', '.join(unknown)}; there are {', '.join(share_gpu_kinds.KINDS)}")
    if args.worker:
        queue, seconds, start = args.worker
        return _worker(args.kinds[0], int(queue), float(seconds), float(start))
    rows = []
    for kind in args.kinds or share_gpu_kinds.KINDS:
        compiled = [
            _processes(one, 1, 0.0, 1, args.blocking, COMPILE_S)[0] for one in kind.split("+")
        ]
        if any("fault" in one for one in compiled):
            rows.append({"kind": kind, "alone": compiled})
            print(f"{kind:<18} alone: {compiled}", flush=True)
            continue
        for queue in args.queue:
            found = _processes(kind, queue, args.seconds, args.processes, args.blocking, None)
            rows.append({"kind": kind, "queue": queue, "processes": found})
            print(f"{kind:<18} queue {queue:<5}" + "; ".join(_words(r) for r in found), flush=True)
            if args.json:
                with open(args.json, "w") as file:
                    json.dump(
                        {"device": torch.cuda.get_device_name(), "rows": rows}, file, indent=1
                    )
            if any("fault" in r for r in found) and not _answers():
                print("the device no longer answers")
                return 1
    fine = lambda row: all(
        "fault" not in r and not r["differ"] for r in row.get("processes", [{"fault": 1}])
    )
    return 0 if all(fine(row) for row in rows) else 1


def _processes(
    kind: str, queue: int, seconds: float, count: int, blocking: bool, limit: float | None
) -> list[dict]:
    """What each process says, kinds in turns; one that says nothing in time is killed."""
    start = time.time() + (GRACE_S if limit is None else 0.0)
    limit = limit or 2 * GRACE_S + seconds
    options = ["--worker", str(queue), str(seconds), str(start)]
    kinds = list(itertools.islice(itertools.cycle(kind.split("+")), count))
    env = os.environ | ({"CUDA_LAUNCH_BLOCKING": "1"} if blocking else {})
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, f"{i}.out") for i in range(count)]
        errors = [Path(folder, f"{i}.err") for i in range(count)]
        children = []
        for one, out, err in zip(kinds, said, errors, strict=True):
            with out.open("w") as stdout, err.open("w") as stderr:
                command = [sys.executable, __file__, one, *options]
                own = env | share_gpu_kinds.KINDS[one].env
                children.append(subprocess.Popen(command, stdout=stdout, stderr=stderr, env=own))
        deadline = time.time() + limit
        while time.time() < deadline:
            over = [
                c.poll() is not None or o.read_text() for c, o in zip(children, said, strict=True)
            ]
            if all(over):
                break
            time.sleep(0.2)
        found = []
        for child, out, err in zip(children, said, errors, strict=True):
            status = child.poll()
            child.kill()  # one that hangs may take its time to go; nobody waits for it
            lines = out.read_text().strip().splitlines()
            if not lines:
                fault = "hangs" if status is None else _last(err.read_text(), status)
                lines = [json.dumps({"fault": fault})]
            found.append(json.loads(lines[-1]))
    return found


def _last(err: str, status: int) -> str:
    lines = err.strip().splitlines()
    return lines[-1][:200] if lines else f"exit status {status}"


def _words(found: dict) -> str:
    if "fault" in found:
        where = f", {found['at']}" if "at" in found else ""
        return f"  {found['fault']} (round {found.get('rounds', '?')}{where})"
    differ = f", differ: {found['differ']}" if found["differ"] else ""
    return f"  {found['rounds']} rounds of {found['ms']:.2f} ms equal{differ}"


def _answers() -> bool:
    """Is the device still there for a new process?"""
    code = "import torch; assert torch.ones(9, device='cuda').sum().item() == 9"
    try:
        return subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _worker(kind: str, queue: int, seconds: float, start: float) -> int:
    compute = share_gpu_kinds.KINDS[kind].make()
    rounds, where = 0, "first"
    alive, main_thread = [time.time()], threading.get_ident()

    def watch() -> None:
        while where != "later" or time.time() < alive[0] + HANGS_S:
            time.sleep(0.5)
        stack = traceback.extract_stack(sys._current_frames()[main_thread])
        at = [
            f"{Path(f.filename).name}:{f.lineno} {f.name}"
            for f in stack
            if "site-packages" not in f.filename
        ]
        print(json.dumps({"fault": "hangs", "rounds": rounds, "at": at[-1]}), flush=True)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    try:
        first = {name: t.clone() for name, t in _bits(compute()).items()}
        counts = {
            name: torch.zeros((), dtype=torch.int64, device=t.device) for name, t in first.items()
        }
        torch.cuda.synchronize()
        while time.time() < start:
            time.sleep(0.01)
        began = alive[0] = time.time()
        where = "later"
        while rounds == 0 or time.time() < began + seconds:
            for _ in range(queue):
                for name, t in _bits(compute()).items():
                    counts[name] += (t != first[name]).any()
                rounds += 1
            torch.cuda.synchronize()
            alive[0] = time.time()
        differ = {name: n.item() for name, n in counts.items() if n.item()}
        found = {"rounds": rounds, "ms": 1e3 * (time.time() - began) / rounds, "differ": differ}
    except (
        Exception
    ) as error:  # a fault of the device reaches torch as a RuntimeError, whichever it is
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        frames = traceback.extract_tb(error.__traceback__)
        at = [
            f"{Path(f.filename).name}:{f.lineno} {f.name}"
            for f in frames
            if "site-packages" not in f.filename
        ]
        found = {"fault": line[:200], "rounds": rounds, "in": where, "at": at[-1]}
    print(json.dumps(found), flush=True)
    os._exit(0)  # a broken context raises again at exit


def _bits(out: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    tensors = {n: t.detach().contiguous() for n, t in out.items() if t is not None and t.numel()}
    return {n: t.view(kinds[t.element_size()]) for n, t in tensors.items()}


if __name__ == "__main__":
    sys.exit(main())
