"""Strict reading of safetensors checkpoints, and the fingerprint that both services compare."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.cache_dir import cache_root, write_atomically
from engine.errors import CheckpointError


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint has no {path.name}") from None
    except ValueError as error:
        raise CheckpointError(f"checkpoint file {path.name} is not valid JSON: {error}") from None


def shard_names(directory: Path) -> list[str]:
    """The safetensors files of a checkpoint: those of the index, or the single file."""
    if (directory / "model.safetensors").is_file():
        return ["model.safetensors"]
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        raise CheckpointError("checkpoint has neither model.safetensors nor its index")
    names = sorted(set(read_json(index).get("weight_map", {}).values()))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing or not names:
        raise CheckpointError(f"checkpoint index names files that are missing: {missing}")
    return names


def _names(handle: Any) -> list[str]:
    return list(handle.keys())


class Weights:
    """Tensors of a checkpoint, read by name and shape. `finish` refuses what nobody asked for."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._files: dict[str, Any] = {}
        self._taken: set[str] = set()
        for name in shard_names(directory):
            try:
                handle = safe_open(directory / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"checkpoint file {name} cannot be read: {error}") from None
            self._files.update(dict.fromkeys(_names(handle), handle))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self._files:
            raise CheckpointError(f"tensor {name} is missing, expected shape {list(shape)}")
        stored = self._files[name].get_slice(name)
        if stored.get_shape() != list(shape):
            raise CheckpointError(
                f"tensor {name} has shape {stored.get_shape()}, expected {list(shape)}"
            )
        self._taken.add(name)
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.to(self.dtype)

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Raises for tensors that the model did not take (`ignored`: endings known to be
        redundant).
        """
        extra = sorted(
            name for name in set(self._files) - self._taken if not name.endswith(ignored or "\0")
        )
        if extra:
            raise CheckpointError(f"{len(extra)} tensors are not part of the model: {extra[:8]}")


def fingerprint(directory: Path) -> str:
    """Hash over config and weights; remembered by size and time of the files."""
    names = ["config.json", *shard_names(directory)]
    stamps = [[name, (s := (directory / name).stat()).st_size, s.st_mtime_ns] for name in names]
    key = hashlib.sha256(json.dumps([str(directory.resolve()), stamps]).encode()).hexdigest()
    remembered = cache_root() / "fingerprints" / key
    if remembered.is_file():
        return remembered.read_text()
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode())
        with (directory / name).open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    value = digest.hexdigest()[:32]
    write_atomically(remembered, value.encode())
    return value
