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

_SUFFIX = ".safetensors"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MASK_VECTOR = "mask_embedding.pt"  # of a block draft

# Stored types that a plain conversion reads rightly; anything else is quantised or no weight.
_STORED = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_INTEGERS = {"I64": "int64", "I32": "int32", "BOOL": "bool"}


def cause(error: Exception) -> str:
    """What went wrong, without the path that messages of the system end with."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)


def _unreadable(name: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"checkpoint file {name} cannot be read: {cause(error)}")


def read_text(path: Path) -> str:
    """A file of the checkpoint. Raises CheckpointError."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint has no {path.name}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path.name, error) from None


def read_json(path: Path) -> Any:
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint file {path.name} is not valid JSON: {error}") from None


def weight_map(directory: Path) -> dict[str, str]:
    """Tensor name -> shard, as the index says; empty for a checkpoint of one file."""
    if (directory / SINGLE).is_file():
        return {}
    if not (directory / INDEX).is_file():
        raise CheckpointError(
            f"checkpoint has neither {SINGLE} nor {INDEX}; accepted: safetensors weights"
        )
    index = read_json(directory / INDEX)
    entries = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise CheckpointError(f"{INDEX} has no weight_map; accepted: tensor names and their files")
    for tensor, name in entries.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(_SUFFIX):
            raise CheckpointError(
                f"{INDEX} puts {tensor} into {name!r}; accepted: a *{_SUFFIX} file beside it"
            )
    return entries


def shard_names(directory: Path) -> list[str]:
    """The safetensors files of a checkpoint: those of the index, or the single file."""
    names = sorted(set(weight_map(directory).values())) or [SINGLE]
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(f"checkpoint index names files that are missing: {missing}")
    return names


def _names(handle: Any) -> list[str]:
    return list(handle.keys())


class Weights:
    """Tensors of a checkpoint, read by name and shape. `finish` refuses what nobody asked for."""

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.dtype, self.device = dtype, torch.device(device)
        self._files: dict[str, Any] = {}
        self._taken: set[str] = set()
        home: dict[str, str] = {}
        for name in shard_names(directory):
            try:
                handle = safe_open(directory / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise _unreadable(name, error) from None
            for tensor in _names(handle):
                if tensor in home:
                    raise CheckpointError(f"tensor {tensor} is in {home[tensor]} and in {name}")
                home[tensor], self._files[tensor] = name, handle
        for tensor, name in weight_map(directory).items():
            if home.get(tensor) != name:
                raise CheckpointError(
                    f"tensor {tensor} is missing from {name}, where {INDEX} puts it"
                )

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor in this reader's dtype, or in `dtype`. Raises CheckpointError."""
        return self._read(name, shape, _STORED).to(self.device, dtype or self.dtype)

    def take_integers(self, name: str, *shape: int) -> Tensor:
        """Ids or flags, as int64 on the CPU."""
        return self._read(name, shape, _INTEGERS).to(torch.int64)

    def _read(self, name: str, shape: tuple[int, ...], known: dict[str, str]) -> Tensor:
        if name not in self._files:
            raise CheckpointError(f"tensor {name} is missing, expected shape {list(shape)}")
        stored = self._files[name].get_slice(name)
        if stored.get_shape() != list(shape):
            raise CheckpointError(
                f"tensor {name} has shape {stored.get_shape()}, expected {list(shape)}"
            )
        if stored.get_dtype() not in known:
            accepted = ", ".join(known.values())
            raise CheckpointError(
                f"tensor {name} has dtype {stored.get_dtype()}; accepted: {accepted}"
            )
        self._taken.add(name)
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def finish(self, ignored: tuple[str, ...] = (), beginnings: tuple[str, ...] = ()) -> None:
        """Raises for tensors that the model did not take (`ignored`: endings known to be redundant;
        `beginnings`: of parts that the model has no use for).
        """
        extra = sorted(
            name
            for name in set(self._files) - self._taken
            if not name.endswith(ignored) and not name.startswith(beginnings)
        )
        if extra:
            raise CheckpointError(f"{len(extra)} tensors are not part of the model: {extra[:8]}")


def fingerprint(directory: Path) -> str:
    """Hash over config and weights; remembered by size and time of the files."""
    extra = [MASK_VECTOR] if (directory / MASK_VECTOR).is_file() else []
    names = ["config.json", *shard_names(directory), *extra]
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
