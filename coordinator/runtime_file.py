"""Where running deployments leave their addresses for the other commands: a file each, which its
process holds a lock on for as long as it lives."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX, _SUFFIX = "up-", ".json"
_UNFINISHED_S = 60.0


def runtime_base() -> Path:
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(given if given and os.path.isdir(given) else tempfile.gettempdir())


def runtime_folder() -> Path:
    return runtime_base() / f"specwire-{os.getuid()}"


@contextmanager
def published(address: str) -> Iterator[Path]:
    """Tells the other commands of a deployment while the block runs. Raises OSError where it cannot
    be told."""
    folder = runtime_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_ours(folder):
        raise PermissionError(f"{folder} belongs to another user or is open to others")
    _remove_unfinished(folder)
    number, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    path = Path(name)
    with open(number, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(number, fcntl.LOCK_EX)
            entry = {"address": address, "pid": os.getpid(), "since_ns": time.time_ns()}
            file.write(json.dumps(entry))
            file.flush()
            # Under a name that is read only now: a reader never sees half of it, or no lock.
            path = path.rename(path.with_suffix(_SUFFIX))
            yield path
        finally:
            path.unlink(missing_ok=True)


def _remove_unfinished(folder: Path) -> None:
    """What processes left that were killed before their files had a name that is read."""
    for path in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another one removes it too
            if path.suffix != _SUFFIX and path.stat().st_mtime < time.time() - _UNFINISHED_S:
                path.unlink()


def running_address() -> str | None:
    """The address of this user's newest deployment that is still alive."""
    folder = runtime_folder()
    # In a shared temporary folder anybody could lead our prompts to a server of theirs.
    if not is_ours(folder):
        return None
    found = [entry for path in folder.glob(f"{_PREFIX}*{_SUFFIX}") if (entry := _alive(path))]
    return max(found)[1] if found else None


def _alive(path: Path) -> tuple[int, str] | None:
    """Since when, and the address. The file of a process that was killed is removed."""
    if not is_ours(path):
        return None
    try:
        with path.open(encoding="utf-8") as file:
            if not is_locked(file.fileno()):
                path.unlink(missing_ok=True)
                return None
            entry = json.load(file)
            return int(entry["since_ns"]), str(entry["address"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_locked(number: int) -> bool:
    """Whether another process holds the lock of an open file."""
    try:
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def is_ours(path: Path) -> bool:
    """Whether only this user can write it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    if stat.S_ISLNK(found.st_mode):
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return found.st_uid == os.getuid() and not found.st_mode & others
