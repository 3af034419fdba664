"""Checkpoints that are whole or not there, and that say which run they belong to.

    RUN/checkpoint-00000400/manifest.json    step, run, and bytes and SHA-256 of every other file

A checkpoint is written into a hidden folder beside its place, every file is flushed to the disk, and
one rename makes it visible. A process killed at any moment leaves the former checkpoints as they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

FORMAT = "hf_deltamatch.checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_FIELDS = {"step": int, "run": dict, "files": dict}
_PREFIX, _PARTIAL = "checkpoint-", ".partial-"

Writer = Callable[[Path], None]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the text names the file."""


def write_checkpoint(
    folder: Path,
    step: int,
    files: Mapping[str, Writer],
    *,
    run: dict,
    aside: dict | None = None,
    keep: int = 3,
) -> Path:
    """Write the checkpoint of ``step`` and remove all but the newest ``keep``.

    Args:
        folder: of the run.
        files: name to a function that writes the file at the path it is given.
        run: what the checkpoint belongs to (JSON types): compared by :func:`read_manifest`.
        aside: what else its numbers depend on, and the command that repeats it; not compared.
        keep: at least 1.

    Returns:
        The checkpoint's folder.
    """
    if keep < 1:
        raise ValueError(f"write_checkpoint: `keep` is {keep}; it must be at least 1.")
    final = folder / f"{_PREFIX}{step:08d}"
    partial = folder / f"{_PARTIAL}{final.name}-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    _remove_partials(folder)
    partial.mkdir()
    facts = {}
    for name, write in files.items():
        path = partial / name
        write(path)
        _flush(path)
        facts[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "step": step,
        "run": run,
        "aside": aside or {},
        "files": facts,
    }
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    _flush(partial / MANIFEST)
    _flush(partial)
    if final.exists():  # the same step again, after a resume from an older one
        _remove(final)
    partial.rename(final)
    _flush(folder)
    for old in checkpoints(folder)[:-keep]:
        _remove(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = [p for p in folder.glob(f"{_PREFIX}*") if p.is_dir()]
    return sorted(p for p in found if p.name.removeprefix(_PREFIX).isdigit())


def read_manifest(checkpoint: Path, run: dict | None = None, files: Collection[str] = ()) -> dict:
    """The manifest of a checkpoint after every file was checked against it.

    Args:
        run: what is about to go on; None checks the files alone.
        files: names that the manifest must have.

    Raises:
        CheckpointError: no manifest or one of another format, a file that is missing, truncated or
            changed, or another run's checkpoint; names the file and what differs.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: missing. {checkpoint} is not a checkpoint of this program, or not a whole one."
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error}). {_OTHER}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: its `format` is not {FORMAT!r}. {_OTHER}")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: `format_version` is {manifest.get('format_version')}; this version reads "
            f"{FORMAT_VERSION}. Use the version of hf-deltamatch that wrote it."
        )
    wrong = [k for k, kind in _FIELDS.items() if not isinstance(manifest.get(k), kind)]
    if wrong:
        raise CheckpointError(f"{path}: no, or no valid, `{wrong[0]}`: damaged. {_OTHER}")
    for name, fact in manifest["files"].items():
        if not isinstance(fact, dict) or not {"bytes", "sha256"} <= fact.keys():
            raise CheckpointError(f"{path}: no size and SHA-256 of {name}: damaged. {_OTHER}")
        _check_file(checkpoint / name, fact)
    missing = sorted(set(files) - manifest["files"].keys())
    if missing:
        raise CheckpointError(f"{path}: does not name {missing[0]}: damaged. {_OTHER}")
    if run is not None and manifest["run"] != _json(run):
        differ = _differences(manifest["run"], _json(run))
        raise CheckpointError(
            f"{path}: the checkpoint of another run: {differ}. Resume with the options that it was "
            "written with, or start anew in another output folder."
        )
    return manifest


_OTHER = "Name another checkpoint, or start anew in another output folder."


def _check_file(path: Path, fact: dict) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path}: missing, though the manifest names it. {_OTHER}")
    size = path.stat().st_size
    if size != fact["bytes"]:
        raise CheckpointError(
            f"{path}: {size} bytes where the manifest says {fact['bytes']}: truncated or changed. "
            f"{_OTHER}"
        )
    if _sha256(path) != fact["sha256"]:
        raise CheckpointError(f"{path}: its SHA-256 is not the manifest's: damaged. {_OTHER}")


def _differences(theirs: dict, ours: dict) -> str:
    parts = [
        f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here"
        for key in sorted({*theirs, *ours})
        if theirs.get(key) != ours.get(key)
    ]
    return "; ".join(parts)


def _json(value: dict) -> dict:
    """As it comes back from a file: tuples are lists there."""
    return json.loads(json.dumps(value))


def _remove(path: Path) -> None:
    """Out of sight first, so that a removal cut short leaves no half of a checkpoint."""
    hidden = path.with_name(f"{_PARTIAL}{path.name}-{os.getpid()}-old")
    path.rename(hidden)
    shutil.rmtree(hidden)


def _remove_partials(folder: Path) -> None:
    for left in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)


def _flush(path: Path) -> None:
    """To the disk: contents of a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
