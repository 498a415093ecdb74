"""The folder of a deployment's sockets and logs, private to its user, gone with the deployment."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from pathlib import Path

from coordinator.runtime_file import is_locked, is_ours, runtime_base

_PREFIX, _LOCK = "specwire-", "owner.lock"


class OwnFolder:
    """Held by a lock for as long as this process lives: one that was killed outright cannot remove
    its own, and the next one does."""

    def __init__(self) -> None:
        _remove_left()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=runtime_base()))  # mode 0700
        unnamed = self.path / "lock"
        self._lock = unnamed.open("w")
        fcntl.flock(self._lock.fileno(), fcntl.LOCK_EX)
        # Under the name that others look for only now, so that none of them meets it free.
        unnamed.rename(self.path / _LOCK)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_left() -> None:
    for lock in runtime_base().glob(f"{_PREFIX}*/{_LOCK}"):
        if not is_ours(lock.parent):
            continue
        try:
            with lock.open() as file:
                left = not is_locked(file.fileno())
        except OSError:  # its owner removes it at this moment
            continue
        if left:
            shutil.rmtree(lock.parent, ignore_errors=True)
