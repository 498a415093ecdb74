"""The target's tokenizer on this machine's disk, by hash, so that a coordinator fetches it once."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from pathlib import Path

from specwire.errors import Reason, SpecwireError
from specwire.v1 import target_pb2, target_pb2_grpc

_HASH = re.compile(r"[0-9A-Za-z_-]{8,128}")
_FETCH_TIMEOUT_S = 60.0


def cache_directory() -> Path:
    """SPECWIRE_CACHE, else the XDG cache directory."""
    if named := os.environ.get("SPECWIRE_CACHE"):
        return Path(named)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "specwire"


class TokenizerCache:
    """Documents under `directory/tokenizers/HASH.json`; without a writable one, no cache."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = (directory or cache_directory()) / "tokenizers"

    async def document(
        self, stub: target_pb2_grpc.TargetServiceAsyncStub, wanted_hash: str
    ) -> bytes:
        path = self._path(wanted_hash)
        if path is not None and (kept := await asyncio.to_thread(_read, path)) is not None:
            return kept
        document = await _fetch(stub, wanted_hash)
        if path is not None:
            await asyncio.to_thread(_write, path, document)
        return document

    def _path(self, wanted_hash: str) -> Path | None:
        # The hash comes from another process: only a plain name may become a file name.
        return self._directory / f"{wanted_hash}.json" if _HASH.fullmatch(wanted_hash) else None


async def _fetch(stub: target_pb2_grpc.TargetServiceAsyncStub, wanted_hash: str) -> bytes:
    document = bytearray()
    served = ""
    request = target_pb2.GetTokenizerRequest()
    async for part in stub.GetTokenizer(request, timeout=_FETCH_TIMEOUT_S):
        served = part.hash or served
        document += part.chunk
    if not document:
        raise SpecwireError(Reason.UNSUPPORTED, "the target serves no tokenizer")
    if served != wanted_hash:
        message = f"tokenizer hash: the target announced {wanted_hash}, served {served}"
        raise SpecwireError(Reason.MODEL_MISMATCH, message)
    return bytes(document)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _write(path: Path, document: bytes) -> None:
    # Renamed into place: another process never reads half a file.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(document)
        os.replace(name, path)
    except OSError:
        return
