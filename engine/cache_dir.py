"""A directory for what can be derived again: converted weights, fingerprints, compiled kernels."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """`$SPECWIRE_CACHE`, else `$XDG_CACHE_HOME/specwire`, else `~/.cache/specwire`."""
    explicit = os.environ.get("SPECWIRE_CACHE")
    if explicit:
        return Path(explicit)
    # Not by Path.home(): it raises where the user has no home.
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "specwire"


@contextmanager
def cache_lock(name: str) -> Iterator[None]:
    """Only one process derives an entry at a time; the others wait and then find it there."""
    path = cache_root() / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def write_atomically(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
