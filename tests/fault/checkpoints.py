"""A tiny valid checkpoint, and copies of it that are broken in one way each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from tests.engine.tiny import VOCAB, write_llama

WEIGHTS = "model.safetensors"
Break = Callable[[Path], None]


def write_tiny(folder: Path) -> Path:
    """A random Llama with 96 tokens and a tokenizer of 96 words."""
    write_llama(folder)
    words(folder, VOCAB)
    return folder


def words(folder: Path, count: int) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    tokenizer.save(str(folder / "tokenizer.json"))


def copy(source: Path, folder: Path, breaks: Break) -> Path:
    shutil.copytree(source, folder)
    breaks(folder)
    return folder


def without(name: str) -> Break:
    return lambda folder: (folder / name).unlink()


def text(name: str, content: str) -> Break:
    def write(folder: Path) -> None:
        (folder / name).write_text(content)

    return write


def config(**changes: Any) -> Break:
    def write(folder: Path) -> None:
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | changes))

    return write


def cut(folder: Path) -> None:
    """The file ends in the middle of the weights, as after a broken download."""
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def garbage(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"<!DOCTYPE html><html>404</html>" * 100)


def empty(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")


def tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Break:
    def write(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS)

    return write


def missing_tensor(found: dict[str, torch.Tensor]) -> None:
    del found["model.layers.2.mlp.up_proj.weight"]


def extra_tensor(found: dict[str, torch.Tensor]) -> None:
    found["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)


def wrong_shape(found: dict[str, torch.Tensor]) -> None:
    found["model.norm.weight"] = torch.zeros(7)


def missing_shard(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
