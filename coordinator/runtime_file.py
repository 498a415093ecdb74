"""Where a running default deployment leaves its address for the other commands."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path


def runtime_base() -> Path:
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(given if given and os.path.isdir(given) else tempfile.gettempdir())


def runtime_path() -> Path:
    return runtime_base() / f"specwire-{os.getuid()}" / "default.json"


def publish(address: str) -> Path:
    """Replaces the file in one step, so that a reader never sees half of it."""
    path = runtime_path()
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not _is_ours(path.parent):
        raise PermissionError(f"{path.parent} belongs to another user or is open to others")
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"address": address, "pid": os.getpid()}), encoding="utf-8")
    draft.replace(path)
    return path


def withdraw() -> None:
    """Removes the file if it is this process's own."""
    entry = _read()
    if entry is not None and entry[1] == os.getpid():
        runtime_path().unlink(missing_ok=True)


def running_address() -> str | None:
    """The address of a default deployment of this user that is still alive."""
    entry = _read()
    if entry is None:
        return None
    try:
        os.kill(entry[1], 0)
    except OSError:
        return None
    return entry[0]


def _read() -> tuple[str, int] | None:
    path = runtime_path()
    # In a shared temporary folder anybody could lead our prompts to a server of theirs.
    if not (_is_ours(path.parent) and _is_ours(path)):
        return None
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        return str(entry["address"]), int(entry["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_ours(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    if stat.S_ISLNK(found.st_mode):
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return found.st_uid == os.getuid() and not found.st_mode & others
