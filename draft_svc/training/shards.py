"""Documents on disk: append-only shards of token ids, a manifest, and a hold-out by prompt hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from engine.cache_dir import write_atomically
from engine.errors import CheckpointError

MANIFEST = "manifest.json"
Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Document:
    """A prompt and the target's answer, eos included when it came; `kind` names where the prompt
    came from."""

    prompt: Sequence[int]
    answer: Sequence[int]
    temperature: float
    kind: int = 0


def prompt_hash(prompt: Sequence[int] | Ids) -> int:
    data = np.asarray(prompt, dtype=np.int32).tobytes()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


def held_out(prompt: Sequence[int] | Ids, share: float) -> bool:
    """Whether a prompt is kept away from training: a property of the prompt alone."""
    return prompt_hash(prompt) / 2.0**64 < share


def distinct_ratio(ids: Sequence[int] | Ids, n: int = 4) -> float:
    """Distinct n-grams over all n-grams; 1.0 for texts shorter than two n-grams."""
    grams = list(zip(*(ids[i:] for i in range(n)), strict=False))
    return len(set(grams)) / len(grams) if len(grams) > 1 else 1.0


@dataclass
class Manifest:
    """What made the data. `settings` must agree when a run is resumed."""

    target_sha256: str
    tokenizer_hash: str
    holdout: float
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    shards: list[dict[str, Any]] = field(default_factory=list)
    # Totals over all shards, and why answers were dropped.
    counts: dict[str, int] = field(default_factory=dict)


def read_manifest(directory: Path) -> Manifest | None:
    path = directory / MANIFEST
    return Manifest(**json.loads(path.read_text())) if path.is_file() else None


class ShardWriter:
    """Collects documents and writes a pair of shards (train, hold-out) with every `flush`."""

    def __init__(self, directory: Path, manifest: Manifest, vocab_size: int) -> None:
        self.directory, self.manifest = directory, manifest
        self._dtype = np.uint16 if vocab_size <= 1 << 16 else np.int32
        self._train: list[Document] = []
        self._held: list[Document] = []
        directory.mkdir(parents=True, exist_ok=True)
        found = read_manifest(directory)
        if found is not None:
            for name in ("target_sha256", "tokenizer_hash", "holdout"):
                old, new = getattr(found, name), getattr(manifest, name)
                if old != new:
                    raise CheckpointError(f"data were made with {name} = {old!r}, not {new!r}")
            manifest.shards, manifest.counts = found.shards, found.counts

    def add(self, document: Document) -> None:
        held = held_out(document.prompt, self.manifest.holdout)
        (self._held if held else self._train).append(document)

    def count(self, name: str, by: int = 1) -> None:
        self.manifest.counts[name] = self.manifest.counts.get(name, 0) + by

    def flush(self) -> None:
        for kind, documents in (("train", self._train), ("holdout", self._held)):
            if documents:
                self._write(kind, documents)
                documents.clear()
        data = json.dumps(asdict(self.manifest), indent=1).encode()
        write_atomically(self.directory / MANIFEST, data)

    def _write(self, kind: str, documents: Sequence[Document]) -> None:
        number = len(self.manifest.shards)
        name = f"{kind}-{number:05d}.safetensors"
        flat = [i for d in documents for part in (d.prompt, d.answer) for i in part]
        answers = sum(len(d.answer) for d in documents)
        path = self.directory / name
        save_file(
            {
                "ids": np.asarray(flat, dtype=self._dtype),
                "prompt_lengths": np.asarray([len(d.prompt) for d in documents], dtype=np.int32),
                "answer_lengths": np.asarray([len(d.answer) for d in documents], dtype=np.int32),
                "temperatures": np.asarray([d.temperature for d in documents], dtype=np.float32),
                "kinds": np.asarray([d.kind for d in documents], dtype=np.int32),
            },
            path,
        )
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self.manifest.shards.append(
            {
                "file": name,
                "kind": kind,
                "documents": len(documents),
                "answer_tokens": answers,
                "sha256": digest,
            }
        )
        self.count(f"{kind}_documents", len(documents))
        self.count(f"{kind}_answer_tokens", answers)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents as one flat array: document i is ids[starts[i] : starts[i + 1]], its answer begins
    `prompts[i]` tokens after its start."""

    ids: Ids
    starts: Ids
    prompts: Ids
    temperatures: NDArray[np.float32]
    kinds: Ids

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def lengths(self) -> Ids:
        return np.diff(self.starts)

    def document(self, index: int) -> Ids:
        return self.ids[self.starts[index] : self.starts[index + 1]]

    def prompt(self, index: int) -> Ids:
        return self.document(index)[: self.prompts[index]]


def load_corpus(directories: Iterable[Path], kind: str = "train") -> Corpus:
    """All documents of `kind` ("train" or "holdout"). A training corpus is checked again against
    the hold-out rule. Raises CheckpointError."""
    parts: list[dict[str, Any]] = []
    shares = []
    for directory in directories:
        manifest = read_manifest(directory)
        if manifest is None:
            raise CheckpointError(f"data directory {directory.name!r} has no {MANIFEST}")
        shares.append(manifest.holdout)
        names = [s["file"] for s in manifest.shards if s["kind"] == kind]
        parts += [load_file(directory / name) for name in names]
    if not parts:
        raise CheckpointError(f"the data hold no {kind} documents")
    prompts = np.concatenate([p["prompt_lengths"] for p in parts])
    answers = np.concatenate([p["answer_lengths"] for p in parts])
    starts = np.concatenate(([0], np.cumsum(prompts.astype(np.int64) + answers)))
    corpus = Corpus(
        np.concatenate([p["ids"] for p in parts]),
        starts,
        prompts,
        np.concatenate([p["temperatures"] for p in parts]),
        np.concatenate([p["kinds"] for p in parts]),
    )
    return corpus if kind != "train" else _without_holdout(corpus, max(shares))


def _without_holdout(corpus: Corpus, share: float) -> Corpus:
    keep = np.array([not held_out(corpus.prompt(i), share) for i in range(len(corpus))])
    if keep.all():
        return corpus
    lengths = corpus.lengths
    return Corpus(
        corpus.ids[np.repeat(keep, lengths)],
        np.concatenate(([0], np.cumsum(lengths[keep]))),
        corpus.prompts[keep],
        corpus.temperatures[keep],
        corpus.kinds[keep],
    )
