"""One process at a time writes a run's folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_deltamatch.training.checkpoints import CheckpointError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Within it, no other process is in ``folder``, which is made if it is not there. The system gives
    the folder free however this process ends.

    Raises:
        CheckpointError: another one is, or the folder cannot be made or written to; said before
            anything is trained.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CheckpointError(
            f"{folder}: no folder that can be written to ({error}). Choose another output folder."
        ) from error
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{folder}: another process is training into this folder, and two would mix their "
                "checkpoints and metrics. Wait for it, end it, or choose another output folder."
            ) from error
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)


class Claims:
    """What of a folder this process is at, so that others which work in it leave that to it. The system gives
    everything free however this process ends."""

    def __init__(self, folder: Path) -> None:
        self._file = None if fcntl is None else (folder / ".claims").open("a+b")

    def take(self, key: str) -> bool:
        """False if another process has ``key``, a hexadecimal number."""
        try:
            self._lock(key, taken=True)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def give(self, key: str) -> None:
        self._lock(key, taken=False)

    def _lock(self, key: str, *, taken: bool) -> None:
        """One byte of the file, which need not be there."""
        if self._file is None:
            return
        try:
            how = fcntl.LOCK_EX | fcntl.LOCK_NB if taken else fcntl.LOCK_UN
            fcntl.lockf(self._file, how, 1, int(key, 16) % 2**62)
        except (BlockingIOError, PermissionError):
            raise
        except OSError:  # a file system without locks
            pass

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
